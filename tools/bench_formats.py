"""Checks the NVFP4 kernels against their reference on a GPU, and measures their bandwidth.

Three checks; the program ends with an error when one byte differs, but measures all the same:
* every hard input, in FP32, BF16 and FP16;
* random values of several distributions, 100 million of them by default, in FP32 and BF16;
* the kernels' divisions, for all 2^23 mantissas of a divisor, beside each boundary of E2M1 and
  E4M3.

Then the bandwidth of each kernel beside a device copy and ModelOpt's `fp4_fake_quant_block`, over
inputs that no cache holds; then microseconds for few tokens under replay of a CUDA graph. Needs
torch, triton, and for one row ModelOpt.

    python tools/bench_formats.py --out formats.json
    python tools/bench_formats.py --sweep        # also the tiles and warps to choose from
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

from megatron_trace.formats import (
    E2M1_VALUES,
    NVFP4,
    fused,
    kernels_bf16,
    kernels_fp32,
    kernels_fused,
    kernels_whole,
)
from megatron_trace.formats.kernels_inputs import Launch
from megatron_trace.testing.hard_inputs import MIDPOINTS, hard_inputs
from megatron_trace.testing.kernel_equality import assert_kernels_equal_reference

GLOBAL_SCALE = 0.002
COLUMNS = 4096
SWEEP = [Launch(tiles, warps) for tiles, warps in itertools.product((1, 2, 4, 8), (2, 4, 8))]
ONE_WARP = Launch(tiles=1, num_warps=1)
SMALL_SWEEP = [Launch(tiles, warps) for tiles, warps in itertools.product((1, 2), (1, 2, 4))]
SMALL_TOKENS = (1, 8, 64, 256, 512)
SMALL_COLUMNS = 2048
# Experts that would be quantised by a launch each.
EXPERTS = 64
# Of inputs, and what dequantised values are rounded to.
_DTYPES = [
    (dtype, rounded_to)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for rounded_to in (None, torch.bfloat16)
]
# Between two E4M3 values lies a fraction of sixteen; other binades divide alike.
E4M3_BOUNDARIES = tuple(1 + sixteenth / 16 for sixteenth in range(16))
NUM_MANTISSAS = 1 << 23


def main() -> None:
    """Runs the checks, then the measurements, and prints each when it is done."""
    arguments = _arguments()
    torch.manual_seed(arguments.seed)
    report: dict = {"device": torch.cuda.get_device_name(), "triton": triton.__version__}
    print(f"{report['device']}, triton {report['triton']}", flush=True)
    wrong: list[str] = []
    if arguments.values:
        compile_all(SWEEP if arguments.sweep else [])
        for name, check in (
            ("hard_inputs", check_hard_inputs),
            ("random_values", lambda: check_random_values(arguments.values)),
            ("divisions", check_divisions),
        ):
            report[name], found = check()
            print_check(name, report[name], found)
            wrong += found
    report["differences"] = wrong
    report["bandwidth"] = {}
    for dtype in (torch.bfloat16, torch.float32):
        results = _measure_dtype(dtype, arguments.megabytes, arguments.sweep)
        report["bandwidth"][str(dtype).removeprefix("torch.")] = results
        print_bandwidth(str(dtype).removeprefix("torch."), results)
    report["small_us"] = measure_small(SMALL_SWEEP if arguments.sweep else [])
    print_small(report["small_us"])
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if wrong:
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--values", type=int, default=100_000_000, help="random values to compare; 0: no checks"
    )
    parser.add_argument("--megabytes", type=int, default=512, help="size of each measured input")
    parser.add_argument("--sweep", action="store_true", help="measure every tile and warp count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file of the report, JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    return arguments


def compile_all(launches: list[Launch]) -> None:
    """Fills Triton's cache in as many processes as there are cores: one takes minutes."""
    # Few values and many are launched differently.
    kinds = [(None, 16), (None, 1 << 21), (ONE_WARP, 16)]
    jobs = [
        (dtype, to, *kind, bits)
        for (dtype, to), kind in itertools.product(_DTYPES, kinds)
        for bits in (1, 2, 4)
    ]
    jobs += [
        (dtype, None, launch, 16, bits)
        for dtype, launch in itertools.product((torch.bfloat16, torch.float32), launches)
        for bits in (1, 4)
    ]
    with multiprocessing.get_context("spawn").Pool() as pool:
        pool.starmap(_compile, jobs, chunksize=1)


def _compile(
    dtype: torch.dtype,
    rounded_to: torch.dtype | None,
    launch: Launch | None,
    num_values: int,
    num_bits: int,
) -> None:
    x = torch.zeros(num_values // 16, 16, dtype=dtype, device="cuda")
    options = {"dtype": rounded_to, "launch": launch}
    if num_bits == 1:
        kernels_whole.rtn(x, 1.0, NVFP4, **options)
    _, *hints = kernels_whole.rtn_record(x, 1.0, NVFP4, num_bits=num_bits, **options)
    kernels_whole.guided(x, *hints, 1.0, NVFP4, num_bits=num_bits, **options)


def check_hard_inputs() -> tuple[int, list[str]]:
    """Compares every kernel on every hard input with the reference on the CPU."""
    num_inputs, wrong = 0, []
    for dtype, rounded_to in _DTYPES:
        for case in hard_inputs(dtype, "cuda"):
            for launch in (None, ONE_WARP):
                what = f"{case.name} {dtype} rounded to {rounded_to} {launch}"
                wrong += _differences(
                    case.x, case.global_scale, dtype=rounded_to, launch=launch, what=what
                )
            num_inputs += 1
    return num_inputs, wrong


def _differences(*arguments, **options) -> list[str]:
    try:
        assert_kernels_equal_reference(*arguments, **options)
    except AssertionError as error:
        return [str(error)]
    return []


def check_random_values(num_values: int) -> tuple[dict[str, int], list[str]]:
    """Compares every kernel on random values with the reference on the GPU; gives values each."""
    counts, wrong = {}, []
    cases = list(itertools.product(_DISTRIBUTIONS.items(), (torch.bfloat16, torch.float32)))
    for (name, make), dtype in cases:
        todo = -(-num_values // len(cases))
        counts[f"{name} {dtype}"] = 0
        while todo > 0:
            rows = min(4096, -(-todo // COLUMNS))
            global_scale = (torch.rand((), device="cuda") * 10 - 8).exp()
            x = make(rows, global_scale).to(dtype)
            noise = 1 + 0.01 * torch.randn(rows, COLUMNS, device="cuda")
            wrong += _differences(
                x,
                global_scale,
                trainer_x=(x * noise).to(dtype),
                dtype=torch.bfloat16,
                reference_device="cuda",
                what=f"{name} {dtype} global scale {global_scale.item()!r}",
            )
            counts[f"{name} {dtype}"] += x.numel()
            todo -= x.numel()
    return counts, wrong


def _normal(rows: int, global_scale: torch.Tensor) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, device="cuda")


def _heavy_tails(rows: int, global_scale: torch.Tensor) -> torch.Tensor:
    return _normal(rows, global_scale) / torch.rand(rows, COLUMNS, device="cuda").clamp_min(1e-4)


def _lognormal_blocks(rows: int, global_scale: torch.Tensor) -> torch.Tensor:
    scales = (4 * torch.randn(rows, COLUMNS // 16, 1, device="cuda")).exp()
    return (_normal(rows, global_scale).unflatten(1, (-1, 16)) * scales).flatten(1)


def _beside_boundaries(rows: int, global_scale: torch.Tensor) -> torch.Tensor:
    """Gives products of boundaries and scales that the kernels will choose, give or take 2 ulp."""
    boundaries = torch.tensor((*MIDPOINTS, *E2M1_VALUES, -0.0), device="cuda")
    choice = torch.randint(len(boundaries), (rows, COLUMNS // 16, 16), device="cuda")
    values = boundaries[choice]
    values[..., 0] = 6.0
    scales = torch.randint(0x20, 0x7E, (rows, COLUMNS // 16, 1), device="cuda", dtype=torch.uint8)
    values *= scales.view(torch.float8_e4m3fn).float() * global_scale
    ulps = torch.randint(-2, 3, values.shape, device="cuda", dtype=torch.int32)
    # Below 0 there is no neighbour of the same sign, and a NaN would take its block with it.
    ulps *= values != 0
    ulps[..., 0] = 0
    values = (values.view(torch.int32) + ulps).view(torch.float32)
    signs = torch.randint(0, 2, values.shape, device="cuda") * 2.0 - 1
    return (values * signs).flatten(1)


def _bits(rows: int, global_scale: torch.Tensor) -> torch.Tensor:
    """Gives every bit pattern alike: all magnitudes, NaN, Inf, denormal numbers."""
    bits = torch.randint(-(2**31), 2**31, (rows, COLUMNS), device="cuda")
    return bits.to(torch.int32).view(torch.float32)


_DISTRIBUTIONS: dict[str, Callable[[int, torch.Tensor], torch.Tensor]] = {
    "normal": _normal,
    "heavy tails": _heavy_tails,
    "lognormal blocks": _lognormal_blocks,
    "beside boundaries": _beside_boundaries,
    "any bits": _bits,
}


@triton.jit
def _division_kernel(boundaries_ptr, wrong_ptr, NEIGHBOURS: tl.constexpr, N: tl.constexpr):
    mantissa = tl.program_id(0) * N + tl.arange(0, N)
    divisor = (mantissa | (127 << 23)).to(tl.float32, bitcast=True)
    boundary = tl.load(boundaries_ptr + tl.program_id(1))
    product = (divisor * boundary).to(tl.int32, bitcast=True) >> 16
    reciprocal, rest = kernels_bf16.reciprocal_of(divisor)
    short, short_rest = kernels_bf16.short_reciprocal_of(divisor)
    # FP32 quotients are right if this is within two units: tests/kernels/quotients.c.
    units = kernels_bf16.near_reciprocal(divisor).to(tl.int32, bitcast=True)
    units -= tl.div_rn(1.0, divisor).to(tl.int32, bitcast=True)
    wrong = (tl.abs(units) > 2).to(tl.int32)
    for neighbour in tl.static_range(-NEIGHBOURS, NEIGHBOURS + 1):
        x = (divisor * boundary).to(tl.int32, bitcast=True) + neighbour
        x = x.to(tl.float32, bitcast=True)
        quotient = kernels_fp32.divided(x, divisor, kernels_fp32.reciprocal_of(divisor))
        wrong += (quotient != tl.div_rn(x, divisor)).to(tl.int32)
        x = ((product + neighbour) << 16).to(tl.float32, bitcast=True)
        expected = tl.div_rn(x, divisor)
        got = kernels_bf16.divided(x, reciprocal, rest)
        agree = ((got < boundary) == (expected < boundary)) & (
            (got > boundary) == (expected > boundary)
        )
        value, value_biased = kernels_bf16.round_to_ladder(tl.minimum(expected, 6.0))
        near, near_biased = kernels_bf16.nearest(x, short, short_rest)
        # Their lowest bits are those of codes.
        same = near_biased.to(tl.int32, bitcast=True) ^ value_biased.to(tl.int32, bitcast=True)
        same = (near == value) & ((same & 1) == 0)
        wrong += tl.where(agree & ((expected > 6.0) | same), 0, 1)
    tl.atomic_add(wrong_ptr, tl.sum(wrong))


def check_divisions() -> tuple[dict[str, int], list[str]]:
    """Compares the kernels' quotients with the exact one, beside each boundary.

    Those of FP32 are to be the rounded ones; of BF16, the side of a boundary that they lie on and
    the code that nearest gives.
    """
    boundaries = (*MIDPOINTS, *E2M1_VALUES[1:], *E4M3_BOUNDARIES)
    boundaries = torch.tensor(boundaries, device="cuda")
    wrong = torch.zeros((), dtype=torch.int32, device="cuda")
    grid = (NUM_MANTISSAS // 1024, boundaries.numel())
    _division_kernel[grid](boundaries, wrong, NEIGHBOURS=2, N=1024)
    counts = {"divisors": NUM_MANTISSAS, "boundaries": boundaries.numel(), "neighbours": 5}
    found = [f"{wrong.item()} wrong quotients"] if wrong.item() else []
    return counts, found


def _measure_dtype(dtype: torch.dtype, megabytes: int, sweep: bool) -> dict[str, dict]:
    """Gives TB/s of each kernel, and its share of the copy's in the same run."""
    size = dtype.itemsize
    rows = megabytes * 2**20 // (COLUMNS * size)
    inputs = [torch.randn(rows, COLUMNS, device="cuda").to(dtype) for _ in range(3)]
    rotating = itertools.cycle(inputs)
    num_values = inputs[0].numel()
    out = torch.empty_like(inputs[0])
    scale = torch.tensor(GLOBAL_SCALE, device="cuda")
    hints = {
        bits: kernels_whole.rtn_record(inputs[0], scale, NVFP4, num_bits=bits)[1:]
        for bits in (1, 4)
    }

    def rate(bytes_per_value: float, call: Callable[[], object]) -> float:
        milliseconds = do_bench(call, warmup=25, rep=150, return_mode="median")
        return bytes_per_value * num_values / milliseconds / 1e9

    def copy() -> None:
        out.copy_(next(rotating))

    results: dict = {"copy": {"TB/s": rate(2 * size, copy)}}
    for name, bytes_per_value, call in _kernel_calls(rotating, scale, hints, size):
        rates = {"chosen": rate(bytes_per_value, call)}
        if sweep:
            for launch in SWEEP:
                key = f"{launch.tiles}t{launch.num_warps}w"
                rates[key] = rate(bytes_per_value, lambda c=call, la=launch: c(launch=la))
        results[name] = {"TB/s": rates.pop("chosen"), "sweep": rates}
    if dtype == torch.bfloat16:
        for name, bytes_per_value, call in (*_fused_calls(rotating, scale),):
            results[name] = {"TB/s": rate(bytes_per_value, call)}
    # Clocks drift: the copy before and after brackets what lies between.
    results["copy"]["TB/s after"] = rate(2 * size, copy)
    modelopt = _modelopt_call(rotating, scale)
    if modelopt is not None:
        results["ModelOpt fp4_fake_quant_block"] = {"TB/s": rate(2 * size, modelopt)}
    reference_rate = max(results["copy"]["TB/s"], results["copy"]["TB/s after"])
    for row in results.values():
        row["of copy"] = row["TB/s"] / reference_rate
    return results


def _kernel_calls(
    rotating: Iterator[torch.Tensor], scale: torch.Tensor, hints: dict, size: int
) -> Iterator[tuple[str, float, Callable]]:
    """Gives names, bytes usefully moved per value, and calls that take a launch."""
    yield "rtn", 2 * size, lambda **kw: kernels_whole.rtn(next(rotating), scale, NVFP4, **kw)
    for bits in (1, 4):
        moved = 2 * size + bits / 8 + 1 / 16

        def record(bits: int = bits, **kw) -> object:
            return kernels_whole.rtn_record(next(rotating), scale, NVFP4, num_bits=bits, **kw)

        def guide(bits: int = bits, **kw) -> object:
            return kernels_whole.guided(
                next(rotating), *hints[bits], scale, NVFP4, num_bits=bits, **kw
            )

        yield f"rtn_record, {bits} bit", moved, record
        yield f"guided, {bits} bit", moved, guide


def _fused_calls(
    rotating: Iterator[torch.Tensor], scale: torch.Tensor
) -> Iterator[tuple[str, float, Callable]]:
    """Gives names, bytes usefully moved per value of the input, and calls.

    The rows "apart" move the same values by torch and the kernels above; their bytes are counted as
    if they were fused.
    """
    weight = torch.rand(COLUMNS, device="cuda", dtype=torch.bfloat16) + 0.5
    eps = 1e-6
    x = next(rotating)
    _, _, *norm_hint = kernels_fused.rms_norm_rtn_record(x, weight, scale, eps=eps, num_bits=1)
    _, *swiglu_hint = kernels_fused.swiglu_rtn_record(x, scale, num_bits=1)
    hint_bytes = 1 / 8 + 1 / 16

    def norm(name: str, *hint: torch.Tensor, **options: int) -> object:
        function = getattr(kernels_fused, name)
        return function(next(rotating), weight, *hint, scale, eps=eps, **options)

    def swiglu(name: str, *hint: torch.Tensor, **options: int) -> object:
        return getattr(kernels_fused, name)(next(rotating), *hint, scale, **options)

    def norm_apart() -> object:
        normed = torch.nn.functional.rms_norm(next(rotating), (COLUMNS,), weight, eps)
        return normed, kernels_whole.rtn(normed, scale, NVFP4)

    def norm_guided_apart() -> object:
        normed = torch.nn.functional.rms_norm(next(rotating), (COLUMNS,), weight, eps)
        return normed, kernels_whole.guided(normed, *norm_hint, scale, NVFP4, num_bits=1)

    yield "norm rtn", 6, lambda: norm("rms_norm_rtn")
    yield "norm rtn_record, 1 bit", 6 + hint_bytes, lambda: norm("rms_norm_rtn_record", num_bits=1)
    yield (
        "norm guided, 1 bit",
        6 + hint_bytes,
        lambda: norm("rms_norm_guided", *norm_hint, num_bits=1),
    )
    yield "norm rtn, apart", 6, norm_apart
    yield "norm guided, 1 bit, apart", 6 + hint_bytes, norm_guided_apart
    yield "swiglu rtn", 3, lambda: swiglu("swiglu_rtn")
    yield (
        "swiglu rtn_record, 1 bit",
        3 + hint_bytes / 2,
        lambda: swiglu("swiglu_rtn_record", num_bits=1),
    )
    yield (
        "swiglu guided, 1 bit",
        3 + hint_bytes / 2,
        lambda: swiglu("swiglu_guided", *swiglu_hint, num_bits=1),
    )
    yield (
        "swiglu rtn, apart",
        3,
        lambda: kernels_whole.rtn(fused.swiglu(next(rotating)), scale, NVFP4),
    )


def _modelopt_call(rotating: Iterator[torch.Tensor], scale: torch.Tensor) -> Callable | None:
    try:
        from modelopt.torch.kernels.quantization.gemm.fp4_kernel_hopper import fp4_fake_quant_block
    except ImportError as error:
        print(f"ModelOpt is not measured: {error}")
        return None
    amax = scale * (6 * 448)
    return lambda: fp4_fake_quant_block(next(rotating), amax)


def measure_small(small_launches: list[Launch]) -> dict[str, dict[str, float]]:
    """Gives microseconds per call for few tokens, under replay of a CUDA graph."""
    scale = torch.tensor(GLOBAL_SCALE, device="cuda")
    results = {}
    for tokens in SMALL_TOKENS:
        x = torch.randn(tokens, SMALL_COLUMNS, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(x)
        hints = {
            bits: kernels_whole.rtn_record(x, scale, NVFP4, num_bits=bits)[1:] for bits in (1, 4)
        }
        calls = {"copy": lambda o=out, x=x: o.copy_(x)}
        for name, _, call in _kernel_calls(itertools.repeat(x), scale, hints, x.itemsize):
            calls[name] = call
            for launch in small_launches:
                key = f"{name} {launch.tiles}t{launch.num_warps}w"
                calls[key] = functools.partial(call, launch=launch)
        results[str(tokens)] = {name: replayed_us(call) for name, call in calls.items()}
    return results


def replayed_us(call: Callable[[], object], calls: int = 100, replays: int = 21) -> float:
    """Gives microseconds of one call: the median of replays of a CUDA graph of many."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1000)
    return statistics.median(times)


def print_check(name: str, counts: int | dict[str, int], found: list[str]) -> None:
    """Prints how much was compared, and what differs."""
    if isinstance(counts, dict):
        counts = ", ".join(f"{key} {count}" for key, count in counts.items())
    print(f"{name}: {counts}; differences: {len(found)}", flush=True)
    for difference in found[:40]:
        print("  " + difference, flush=True)


def print_bandwidth(dtype: str, results: dict[str, dict]) -> None:
    """Prints the rates of one dtype."""
    for name, row in results.items():
        line = f"{dtype:9} {name:30} {row['TB/s']:6.3f} TB/s {row['of copy']:6.3f} of copy"
        if row.get("sweep"):
            ranked = sorted(row["sweep"], key=row["sweep"].get, reverse=True)
            line += "   " + ", ".join(f"{key} {row['sweep'][key]:.3f}" for key in ranked[:4])
        print(line, flush=True)


def print_small(small_us: dict[str, dict[str, float]]) -> None:
    """Prints the microseconds of few tokens."""
    for tokens, calls in small_us.items():
        cells = ", ".join(f"{name} {microseconds:.2f}" for name, microseconds in calls.items())
        experts = f"one call each for {EXPERTS} experts: rtn {EXPERTS * calls['rtn']:.0f}"
        print(f"{tokens} x {SMALL_COLUMNS}, us: {cells}; {experts}", flush=True)


if __name__ == "__main__":
    main()
