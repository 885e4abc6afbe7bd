"""Measures the hint codec beside a copy of the same bytes, on the CPU and on a GPU if there is one.

A step's bytes are those that it must read and write. Its share is its bytes per second over those
of a copy into new memory in the same run: a step gives new memory too, whose pages take a CPU most
of the time. A copy into memory that is there already is shown for comparison.

    python tools/bench_codec.py --threads 1 --out codec.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_trace.formats import ops, packing, residues, unpack_codes
from megatron_trace.hints import HintKey, Site, encode_packed_hint

GLOBAL_SCALE = 0.002
KEY = HintKey("s0", layer=0, site=Site.FC1, policy_version=0, settings_digest="")


@dataclass(frozen=True)
class Measured:
    """One step of the codec.

    Attributes:
        name: What it does.
        megabytes: Bytes that it must read and write.
        milliseconds: Median time.
        gigabytes_per_s: Their quotient.
        share_of_copy: That over the copy's.
        tokens_per_s: Rows of K values in a second.
    """

    name: str
    megabytes: float
    milliseconds: float
    gigabytes_per_s: float
    share_of_copy: float
    tokens_per_s: float


def main() -> None:
    """Measures on every device and prints a table."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    report = {}
    for device in devices:
        name = torch.cuda.get_device_name() if device == "cuda" else f"{arguments.threads} threads"
        report[device] = [asdict(row) for row in measure(device, arguments)]
        print(f"{device}, {name}; {arguments.rows} tokens of {arguments.columns} values")
        print(f"{'step':44} {'MB':>8} {'ms':>9} {'GB/s':>7} {'of copy':>8} {'tokens/s':>12}")
        for row in report[device]:
            print(
                f"{row['name']:44} {row['megabytes']:8.2f} {row['milliseconds']:9.3f} "
                f"{row['gigabytes_per_s']:7.1f} {row['share_of_copy']:8.3f} "
                f"{row['tokens_per_s']:12,.0f}"
            )
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def measure(device: str, arguments: argparse.Namespace) -> list[Measured]:
    """Gives the copies first, then every step."""
    generator = torch.Generator(device).manual_seed(arguments.seed)
    shape = (arguments.rows, arguments.columns)
    x = torch.randn(shape, device=device, generator=generator).to(torch.bfloat16)
    trainer = x * (1 + 0.01 * torch.randn(shape, device=device, generator=generator)).bfloat16()
    _, codes, scale_bytes = ops.rtn_record(x, GLOBAL_SCALE, num_bits=4)
    full = unpack_codes(codes)
    copied = torch.empty_like(full)
    _, of_scales = residues.to_residues(codes, scale_bytes, num_bits=4)
    packed = packing.pack_residues(of_scales)

    steps: list[tuple[str, Callable[[], object], Sequence[torch.Tensor]]] = [
        ("copy into new memory", full.clone, (full, full)),
        ("copy", lambda: copied.copy_(full), (full, full)),
    ]
    for bits in (1, 2, 4):
        hint = packing.narrowed(codes, bits)
        steps += [
            (
                f"codes to {bits}-bit hints",
                lambda bits=bits: packing.pack_hint(full, bits),
                (full, hint),
            ),
            (
                f"{bits}-bit hints to values",
                lambda bits=bits, hint=hint: packing.unpack_hint(hint, bits),
                (hint, full),
            ),
        ]
        if bits < 4:
            steps.append(
                (
                    f"packed codes to {bits}-bit hints",
                    lambda bits=bits: ops.narrowed(codes, bits),
                    (codes, hint),
                )
            )
        for form, scales in (("raw", scale_bytes), ("residue", packed)):
            steps.append(
                (
                    f"record as hint, {bits} bit, {form}",
                    lambda bits=bits, form=form: encode_packed_hint(
                        KEY, codes, scale_bytes, GLOBAL_SCALE, bits, form
                    ),
                    (codes, scale_bytes, hint, scales),
                )
            )
        steps.append(
            (
                f"restore scales beside x, {bits} bit",
                lambda bits=bits, hint=hint: ops.restored_scales(
                    trainer, hint, of_scales, GLOBAL_SCALE, num_bits=bits
                ),
                (trainer, hint, of_scales, scale_bytes),
            )
        )
    steps += [
        ("pack residues", lambda: ops.pack_residues(of_scales), (of_scales, packed)),
        (
            "unpack residues",
            lambda: ops.unpack_residues(packed, of_scales.shape[-1]),
            (packed, of_scales),
        ),
    ]
    rows: list[Measured] = []
    for name, function, moved in steps:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in moved)
        seconds = _median_seconds(function, device, arguments.repeats)
        speed = num_bytes / seconds / 1e9
        of_copy = speed / rows[0].gigabytes_per_s if rows else 1.0
        rows.append(
            Measured(name, num_bytes / 1e6, seconds * 1e3, speed, of_copy, shape[0] / seconds)
        )
    return rows


def _median_seconds(function: Callable[[], object], device: str, repeats: int) -> float:
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(function, return_mode="median") / 1e3
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=16384, help="tokens")
    parser.add_argument("--columns", type=int, default=2048, help="values of a token")
    parser.add_argument("--repeats", type=int, default=9, help="runs of each step on the CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file of the report, JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
