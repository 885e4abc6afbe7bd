"""Checks and times the kernels of the packed K/V cache on one GPU.

Correctness: attention against FP64 over the cache's exact values, append against the specification.
Speed: decode over FP4 working sets of 1 GB and more against copying, against the best BF16 kernels
at hand (contiguous keys and values, which is kinder to them than pages), and against kernels that
only load, or load and decode; then small cases under graph replay, prefill and append.
Bytes are those of codes and block scales (BF16: of the values), each read once; the median of
repeated runs is reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from bench_kv_kernels import bf16_decode, ceiling
from triton.testing import do_bench

from megatron_trace.formats import NVFP4
from megatron_trace.rollout.kernels import append as triton_append
from megatron_trace.rollout.kernels import attention as triton_attention
from megatron_trace.rollout.kernels import cuda, reference
from megatron_trace.rollout.pages import PackedPages, PageLayout
from megatron_trace.testing.device_timing import copy_bandwidth
from megatron_trace.testing.paged_kv import (
    DECODE_CASES,
    PackedCache,
    exact_attention,
    random_cache,
    relative_error,
)

HEADS, RATIO, HEAD_DIM, PAGE = 2, 8, 256, 64
# (requests, tokens of each): FP4 working sets of 1.2 GB and more.
LARGE = ((256, 8192), (64, 32768), (16, 131072), (128, 32768))
SMALL = ((1, 1024), (1, 8192), (1, 32768), (4, 1024), (4, 8192), (8, 1024), (8, 8192))


def median_ms(function: Callable[[], Any], rep: int = 40) -> float:
    """Gives the median time of a call in ms."""
    return do_bench(function, warmup=5, rep=rep, return_mode="median")


def graph_us(function: Callable[[], Any], calls: int = 20) -> float:
    """Gives the time of a call in us when a graph of several calls is replayed."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return median_ms(graph.replay) * 1000 / calls


def checks() -> dict[str, float]:
    """Gives the relative error of each kernel in each case."""
    errors = {}
    for head_dim, page, heads, ratio, lengths in DECODE_CASES:
        layout = PageLayout(NVFP4, head_dim, page)
        cache = random_cache(
            layout, lengths, num_heads=heads, ratio=ratio, device="cuda", padding_rows=3
        )
        expected = exact_attention(cache)
        name = f"D{head_dim} page {page} {heads}x{ratio} {len(lengths)} requests"
        if cuda.why_not(cache.keys, heads * ratio, cache.query.device) is None:
            got = cuda.paged_attention(*cache.arguments)
            errors[f"cuda {name}"] = relative_error(got, expected)
            errors[f"cuda {name}: padding"] = float(got[len(lengths) :].abs().sum())
        for splits in (1, None):
            got = triton_attention.paged_attention(
                *cache.arguments, max_new_tokens=1, num_splits=splits
            )
            errors[f"triton {name}, splits {splits}"] = relative_error(got, expected)
        got = reference.paged_attention(*cache.arguments)
        errors[f"torch {name}"] = relative_error(got, expected)
    for head_dim in (64, 96, 256):
        cache = random_cache(
            PageLayout(NVFP4, head_dim, 32),
            [300, 64, 1, 0, 77],
            [300, 10, 1, 1, 70],
            num_heads=2,
            ratio=4,
            device="cuda",
        )
        got = triton_attention.paged_attention(*cache.arguments, max_new_tokens=300)
        errors[f"triton prefill D{head_dim}"] = relative_error(got, exact_attention(cache))
    for num_bits in (None, 1, 2, 4):
        errors[f"append, hints of {num_bits} bits: differing bytes"] = append_differs(num_bits)
    return errors


def append_differs(num_bits: int | None) -> float:
    """Gives how many bytes of pages and records differ from the specification."""
    layout = PageLayout(NVFP4, HEAD_DIM, PAGE)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2, 1000, HEADS, HEAD_DIM, device="cuda", generator=generator).bfloat16()
    x[0, :8] *= 1e-3
    x[1, 8:16] *= 1e3
    x[:, 16, :, :40] = -0.0
    place = torch.randperm(20 * PAGE, device="cuda", generator=generator)[:1000].int()
    written = []
    for function in (reference.append, triton_append.append):
        pages = [
            PackedPages(
                torch.zeros(layout.shape(20, HEADS), dtype=torch.uint8, device="cuda"),
                layout,
                torch.tensor(scale, device="cuda"),
            )
            for scale in (1e-3, 2e-3)
        ]
        records = function(*x, *pages, place // PAGE, place % PAGE, num_bits=num_bits)
        tensors = [page.stored for page in pages]
        written.append([*tensors, *(part for record in records if record for part in record)])
    pairs = zip(*written, strict=True)
    return float(sum(int((ours != theirs).sum()) for ours, theirs in pairs))


def large_cache(requests: int, tokens: int, lengths: list[int] | None = None) -> PackedCache:
    """Gives a cache of random bytes; its pages are not poisoned."""
    return random_cache(
        PageLayout(NVFP4, HEAD_DIM, PAGE),
        lengths or [tokens] * requests,
        num_heads=HEADS,
        ratio=RATIO,
        device="cuda",
    )


def time_large(copy: float, *, quick: bool) -> list[dict[str, Any]]:
    """Gives a row for each large case."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randint(8192, 131073, (32,), generator=generator).tolist()
    cases = [(requests, tokens, None) for requests, tokens in LARGE]
    cases.append((32, 0, mixed))
    for requests, tokens, lengths in cases:
        cache = large_cache(requests, tokens, lengths)
        row: dict[str, Any] = {"requests": requests, "tokens": tokens or "8K to 128K"}
        row["fp4_GB"] = cache.kv_bytes / 1e9
        row["cuda_ms"] = median_ms(lambda c=cache: cuda.paged_attention(*c.arguments))
        if not quick:
            row["triton_ms"] = median_ms(
                lambda c=cache: triton_attention.paged_attention(*c.arguments, max_new_tokens=1)
            )
        row["cuda_TBps"] = cache.kv_bytes / row["cuda_ms"] / 1e9
        row["cuda_of_copy"] = row["cuda_TBps"] / copy
        num_tokens = int(cache.lengths.sum())
        del cache
        if lengths is None and num_tokens * 2 * HEADS * HEAD_DIM * 2 < 60e9:
            row |= time_bf16(requests, tokens)
            row["speedup"] = min(v for k, v in row.items() if k.startswith("bf16")) / row["cuda_ms"]
        print(row, flush=True)
        rows.append(row)
    return rows


def time_bf16(requests: int, tokens: int) -> dict[str, float]:
    """Gives the times of BF16 kernels in ms, on contiguous keys and values."""
    shape = (requests, HEADS, tokens, HEAD_DIM)
    keys = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    values = torch.empty_like(keys).normal_()
    query = torch.randn(requests, HEADS * RATIO, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    times = {}
    ours = bf16_decode(query.view(-1, RATIO, HEAD_DIM), keys, values)
    expected = F.scaled_dot_product_attention(query[:1], keys[:1], values[:1], enable_gqa=True)
    assert relative_error(ours[:HEADS].view(expected.shape), expected.double()) < 1e-2
    for block, warps, stages in ((64, 8, 2), (32, 4, 3), (64, 4, 2)):
        try:
            times[f"bf16_triton_{block}_{warps}_{stages}_ms"] = median_ms(
                lambda b=block, w=warps, s=stages: bf16_decode(
                    query.view(-1, RATIO, HEAD_DIM), keys, values, block=b, warps=w, stages=s
                )
            )
        except triton.runtime.errors.OutOfResources:
            continue
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
        backend = getattr(torch.nn.attention.SDPBackend, name)
        # Eight query heads of a key/value head are eight rows of it: no mask is needed.
        rows = query.view(requests, HEADS, RATIO, HEAD_DIM)
        with torch.nn.attention.sdpa_kernel(backend):
            try:
                times[f"bf16_sdpa_{name.lower()}_ms"] = median_ms(
                    lambda q=rows: F.scaled_dot_product_attention(q, keys, values)
                )
            except RuntimeError as error:
                print(name, "cannot run:", str(error)[:100])
    return times


def time_ceilings(copy: float) -> dict[str, float]:
    """Gives the bandwidth of kernels that load, or load and decode, 2.4 GB, as shares of copy."""
    num_lines = 1 << 24
    lines = torch.randint(0, 256, (num_lines, 144), dtype=torch.uint8, device="cuda")
    lines[:, 128:] = 0x38
    shares = {}
    for mode, name in enumerate(("load", "decode", "decode_mma")):
        best = min(
            median_ms(lambda m=mode, b=blocks: ceiling(lines, m, b)) for blocks in (4, 8, 16)
        )
        shares[f"{name}_of_copy"] = lines.numel() / best / 1e9 / copy
    return shares


def time_small() -> list[dict[str, Any]]:
    """Gives a row for each small case, in us under graph replay."""
    rows = []
    for requests, tokens in SMALL:
        cache = large_cache(requests, tokens)
        row = {"requests": requests, "tokens": tokens}
        row["cuda_us"] = graph_us(lambda c=cache: cuda.paged_attention(*c.arguments))
        row["triton_us"] = graph_us(
            lambda c=cache: triton_attention.paged_attention(*c.arguments, max_new_tokens=1)
        )
        shape = (requests, HEADS, tokens, HEAD_DIM)
        keys = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        values = torch.randn_like(keys)
        query = cache.query.view(-1, RATIO, HEAD_DIM)
        row["bf16_triton_us"] = graph_us(lambda q=query, k=keys, v=values: bf16_decode(q, k, v))
        rows.append(row)
        print(row, flush=True)
    return rows


def time_prefill() -> list[dict[str, Any]]:
    """Gives a row for each chunk of queries."""
    rows = []
    for new, before in ((2048, 0), (2048, 6144), (512, 32256)):
        cache = random_cache(
            PageLayout(NVFP4, HEAD_DIM, PAGE),
            [before + new],
            [new],
            num_heads=HEADS,
            ratio=RATIO,
            device="cuda",
        )
        row: dict[str, Any] = {"new": new, "before": before}
        row["triton_ms"] = median_ms(
            lambda c=cache, n=new: triton_attention.paged_attention(*c.arguments, max_new_tokens=n)
        )
        row["torch_ms"] = median_ms(lambda c=cache: reference.paged_attention(*c.arguments))
        pairs = new * before + new * (new + 1) / 2
        row["triton_TFLOPs"] = 4 * pairs * HEADS * RATIO * HEAD_DIM / row["triton_ms"] / 1e9
        rows.append(row)
        print(row, flush=True)
    return rows


def time_append() -> list[dict[str, Any]]:
    """Gives a row for each number of tokens, in us under graph replay."""
    rows = []
    layout = PageLayout(NVFP4, HEAD_DIM, PAGE)
    for tokens in (1, 64, 256, 8192):
        x = torch.randn(2, tokens, HEADS, HEAD_DIM, device="cuda").bfloat16()
        count = -(-tokens // PAGE)
        pages = [
            PackedPages(
                torch.zeros(layout.shape(count, HEADS), dtype=torch.uint8, device="cuda"),
                layout,
                torch.tensor(1e-3, device="cuda"),
            )
            for _ in range(2)
        ]
        place = torch.arange(tokens, device="cuda").int()
        block, offset = place // PAGE, place % PAGE
        arguments = (*x, *pages, block, offset)
        row = {"tokens": tokens}
        for bits in (None, 1, 4):
            row[f"append_{bits}_bits_us"] = graph_us(
                lambda a=arguments, b=bits: triton_append.append(*a, num_bits=b)
            )
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("bench_kv.json"))
    parser.add_argument("--quick", action="store_true", help="neither Triton nor small cases")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "head_dim": HEAD_DIM,
        "heads": HEADS,
        "query_heads": HEADS * RATIO,
        "page_tokens": PAGE,
    }

    def keep(name: str, value: Any) -> None:
        result[name] = value
        arguments.out.write_text(json.dumps(result, indent=1))
        print(name, value, flush=True)

    keep("errors", checks())
    keep("copy_TBps", copy_bandwidth())
    keep("large", time_large(result["copy_TBps"], quick=arguments.quick))
    keep("ceilings", time_ceilings(result["copy_TBps"]))
    if not arguments.quick:
        keep("small", time_small())
        keep("prefill", time_prefill())
        keep("append", time_append())


if __name__ == "__main__":
    main()
