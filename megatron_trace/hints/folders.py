"""Hints of samples that lie in several folders, read as from one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.part import HintPart
from megatron_trace.hints.sample_file import Place
from megatron_trace.hints.store import RecordKind
from megatron_trace.hints.types import HintKey, RolloutSample, SiteHint


class HintFolders:
    """A `HintSource` that finds each sample in a folder of its own; not for two threads.

    Attributes:
        sources: Folder of each sample; whoever asks for a sample says before where it is.
    """

    def __init__(self) -> None:
        self.sources: dict[str, Path] = {}
        self._readers: dict[Path, HintFiles] = {}

    def folder_of(self, sample_id: str) -> Path:
        """Gives the folder that a sample is in.

        Raises:
            LookupError: Nobody said where the sample is.
        """
        if sample_id not in self.sources:
            raise LookupError(f"sample {sample_id} is in no known folder")
        return self.sources[sample_id]

    def reader(self, sample_id: str) -> HintFiles:
        """Gives the reader of the folder that a sample is in.

        Raises:
            LookupError: Nobody said where the sample is.
            FileNotFoundError: There is no such folder.
        """
        folder = self.folder_of(sample_id)
        if folder not in self._readers:
            self._readers[folder] = HintFiles(folder)
        return self._readers[folder]

    def get(
        self,
        key: HintKey,
        *,
        num_rows: int,
        kind: RecordKind = RecordKind.HINT,
        part: HintPart | None = None,
    ) -> SiteHint:
        """Gives the record of one sample at one place; see `HintFiles.get`."""
        return self.reader(key.sample_id).get(key, num_rows=num_rows, kind=kind, part=part)

    def places(self, sample_id: str, kind: RecordKind = RecordKind.HINT) -> tuple[Place, ...]:
        """Gives the (layer, site) of a sample's records in ascending order."""
        return self.reader(sample_id).places(sample_id, kind)

    def sample(self, sample_id: str) -> RolloutSample:
        """Gives a sample as the rollout returned it; see `HintFiles.sample`."""
        return self.reader(sample_id).sample(sample_id)

    def release(self, sample_ids: Iterable[str]) -> None:
        """Closes the files of samples; see `HintFiles.release`."""
        for sample_id in sample_ids:
            if sample_id in self.sources:
                self.reader(sample_id).release([sample_id])

    def refresh(self) -> None:
        """Takes notice of what was committed, dropped and expired since."""
        for reader in self._readers.values():
            reader.refresh()
