"""The kernel of guard and rounding: in Triton's interpreter everywhere, compiled on a GPU."""

import threading

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend

from megatron_trace.formats import NUMBER_FORMATS, kernels_guided, ops
from megatron_trace.formats.kernels_guided_rows import guided_kernel
from megatron_trace.hints.guard import THRESHOLDS, GuardThresholds
from megatron_trace.hints.guided import guided_values
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import num_of_whole_blocks
from megatron_trace.testing.token_rows import rows_of, with_noise

WHOLE_BLOCKS = num_of_whole_blocks()


@pytest.mark.parametrize(
    ("formats", "dtype"),
    [("nvfp4,nvfp4_4over6", "bfloat16"), ("nvfp4,mxfp4,mxfp8", "float32")],
)
def test_interpreted_kernel_judges_and_rounds_as_torch(run_program, formats, dtype) -> None:
    """BF16 goes in pairs, whose instructions `emulated_ptx` knows."""
    printed = run_program("interpreted_guided.py", formats, "cpu", dtype, interpret=True)
    assert printed == f"{[WHOLE_BLOCKS] * len(formats.split(','))} inputs"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("fmt", NUMBER_FORMATS)
def test_kernel_judges_and_rounds_as_torch(run_program, fmt: str, dtype: str) -> None:
    printed = run_program("interpreted_guided.py", fmt, "cuda", dtype, interpret=False)
    assert printed == f"{[WHOLE_BLOCKS]} inputs"


def test_a_compiled_kernel_gets_its_arguments_in_its_order() -> None:
    x = torch.ones(2, 64)
    kind = (-1, x.dtype, 64, NUMBER_FORMATS["mxfp8"], 1, None, 1, "none", None, *(False,) * 4)
    constants = list(kernels_guided._new_plan(kind, x).constants)
    assert guided_kernel.arg_names[-len(constants) :] == constants
    assert guided_kernel.arg_names[10 : -len(constants)] == [
        "num_rows",
        "max_scale_steps",
        "max_far_blocks",
        "min_parity_agreement",
    ]


def test_a_compiled_kernel_depends_on_addresses_of_which_its_launch_asks() -> None:
    """Those that are allocated for it are aligned; of shares, as floats, nothing is compiled in."""
    specialised = [
        p.name
        for p in guided_kernel.params
        if not (p.is_constexpr or p.do_not_specialize or p.do_not_specialize_on_alignment)
    ]
    shares = ["max_far_blocks", "min_parity_agreement"]
    assert specialised == ["x_ptr", "hint_ptr", "out_ptr", "out_bytes_ptr", *shares]
    of_share = [native_specialize_impl(BaseBackend, x, False, True, True) for x in (1.0, 0.25)]
    assert of_share == [("fp32", None)] * 2


@pytest.mark.gpu
def test_a_compiled_kernel_fits_other_rows_addresses_limits_streams_threads_and_graphs() -> None:
    """It is launched without Triton's binder, which would see what it was not compiled for."""
    fmt = NUMBER_FORMATS["nvfp4"]
    x = rows_of(64)[:257].bfloat16()
    _, hint, scale_bytes = ops.rtn_record(x, 0.002, num_bits=2, implementation="torch")
    x = with_noise(x.float(), 0.02).bfloat16()
    hint[::5] ^= 0x5A
    flags = torch.arange(len(x)) % 7 != 0
    usual = THRESHOLDS["nvfp4"]
    counts = torch.zeros(1, dtype=torch.int64, device="cuda")

    def apart(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """Gives the tensor on the GPU, so many bytes beyond what memory is aligned to."""
        size = num_bytes // tensor.element_size()
        memory = tensor.new_empty(size + tensor.numel(), device="cuda")
        return memory[size:].view(tensor.shape).copy_(tensor)

    def here(call) -> int:
        call()
        return 1

    def compared(rows: int = 257, at=(0, 0, 0, 0), thresholds=usual, called=here) -> None:
        given = x[:rows], hint[:rows], scale_bytes[:rows], flags[:rows]
        there = [apart(*one) for one in zip(given, at, strict=True)]
        rejected, how = torch.tensor([0]), {"num_bits": 2, "thresholds": thresholds}
        expected = guided_values(*given, 0.002, rejected=rejected, implementation="torch", **how)
        before, got = int(counts), []
        torch.cuda.synchronize()

        def call() -> None:
            got[:] = kernels_guided.guided_values(
                *there, 0.002, fmt, thresholds.limits, num_bits=2, rejected=counts
            )

        times = called(call)
        torch.cuda.synchronize()
        for mine, theirs in zip(got, expected, strict=True):
            assert_same_bytes(mine.cpu(), theirs, f"{rows} {at} {thresholds}")
        assert int(counts) - before == times * int(rejected)

    def on_a_stream(call) -> int:
        with torch.cuda.stream(torch.cuda.Stream()):
            call()
        return 1

    def in_a_thread(call) -> int:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return 1

    def in_a_graph(call) -> int:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        for _ in range(3):
            graph.replay()
        return 3

    all_rows, no_row = GuardThresholds(1, 99, 0), GuardThresholds(0, 0, 1)
    compared(thresholds=all_rows)
    kinds = len(kernels_guided._plans)
    for rows in (1, 2, 16, 31, 257):
        compared(rows)
    for at in ((2, 0, 0, 0), (4, 0, 0, 0), (8, 2, 0, 0), (0, 1, 1, 1), (0, 8, 3, 5), (0, 0, 0, 0)):
        compared(at=at)
    for thresholds in (all_rows, no_row, GuardThresholds(0.1, 1, 0.9), usual):
        compared(thresholds=thresholds)
    for called in (on_a_stream, in_a_thread, in_a_graph):
        compared(called=called)
    assert len(kernels_guided._plans) == kinds


def test_the_kernel_says_why_it_cannot_run_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="triton needs x on a GPU; got cpu"):
        guided_values(
            torch.ones(2, 32),
            torch.zeros(2, 4, dtype=torch.uint8),
            torch.zeros(2, 2, dtype=torch.uint8),
            torch.ones(2, dtype=torch.bool),
            1.0,
            num_bits=1,
            thresholds=THRESHOLDS["nvfp4"],
            implementation="triton",
        )
