"""Compares guard and rounding in one kernel with torch; a program, for TRITON_INTERPRET.

python interpreted_guided.py FORMATS DEVICE DTYPE     prints how many inputs were compared
"""

import sys
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from megatron_trace.formats import (
    NUMBER_FORMATS,
    NumberFormat,
    kernels_guard,
    kernels_guided,
    ops,
)
from megatron_trace.formats.kernels_guided import RowLaunch
from megatron_trace.hints import guard, guided
from megatron_trace.hints.guard import THRESHOLDS, GuardThresholds
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_rows
from megatron_trace.testing.kernel_equality import row_scales

# The interpreter takes about 20 us a value and candidate.
MAX_VALUES = {"cpu": 96, "cuda": 1 << 20}
# One row a program, and several, of which some may be missing; octets at once, and one by one.
LAUNCHES = (
    RowLaunch(lanes=8, num_warps=1, tiles=2),
    RowLaunch(lanes=32, num_warps=1, tiles=1),
    RowLaunch(lanes=4, num_warps=1, tiles=1),
    RowLaunch(lanes=32, num_warps=4, tiles=2),
    RowLaunch(lanes=128, num_warps=4, tiles=2),
)
# In which some dequantised values are rounded; the interpreter truncates what becomes BF16.
OPERAND_DTYPES = {
    "cpu": {torch.float32: torch.float16},
    "cuda": {torch.float32: torch.bfloat16, torch.float16: torch.bfloat16},
}
# Of other calls.
REJECTED = 5


@dataclass
class Rows:
    """Rows and their hints.

    Attributes:
        x: float [N, K].
        hint: uint8 [N, A].
        scale_bytes: uint8 [N, B].
        has_hint: bool [N].
        scale: The global scale.
    """

    x: torch.Tensor
    hint: torch.Tensor
    scale_bytes: torch.Tensor
    has_hint: torch.Tensor
    scale: torch.Tensor | float | None


def compare(fmt: NumberFormat, dtype: torch.dtype, device: str) -> int:
    """Compares values, codes and decisions on each hard input that holds a block.

    Each kind of arguments is a kernel of its own, so that they take turns.
    """
    num_compared = 0
    for case, x in hard_rows(dtype, max_values=MAX_VALUES[device]):
        scale = torch.tensor(case.global_scale)
        scales = [scale, row_scales(x, case.global_scale), case.global_scale]
        scale = scales[num_compared % 3] if fmt.has_global_scale else None
        # Also what is launched where nothing is said.
        launch = LAUNCHES[num_compared % 3] if device == "cpu" else None
        _compare(fmt, x, scale, device, num_compared, launch, f"{case.name} {dtype}")
        num_compared += 1
    # Rows that fill no tile, several and many at once.
    lengths = (96, 320) if device == "cpu" else (96, 1312, 512, 512, 2048)
    for turn, (length, launch) in enumerate(zip(lengths, LAUNCHES, strict=False)):
        x = torch.randn(3 if device == "cpu" else 999, length).to(dtype)
        scale = 0.002 if fmt.has_global_scale else None
        _compare(fmt, x, scale, device, turn, launch, f"{length} {dtype}")
    return num_compared


def _compare(
    fmt: NumberFormat, x, scale, device: str, turn: int, launch: RowLaunch | None, what: str
) -> None:
    """Compares every kind of hint of some number of bits; one of them in the interpreter."""
    bits = fmt.hint_bits[turn // 3 % 3]
    some = torch.arange(len(x)) % 3 != 1
    _, hint, scale_bytes = ops.rtn_record(
        x, scale, num_bits=bits, number_format=fmt, implementation="torch"
    )
    random = torch.randint(0, 256, hint.shape, dtype=torch.uint8)
    mixed = torch.where((torch.arange(len(x)) % 4 == 2)[:, None], random, hint)
    kinds = (
        ("near", Rows(x * 1.02, hint, scale_bytes, some, scale)),
        ("some random bits", Rows(x * 1.02, mixed, scale_bytes, some | True, scale)),
        ("other scales", Rows(x * 0.7, hint, scale_bytes.roll(1, 0), some, scale)),
    )
    for name, rows in kinds if device == "cuda" else kinds[turn % 3 :][:1]:
        case = f"{what} {name} {bits} {launch} {'in order' if turn % 2 else ''}"
        _compare_rows(fmt, rows, bits, launch, device, turn, case)


def _compare_rows(
    fmt, rows: Rows, bits: int, launch: RowLaunch | None, device: str, turn: int, what: str
) -> None:
    x, hint, scale_bytes, order = rows.x, rows.hint, rows.scale_bytes, None
    if turn % 2:
        # Two rows of hints for each flag, of which each row of x names one.
        hint, scale_bytes = (torch.cat((one.roll(1, 0), one)) for one in (hint, scale_bytes))
        order = (torch.arange(len(x)) + len(x)).flip(0).int()
        x = x.flip(0)
    elif turn % 4:
        # Aligned less than memory is.
        hint = torch.cat((hint[:1], hint))[1:]

    def on_device(tensor):
        return tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor

    given = [x, hint, scale_bytes, rows.has_hint, rows.scale]
    counts = [torch.full((1,), REJECTED, device=where) for where in (device, "cpu")]
    thresholds = THRESHOLDS[fmt.name]
    # The interpreter mistakes denormal BF16 numbers, which only come out under a denormal scale.
    is_denormal = device == "cpu" and "global_scale_denormal torch.bfloat16" in what
    kind = "codes" if is_denormal else ("values", "codes")[turn // 2 % 2]
    dtype = OPERAND_DTYPES[device].get(x.dtype) if turn // 3 % 3 == 1 else None
    how = {"num_bits": bits} | ({"dtype": dtype} if kind == "values" else {})
    got = getattr(kernels_guided, f"guided_{kind}")(
        *map(on_device, given),
        fmt,
        thresholds.limits,
        order=on_device(order),
        rejected=counts[0],
        launch=launch,
        **how,
    )
    expected = getattr(guided, f"guided_{kind}")(
        *given,
        thresholds=thresholds,
        number_format=fmt,
        order=order,
        rejected=counts[1],
        implementation="torch",
        **how,
    )
    for mine, theirs in zip(got, expected, strict=True):
        assert_same_bytes(mine.cpu(), theirs, f"{what} {kind} {dtype}", any_nan=True)
    assert counts[0].tolist() == counts[1].tolist(), f"{what} rejected {counts}"


def compare_kinds(device: str) -> None:
    """Compares calls that differ in one kind of argument, which must not share a plan."""
    fmt, usual, other = NUMBER_FORMATS["nvfp4"], torch.float32, torch.float16
    rows = torch.randn(4, 64, dtype=other)
    _, hint, scale_bytes = ops.rtn_record(rows, 0.002, num_bits=1, implementation="torch")
    flags = torch.tensor([True, False, True, True])
    one, some = torch.tensor(0.002), torch.tensor([[0.002], [0.003], [0.002], [0.002]])
    reverse = torch.arange(3, -1, -1).int()
    for x_dtype, dtype, scale, num_flags, launch in (
        (usual, None, 0.002, 4, None),
        (other, None, 0.002, 4, None),
        (usual, other, 0.002, 4, None),
        (usual, None, one, 4, None),
        (usual, None, some, 4, None),
        (usual, None, 0.002, 2, None),
        (usual, None, 0.002, 4, RowLaunch(lanes=4, num_warps=1, tiles=1)),
    ):
        x = (rows.float() * 1.01).to(x_dtype)
        given = x, hint, scale_bytes, flags[:num_flags], scale
        there = [one.to(device) if isinstance(one, torch.Tensor) else one for one in given]
        thresholds, how = THRESHOLDS["nvfp4"], {"num_bits": 1, "dtype": dtype}
        got = kernels_guided.guided_values(
            *there, fmt, thresholds.limits, order=reverse.to(device), launch=launch, **how
        )
        expected = guided.guided_values(
            *given, order=reverse, thresholds=thresholds, implementation="torch", **how
        )
        for mine, theirs in zip(got, expected, strict=True):
            assert_same_bytes(mine.cpu(), theirs, f"{x_dtype} {dtype} {scale} {num_flags} {launch}")
    assert len(kernels_guided._plans) == 7


@triton.jit
def _decide(blocks_ptr, bits_ptr, accepted_ptr, num_rows, far, parity, T: tl.constexpr):
    row = tl.program_id(0) * T + tl.arange(0, T)
    there = row < num_rows
    blocks = tl.load(blocks_ptr + row, mask=there, other=0)
    bits = tl.load(bits_ptr + row, mask=there, other=0)
    tl.store(accepted_ptr + row, kernels_guard.accepts(blocks, bits, far, parity), mask=there)


def compare_decisions(device: str) -> None:
    """Asserts that shares at and beside a threshold are decided as in torch, here and there."""
    octets = torch.arange(1, 8192)
    for share in (0.0, 0.05, 0.1, 0.25, 0.3, 1 / 3, 0.65, 0.7, 0.9, 0.97, 1.0):
        thresholds = GuardThresholds(share, 2, share)
        ties = 0
        for unit, is_far in ((1, True), (8, False)):
            whole = (octets * unit)[:, None]
            near = (whole * share).round().long() + torch.arange(-1, 2)
            part = torch.minimum(near.clamp(min=0), whole).flatten()
            whole = whole.expand(-1, 3).flatten()
            ties += int((part == whole * share).sum())
            # The other number accepts.
            none = torch.zeros_like(part)
            counts = torch.stack((part, whole, none, none) if is_far else (none, none, part, whole))
            expected = guard._health(counts, thresholds).accepted
            on_device = guard._health(counts.to(device), thresholds).accepted.cpu()
            packed = [
                (counts[i] | (counts[i + 1] // of << 16)).int().to(device)
                for i, of in ((0, 1), (2, 8))
            ]
            accepted = torch.zeros(len(part), dtype=torch.bool, device=device)
            shares = thresholds.limits[1:]
            _decide[(-(-len(part) // 8192),)](*packed, accepted, len(part), *shares, T=8192)
            assert_same_bytes(on_device, expected, f"torch {share} {is_far}")
            assert_same_bytes(accepted.cpu(), expected, f"kernel {share} {is_far}")
        assert ties, f"no share is {share}"


def compare_refusals(device: str) -> None:
    """Asserts that what does not fit x is refused, and that no rows are none."""
    x = torch.ones(4, 32, device=device)
    hint, scale_bytes = (torch.zeros(8, size, dtype=torch.uint8, device=device) for size in (4, 2))
    order = torch.arange(4, device=device).int()
    limits, fmt = THRESHOLDS["nvfp4"].limits, NUMBER_FORMATS["nvfp4"]
    rejected = torch.zeros(1, dtype=torch.int64, device=device)
    flags = torch.ones(4, dtype=torch.bool, device=device)
    fits = (x, hint, scale_bytes, flags, order, rejected)
    assert [list(one.shape) for one in _called(fits, fmt, limits)] == [[4, 32], [4]]
    none = (x[:0], hint, scale_bytes, flags, order[:0], rejected)
    assert [list(one.shape) for one in _called(none, fmt, limits)] == [[0, 32], [0]]
    for place, other in (
        (1, hint[:7]),
        (1, hint[:, :3]),
        (1, hint.int()),
        (2, scale_bytes[:7]),
        (3, flags[:3]),
        (3, flags.to(torch.uint8)),
        (4, order[:3]),
        (4, order.long()),
        (4, None),
        (5, rejected.int()),
        (5, torch.zeros(2, dtype=torch.int64, device=device)),
        *(((1, hint.cpu()), (4, order.cpu()), (5, rejected.cpu())) if device == "cuda" else ()),
    ):
        given = [*fits[:place], other, *fits[place + 1 :]]
        with pytest.raises(ValueError, match="needs hint uint8"):
            _called(given, fmt, limits)


def _called(given, fmt: NumberFormat, limits) -> tuple[torch.Tensor, torch.Tensor]:
    *tensors, order, rejected = given
    return kernels_guided.guided_values(
        *tensors, 0.01, fmt, limits, num_bits=1, order=order, rejected=rejected
    )


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names, device, dtype = sys.argv[1:]
    if device == "cpu" and dtype == "bfloat16":
        import emulated_ptx

        emulated_ptx.install()
    # Once: on a GPU each kind is a kernel.
    if dtype == "float32" and "nvfp4" in names.split(","):
        compare_kinds(device)
    compare_refusals(device)
    compare_decisions(device)
    formats = [NUMBER_FORMATS[name] for name in names.split(",")]
    compared = [compare(fmt, getattr(torch, dtype), device) for fmt in formats]
    sys.stdout.write(f"{compared} inputs")


if __name__ == "__main__":
    main()
