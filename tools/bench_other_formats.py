"""Compares kernels of 4over6, MXFP4, MXFP8 and scales of rows with their references; times them.

Random values of several distributions, with the references on the same GPU; then the bandwidth of
each kernel beside a device copy, and microseconds for few tokens under replay of a CUDA graph.
Ends with an error when one byte differs.

    python tools/bench_other_formats.py --values 12000000 --megabytes 512
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from bench_formats import SMALL_COLUMNS, SMALL_TOKENS, replayed_us
from triton.testing import do_bench

from megatron_trace.formats import MXFP4, MXFP8, NVFP4, NVFP4_4OVER6, kernels_whole
from megatron_trace.testing.assertions import assert_same_bytes

COLUMNS = 4096
ROWS = 512
FORMATS = {"rows": NVFP4, "4over6": NVFP4_4OVER6, "MXFP4": MXFP4, "MXFP8": MXFP8}


def main() -> None:
    """Runs the comparison, then the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=12_000_000, help="random values a format")
    parser.add_argument(
        "--megabytes", type=int, default=512, help="size of an input; 0: few tokens only"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    for name in FORMATS:
        print(f"{name}: {compare(name, arguments.values)} random values, equal bytes")
    if arguments.megabytes:
        measure(arguments.megabytes)
    measure_small()


def compare(name: str, num_values: int) -> int:
    """Compares every function of a format on random values; gives how many values."""
    number_format = FORMATS[name]
    specified = number_format.specification
    rules = ({"error": "mse"}, {"error": "mae"}) if name == "4over6" else (number_format.rules,)
    cases = list(itertools.product(_DISTRIBUTIONS, (torch.bfloat16, torch.float32), rules))
    done = 0
    while done < num_values:
        for make, dtype, options in cases:
            x = make().to(dtype)
            scale, ruled = _scale(name, x), replace(number_format, rules=options)
            trainer_x = (x * (1 + 0.01 * torch.randn_like(x))).to(dtype)
            what = f"{name} {make.__name__} {dtype} {options}"
            got, expected = kernels_whole.rtn(x, scale, ruled), specified.rtn(x, scale, **options)
            _check(got, expected, what)
            for bits in number_format.hint_bits:
                got = kernels_whole.rtn_record(x, scale, ruled, num_bits=bits)
                expected = specified.rtn_record(x, scale, num_bits=bits, **options)
                for mine, theirs in zip(got, expected, strict=True):
                    _check(mine, theirs, f"{what} record {bits}")
                for hint in (got[1], torch.randint_like(got[1], 256)):
                    guide = (trainer_x, hint, got[2], scale)
                    y = kernels_whole.guided(*guide, ruled, num_bits=bits)
                    _check(y, specified.guided(*guide, num_bits=bits), f"{what} guided {bits}")
            done += x.numel()
    return done


def _check(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert_same_bytes(got, expected, what, any_nan=True)


def _scale(name: str, x: torch.Tensor) -> torch.Tensor | None:
    """Gives the global scale: of rows, of the tensor for every other, or none."""
    if not FORMATS[name].has_global_scale:
        return None
    scales = (torch.rand(x.shape[0], 1, device="cuda") * 10 - 8).exp()
    return scales if name == "rows" or torch.rand(()) < 0.5 else scales[0, 0]


def normal() -> torch.Tensor:
    """Gives normal values."""
    return torch.randn(ROWS, COLUMNS, device="cuda")


def lognormal_blocks() -> torch.Tensor:
    """Gives blocks of very different size."""
    scales = (4 * torch.randn(ROWS, COLUMNS // 16, 1, device="cuda")).exp()
    return (normal().unflatten(1, (-1, 16)) * scales).flatten(1)


def any_bits() -> torch.Tensor:
    """Gives every bit pattern alike."""
    bits = torch.randint(-(2**31), 2**31, (ROWS, COLUMNS), device="cuda")
    return bits.to(torch.int32).view(torch.float32)


_DISTRIBUTIONS = (normal, lognormal_blocks, any_bits)


def measure(megabytes: int) -> None:
    """Prints TB/s of each kernel for BF16, useful bytes only, and its share of a copy's."""
    rows = megabytes * 2**20 // (COLUMNS * 2)
    inputs = [torch.randn(rows, COLUMNS, device="cuda").bfloat16() for _ in range(3)]
    rotating = itertools.cycle(inputs)
    out = torch.empty_like(inputs[0])

    def rate(bytes_per_value: float, call: Callable[[], object]) -> float:
        milliseconds = do_bench(call, warmup=25, rep=100, return_mode="median")
        return bytes_per_value * out.numel() / milliseconds / 1e9

    copy = rate(4, lambda: out.copy_(next(rotating)))
    print(f"copy {copy:.3f} TB/s")
    for name, bytes_per_value, call in _calls(rotating, rows):
        found = rate(bytes_per_value, call)
        print(f"{name:28} {found:.3f} TB/s {found / copy:.3f} of copy")


def measure_small() -> None:
    """Prints microseconds per call for few tokens of BF16."""
    for tokens in SMALL_TOKENS:
        x = torch.randn(tokens, SMALL_COLUMNS, device="cuda").bfloat16()
        out = torch.empty_like(x)
        copy = replayed_us(lambda out=out, x=x: out.copy_(x))
        calls = _calls(itertools.repeat(x), tokens)
        times = ", ".join(f"{name} {replayed_us(call):.2f}" for name, _, call in calls)
        print(f"{tokens} x {SMALL_COLUMNS}, us: copy {copy:.2f}, {times}", flush=True)


def _calls(
    rotating: Iterator[torch.Tensor], rows: int
) -> Iterator[tuple[str, float, Callable[[], object]]]:
    one = torch.tensor(0.002, device="cuda")
    each = one * (1 + torch.rand(rows, 1, device="cuda"))
    for label, number_format, scale in (
        ("NVFP4", NVFP4, one),
        ("NVFP4 rows", NVFP4, each),
        ("4over6", NVFP4_4OVER6, one),
        ("MXFP4", MXFP4, None),
        ("MXFP8", MXFP8, None),
    ):
        form = scale, number_format
        yield f"{label} rtn", 4, lambda f=form: kernels_whole.rtn(next(rotating), *f)
        for bits in (1, number_format.code_bits):
            moved = 4 + bits / 8 + 1 / number_format.block_size
            _, *hint = kernels_whole.rtn_record(next(rotating), *form, num_bits=bits)

            def record(f=form, b=bits) -> object:
                return kernels_whole.rtn_record(next(rotating), *f, num_bits=b)

            def guide(f=form, b=bits, h=hint) -> object:
                return kernels_whole.guided(next(rotating), *h, *f, num_bits=b)

            yield f"{label} rtn_record, {bits} bit", moved, record
            yield f"{label} guided, {bits} bit", moved, guide


if __name__ == "__main__":
    main()
