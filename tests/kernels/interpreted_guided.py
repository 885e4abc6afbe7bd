"""Compares guard and rounding in one kernel with torch; a program, for TRITON_INTERPRET.

python interpreted_guided.py FORMATS DEVICE DTYPE     prints how many inputs were compared
"""

import sys
from dataclasses import dataclass

import torch

from megatron_trace.formats import NUMBER_FORMATS, NumberFormat, kernels_guided, ops
from megatron_trace.formats.kernels_guided import RowLaunch
from megatron_trace.hints import guided
from megatron_trace.hints.guard import THRESHOLDS
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
    """Compares values, codes and decisions on each hard input that holds a block."""
    num_compared = 0
    for case, x in hard_rows(dtype, max_values=MAX_VALUES[device]):
        scale = torch.tensor(case.global_scale)
        scales = [scale, row_scales(x, case.global_scale), case.global_scale]
        if not fmt.has_global_scale:
            scales = [None]
        turn = None if device == "cuda" else num_compared
        for one in scales if turn is None else scales[turn % len(scales) :][:1]:
            _compare(fmt, x, one, device, turn, f"{case.name} {dtype}")
        num_compared += 1
    scale = 0.002 if fmt.has_global_scale else None
    # Rows that fill no tile, several and many at once.
    for turn, length in enumerate((96, 1312, 512, 2048) if device == "cuda" else (96, 320)):
        rows = 999 if device == "cuda" else 3
        x = torch.randn(rows, length, generator=torch.Generator().manual_seed(0)).to(dtype)
        _compare(fmt, x, scale, device, None if device == "cuda" else turn, f"{length} {dtype}")
    return num_compared


def _compare(fmt: NumberFormat, x, scale, device: str, turn: int | None, what: str) -> None:
    """Compares every kind of hint of every number of bits; one of them if it is its turn."""
    some = torch.arange(len(x)) % 3 != 1
    for bits in fmt.hint_bits if turn is None else fmt.hint_bits[turn % 3 :][:1]:
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
        for name, rows in kinds if turn is None else kinds[turn % 3 :][:1]:
            for launch in LAUNCHES if turn is None else LAUNCHES[turn % 3 :][:1]:
                for ordered in (False, True) if turn is None else (turn % 2 == 1,):
                    case = f"{what} {name} {bits} {launch} {'in order' if ordered else ''}"
                    _compare_rows(fmt, rows, bits, launch, device, ordered, turn, case)


def _compare_rows(
    fmt, rows: Rows, bits: int, launch: RowLaunch, device: str, ordered: bool, turn, what: str
) -> None:
    x, hint, scale_bytes, order = rows.x, rows.hint, rows.scale_bytes, None
    if ordered:
        # Two rows of hints for each flag, of which each row of x names one.
        hint, scale_bytes = (torch.cat((one.roll(1, 0), one)) for one in (hint, scale_bytes))
        order = (torch.arange(len(x)) + len(x)).flip(0).int()
        x = x.flip(0)

    def on_device(tensor):
        return tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor

    given = [x, hint, scale_bytes, rows.has_hint, rows.scale]
    counts = [torch.full((1,), REJECTED, device=where) for where in (device, "cpu")]
    thresholds = THRESHOLDS[fmt.name]
    for kind in ("values", "codes") if turn is None else (("values", "codes")[turn % 2],):
        got = getattr(kernels_guided, f"guided_{kind}")(
            *map(on_device, given),
            fmt,
            thresholds.limits,
            num_bits=bits,
            order=on_device(order),
            rejected=counts[0],
            launch=launch,
        )
        expected = getattr(guided, f"guided_{kind}")(
            *given,
            num_bits=bits,
            thresholds=thresholds,
            number_format=fmt,
            order=order,
            rejected=counts[1],
            implementation="torch",
        )
        for mine, theirs in zip(got, expected, strict=True):
            assert_same_bytes(mine.cpu(), theirs, f"{what} {kind}", any_nan=True)
        assert counts[0].tolist() == counts[1].tolist(), f"{what} rejected {counts}"


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names, device, dtype = sys.argv[1:]
    if device == "cpu" and dtype == "bfloat16":
        import emulated_ptx

        emulated_ptx.install()
    formats = [NUMBER_FORMATS[name] for name in names.split(",")]
    compared = [compare(fmt, getattr(torch, dtype), device) for fmt in formats]
    sys.stdout.write(f"{compared} inputs")


if __name__ == "__main__":
    main()
