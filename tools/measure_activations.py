"""Bytes per token of activations kept for backward: bf16, qat, trace, values or packed codes.

    python tools/measure_activations.py                   the demo's tiny MoE
    python tools/measure_activations.py --shape 35b       a decoder layer as wide as Qwen3.5-35B-A3B

Measured by `torch.autograd.graph.saved_tensors_hooks` on one forward pass on the CPU, tokens and
routing random, no padding. Bytes are those of one token in one decoder layer.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

import logging
import warnings

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()
if __name__ == "__main__":  # Megatron and torch announce deprecations of their own parts.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)

import argparse
from typing import Any

import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.hints.store import HintStore
from megatron_trace.testing.recorded_samples import calibrate, random_samples, record
from megatron_trace.testing.saved_activations import saved_activation_bytes
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import VOCAB_SIZE, tiny_trainer
from megatron_trace.training.micro_batch import MicroBatch, make_micro_batch

# Fewer experts than the model has: how many there are does not change what a token keeps.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"pattern": "*E*E*E*E", "config": {}},
    "35b": {
        "pattern": "*E",
        "config": {
            "hidden_size": 2048,
            "num_attention_heads": 16,
            "num_query_groups": 2,
            "kv_channels": 256,
            "num_moe_experts": 32,
            "moe_router_topk": 8,
            "ffn_hidden_size": 512,
            "moe_ffn_hidden_size": 512,
        },
    },
}
LENGTHS = ((65, 64), (65, 64))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WITHOUT_FC2 = ("fc1", "k", "v")
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16", {}),
    "qat": ("qat", {}),
    "qat, packed": ("qat", {"save_packed_activations": True}),
    "trace": ("trace", {"hint_sites": WITHOUT_FC2}),
    "trace, packed": ("trace", {"hint_sites": WITHOUT_FC2, "save_packed_activations": True}),
    "trace with fc2, packed": (
        "trace",
        {"hint_sites": HINT_SITES, "save_packed_activations": True},
    ),
}
PARTS = ("experts", "moe", "attention", "other")


def measure(shape: dict[str, Any], dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Gives bytes per token and decoder layer, by row of the table and part."""
    size = {
        "pattern": shape["pattern"],
        "config": shape["config"],
        "max_sequence_length": max(map(sum, LENGTHS)),
    }
    model, sites = tiny_trainer("qat", dtype=torch.bfloat16, **size)
    samples = random_samples(LENGTHS, sites.shape, vocab_size=VOCAB_SIZE)
    calibrate(model, sites, samples)
    settings, store = sites.settings, HintStore()
    recorded = record(model, sites, samples, store, places=sites.shape.places)
    del model, sites
    table = {}
    for name, (method, options) in ROWS.items():
        model, sites = tiny_trainer(method, dtype=dtype, settings=settings, **size, **options)
        micro_batch = make_micro_batch(recorded, store, sites)
        num_layers = len(sites.shape.moe_layers)
        per_token = micro_batch.valid.numel() * num_layers
        kept = saved_activation_bytes(model, sites, micro_batch)
        table[name] = {part: kept[part] / per_token for part in PARTS}
        table[name]["all"] = sum(kept.values()) / per_token
        table[name]["hints"] = _hint_bytes(micro_batch) / per_token
        del model, sites
    return table


def _hint_bytes(micro_batch: MicroBatch) -> int:
    return sum(
        rows.payload.numel() + rows.scale_bytes.numel() for rows in micro_batch.hints.values()
    )


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--trainer-dtype", choices=DTYPES, default="bf16")
    parser.add_argument(
        "--fused-swiglu", action="store_true", help="Megatron's bias_activation_fusion"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = SHAPES[options.shape]
    fusion = {"bias_activation_fusion": options.fused_swiglu}
    with single_process(seed=0):
        table = measure(shape | {"config": shape["config"] | fusion}, DTYPES[options.trainer_dtype])
    columns = (*PARTS, "all", "hints")
    print(f"| {options.shape}, {options.trainer_dtype} trainer | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for name, row in table.items():
        print(f"| {name} | {' | '.join(f'{row[column]:,.0f}' for column in columns)} |")


if __name__ == "__main__":
    main()
