"""Checkpoints in ModelOpt's layout: NVFP4 routed experts, everything else as published.

    model-00001-of-00002.safetensors, ...     model.safetensors.index.json
    hf_quant_config.json                      what is quantised, as ModelOpt 0.47 writes it
    config.json                               as published, with the same as `quantization_config`

A linear of a routed expert has `weight` (uint8, two codes a byte), `weight_scale` (E4M3),
`weight_scale_2` and `input_scale` (FP32). Gate and up have one `weight_scale_2` and one
`input_scale`: they are one matrix and read one input. Quantised keys and values have
`k_proj.k_scale` and `v_proj.v_scale`.

Legend: O output features, K input features of a matrix.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_trace.conversion.output_folder import output_folder, require_absent
from megatron_trace.conversion.published_folder import (
    INDEX_FILE,
    PublishedFolder,
    published_architecture,
)
from megatron_trace.conversion.safetensors_file import DTYPES
from megatron_trace.conversion.weight_rows import PublishedNames, Rows, weight_rows
from megatron_trace.formats.packed_matrix import PackedMatrix

QUANT_CONFIG_FILE = "hf_quant_config.json"
# Decoder layer, expert, and fc1 (gate above up) or fc2.
MatrixPlace = tuple[int, int, str]
_EXPERT = re.compile(
    r"decoder\.layers\.(\d+)\.mlp\.experts\.local_experts\.(\d+)\.linear_(fc[12])\b.*"
)
_PARTS = ("weight", "weight_scale", "weight_scale_2", "input_scale")


@dataclass(frozen=True)
class QuantisedModel:
    """A model with NVFP4 experts, under the names of our HybridModel.

    Attributes:
        parameters: Every parameter that is not a routed expert's, by name.
        experts: The experts' matrices.
        input_scales: Static global scale of (decoder layer, site): fc1 and fc2, and k and v if
            keys and values are quantised.
    """

    parameters: Mapping[str, torch.Tensor]
    experts: Mapping[MatrixPlace, PackedMatrix]
    input_scales: Mapping[tuple[int, str], float]

    @property
    def quantises_kv(self) -> bool:
        """Whether keys and values are quantised."""
        return any(site == "k" for _, site in self.input_scales)


def write_modelopt_folder(
    model: QuantisedModel, like: Path, output: Path, *, max_shard_bytes: int = 5 << 30
) -> tuple[str, ...]:
    """Writes a checkpoint that engines load which know ModelOpt's.

    Args:
        model: What is written.
        like: Published checkpoint of the same model; gives names and dtypes, its configuration and
            tokenizer are copied, and so are its tensors that the model has not (vision, MTP).
        output: Folder to make.
        max_shard_bytes: Size of the largest file, unless one tensor is larger.

    Returns:
        Tensors that were copied from `like`.

    Raises:
        ValueError: The model is not the one of `like`, or `output` exists.
    """
    require_absent(output)
    folder = PublishedFolder(like)
    rows = _rows(folder, like)
    _require_model(model, rows, like)
    copied = tuple(folder.require(_published_rows(folder, like), _row_shapes(model, rows)))
    with output_folder(output) as made:
        tensors = (
            *_expert_tensors(model, rows),
            *_other_tensors(model, rows, folder),
            *_kv_scales(model, rows),
            *_copied(folder, copied),
        )
        weight_map, plain = _write_shards(made, iter(tensors), max_shard_bytes)
        index = {"metadata": {"total_size": plain.num_bytes}, "weight_map": weight_map}
        (made / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")
        _write_configuration(made, like, model, plain.modules)
        for path in sorted(like.iterdir()):
            if path.is_file() and path.name not in folder.files and not (made / path.name).exists():
                shutil.copyfile(path, made / path.name)
    return copied


def read_modelopt_folder(folder: Path, like: Path) -> QuantisedModel:
    """Reads what `write_modelopt_folder` wrote.

    Args:
        folder: The checkpoint.
        like: The published checkpoint whose names it has.

    Raises:
        ValueError: Gate and up have different scales, or experts of a layer different input
            scales, which one quantised input cannot have.
        LookupError: A tensor is missing.
    """
    tensors = _Tensors(folder)
    experts: dict[MatrixPlace, PackedMatrix] = {}
    parameters: dict[str, torch.Tensor] = {}
    input_scales: dict[tuple[int, str], float] = {}
    for name, parts in _rows(PublishedFolder(like), like).items():
        place = _place(name)
        if place is None:
            parameters[name] = torch.cat([tensors.rows(part) for part in parts])
            continue
        layer, expert, matrix = place
        modules = [part.name.removesuffix(".weight") for part in parts]
        scales = {
            kind: tensors.one(f"{module}.{kind}" for module in modules)
            for kind in ("weight_scale_2", "input_scale")
        }
        packed, scale_bytes = (
            torch.cat([tensors[f"{module}.{kind}"].view(torch.uint8) for module in modules])
            for kind in ("weight", "weight_scale")
        )
        experts[layer, expert, matrix] = PackedMatrix(packed, scale_bytes, scales["weight_scale_2"])
        scale = float(scales["input_scale"])
        if input_scales.setdefault((layer, matrix), scale) != scale:
            raise ValueError(
                f"{folder}: expert {expert} of layer {layer} has input_scale {scale} at {matrix}, "
                f"others have {input_scales[layer, matrix]}; they read one quantised input"
            )
    for (layer, site), name in _kv_names(_rows(PublishedFolder(like), like)).items():
        if name in tensors:
            input_scales[layer, site] = float(tensors[name])
    return QuantisedModel(parameters, experts, input_scales)


def _rows(folder: PublishedFolder, like: Path) -> dict[str, tuple[Rows, ...]]:
    """Gives the rows of every parameter under ModelOpt's names: each expert on its own."""
    names = dataclasses.replace(PublishedNames.of(folder.names), stacked_experts=False)
    return weight_rows(published_architecture(like), names, mtp=False)


def _published_rows(folder: PublishedFolder, like: Path) -> dict[str, tuple[Rows, ...]]:
    names = PublishedNames.of(folder.names)
    return weight_rows(published_architecture(like), names, mtp=False)


def _row_shapes(
    model: QuantisedModel, rows: Mapping[str, tuple[Rows, ...]]
) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for name in rows:
        place = _place(name)
        if place is None:
            shapes[name] = tuple(model.parameters[name].shape[1:])
        else:
            shapes[name] = (2 * model.experts[place].packed_codes.shape[1],)
    return shapes


def _place(name: str) -> MatrixPlace | None:
    """Gives which expert's matrix a parameter is; None for other parameters."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    position, expert, matrix = match.groups()
    return int(position) // 2, int(expert), matrix


def _require_model(model: QuantisedModel, rows: Mapping[str, Any], like: Path) -> None:
    places = {name: _place(name) for name in rows}
    missing = [
        name
        for name, place in places.items()
        if (name not in model.parameters if place is None else place not in model.experts)
    ]
    unknown = [name for name in model.parameters if name not in rows]
    scaled = {(place[0], place[2]) for place in places.values() if place is not None}
    missing += [f"input scale of {place}" for place in sorted(scaled - model.input_scales.keys())]
    for kind, names in (("lacks", missing), ("has the unknown", unknown)):
        if names:
            raise ValueError(
                f"the model is not that of {like}: it {kind} {', '.join(names[:5])}"
                + (f" and {len(names) - 5} more" if names[5:] else "")
            )


def _expert_tensors(
    model: QuantisedModel, rows: Mapping[str, tuple[Rows, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parts in rows.items():
        place = _place(name)
        if place is None:
            continue
        layer, _, matrix = place
        input_scale = torch.tensor(model.input_scales[layer, matrix], dtype=torch.float32)
        first = 0
        for part in parts:
            piece = model.experts[place].rows(first, first + part.stop - part.start)
            first += part.stop - part.start
            values = (
                piece.packed_codes.clone(),
                piece.scale_bytes.clone().view(torch.float8_e4m3fn),
                piece.global_scale.float().reshape(()).clone(),
                input_scale.clone(),
            )
            module = part.name.removesuffix(".weight")
            for kind, value in zip(_PARTS, values, strict=True):
                yield f"{module}.{kind}", value


def _other_tensors(
    model: QuantisedModel, rows: Mapping[str, tuple[Rows, ...]], folder: PublishedFolder
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields published tensors from the rows of our parameters, when the last row is there."""
    tensors: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    for name, parts in rows.items():
        if _place(name) is not None:
            continue
        first = 0
        for part in parts:
            size = part.stop - part.start
            stored = folder.stored(part.name)
            if part.name not in tensors:
                tensors[part.name] = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
                missing[part.name] = stored.shape[0]
            tensors[part.name][part.start : part.stop] = model.parameters[name][
                first : first + size
            ]
            first += size
            missing[part.name] -= size
            if not missing[part.name]:
                yield part.name, tensors.pop(part.name)
    assert not tensors, "PublishedFolder.require says that every row is used once"


def _kv_names(rows: Mapping[str, tuple[Rows, ...]]) -> dict[tuple[int, str], str]:
    names = {}
    for name, parts in rows.items():
        if name.startswith("decoder.") and name.endswith(".self_attention.linear_qkv.weight"):
            attention = parts[0].name.removesuffix("q_proj.weight")
            layer = int(name.split(".")[2]) // 2
            for site in ("k", "v"):
                names[layer, site] = f"{attention}{site}_proj.{site}_scale"
    return names


def _kv_scales(
    model: QuantisedModel, rows: Mapping[str, tuple[Rows, ...]]
) -> Iterator[tuple[str, torch.Tensor]]:
    if not model.quantises_kv:
        return
    for place, name in _kv_names(rows).items():
        yield name, torch.tensor(model.input_scales[place], dtype=torch.float32)


def _copied(folder: PublishedFolder, names: tuple[str, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    wanted = set(names)
    for file in folder.files.values():
        with safe_open(file.path, framework="pt") as opened:
            for name in file.tensors:
                if name in wanted:
                    yield name, opened.get_tensor(name)


@dataclass
class _Plain:
    """What is written: bytes of all tensors, and modules whose weight is not quantised."""

    num_bytes: int = 0
    modules: list[str] = dataclasses.field(default_factory=list)


def _write_shards(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> tuple[dict[str, str], _Plain]:
    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    held_bytes, plain = 0, _Plain()

    def flush() -> None:
        save_file(held, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and held_bytes + tensor.nbytes > max_shard_bytes:
            flush()
            held_bytes = 0
        held[name] = tensor.detach().cpu().contiguous()
        held_bytes += tensor.nbytes
        plain.num_bytes += tensor.nbytes
        # A vector is a norm's, or a gate's: no module that could be quantised.
        if name.endswith(".weight") and tensor.dim() > 1 and tensor.dtype != torch.uint8:
            plain.modules.append(name.removesuffix(".weight"))
    flush()
    weight_map = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        # The package writes files that only their owner may read.
        (folder / f"{number}.part").chmod(0o644)
        (folder / f"{number}.part").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    return dict(sorted(weight_map.items())), plain


def _write_configuration(
    folder: Path, like: Path, model: QuantisedModel, plain_modules: list[str]
) -> None:
    quantisation = {
        "producer": {"name": "modelopt", "version": version("nvidia-modelopt")},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "NVFP4" if model.quantises_kv else None,
            "group_size": 16,
            "exclude_modules": sorted(plain_modules),
        },
    }
    text = json.dumps(quantisation, indent=4)
    (folder / QUANT_CONFIG_FILE).write_text(text, encoding="utf-8")
    config = json.loads((like / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = convert_hf_quant_config_format(quantisation)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


class _Tensors:
    """The tensors of a folder, read one by one."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
        self._folder, self._file_of = folder, index["weight_map"]
        self._last: tuple[str, torch.Tensor] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise LookupError(f"{self._folder} has no tensor {name}")
        if self._last is None or self._last[0] != name:
            with safe_open(self._folder / self._file_of[name], framework="pt") as file:
                self._last = name, file.get_tensor(name)
        return self._last[1]

    def rows(self, part: Rows) -> torch.Tensor:
        """Gives rows of a tensor."""
        return self[part.name][part.start : part.stop]

    def one(self, names: Iterator[str]) -> torch.Tensor:
        """Gives the value that several scalars have.

        Raises:
            ValueError: They differ.
        """
        values = {name: self[name] for name in names}
        (first, value), *others = values.items()
        for name, other in others:
            if not torch.equal(value, other):
                raise ValueError(
                    f"{self._folder}: {first} is {float(value)}, but {name} is {float(other)}; "
                    "gate and up are one matrix with one scale"
                )
        return value
