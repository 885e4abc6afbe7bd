"""Memory of hints on the host (case 42)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from megatron_trace.hints import HintStore, QuantizerSettings, RolloutSample, Site
from megatron_trace.rollout.storing import store_records
from megatron_trace.testing.assertions import tolerance
from megatron_trace.testing.programs import load_program
from megatron_trace.testing.ranks import run_ranks

TOOL = Path(__file__).parents[2] / "tools" / "measure_hint_memory.py"


def in_process(function, **arguments):
    """Calls a function of this file in a process of its own.

    Memory that other tests freed would be used again unnoticed.
    """
    return run_ranks(__file__, function, world_size=1, parallel={}, **arguments)[0]


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def stored(rank, num_samples, rows):
    """Stores hints of four layers; gives how much memory that took, and the bytes of the hints."""
    widths = {Site.FC1: 2048, Site.K: 512, Site.V: 512}
    samples = [
        RolloutSample(
            f"s{number}",
            (1,) * (rows + 1),
            (),
            torch.zeros(0),
            torch.zeros(rows, 1, 1, dtype=torch.int16),
            0,
            "d",
            "length",
        )
        for number in range(num_samples)
    ]
    # Tensors of ones, not of zeros: pages that were never written are not resident.
    records = [
        {
            (layer, site): tuple(
                torch.ones(rows, width // per_byte, dtype=torch.uint8) for per_byte in (2, 16)
            )
            for layer in range(4)
            for site, width in widths.items()
        }
        for _ in samples
    ]
    store, before = HintStore(), resident_bytes()
    store_records(
        store,
        samples,
        records,
        QuantizerSettings(dict.fromkeys(records[0], 0.01)),
        hint_bits=1,
        hint_sites=tuple(widths),
        diagnostic_share=0.0,
    )
    return resident_bytes() - before, store.num_bytes


def test_42_hints_of_16_samples_take_little_more_than_their_bytes():
    """Measured: 1.2 times. 16 x 1K tokens of four layers."""
    grown, hint_bytes = in_process("stored", num_samples=16, rows=1023)
    assert hint_bytes == 16 * 1023 * 4 * (2048 + 512 + 512) * 3 // 16
    assert grown <= 2.5 * hint_bytes


def tool_with(*flags):
    """Gives the tool and its options."""
    tool = load_program(TOOL)
    sizes = "--samples 64 --tokens 1024 --layers 2 --micro-batch-samples 2 --bound-mb 6 --work-s 0"
    sys.argv = [str(TOOL), *sizes.split(), *flags]
    return tool, tool._options()


def written(rank, folder):
    """Writes a folder of hints; gives their bytes."""
    tool, options = tool_with()
    return tool.write(options, Path(folder))


def read(rank, folder, way):
    """Reads the folder; gives what the tool measures."""
    tool, options = tool_with("--folder", folder, "--way", way)
    return tool.measured(options)


def test_42_hints_of_a_folder_are_read_within_a_bound(tmp_path):
    """Measured: 72 MiB of hints; growth 124 MiB at once, 11 one by one, 13 ahead (H200: 58, 64)."""
    hints = in_process("written", folder=str(tmp_path)) / 2**20
    ways = {
        way: in_process("read", folder=str(tmp_path), way=way)
        for way in ("at once", "one by one", "ahead")
    }
    growth = {way: found["peak growth, MiB"] for way, found in ways.items()}
    assert ways["ahead"]["most bytes held, MiB"] <= 6
    assert growth["at once"] > hints
    assert max(growth["one by one"], growth["ahead"]) < tolerance(cpu=hints / 2, gpu=hints)
