"""Compares the kernels of guard, checks and changes with torch; a program, for TRITON_INTERPRET.

python interpreted_guard.py FORMATS DEVICE DTYPE     prints how many inputs were compared
"""

import sys

import torch

from megatron_trace.formats import (
    NUMBER_FORMATS,
    NumberFormat,
    bad_values,
    kernels_changed,
    kernels_checks,
    kernels_guard,
    kernels_guided,
    ops,
)
from megatron_trace.hints import guard
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.hard_inputs import hard_rows
from megatron_trace.testing.kernel_equality import row_scales

# The interpreter takes about 20 us a value.
MAX_VALUES = {"cpu": 32, "cuda": 1 << 20}


def compare(fmt: NumberFormat, dtype: torch.dtype, device: str) -> int:
    """Compares counts and decisions on each hard input that holds a block; gives how many do."""
    num_compared = 0
    for case, x in hard_rows(dtype, max_values=MAX_VALUES[device]):
        scales = [case.global_scale, row_scales(x, case.global_scale)]
        if not fmt.has_global_scale:
            scales = [None]
        turn = None if device == "cuda" else num_compared
        for scale in scales if turn is None else scales[turn % len(scales) :][:1]:
            _compare(fmt, x, scale, device, turn, f"{case.name} {dtype}")
        num_compared += 1
    scale = 0.002 if fmt.has_global_scale else None
    # A row that fills no tile, and more than a tile.
    for turn, length in enumerate((96, 1312)):
        rows = 999 if device == "cuda" else 3 - turn
        x = torch.randn(rows, length, generator=torch.Generator().manual_seed(0)).to(dtype)
        turn = None if device == "cuda" else turn
        _compare(fmt, x, scale, device, turn, f"rows of {length} {dtype}")
    return num_compared


def _compare(
    fmt: NumberFormat, x: torch.Tensor, scale, device: str, turn: int | None, what: str
) -> None:
    """Compares every kind of hint of every number of bits; one of them if it is its turn."""

    def on_device(tensor):
        return tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor

    _compare_checks(x, fmt.block_size, device, what)
    thresholds = guard.THRESHOLDS[fmt.name]
    for bits in fmt.hint_bits if turn is None else fmt.hint_bits[turn % 3 :][:1]:
        _, hint, scale_bytes = ops.rtn_record(
            x, scale, num_bits=bits, number_format=fmt, implementation="torch"
        )
        some = torch.arange(len(x)) % 3 != 1
        random = torch.randint(0, 256, hint.shape, dtype=torch.uint8)
        others = scale_bytes.roll(1, 0)
        kinds = (
            ("near", x * 1.02, hint, scale_bytes),
            ("random bits", x, random, scale_bytes),
            ("other scales", x * 0.7, hint, others),
        )
        for name, trainer_x, payload, bytes_of in kinds if turn is None else kinds[turn % 2 :][:2]:
            tensors = (trainer_x, payload, bytes_of)
            steps = {"num_bits": bits, "max_scale_steps": thresholds.max_scale_steps}
            given = [on_device(tensor) for tensor in (*tensors, scale)]
            counts = guard._counts(*tensors, scale, fmt, bits, thresholds)
            got = kernels_guard.guard_counts(*given, fmt, **steps)
            assert_same_bytes(got.cpu().long(), counts, f"{what} {name} {bits} counts")
            if turn is not None and len(x) == 1:
                continue
            options = {"num_bits": bits, "thresholds": thresholds, "number_format": fmt}
            expected = guard.guided_rows(*tensors, some, scale, **options, implementation="torch")
            *three, on_gpu = given
            got = kernels_guided.accepted_rows(
                *three, on_device(some), on_gpu, fmt, thresholds.limits, num_bits=bits
            )
            assert_same_bytes(got.cpu(), expected, f"{what} {name} {bits} decision")


def _compare_checks(x: torch.Tensor, size: int, device: str, what: str) -> None:
    """Compares what is noted of bad values, and counted, with torch."""
    amax = x.unflatten(-1, (-1, size)).abs().amax(-1)
    numbers = amax[amax == amax].sort().values
    limit = float(numbers[len(numbers) // 2]) * 1.001 if len(numbers) else 1.0
    spoilt = x.clone()
    if x.numel():
        spoilt.flatten()[x.numel() // 2 :: 7] = torch.nan
        spoilt.flatten()[x.numel() * 2 // 3] = -torch.inf
    for values, known, notes, counts in (
        (x, bad_values.ALL_FINITE, True, True),
        (x, bad_values.ALL_FINITE, False, True),
        (spoilt, bad_values.ALL_FINITE, True, False),
        (spoilt, 2, True, True),
    ):
        found = []
        for of, where in ((bad_values, "cpu"), (kernels_checks, device)):
            note, count = (torch.full((1,), start, device=where) for start in (known, 3))
            asked = note if notes else None, count if counts else None
            of.note_bad_values(values.to(where), *asked, limit, size)
            found.append((int(note), int(count)))
        assert found[0] == found[1], f"{what}: {found}, beyond {limit}"


def _compare_changed(device: str) -> None:
    """Compares which tensors differ with those in which a bit was changed."""
    sizes = ((16, 64), (4, 4), (3, 8192), (8, 32))
    tensors = [torch.randn(size).bfloat16().to(device) for size in sizes]
    others = [tensor.clone() for tensor in tensors]
    others[1][3, 3] *= -1
    others[2][2, 8191] += 1
    own, words = ([kernels_changed.words_of(tensor) for tensor in of] for of in (tensors, others))
    got = kernels_changed.changed_bits(tensors, words)
    assert got is not None
    assert got.tolist() == [False, True, True, False], f"changed: {got.tolist()}"
    same = kernels_changed.changed_bits(tensors, own)
    assert same is not None
    assert not same.any()
    for odd in (tensors[0].t(), tensors[0].view(-1)[1:5], tensors[1].view(-1)[:3]):
        assert kernels_changed.words_of(odd) is None
        assert kernels_changed.changed_bits([odd], [kernels_changed.words_of(odd)]) is None
    assert kernels_changed.changed_bits([tensors[0].t()], own[:1]) is None


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names, device, dtype = sys.argv[1:]
    if device == "cpu" and dtype == "bfloat16":
        import emulated_ptx

        emulated_ptx.install()
    _compare_changed(device)
    formats = [NUMBER_FORMATS[name] for name in names.split(",")]
    compared = [compare(fmt, getattr(torch, dtype), device) for fmt in formats]
    sys.stdout.write(f"{compared} inputs")


if __name__ == "__main__":
    main()
