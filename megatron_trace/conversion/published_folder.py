"""A published checkpoint: a folder with config.json and one or more safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_trace.conversion.safetensors_file import DTYPES, SafetensorsFile, StoredTensor
from megatron_trace.conversion.weight_rows import Rows
from megatron_trace.models.architecture import Architecture

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MODEL_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
# Of Qwen3.8-Flash-Next and its like.
_FOREIGN_PARTS = {
    "hc_count": "hyper-connections",
    "indexer_n_heads": "sparse attention with an indexer",
    "ple_layer_ids": "n-gram embeddings",
}
# How many names an error lists of each kind.
_MAX_NAMES = 12


class PublishedFolder:
    """The tensors of a published checkpoint, read by rows; none is kept.

    Args:
        folder: The folder.

    Raises:
        ValueError: Files are missing or broken, or the index contradicts them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / INDEX_FILE
        if index.is_file():
            listed = _read_json(index).get("weight_map")
            if not isinstance(listed, dict):
                raise ValueError(f"{index} has no weight_map, which names the file of each tensor")
        elif (folder / SINGLE_FILE).is_file():
            listed = None
        else:
            raise ValueError(f"{folder} has neither {INDEX_FILE} nor {SINGLE_FILE}")
        names = sorted(set(listed.values())) if listed is not None else [SINGLE_FILE]
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ValueError(f"{folder} lacks {listing(absent)}, which {INDEX_FILE} names")
        self.files = {name: SafetensorsFile.open(folder / name) for name in names}
        self._file_of = {tensor: file for file in self.files.values() for tensor in file.tensors}
        if listed is not None:
            wrong = [
                name for name, file in listed.items() if name not in self.files[file].tensors
            ] + [name for name in self._file_of if name not in listed]
            if wrong:
                raise ValueError(f"{index} and the files disagree about {listing(wrong)}")

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    def stored(self, name: str) -> StoredTensor:
        """Gives what the file says of a tensor."""
        return self._file_of[name].tensors[name]

    def read(self, rows: Sequence[Rows]) -> torch.Tensor:
        """Reads rows of tensors, one after another, into memory of their own."""
        parts = [
            self._file_of[part.name].read_rows(part.name, part.start, part.stop, entry=part.expert)
            for part in rows
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def require(
        self, rows: Mapping[str, Sequence[Rows]], row_shapes: Mapping[str, tuple[int, ...]]
    ) -> list[str]:
        """Checks that every tensor that is asked for is there, as a whole, and nothing unknown.

        Args:
            rows: What each parameter is made of.
            row_shapes: Shape of a row of each parameter.

        Returns:
            Tensors that no parameter is made of: of vision, and of multi-token prediction if that
            is not asked for.

        Raises:
            ValueError: Tensors are missing, have another shape or dtype, or are unknown; one
                message names all of them.
        """
        expected = _published_shapes(rows, row_shapes)
        missing = [name for name in expected if name not in self._file_of]
        wrong, quantised = [], []
        for name, shape in expected.items():
            if name in self._file_of:
                stored = self.stored(name)
                if stored.shape != shape:
                    wrong.append(f"{name} ({list(stored.shape)}, not {list(shape)})")
                if stored.dtype not in DTYPES:
                    quantised.append(f"{name} ({stored.dtype})")
        unused = [name for name in self._file_of if name not in expected]
        left_out = ["model.visual.", "visual."]
        if not any(name.startswith("mtp.") for name in expected):
            left_out.append("mtp.")
        unknown = [name for name in unused if not name.startswith(tuple(left_out))]
        problems = [
            f"{kind}: {listing(found)}"
            for kind, found in (
                ("missing", missing),
                ("of another shape", wrong),
                (f"neither {' nor '.join(DTYPES)}", quantised),
                ("unknown", unknown),
            )
            if found
        ]
        if problems:
            raise ValueError(f"{self.folder} does not hold the model: {'; '.join(problems)}")
        return unused


def _published_shapes(
    rows: Mapping[str, Sequence[Rows]], row_shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Gives the shape that each published tensor must have so that its rows are used once each."""
    stops: dict[str, int] = {}
    experts: dict[str, int] = {}
    used: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter, parts in rows.items():
        for part in parts:
            stops[part.name] = max(stops.get(part.name, 0), part.stop)
            used[part.name] = used.get(part.name, 0) + part.stop - part.start
            if part.expert is not None:
                experts[part.name] = max(experts.get(part.name, 0), part.expert + 1)
            shapes[part.name] = row_shapes[parameter]
    for name, stop in stops.items():
        whole = (experts[name], stop) if name in experts else (stop,)
        assert used[name] == stop * experts.get(name, 1), f"rows of {name} used twice or never"
        shapes[name] = (*whole, *shapes[name])
    return shapes


def published_architecture(folder: Path, *, mtp_layers: int = 0) -> Architecture:
    """Gives the model that a folder's config.json describes.

    Args:
        folder: The folder of a published checkpoint.
        mtp_layers: Layers of multi-token prediction that it has, which config.json need not tell.

    Raises:
        ValueError: It is another family, or has something that our models do not compute.
    """
    whole = _read_json(folder / "config.json")
    config: dict[str, Any] = whole.get("text_config", whole)
    if whole.get("model_type") not in MODEL_TYPES:
        foreign = [f"{name} ({part})" for name, part in _FOREIGN_PARTS.items() if config.get(name)]
        raise ValueError(
            f"{folder / 'config.json'} has "
            f"{listing([f'model_type={whole.get("model_type")}', *foreign])}, which cannot be "
            f"converted; {', '.join(MODEL_TYPES)} can"
        )
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
    interval = config.get("full_attention_interval", 4)
    try:
        architecture = Architecture(
            name=folder.name,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_query_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            num_experts=config["num_experts"],
            router_topk=config["num_experts_per_tok"],
            expert_hidden_size=config["moe_intermediate_size"],
            shared_expert_hidden_size=config["shared_expert_intermediate_size"],
            gdn_key_heads=config["linear_num_key_heads"],
            gdn_value_heads=config["linear_num_value_heads"],
            gdn_key_head_dim=config["linear_key_head_dim"],
            gdn_value_head_dim=config["linear_value_head_dim"],
            gdn_conv_width=config["linear_conv_kernel_dim"],
            attention_interval=interval,
            mtp_layers=mtp_layers,
            vocab_size=config["vocab_size"],
            rope_base=int(_given(rope, config, "rope_theta")),
            rope_share=float(_given(rope, config, "partial_rotary_factor")),
            norm_eps=config["rms_norm_eps"],
        )
    except KeyError as error:
        raise ValueError(f"{folder / 'config.json'} lacks {error}") from None
    except TypeError as error:
        raise ValueError(
            f"{folder / 'config.json'} has a size that is no number: {error}"
        ) from None
    mixers = {"*": "full_attention", "G": "linear_attention"}
    layer_types = [mixers[mixer] for mixer in architecture.mixers()]
    unsupported = {
        f"layer_types other than full attention at the end of every {interval} layers": config.get(
            "layer_types", layer_types
        )
        != layer_types,
        f"rope_type={rope_type}": rope_type != "default",
        f"hidden_act={config.get('hidden_act')}": config.get("hidden_act") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "tie_word_embeddings": bool(
            whole.get("tie_word_embeddings") or config.get("tie_word_embeddings")
        ),
        "attn_output_gate=False": config.get("attn_output_gate") is False,
        "norm_topk_prob=False": config.get("norm_topk_prob") is False,
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "quantization_config": "quantization_config" in whole,
    }
    found = [name for name, present in unsupported.items() if present]
    found += [f"{name} ({part})" for name, part in _FOREIGN_PARTS.items() if config.get(name)]
    if found:
        raise ValueError(
            f"{folder / 'config.json'} has {listing(found)}, which cannot be converted"
        )
    return architecture


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(content).__name__}")
    return content


def _given(rope: Mapping[str, Any], config: Mapping[str, Any], name: str) -> Any:
    return rope[name] if name in rope else config[name]


def listing(names: Sequence[str]) -> str:
    """Gives names for an error: the first ones, and how many more there are."""
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
