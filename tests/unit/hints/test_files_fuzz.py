"""Damaged files and killed writers, in the size of continuous integration.

The nightly size is `tools/fuzz_hint_files.py --mutations 10000 --kills 200`.
"""

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from megatron_trace.hints.tensor_file import DTYPES, TensorFile
from megatron_trace.testing.hint_damage import damage, make_original

TOOL = Path(__file__).parents[3] / "tools" / "fuzz_hint_files.py"


def test_damage_is_detected_and_named_or_harmless(tmp_path: Path, caplog) -> None:
    # Tens of thousands of expected warnings.
    caplog.set_level(logging.ERROR, logger="megatron_trace")
    original = make_original(tmp_path / "original")
    outcomes = damage(tmp_path / "damaged", original, num_mutations=500, seed=0)
    assert sum(counts.total() for counts in outcomes.values()) == 500
    # A kind that never bites would test nothing.
    toothless = {name for name, counts in outcomes.items() if not counts["detected"]}
    assert toothless == {"copy_beside"}


def test_fuzzer_fails_when_checksums_are_not_compared(tmp_path: Path, monkeypatch) -> None:
    def unchecked(self: TensorFile, name: str) -> torch.Tensor:
        entry = self.entries[name]
        content = self._slice(self.tensors_start + entry.offset, entry.num_bytes)
        return content.view(DTYPES[entry.dtype]).view(entry.shape)

    original = make_original(tmp_path / "original")
    monkeypatch.setattr(TensorFile, "tensor", unchecked)
    with pytest.raises(AssertionError, match=r"mutation .* differs from what was"):
        damage(tmp_path / "damaged", original, num_mutations=500, seed=0)


def test_killed_writers_lose_nothing_and_show_nothing_half_written() -> None:
    # A kill leaves the page cache alone, so that a folder in memory, where a sync is free, will do.
    folder = next(filter(os.path.isdir, ("/dev/shm", tempfile.gettempdir())))
    result = subprocess.run(
        [sys.executable, TOOL, "--mutations", "0", "--kills", "10", "--folder", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "10 kills at random" in result.stdout
    assert "system calls: ended at each, nothing lost" in result.stdout
