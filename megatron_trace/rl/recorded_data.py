"""What Megatron's samplers hand out of folders of rollouts: indices of samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from megatron_trace.rl.exchange_folder import Samples

_logger = logging.getLogger(__name__)


class SampleIndices(Dataset[dict[str, int]]):
    """The indices of a folder's samples, for Megatron's samplers.

    Args:
        part: 0 for the folder to train on, 1 for the one to evaluate on.
        num_samples: Samples that are handed out; those of the folder repeat in order.
        folder_size: Samples of the folder.
    """

    def __init__(self, part: int, num_samples: int, folder_size: int) -> None:
        self.part = part
        self.num_samples = num_samples
        self.folder_size = folder_size

    def __len__(self) -> int:
        """Samples that are handed out."""
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, int]:
        """Gives the index of a sample in its folder, and which folder."""
        return {"part": self.part, "sample": index % self.folder_size}


def index_datasets(
    folders: Sequence[Samples], num_samples: Sequence[int]
) -> tuple[Dataset[Any], Dataset[Any] | None, None]:
    """Gives the datasets of training, validation and test, and warns of what they leave out.

    Args:
        folders: The folder to train on, and the one to evaluate on, if any.
        num_samples: Samples that the run takes of each.

    Raises:
        ValueError: The run evaluates, but there is nothing to evaluate on.
    """
    train, valid, _ = num_samples
    if valid and len(folders) < 2:
        raise ValueError(
            "--eval-iters needs --trace-valid-hint-dir; give it, or set --eval-iters 0"
        )
    for number, folder in zip((train, valid), folders, strict=False):
        if folder.unsettled:
            _logger.warning(
                "%s: %d samples are left out, as they or others of their group have no reward",
                folder.folder,
                len(folder.unsettled),
            )
        for names, reason in (
            (folder.stale, "they are older than --trace-max-lag allows"),
            (folder.without_spread, "all rewards of their groups are equal"),
        ):
            if names:
                _logger.warning(
                    "%s: %d samples are left out, as %s", folder.folder, len(names), reason
                )
        if number > len(folder):
            _logger.warning(
                "%s has %d samples, and %d are taken: each up to %d times",
                folder.folder,
                len(folder),
                number,
                -(-number // len(folder)),
            )
    parts = [
        SampleIndices(part, number, len(folder))
        for part, (number, folder) in enumerate(zip((train, valid), folders, strict=False))
    ]
    return parts[0], parts[1] if valid else None, None
