"""Compares and measures the fused kernels, and those of rows, for every format.

Random values of several distributions, with the specification on the same GPU; then bandwidths
beside a device copy. Ends with an error when one byte differs.

    python tools/bench_fused.py --values 4000000 --megabytes 512
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial

import torch
from triton.testing import do_bench

from megatron_trace.formats import NUMBER_FORMATS, NumberFormat, fused, kernels_fused, ops
from megatron_trace.testing.assertions import assert_same_bytes

COLUMNS = 4096
ROWS = 512
EPS = 1e-6
GLOBAL_SCALE = 0.002


def main() -> None:
    """Runs the comparison, then the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=4_000_000, help="random values a format")
    parser.add_argument("--megabytes", type=int, default=512, help="size of an input; 0: none")
    parser.add_argument("--formats", nargs="+", choices=NUMBER_FORMATS, default=[*NUMBER_FORMATS])
    parser.add_argument(
        "--workers", type=int, default=8, help="processes that compare; most of it is compiling"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name())
    if arguments.values:
        cases = itertools.product(
            arguments.formats,
            ("_normal", "_lognormal_blocks"),
            (torch.bfloat16, torch.float32),
            (False, True),
            [-(-arguments.values // 8)],
        )
        with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
            counts = dict.fromkeys(arguments.formats, 0)
            for name, count in pool.starmap(compare, cases, chunksize=1):
                counts[name] += count
        for name, count in counts.items():
            print(f"{name}: {count} random values, equal bytes", flush=True)
    if arguments.megabytes:
        measure([NUMBER_FORMATS[name] for name in arguments.formats], arguments.megabytes)


def compare(
    name: str, distribution: str, dtype: torch.dtype, scales_of_rows: bool, num_values: int
) -> tuple[str, int]:
    """Compares fused kernels and those of rows with torch.

    Args:
        name: The format.
        distribution: Name of the function that makes values.
        dtype: Their dtype.
        scales_of_rows: Whether global scales are those of rows; nothing is compared if the format
            has none.
        num_values: At least so many.

    Returns:
        The name, and how many values were compared.
    """
    torch.manual_seed(0)
    fmt, compared = NUMBER_FORMATS[name], 0
    what = f"{name} {distribution} {dtype} {scales_of_rows}"
    while compared < num_values and (fmt.has_global_scale or not scales_of_rows):
        x = globals()[distribution]().to(dtype)
        scale = _scales(fmt)[scales_of_rows]
        _compare_fused(fmt, x, scale, what)
        _compare_rows(fmt, x, scale, what)
        compared += x.numel()
    return name, compared


def _normal() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, device="cuda")


def _lognormal_blocks() -> torch.Tensor:
    sizes = (4 * torch.randn(ROWS, COLUMNS // 16, 1, device="cuda")).exp()
    return (_normal().unflatten(1, (-1, 16)) * sizes).flatten(1)


def _scales(fmt: NumberFormat) -> list[torch.Tensor | None]:
    if not fmt.has_global_scale:
        return [None]
    one = (torch.rand((), device="cuda") * 8 - 8).exp()
    return [one, one * (0.5 + torch.rand(ROWS, 1, device="cuda"))]


def _compare_fused(fmt: NumberFormat, x: torch.Tensor, scale, what: str) -> None:
    weight = (torch.rand(x.shape[-1], device="cuda") + 0.5).to(x.dtype)
    noisy = (x * (1 + 0.01 * torch.randn_like(x))).to(x.dtype)
    gates = torch.randn_like(x)
    for name, values, trainer, options in (
        ("rms_norm", (x, weight), (noisy, weight), {"eps": EPS}),
        ("swiglu", (torch.cat((gates, x), -1),), (torch.cat((gates, noisy), -1),), {}),
    ):
        options["number_format"] = fmt
        _check(name, "rtn", (*values, scale), options, what)
        for bits in fmt.hint_bits:
            more = options | {"num_bits": bits}
            *_, hint, scale_bytes = _check(name, "rtn_record", (*values, scale), more, what)
            random = torch.randint_like(hint, 0, 256)
            for payload in (hint, random):
                _check(name, "guided", (*trainer, payload, scale_bytes, scale), more, what)


def _check(name: str, function: str, arguments, options: dict, what: str) -> list[torch.Tensor]:
    got, expected = (
        getattr(module, f"{name}_{function}")(*arguments, **options)
        for module in (kernels_fused, fused)
    )
    got, expected = ((t,) if isinstance(t, torch.Tensor) else t for t in (got, expected))
    for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert_same_bytes(mine, theirs, f"{what} {name}_{function}, result {index}", any_nan=True)
    return list(expected)


def _compare_rows(fmt: NumberFormat, x: torch.Tensor, scale, what: str) -> None:
    noisy = (x * (1 + 0.01 * torch.randn_like(x))).to(x.dtype)
    has_hint = torch.rand(len(x), device="cuda") < 0.9
    options = {"has_hint": has_hint, "number_format": fmt}
    calls = [partial(ops.encode, x, scale, number_format=fmt)]
    for bits in fmt.hint_bits:
        _, hint, scale_bytes = ops.rtn_record(x, scale, num_bits=bits, number_format=fmt)
        for payload in (hint, torch.randint_like(hint, 0, 256)):
            tensors = (noisy, payload, scale_bytes, scale)
            calls += [
                partial(function, *tensors, num_bits=bits, **options)
                for function in (ops.guided, ops.guided_packed)
            ]
    for call in calls:
        got, expected = call(implementation="triton"), call(implementation="torch")
        got, expected = ((t,) if isinstance(t, torch.Tensor) else t for t in (got, expected))
        for index, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
            assert_same_bytes(mine, theirs, f"{what} rows, result {index}", any_nan=True)


def measure(formats: list[NumberFormat], megabytes: int) -> None:
    """Prints the share of a copy's bandwidth that each kernel reaches, in BF16."""
    rows = megabytes * 2**20 // (COLUMNS * 2)
    inputs = [torch.randn(rows, COLUMNS, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    rotating = itertools.cycle(inputs)
    out = torch.empty_like(inputs[0])
    num_values = out.numel()

    def rate(bytes_per_value: float, call: Callable[[], object], reps: int = 80) -> float:
        milliseconds = do_bench(call, warmup=15, rep=reps, return_mode="median")
        return bytes_per_value * num_values / milliseconds / 1e9

    copy = rate(4, lambda: out.copy_(next(rotating)), 150)
    print(f"copy: {copy:.3f} TB/s")
    for fmt in formats:
        for name, bytes_per_value, call in _calls(fmt, rotating):
            reached = rate(bytes_per_value, call)
            print(f"{fmt.name:13} {name:32} {reached / copy:6.3f} of copy", flush=True)
    print(f"copy after: {rate(4, lambda: out.copy_(next(rotating)), 150):.3f} TB/s")


def _calls(
    fmt: NumberFormat, rotating: Iterator[torch.Tensor]
) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """Gives names, bytes usefully moved per value of the input, and calls."""
    scale = torch.tensor(GLOBAL_SCALE, device="cuda") if fmt.has_global_scale else None
    weight = torch.rand(COLUMNS, device="cuda", dtype=torch.bfloat16) + 0.5
    norm, swiglu = ({"number_format": fmt} | more for more in ({"eps": EPS}, {}))
    code = fmt.code_bits / 8 + 1 / fmt.block_size
    yield "norm rtn", 6, lambda: kernels_fused.rms_norm_rtn(next(rotating), weight, scale, **norm)
    yield "swiglu rtn", 3, lambda: kernels_fused.swiglu_rtn(next(rotating), scale, **swiglu)
    yield (
        "rows encode",
        2 + code,
        lambda: ops.encode(next(rotating), scale, number_format=fmt),
    )
    for bits in (1, 2):
        hinted = bits / 8 + 1 / fmt.block_size
        _, _, *of_norm = kernels_fused.rms_norm_rtn_record(
            next(rotating), weight, scale, num_bits=bits, **norm
        )
        _, *of_swiglu = kernels_fused.swiglu_rtn_record(
            next(rotating), scale, num_bits=bits, **swiglu
        )
        has_hint = torch.ones(len(next(rotating)), dtype=torch.bool, device="cuda")
        has_hint[::10] = False
        rows = {"num_bits": bits, "has_hint": has_hint, "number_format": fmt}

        def norm_record(bits: int = bits) -> object:
            return kernels_fused.rms_norm_rtn_record(
                next(rotating), weight, scale, num_bits=bits, **norm
            )

        def norm_guided(bits: int = bits, hint=of_norm) -> object:
            return kernels_fused.rms_norm_guided(
                next(rotating), weight, *hint, scale, num_bits=bits, **norm
            )

        def swiglu_record(bits: int = bits) -> object:
            return kernels_fused.swiglu_rtn_record(next(rotating), scale, num_bits=bits, **swiglu)

        def swiglu_guided(bits: int = bits, hint=of_swiglu) -> object:
            return kernels_fused.swiglu_guided(
                next(rotating), *hint, scale, num_bits=bits, **swiglu
            )

        def guided(hint=of_norm, options=rows) -> object:
            return ops.guided(next(rotating), *hint, scale, **options)

        def guided_packed(hint=of_norm, options=rows) -> object:
            return ops.guided_packed(next(rotating), *hint, scale, **options)

        def guided_packed_in_torch(hint=of_norm, options=rows) -> object:
            return ops.guided_packed(
                next(rotating), *hint, scale, implementation="torch", **options
            )

        yield f"norm rtn_record, {bits} bit", 6 + hinted, norm_record
        yield f"norm guided, {bits} bit", 6 + hinted, norm_guided
        yield f"swiglu rtn_record, {bits} bit", 3 + hinted / 2, swiglu_record
        yield f"swiglu guided, {bits} bit", 3 + hinted / 2, swiglu_guided
        yield (
            f"plain rtn_record, {bits} bit",
            4 + hinted,
            (
                lambda bits=bits: ops.rtn_record(
                    next(rotating), scale, num_bits=bits, number_format=fmt
                )
            ),
        )
        yield (
            f"plain guided, {bits} bit",
            4 + hinted,
            (
                lambda hint=of_norm, bits=bits: ops.guided(
                    next(rotating), *hint, scale, num_bits=bits, number_format=fmt
                )
            ),
        )
        yield f"rows guided, {bits} bit", 4 + hinted, guided
        yield f"rows guided_packed, {bits} bit", 2 + hinted + code, guided_packed
        if bits == 1:
            yield "torch guided_packed, 1 bit", 2 + hinted + code, guided_packed_in_torch


if __name__ == "__main__":
    main()
