"""The kernels of the packed K/V cache: interpreted or compiled everywhere, run on a GPU."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_trace.formats import NVFP4
from megatron_trace.rollout import kernels
from megatron_trace.rollout.kernels import ops
from megatron_trace.rollout.pages import PackedPages, PageLayout
from megatron_trace.testing.hard_inputs import hard_inputs
from megatron_trace.testing.paged_kv import (
    DECODE_CASES,
    assert_append_equals_reference,
    exact_attention,
    exact_plain_attention,
    plain_cache,
    random_cache,
    relative_error,
)

NAMES = [case.name for case in hard_inputs()]
# Measured at most 1.75e-3 on an H200, of which rounding the output to BF16 makes nearly all.
TOLERANCE = 2.5e-3


def test_interpreted_kernels_equal_the_reference(run_program) -> None:
    assert run_program("interpreted_kv.py", interpret=True) == f"{2 * len(NAMES) + 6} inputs"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_decode_kernel_compiles_without_spilling_registers(tmp_path: Path) -> None:
    source = Path(kernels.__file__).with_name("decode_attention.cu")
    command = ["nvcc", "-arch=sm_90", "-O3", "-std=c++17", "-Xptxas", "-v", "-cubin"]
    process = subprocess.run(
        [*command, str(source), "-o", str(tmp_path / "decode.cubin")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    spills = re.findall(r"(\d+) bytes spill stores", process.stderr)
    # Attention and its combination, for three head dims and two widths.
    assert spills == ["0"] * 12


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_append_equals_the_reference_on_the_hard_inputs(name: str, dtype) -> None:
    from megatron_trace.rollout.kernels.append import append

    case = next(case for case in hard_inputs(dtype, "cuda") if case.name == name)
    num_tokens = case.x.numel() // 16
    values = case.x.flatten()[: num_tokens * 16].view(num_tokens, 1, 16)
    for num_bits in (None, 1, 2, 4):
        assert_append_equals_reference(
            append, values, case.global_scale, page_tokens=4, num_bits=num_bits, what=name
        )


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "page_tokens"), [(64, 16), (96, 8), (128, 32), (256, 64)])
def test_append_writes_every_head_dim_where_the_reference_does(head_dim, page_tokens) -> None:
    from megatron_trace.rollout.kernels.append import append

    generator = torch.Generator("cuda").manual_seed(0)
    # A slice of a projection's output, as the engine's keys are.
    x = torch.randn(300, 3, 2 * head_dim, device="cuda", generator=generator).bfloat16()
    assert_append_equals_reference(
        append, x[..., :head_dim], 2e-3, page_tokens=page_tokens, num_bits=1
    )


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["cuda", "triton"])
@pytest.mark.parametrize(("head_dim", "page", "heads", "ratio", "lengths"), DECODE_CASES)
def test_decode_is_exact_attention(implementation, head_dim, page, heads, ratio, lengths) -> None:
    cache = random_cache(
        PageLayout(NVFP4, head_dim, page),
        lengths,
        num_heads=heads,
        ratio=ratio,
        device="cuda",
        padding_rows=2,
    )
    got = ops.paged_attention(*cache.arguments, max_new_tokens=1, implementation=implementation)
    expected = exact_attention(cache)
    for row, length in enumerate(lengths):
        if length:
            error = relative_error(got[row], expected[row])
            assert error < TOLERANCE, f"request {row} of {length} tokens: {error}"
        else:
            assert not got[row].any(), f"request {row} of no tokens must get zeros"
    assert not got[len(lengths) :].any(), "rows of no request must be zero"
    again = ops.paged_attention(*cache.arguments, max_new_tokens=1, implementation=implementation)
    assert torch.equal(got, again)


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "page", "heads", "ratio", "lengths"), DECODE_CASES)
def test_decode_over_plain_pages_is_exact_attention(head_dim, page, heads, ratio, lengths) -> None:
    cache = random_cache(
        PageLayout(NVFP4, head_dim, page),
        lengths,
        num_heads=heads,
        ratio=ratio,
        device="cuda",
        padding_rows=2,
    )
    keys, values = plain_cache(cache)
    arguments = cache.query, keys, values, *cache.arguments[3:]
    got = ops.paged_attention(*arguments, max_new_tokens=1, implementation="triton")
    assert relative_error(got, exact_plain_attention(cache, keys, values)) < TOLERANCE
    assert not got[len(lengths) :].any(), "rows of no request must be zero"
    again = ops.paged_attention(*arguments, max_new_tokens=1)
    assert torch.equal(got, again), "the choice of auto, and equal bits"


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["cuda", "triton"])
def test_prefill_and_decode_in_one_step_are_exact_attention(implementation) -> None:
    cache = random_cache(
        PageLayout(NVFP4, 256, 32),
        [300, 64, 1, 0, 77],
        [300, 10, 1, 1, 70],
        num_heads=2,
        ratio=4,
        device="cuda",
    )
    got = ops.paged_attention(*cache.arguments, max_new_tokens=300, implementation=implementation)
    assert relative_error(got, exact_attention(cache)) < TOLERANCE


@pytest.mark.gpu
def test_triton_reads_lines_of_one_token_where_head_dim_does_not_divide_256() -> None:
    cache = random_cache(
        PageLayout(NVFP4, 96, 32), [300, 64, 77], [1, 10, 70], num_heads=2, ratio=4, device="cuda"
    )
    got = ops.paged_attention(*cache.arguments, max_new_tokens=70, implementation="triton")
    assert relative_error(got, exact_attention(cache)) < TOLERANCE
    with pytest.raises(ValueError, match=r"head_dim must be one of \(64, 128, 256\), not 96"):
        ops.paged_attention(*cache.arguments, max_new_tokens=70, implementation="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("magnitude", [1e-30, 1e-4, 1e4, 1e30])
def test_decode_takes_queries_of_any_magnitude(magnitude: float) -> None:
    cache = random_cache(PageLayout(NVFP4, 256, 64), [500, 3], num_heads=2, ratio=8, device="cuda")
    cache = dataclasses.replace(cache, query=(cache.query.float() * magnitude).bfloat16())
    got = ops.paged_attention(*cache.arguments, max_new_tokens=1, implementation="cuda")
    assert relative_error(got, exact_attention(cache)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["cuda", "triton"])
def test_a_block_with_a_nan_makes_nan_of_its_own_request_and_heads_only(implementation) -> None:
    cache = random_cache(PageLayout(NVFP4, 256, 64), [100, 90], num_heads=2, ratio=4, device="cuda")
    page = int(cache.block_table[0, 1])
    _, scale_bytes = cache.values.layout.split(cache.values.stored)
    scale_bytes[page, 1, 3, 0, 5] = 0x7F
    got = ops.paged_attention(*cache.arguments, max_new_tokens=1, implementation=implementation)
    nan = got.isnan()
    assert nan[0, 4:, 80:96].all(), "the block's columns of the head"
    assert int(nan.sum()) == 4 * 16


@pytest.mark.gpu
def test_decode_can_be_captured_and_replayed_with_other_lengths() -> None:
    cache = random_cache(
        PageLayout(NVFP4, 256, 64), [700, 900], num_heads=2, ratio=8, device="cuda"
    )

    def run() -> torch.Tensor:
        return ops.paged_attention(*cache.arguments, max_new_tokens=1, implementation="cuda")

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()
    cache.lengths.copy_(torch.tensor([5, 640], dtype=torch.int32))
    graph.replay()
    assert relative_error(output, exact_attention(cache)) < TOLERANCE


@pytest.mark.gpu
def test_the_fastest_kernel_that_can_run_is_chosen() -> None:
    def chosen(pages: PackedPages, query_heads: int) -> str:
        query = torch.zeros(1, query_heads, pages.layout.head_dim, device="cuda")
        return ops._attention_implementation("auto", query, pages)

    def pages(head_dim: int) -> PackedPages:
        cache = random_cache(
            PageLayout(NVFP4, head_dim, 32), [5], num_heads=1, ratio=1, device="cuda"
        )
        return cache.keys

    assert chosen(pages(256), 8) == "cuda"
    assert chosen(pages(256), 17) == "triton"
    assert chosen(pages(96), 8) == "triton"
