"""Compares FP4 codes of SmolLM2's real activations between an FP32 and a BF16 forward.

    python tools/compare_activations.py --tokens 384

Prints a table in Markdown: per site, the mean over the layers and the worst layer. Global scales
come from the BF16 forward, which plays the rollout. Needs the packages of `study/smollm2.py`.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import warnings
from pathlib import Path

import torch

from megatron_trace.formats import NUMBER_FORMATS
from megatron_trace.hints.types import Site
from megatron_trace.metrics import CodeMismatch
from megatron_trace.study import smollm2
from megatron_trace.study.activations import captured_activations, code_mismatches
from megatron_trace.testing.single_process import single_process

SITES = {Site.FC1: "MLP input", Site.FC2: "after SwiGLU", Site.K: "K", Site.V: "V"}
HEADER = """| site | layers | codes differ (rtn) | of these one step | scale bytes differ | guided |
|---|---|---|---|---|---|"""


def main(arguments: list[str] | None = None) -> None:
    """Runs both forwards and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=384, help="tokens of text, at least 96")
    parser.add_argument("--format", choices=sorted(NUMBER_FORMATS), default="nvfp4")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")  # Megatron and torch announce deprecations of their parts.
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    model = smollm2.load(Path())
    texts = [prompt[:96] for prompt in model.prompts[2::3] if len(prompt) >= 96]
    batches = [torch.tensor(texts[: options.tokens // 96])]
    with single_process(seed=0):
        train, rollout = (
            captured_activations(model, batches, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16)
        )
    found = code_mismatches(train, rollout, number_format=NUMBER_FORMATS[options.format])
    print(f"{batches[0].numel()} tokens, {options.format}, FP32 against BF16\n\n{HEADER}")
    for site, name in SITES.items():
        layers = {layer: counts for (layer, at), counts in found.items() if at is site}
        worst = max(layers, key=lambda layer: layers[layer].rtn_share)
        print(_row(name, f"all {len(layers)}", sum(layers.values(), CodeMismatch())))
        print(_row(name, f"layer {worst}", layers[worst]))


def _row(name: str, layers: str, counts: CodeMismatch) -> str:
    return (
        f"| {name} | {layers} | {counts.rtn_share:.2%} | {counts.one_step_share:.2%} | "
        f"{counts.scale_byte_share:.2%} | {counts.guided_share:.4%} |"
    )


if __name__ == "__main__":
    main()
