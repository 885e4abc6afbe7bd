"""Tiny random checkpoints of the Qwen family, as `transformers` writes them, and their models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.hybrid.hybrid_model import HybridModel
from safetensors.torch import load_file, save_file

from megatron_trace.hints.types import RolloutSample
from megatron_trace.models.architecture import Architecture
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.models.local_config import architecture_config

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
    },
}


def published_model(
    family: str,
    folder: Path,
    *,
    sizes: dict[str, Any] | None = None,
    max_shard_size: str = "5GB",
) -> Any:
    """Makes a random text model in BF16, saves it and gives it.

    Args:
        family: `qwen3_5_moe` or `qwen3_next`.
        folder: Where to save it.
        sizes: What of `SIZES` is to be otherwise.
        max_shard_size: Size of its largest file.
    """
    import transformers

    torch.manual_seed(0)
    if family == "qwen3_5_moe":
        config = transformers.Qwen3_5MoeTextConfig(**SIZES | (sizes or {}))
        model: Any = transformers.Qwen3_5MoeForCausalLM(config)
    else:
        config = transformers.Qwen3NextConfig(**SIZES | (sizes or {}))
        model = transformers.Qwen3NextForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms far from 1 and from 0, as training makes them.
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).eval().save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def converted_model(
    checkpoint: Path, architecture: Architecture, dtype: torch.dtype, *, mtp: bool = False
) -> HybridModel:
    """Gives our model of up to 64 positions, with the weights of a converted checkpoint.

    Args:
        checkpoint: Folder that the conversion made.
        architecture: The model.
        dtype: FP32 or BF16.
        mtp: Whether multi-token prediction is built.
    """
    bf16 = dtype == torch.bfloat16
    model = build_hybrid_model(
        architecture_config(architecture, mtp=mtp, params_dtype=dtype, bf16=bf16),
        pattern=architecture.pattern(mtp=mtp),
        vocab_size=architecture.vocab_size,
        max_sequence_length=64,
        modules=HybridModules(),
        rotary_percent=architecture.rope_share,
        rotary_base=architecture.rope_base,
    )
    folder = str(checkpoint / "iter_0000000")
    state: Any = dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)
    model.load_state_dict(state["model"])
    return model.eval()


def assert_same_folders(one: Path, other: Path) -> None:
    """Asserts that two folders have files of the same names and bytes.

    Raises:
        AssertionError: They differ; names the first file that does.
    """
    names = sorted(path.name for path in one.iterdir())
    others = sorted(path.name for path in other.iterdir())
    assert names == others, f"{names} and {others}"
    for name in names:
        same = (one / name).read_bytes() == (other / name).read_bytes()
        assert same, f"{name} differs between {one} and {other}"


def add_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Adds tensors to a checkpoint of one file."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})


def mtp_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Gives random tensors of multi-token prediction, shaped like the last decoder layer's."""
    stored = load_file(folder / "model.safetensors")
    last = f"model.layers.{SIZES['num_hidden_layers'] - 1}."
    layer = {
        name.replace(last, "mtp.layers.0."): torch.randn_like(tensor)
        for name, tensor in stored.items()
        if name.startswith(last)
    }
    hidden, dtype = SIZES["hidden_size"], next(iter(layer.values())).dtype
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return (
        layer
        | {f"mtp.{name}.weight": torch.randn(hidden).to(dtype) for name in norms}
        | {"mtp.fc.weight": torch.randn(hidden, 2 * hidden).to(dtype)}
    )


def stack_experts(folder: Path) -> None:
    """Makes one tensor of a layer's experts, as large published checkpoints have it."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    num_experts = SIZES["num_experts"]
    experts = {name.split(".experts.")[0] for name in stored if ".experts." in name}
    for mlp in sorted(experts):
        parts = {
            part: [stored.pop(f"{mlp}.experts.{n}.{part}.weight") for n in range(num_experts)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = [
            torch.cat(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)
        ]
        stored[f"{mlp}.experts.gate_up_proj"] = torch.stack(gate_up)
        stored[f"{mlp}.experts.down_proj"] = torch.stack(parts["down_proj"])
    save_file(stored, path, metadata={"format": "pt"})


def make_it_see(folder: Path) -> None:
    """Renames a text model's tensors to those of a model that also sees, and adds one of vision."""
    path = folder / "model.safetensors"
    stored = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(path).items()
    }
    stored["model.visual.patch_embed.proj.weight"] = torch.randn(8, 3).to(torch.bfloat16)
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    whole = {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": config}
    (folder / "config.json").write_text(json.dumps(whole))


def calibration_sample(number: int) -> RolloutSample:
    """Gives a sample of a BF16 rollout of such a model, to calibrate with.

    Args:
        number: Of the sample; decides its tokens.
    """
    return RolloutSample(
        f"s{number}",
        prompt_tokens=(1, 2 + number, 3),
        response_tokens=(4, 5 + number),
        logprobs=torch.zeros(2),
        routing=torch.zeros(4, 4, 4, dtype=torch.int16),
        policy_version=0,
        settings_digest="",
        finish_reason="stop",
    )
