"""Memory of hints on the host (case 42)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# In a process of its own, because memory that other tests freed would be used again unnoticed.
PROGRAM = """
import torch
from megatron_trace.hints import HintStore, QuantizerSettings, RolloutSample, Site
from megatron_trace.rollout.storing import store_records

def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

rows, widths = 1023, {Site.FC1: 2048, Site.K: 512, Site.V: 512}
samples = [
    RolloutSample(f"s{n}", (1,) * (rows + 1), (), torch.zeros(0),
                  torch.zeros(rows, 1, 1, dtype=torch.int16), 0, "d", "length")
    for n in range(64)
]
# Tensors of ones, not of zeros: pages that were never written are not resident.
records = [
    {
        (layer, site): tuple(
            torch.ones(rows, width // per_byte, dtype=torch.uint8) for per_byte in (2, 16)
        )
        for layer in range(4) for site, width in widths.items()
    }
    for _ in samples
]
store, before = HintStore(), resident_bytes()
store_records(store, samples, records, QuantizerSettings(dict.fromkeys(records[0], 0.01)),
              hint_bits=1, hint_sites=tuple(widths), diagnostic_share=0.0)
print(resident_bytes() - before, store.num_bytes)
"""


def test_42_hints_of_64_samples_take_little_more_than_their_bytes():
    """Measured: 1.2 times. 64 x 1K tokens of four layers."""
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], check=True, capture_output=True, text=True
    ).stdout
    grown, hint_bytes = map(int, output.split())
    assert hint_bytes == 64 * 1023 * 4 * (2048 + 512 + 512) * 3 // 16
    assert grown <= 2.5 * hint_bytes


def test_42_hints_of_a_folder_are_read_within_a_bound():
    """Measured: 72 MiB of hints; growth 124 MiB at once, 11 one by one, 13 ahead."""
    sizes = "--samples 64 --tokens 1024 --layers 2 --micro-batch-samples 2 --bound-mb 6 --work-s 0"
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "tools/measure_hint_memory.py", *sizes.split()],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    ).stdout
    hints = int(re.search(r"tokens: (\d+) MiB", output).group(1))
    growth = dict(re.findall(r"(at once|one by one|ahead): peak growth, MiB (\d+)", output))
    assert int(re.search(r"most bytes held, MiB (\d+)", output).group(1)) <= 6
    assert int(growth["at once"]) > hints
    assert max(int(growth["one by one"]), int(growth["ahead"])) < hints / 2
