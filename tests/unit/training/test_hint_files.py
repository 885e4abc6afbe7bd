"""Training from a folder of hint files is training from the store in memory."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from megatron_trace.hints import HintFiles, HintFilesWriter, RecordKind
from megatron_trace.testing.tiny_trainer import RecordedRollout
from megatron_trace.training.micro_batch import make_micro_batch


def _written(rolled: RecordedRollout, folder: Path) -> HintFiles:
    with HintFilesWriter(folder) as files:
        rolled.put_records(files, RecordKind)
        files.commit(rolled.samples)
    return HintFiles(folder)


def test_micro_batch_from_files_equals_one_from_memory(build, rollout, tmp_path: Path) -> None:
    rolled = rollout(codes=True)
    _, sites = build("trace", settings=rolled.settings)
    sites.diagnostics = True
    files = _written(rolled, tmp_path)
    samples = [files.sample(sample.sample_id) for sample in rolled.samples]
    from_memory = make_micro_batch(rolled.samples, rolled.store, sites)
    from_files = make_micro_batch(samples, files, sites)
    assert from_memory.sample_ids == from_files.sample_ids
    assert from_memory.hints.keys() == from_files.hints.keys() != set()
    assert from_memory.codes.keys() == from_files.codes.keys() != set()
    for of_memory, of_files in (
        (from_memory, from_files),
        *zip(from_memory.hints.values(), from_files.hints.values(), strict=True),
        *zip(from_memory.codes.values(), from_files.codes.values(), strict=True),
    ):
        for field in fields(of_memory):
            value = getattr(of_memory, field.name)
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, getattr(of_files, field.name)), field.name
