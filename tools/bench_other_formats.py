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

import torch
from bench_formats import SMALL_COLUMNS, SMALL_TOKENS, replayed_us
from triton.testing import do_bench

from megatron_trace.formats import (
    four_over_six,
    kernels,
    kernels_four_over_six,
    kernels_mxfp4,
    kernels_mxfp8,
    mxfp4,
    mxfp8,
    reference,
)
from megatron_trace.testing.assertions import assert_same_bytes

COLUMNS = 4096
ROWS = 512
BITS = {"rows": (1, 2, 4), "4over6": (1, 2, 4), "MXFP4": (1, 2, 4), "MXFP8": (1, 2, 8)}
MODULES = {
    "rows": (reference, kernels),
    "4over6": (four_over_six, kernels_four_over_six),
    "MXFP4": (mxfp4, kernels_mxfp4),
    "MXFP8": (mxfp8, kernels_mxfp8),
}


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
    for name in MODULES:
        print(f"{name}: {compare(name, arguments.values)} random values, equal bytes")
    if arguments.megabytes:
        measure(arguments.megabytes)
    measure_small()


def compare(name: str, num_values: int) -> int:
    """Compares every function of a format on random values; gives how many values."""
    specified, kernels_of_it = MODULES[name]
    errors = ({"error": "mse"}, {"error": "mae"}) if name == "4over6" else ({},)
    cases = list(itertools.product(_DISTRIBUTIONS, (torch.bfloat16, torch.float32), errors))
    done = 0
    while done < num_values:
        for make, dtype, options in cases:
            x = make().to(dtype)
            scale = _scale(name, x)
            trainer_x = (x * (1 + 0.01 * torch.randn_like(x))).to(dtype)
            what = f"{name} {make.__name__} {dtype} {options}"
            _check(
                kernels_of_it.rtn(x, *scale, **options), specified.rtn(x, *scale, **options), what
            )
            for bits in BITS[name]:
                got = kernels_of_it.rtn_record(x, *scale, num_bits=bits, **options)
                expected = specified.rtn_record(x, *scale, num_bits=bits, **options)
                for mine, theirs in zip(got, expected, strict=True):
                    _check(mine, theirs, f"{what} record {bits}")
                for hint in (got[1], torch.randint_like(got[1], 256)):
                    guide = (trainer_x, hint, got[2], *scale)
                    y = specified.guided(*guide, num_bits=bits)
                    _check(kernels_of_it.guided(*guide, num_bits=bits), y, f"{what} guided {bits}")
            done += x.numel()
    return done


def _check(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert_same_bytes(got, expected, what, any_nan=True)


def _scale(name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gives the global scale as arguments: of rows, of the tensor for every other, or none."""
    if name.startswith("MX"):
        return ()
    scales = (torch.rand(x.shape[0], 1, device="cuda") * 10 - 8).exp()
    return (scales,) if name == "rows" or torch.rand(()) < 0.5 else (scales[0, 0],)


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
    for label, name, scale, block in (
        ("NVFP4", "rows", (one,), 16),
        ("NVFP4 rows", "rows", (each,), 16),
        ("4over6", "4over6", (one,), 16),
        ("MXFP4", "MXFP4", (), 32),
        ("MXFP8", "MXFP8", (), 32),
    ):
        module = MODULES[name][1]
        yield f"{label} rtn", 4, lambda m=module, s=scale: m.rtn(next(rotating), *s)
        for bits in (1, BITS[name][-1]):
            moved = 4 + bits / 8 + 1 / block
            _, *hint = module.rtn_record(next(rotating), *scale, num_bits=bits)

            def record(m=module, s=scale, b=bits) -> object:
                return m.rtn_record(next(rotating), *s, num_bits=b)

            def guide(m=module, s=scale, b=bits, h=hint) -> object:
                return m.guided(next(rotating), *h, *s, num_bits=b)

            yield f"{label} rtn_record, {bits} bit", moved, record
            yield f"{label} guided, {bits} bit", moved, guide


if __name__ == "__main__":
    main()
