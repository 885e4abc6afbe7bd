"""Times what of a decode step is neither attention nor experts: sampling, and Gated DeltaNets.

    python tools/bench_decode_parts.py --json bench_decode_parts.json        on one GPU
    python tools/bench_decode_parts.py --cpu                                 tries the tool

Drawing tokens of a large vocabulary: by torch's sums in FP64 and by the kernel
(`rollout/kernels/draw.py`), on the same probabilities; both must give the same tokens. Then all of
the sampler's device work, with the log-probs before it.

A token of a Gated DeltaNet with a published model's dimensions, without its two linears: states
gathered, moved on by flash-linear-attention and put back, and moved on in their slots
(`rollout/kernels/delta_step.py`). A captured graph goes over several layers' states, so that none
is in the L2 cache. Bytes are those of the states, read and written once; the share is of a copy.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_trace.models.hybrid import build_hybrid_model
from megatron_trace.models.local_config import architecture_config
from megatron_trace.models.presets import PRESETS, preset
from megatron_trace.rollout.gated_delta_net import EngineGatedDeltaNet, delta_nets
from megatron_trace.rollout.model import engine_modules
from megatron_trace.rollout.sampling import (
    SamplingSettings,
    draw,
    draw_by_torch,
    sampling_logprobs,
)
from megatron_trace.testing.device_timing import copy_bandwidth, median_us
from megatron_trace.testing.single_process import single_process

LAYERS = 4
# Columns of a head's state that a program holds, and its warps.
LAUNCHES = ((16, 4), (32, 2), (32, 4), (64, 4), (64, 8), (128, 8))


def replayed_us(calls: list[Callable[[], Any]], *, captured: bool) -> float:
    """Gives the time of a call in us where several follow one another, by a graph on a GPU."""
    calls[0]()
    torch.cuda.synchronize()
    if not captured:
        return median_us(lambda: [call() for call in calls], repeats=3) / len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_us(graph.replay) / len(calls)


@torch.inference_mode()
def sampling_row(rows: int, vocab_size: int, *, is_cpu: bool) -> dict[str, Any]:
    """Gives the times of drawing, and of the sampler, for so many rows."""
    device = torch.cuda.current_device()
    logits = 3 * torch.randn(rows, vocab_size, device=device)
    settings = SamplingSettings(max_new_tokens=1)
    logprobs = sampling_logprobs(logits, settings)
    uniform = torch.rand(rows, dtype=torch.float64, device=device)
    if not torch.equal(draw(logprobs, uniform), draw_by_torch(logprobs, uniform)):
        raise RuntimeError(f"{rows} rows: the kernel draws other tokens")

    def sample(drawn: Callable[..., torch.Tensor]) -> None:
        drawn(sampling_logprobs(logits, settings), uniform)
        torch.isfinite(logits.sum(-1, dtype=torch.float64))

    times = {
        "torch_us": median_us(lambda: draw_by_torch(logprobs, uniform)),
        "kernel_us": median_us(lambda: draw(logprobs, uniform)),
        "log_softmax_us": median_us(lambda: sampling_logprobs(logits, settings)),
        "finite_by_value_us": median_us(lambda: torch.isfinite(logits).all(-1)),
        "finite_by_sum_us": median_us(lambda: torch.isfinite(logits.sum(-1, dtype=torch.float64))),
        "sampler_us": median_us(partial(sample, draw)),
    }
    if not is_cpu:
        from megatron_trace.rollout.kernels import draw as kernel

        for block in (1024, 4096):
            call = partial(kernel.draw, logprobs, uniform, block_tokens=block)
            times[f"kernel_{block}_us"] = median_us(call)
    return {"rows": rows, "vocab_size": vocab_size} | times


def delta_net(name: str, *, reduced: bool) -> EngineGatedDeltaNet:
    """Gives a layer of a published model with random weights."""
    architecture = preset(name)
    if reduced:
        architecture = architecture.reduced()
    architecture = dataclasses.replace(architecture, num_layers=4, num_experts=8)
    model = build_hybrid_model(
        architecture_config(architecture, use_cpu_initialization=False),
        pattern=architecture.pattern(),
        vocab_size=512,
        max_sequence_length=64,
        modules=engine_modules(),
        rotary_percent=architecture.rope_share,
    )
    return delta_nets(model)[0].bfloat16()


@torch.inference_mode()
def delta_row(
    layer: EngineGatedDeltaNet, batch: int, copy_tb_s: float, *, is_cpu: bool, with_fla: bool
) -> dict[str, Any]:
    """Gives the times of a token in slots, and if asked in copies, for so many requests."""
    device = torch.cuda.current_device()
    projected = torch.randn(
        batch, 1, layer.in_proj.weight.shape[0], device=device, dtype=torch.bfloat16
    )
    slots = torch.randperm(batch, device=device)

    def states() -> tuple[torch.Tensor, torch.Tensor]:
        conv = torch.randn(batch, *layer.conv_state_shape, device=device).bfloat16()
        return conv, torch.randn(batch, *layer.recurrent_state_shape, device=device)

    def in_copies(conv: torch.Tensor, recurrent: torch.Tensor) -> torch.Tensor:
        mixed, conv_after, recurrent_after = layer.advance(
            projected, conv[slots], recurrent[slots], keep_states=True
        )
        assert conv_after is not None, "asked for"
        conv[slots], recurrent[slots] = conv_after, recurrent_after
        return mixed

    def in_slots(conv: torch.Tensor, recurrent: torch.Tensor) -> torch.Tensor:
        return layer._step(projected, conv, recurrent, slots)

    layers = [states() for _ in range(LAYERS)]
    row: dict[str, Any] = {"batch": batch}
    ways: dict[str, Callable[..., Any]] = {"slots": in_slots}
    if with_fla:
        ways["copies"] = in_copies
        first = [part.clone() for part in layers[0]]
        pairs = (in_copies(*first), in_slots(*layers[0])), (first[1], layers[0][1])
        for name, (expected, got) in zip(("output_error", "state_error"), pairs, strict=True):
            error = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
            row[name] = float(error)
    moved = 2 * sum(part.numel() * part.element_size() for part in layers[0])
    if not is_cpu:
        from megatron_trace.rollout.kernels.delta_step import delta_step

        parameters = layer._parameters_of_step()
        for values, warps in LAUNCHES:
            ways[f"slots_{values}x{warps}"] = lambda conv, recurrent, v=values, w=warps: delta_step(
                projected[:, 0], conv, recurrent, slots, parameters, values=v, num_warps=w
            )
    for name, way in ways.items():
        calls = [partial(way, *own) for own in layers]
        us = replayed_us(calls, captured=not is_cpu)
        row[name] = {"us": us, "share_of_copy": moved / us / 1e6 / copy_tb_s}
    return row


def main(arguments: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="Qwen3.5-35B-A3B", help=", ".join(PRESETS))
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 25, 64, 256])
    parser.add_argument(
        "--without-fla", action="store_true", help="no copies: fla tunes itself at length"
    )
    parser.add_argument("--cpu", action="store_true", help="try the tool without a GPU")
    parser.add_argument("--json", type=Path, help="file that gets the numbers")
    options = parser.parse_args(arguments)
    if not options.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --cpu tries the tool")
    copy_tb_s = copy_bandwidth(1 << (20 if options.cpu else 31))
    rows: list[dict[str, Any]] = [{"copy_TBps": copy_tb_s, "torch": torch.__version__}]
    vocab_size = 1000 if options.cpu else preset(options.preset).vocab_size
    with single_process(seed=0):
        layer = delta_net(options.preset, reduced=options.cpu)
        for batch in options.batches:
            rows.append(sampling_row(batch, vocab_size, is_cpu=options.cpu))
            print(json.dumps(rows[-1]), flush=True)
            with_fla = not options.without_fla
            rows.append(delta_row(layer, batch, copy_tb_s, is_cpu=options.cpu, with_fla=with_fla))
            print(json.dumps(rows[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
