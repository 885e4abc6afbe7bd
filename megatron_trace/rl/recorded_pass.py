"""The micro-batches of one pass of Megatron's schedule over recorded samples, read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from megatron_trace.rl.exchange_folder import Samples
from megatron_trace.training.hint_reader import HintReader
from megatron_trace.training.micro_batch import MicroBatch
from megatron_trace.training.prefetch import MicroBatchPrefetcher
from megatron_trace.training.sites import TraceSites

# What Megatron's iterator gives: int64 [B] each of "part" (always the same one) and "sample".
Indices = dict[str, torch.Tensor]


def part_of(batch: Indices) -> int:
    """Gives which folder a batch of indices is of."""
    return int(batch["part"][0])


class RecordedPass:
    """The micro-batches that one stage forwards for one optimizer step, or one evaluation step.

    All indices of the pass are taken from Megatron's iterator when it begins, and none of the next
    one: when the pass ends, the iterator stands where it would without reading ahead, in every
    `--rerun-mode` (a repeated pass finds the iterator rewound and begins anew), at every checkpoint
    and before every evaluation. So the first micro-batch of a pass is waited for.

    Args:
        data_iterator: Gives `SampleIndices` in batches.
        num_micro_batches: Micro-batches of the pass.
        readers: The folders by part, with readers that no other thread uses.
        sites: `TraceSites` of the stage.
        max_host_bytes: As of `MicroBatchPrefetcher`.
        num_positions: As of `MicroBatchPrefetcher`.
        packed: As of `MicroBatchPrefetcher`.
        reader: As of `MicroBatchPrefetcher`.
    """

    def __init__(
        self,
        data_iterator: Iterator[Indices],
        num_micro_batches: int,
        readers: Sequence[Samples],
        sites: TraceSites,
        *,
        max_host_bytes: int | None,
        num_positions: int | None,
        packed: bool,
        reader: HintReader | None,
    ) -> None:
        batches = [next(data_iterator) for _ in range(num_micro_batches)]
        folder = readers[part_of(batches[0])]
        self._data_iterator = data_iterator
        self._waiting = deque(batches)
        self._prefetcher = MicroBatchPrefetcher(
            # By names: what reads the hints reads the samples, too.
            ([folder.sample_id(n) for n in batch["sample"].tolist()] for batch in batches),
            folder.hints,
            sites,
            max_host_bytes=max_host_bytes,
            num_positions=num_positions,
            packed=packed,
            reader=reader,
        )

    @property
    def is_over(self) -> bool:
        """Whether all of its micro-batches were taken."""
        return not self._waiting

    def next_indices(self, data_iterator: Iterator[Indices]) -> Indices:
        """Gives the indices of the micro-batch that `next_micro_batch` gives next.

        Args:
            data_iterator: What Megatron gave now.

        Raises:
            RuntimeError: It is another one: Megatron did not forward as many micro-batches as were
                taken from the first.
        """
        if data_iterator is not self._data_iterator:
            raise RuntimeError(
                f"Megatron began another pass, but {len(self._waiting)} micro-batches of the last "
                "one were not forwarded; switch --trace-prefetch off"
            )
        return self._waiting[0]

    def next_micro_batch(self) -> MicroBatch:
        """Gives the next micro-batch; after the last one, nothing is read any more.

        Raises:
            LookupError: See `make_micro_batch`.
            ValueError: See `make_micro_batch`; or the hints exceed the bound.
        """
        micro_batch = next(self._prefetcher)
        self._waiting.popleft()
        if self.is_over:
            self.close()
        return micro_batch

    def close(self) -> None:
        """Ends the reading ahead."""
        self._prefetcher.close()
