"""Measures guard and rounding in one kernel on a GPU, beside what it replaces.

At the sizes of Qwen3.5-35B-A3B, with hints of 1 bit and a trainer's values that are near them:
fc1 before dispatch (also of a hidden size of 7168), K or V, and fc2, whose hints lie by token and
expert slot, unlike its rows.
First values, decisions and counts of every launch are compared with those of the kernels that it
replaces; the program ends with an error where one differs, but measures all the same.

Then microseconds of the GPU, and useful bytes a second as a share of a copy's; and microseconds of
the host for each call, with so few rows that the GPU does not count.

    python tools/bench_guided.py --out guided.json
    python tools/bench_guided.py --sweep         # also the lanes, warps and tiles to choose from
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from triton.testing import do_bench

from megatron_trace.formats import NUMBER_FORMATS, NumberFormat, kernels_guided, ops
from megatron_trace.formats.kernels_guided import RowLaunch
from megatron_trace.hints.guard import THRESHOLDS, guided_rows
from megatron_trace.hints.guided import guided_codes, guided_values
from megatron_trace.testing.assertions import assert_same_bytes

SLOTS = 8
# Relative noise of the trainer's values.
NEAR = 0.01
# A copy of each input, so that no cache holds the next one.
COPIES = 4
# That compile.
PROCESSES = 10
LAUNCHES = {
    7168: [RowLaunch(32 * warps, warps, 4) for warps in (1, 2, 4, 8)],
    2048: [
        *(RowLaunch(32, warps, tiles) for warps, tiles in ((1, 8), (1, 4), (2, 4), (4, 4), (4, 2))),
        *(RowLaunch(64, warps, tiles) for warps, tiles in ((2, 4), (2, 2), (4, 4), (4, 2))),
        *(RowLaunch(128, warps, tiles) for warps, tiles in ((4, 2), (4, 1), (8, 2))),
        RowLaunch(256, 8, 1),
    ],
    512: [
        *(RowLaunch(32, warps, tiles) for warps, tiles in ((1, 2), (2, 2), (4, 2), (8, 2), (4, 1))),
        *(RowLaunch(16, warps, tiles) for warps, tiles in ((1, 4), (2, 4), (4, 4), (4, 2))),
        *(RowLaunch(64, warps, 1) for warps in (2, 4, 8)),
    ],
}


@dataclass
class Place:
    """Rows of a place in training, and their hints.

    Attributes:
        name: Its name and rows.
        values: BF16 [N, K], copies that take turns.
        hint: uint8 [M, K / 8].
        scale_bytes: uint8 [M, B].
        has_hint: bool [M], or [M / 8] with an order.
        order: int32 [N], or None.
        scale: The global scale.
        number_format: The format.
    """

    name: str
    values: list[torch.Tensor]
    hint: torch.Tensor
    scale_bytes: torch.Tensor
    has_hint: torch.Tensor
    order: torch.Tensor | None
    scale: torch.Tensor | None
    number_format: NumberFormat

    @property
    def useful_bytes(self) -> int:
        """Bytes that must be read and written."""
        x = self.values[0]
        return 2 * x.nbytes + x.numel() // 8 + x.numel() // self.number_format.block_size

    @property
    def options(self) -> dict:
        """What every function takes by name."""
        return {"num_bits": 1, "number_format": self.number_format}


def main() -> None:
    """Compares, then measures, and prints each result when there is one."""
    arguments = _arguments()
    torch.manual_seed(0)
    report: dict = {"device": torch.cuda.get_device_name(), "places": {}, "host_us": {}}
    print(report["device"], flush=True)
    wrong: list[str] = []
    compile_all(arguments.formats, arguments.sweep)
    for name in arguments.formats:
        for rows, length, ordered in _sizes(arguments.rows):
            place = make_place(NUMBER_FORMATS[name], rows, length, ordered=ordered)
            wrong += compare(place, arguments.sweep)
            found = measure(place, arguments)
            report["places"][place.name] = found
            print_place(place.name, found)
            del place
    report["host_us"] = measure_host(arguments.host_calls)
    for name, us in report["host_us"].items():
        print(f"host {name:24} {us:7.1f} us a call", flush=True)
    report["wrong"] = wrong
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(wrong)} differences", *wrong[:10], sep="\n", flush=True)
    if wrong:
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["nvfp4"], choices=list(NUMBER_FORMATS))
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 32768], help="tokens")
    parser.add_argument("--sweep", action="store_true", help="measure every launch")
    parser.add_argument("--rep-ms", type=int, default=60, help="how long each is measured")
    # As many as are queued before the host waits for the GPU.
    parser.add_argument("--host-calls", type=int, default=500)
    parser.add_argument("--out", type=Path, help="file of the report, JSON")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device is visible")
    return arguments


def compile_all(formats: list[str], sweep: bool) -> None:
    """Fills Triton's cache in several processes: one takes minutes."""
    jobs = [
        (name, length, ordered, launch)
        for name in formats
        for _, length, ordered in _sizes([16])
        for launch in (None, *(LAUNCHES[length] if sweep else ()))
    ]
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        pool.starmap(_compile, jobs, chunksize=2)
    print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)


def _compile(name: str, length: int, ordered: bool, launch: RowLaunch | None) -> None:
    place = make_place(NUMBER_FORMATS[name], 16, length, ordered=ordered, copies=1)
    rejected = torch.zeros(1, dtype=torch.int64, device="cuda")
    fused(place, place.values[0], rejected, launch)
    if launch is None:
        fused(place, place.values[0], rejected, codes=True)
        replaced(place, place.values[0])


def _sizes(tokens: list[int]) -> Iterator[tuple[int, int, bool]]:
    for number in tokens:
        yield number, 7168, False
        yield number, 2048, False
        yield number, 512, False
        yield number * SLOTS, 512, True


def make_place(
    number_format: NumberFormat, num_rows: int, length: int, *, ordered: bool, copies: int = COPIES
) -> Place:
    """Gives rows, of which a thousandth has the hint of another row and a hundredth has none."""
    rollout = torch.randn(num_rows, length, device="cuda")
    rollout *= torch.exp(0.5 * torch.randn(num_rows, 1, device="cuda"))
    scale = number_format.global_scale_from_amax(rollout.abs().max())
    _, hint, scale_bytes = ops.rtn_record(
        rollout.bfloat16(), scale, num_bits=1, number_format=number_format
    )
    others = torch.arange(num_rows, device="cuda") % 1000 == 3
    hint[others], scale_bytes[others] = hint.roll(1, 0)[others], scale_bytes.roll(1, 0)[others]
    order = None
    if ordered:
        order = torch.randperm(num_rows, device="cuda").int()
        rollout = rollout[order]
    flags = torch.arange(num_rows // (SLOTS if ordered else 1), device="cuda") % 100 != 7
    values = [(rollout * (1 + NEAR * torch.randn_like(rollout))).bfloat16() for _ in range(copies)]
    kind = "fc2 in order" if ordered else "fc1" if length > 512 else "k or v"
    name = f"{number_format.name} {kind}, {num_rows} x {length}"
    return Place(name, values, hint, scale_bytes, flags, order, scale, number_format)


def replaced(place: Place, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives values, decisions and rejected rows as three functions and a gather give them."""
    hint, scale_bytes, has_hint = place.hint, place.scale_bytes, place.has_hint
    if place.order is not None:
        hint, scale_bytes = (part.index_select(0, place.order) for part in (hint, scale_bytes))
        has_hint = has_hint.index_select(0, place.order // SLOTS)
    accepted = guided_rows(
        x,
        hint,
        scale_bytes,
        has_hint,
        place.scale,
        thresholds=THRESHOLDS[place.number_format.name],
        **place.options,
    )
    rejected = (has_hint & ~accepted).sum()
    y = ops.guided(x, hint, scale_bytes, place.scale, has_hint=accepted, **place.options)
    return y, accepted, rejected


def fused(
    place: Place,
    x: torch.Tensor,
    rejected: torch.Tensor,
    launch: RowLaunch | None = None,
    *,
    codes: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Gives what one kernel gives: values or codes, and decisions."""
    function = kernels_guided.guided_codes if codes else kernels_guided.guided_values
    return function(
        x,
        place.hint,
        place.scale_bytes,
        place.has_hint,
        place.scale,
        place.number_format,
        THRESHOLDS[place.number_format.name].limits,
        num_bits=1,
        order=place.order,
        rejected=rejected,
        launch=launch,
    )


def compare(place: Place, sweep: bool) -> list[str]:
    """Gives where a launch differs from what it replaces."""
    wrong = []
    x = place.values[0]
    y, accepted, num_rejected = replaced(place, x)
    assert 0 < int(num_rejected) < len(x) // 100, f"{place.name}: {int(num_rejected)} rejected"
    for launch in (None, *(LAUNCHES[x.shape[-1]] if sweep else ())):
        rejected = torch.zeros(1, dtype=torch.int64, device="cuda")
        try:
            got, flags = fused(place, x, rejected, launch)
            assert_same_bytes(got, y, f"{place.name} {launch} values")
            assert_same_bytes(flags, accepted, f"{place.name} {launch} decisions")
            assert rejected.item() == int(num_rejected), f"{place.name} {launch} rejected"
            if launch is None:
                *packed, flags = fused(place, x, rejected, codes=True)
                assert_same_bytes(_decoded(place, *packed), y, f"{place.name} codes")
                assert_same_bytes(flags, accepted, f"{place.name} decisions beside codes")
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


def _decoded(place: Place, codes: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    how = {"number_format": place.number_format, "dtype": torch.bfloat16}
    return ops.decode(codes, scale_bytes, place.scale, **how)


def measure(place: Place, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Gives microseconds and the share of a copy's speed, of each way."""
    turns = itertools.cycle(place.values)
    out = torch.empty_like(place.values[0])
    rejected = torch.zeros(1, dtype=torch.int64, device="cuda")
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2 * out.nbytes, lambda: out.copy_(next(turns))),
        "rtn": (
            2 * out.nbytes,
            lambda: ops.rtn(next(turns), place.scale, number_format=place.number_format),
        ),
        "replaced": (place.useful_bytes, lambda: replaced(place, next(turns))),
        "fused": (place.useful_bytes, lambda: fused(place, next(turns), rejected)),
        "fused, codes": (
            place.useful_bytes - out.nbytes * 23 // 32,
            lambda: fused(place, next(turns), rejected, codes=True),
        ),
    }
    if arguments.sweep:
        for launch in LAUNCHES[out.shape[-1]]:
            name = f"{launch.lanes} lanes, {launch.num_warps} warps, {launch.tiles} tiles"
            calls[name] = (
                place.useful_bytes,
                lambda launch=launch: fused(place, next(turns), rejected, launch),
            )
    found = {}
    for name, (num_bytes, call) in calls.items():
        us = 1e3 * do_bench(call, warmup=10, rep=arguments.rep_ms, return_mode="median")
        found[name] = {"us": us, "TB/s": num_bytes / us / 1e6}
    # Clocks drift: a copy before and after brackets what lies between.
    us = 1e3 * do_bench(calls["copy"][1], warmup=10, rep=arguments.rep_ms, return_mode="median")
    fastest = max(found["copy"]["TB/s"], 2 * out.nbytes / us / 1e6)
    for row in found.values():
        row["of copy"] = row["TB/s"] / fastest
    return found


def measure_host(num_calls: int) -> dict[str, float]:
    """Gives microseconds of the host for each call, the least of rounds in which all take turns."""
    calls: dict[str, Callable[[], object]] = {}
    for ordered in (False, True):
        place = make_place(NUMBER_FORMATS["nvfp4"], 16, 512, ordered=ordered, copies=1)
        (x,) = place.values
        rejected = torch.zeros(1, dtype=torch.int64, device="cuda")
        given = (x, place.hint, place.scale_bytes, place.has_hint, place.scale)
        how = {"thresholds": THRESHOLDS["nvfp4"], "order": place.order, "rejected": rejected}
        end = ", in order" if ordered else ""
        calls |= {
            f"rtn{end}": lambda x=x, place=place: ops.rtn(x, place.scale),
            f"replaced{end}": lambda x=x, place=place: replaced(place, x),
            f"fused{end}": lambda g=given, h=how: guided_values(*g, num_bits=1, **h),
            f"fused, codes{end}": lambda g=given, h=how: guided_codes(*g, num_bits=1, **h),
        }
    rounds = [{name: _host_us(call, num_calls) for name, call in calls.items()} for _ in range(5)]
    return {name: min(us[name] for us in rounds) for name in calls}


def _host_us(call: Callable[[], object], num_calls: int) -> float:
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(num_calls):
        call()
    us = 1e6 * (time.perf_counter() - began) / num_calls
    torch.cuda.synchronize()
    return us


def print_place(name: str, found: dict[str, dict[str, float]]) -> None:
    """Prints the ways, the fastest of a sweep first."""
    print(name, flush=True)
    fixed = ("copy", "rtn", "replaced", "fused", "fused, codes")
    rest = sorted((one for one in found if one not in fixed), key=lambda one: found[one]["us"])
    for one in (*fixed, *rest):
        row = found[one]
        print(f"  {one:30} {row['us']:8.1f} us  {row['TB/s']:5.2f} TB/s  {row['of copy']:.3f}")


if __name__ == "__main__":
    main()
