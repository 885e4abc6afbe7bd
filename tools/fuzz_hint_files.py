"""Damages hint files and kills their writers, and fails if anything passes unnoticed or is lost.

Continuous integration runs it small; the nightly run is

    python tools/fuzz_hint_files.py --mutations 10000 --kills 200
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path

import torch

from megatron_trace.testing.hint_crashes import kill_at_each_call, kill_at_random
from megatron_trace.testing.hint_damage import damage, make_original


def main(arguments: list[str] | None = None) -> None:
    """Runs what the options ask for, and prints counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutations", type=int, default=500, help="damages (default 500)")
    parser.add_argument("--kills", type=int, default=10, help="kills at random (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="seed of both (default 0)")
    parser.add_argument("--folder", help="where to work (default: the system's temporary folder)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    # Each of them is expected; the checks look at what is found.
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.mutations:
            _damage(folder, options.mutations, options.seed)
        if options.kills:
            _kill(folder, options.kills, options.seed)


def _damage(folder: Path, num_mutations: int, seed: int) -> None:
    start = time.perf_counter()
    outcomes = damage(folder / "damaged", make_original(folder / "original"), num_mutations, seed)
    print(f"{'mutation':16} {'detected':>9} {'harmless':>9}")
    for kind, counts in outcomes.items():
        print(f"{kind:16} {counts['detected']:9} {counts['harmless']:9}")
    detected = sum(counts["detected"] for counts in outcomes.values())
    print(
        f"{num_mutations} mutations: {detected} detected and named, {num_mutations - detected} "
        f"harmless, 0 unnoticed, in {time.perf_counter() - start:.0f} s"
    )


def _kill(folder: Path, num_kills: int, seed: int) -> None:
    start = time.perf_counter()
    numbers = iter(range(10**6))

    def make_folder() -> Path:
        return folder / f"call{next(numbers)}"

    num_calls = kill_at_each_call(make_folder)
    print(f"{num_calls} system calls: ended at each, nothing lost, nothing half-written")
    counts = kill_at_random(folder / "killed", num_kills, seed)
    committed = counts.pop("committed")
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    print(
        f"{num_kills} kills at random: {committed} samples committed, all intact; reported and "
        f"collected: {found}; in {time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
