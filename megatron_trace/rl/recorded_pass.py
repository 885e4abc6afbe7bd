"""The micro-batches that Megatron's schedule forwards: read one by one, or a pass of them ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from megatron_trace.config import RecordedConfig
from megatron_trace.rl.exchange_folder import Samples
from megatron_trace.training.hint_reader import HintReader, wants_process
from megatron_trace.training.micro_batch import MicroBatch
from megatron_trace.training.over_ranks import agreed, all_ranks
from megatron_trace.training.prefetch import MicroBatchPrefetcher, read_micro_batch
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


class RecordedMicroBatches:
    """The micro-batches of all stages on this rank; `close` it at the end.

    Args:
        folders: The folders by part.
        recorded: How they are read.
        num_positions: As of `MicroBatchPrefetcher`.
        num_micro_batches: Gives how many micro-batches Megatron's next pass will forward, of
            whether it trains; read by prefetch only.

    Attributes:
        max_host_bytes: Most bytes of hints that are held; None without a bound.

    Raises:
        ValueError: Prefetch has no `num_micro_batches`.
    """

    def __init__(
        self,
        folders: Sequence[Samples],
        recorded: RecordedConfig,
        *,
        num_positions: int | None,
        num_micro_batches: Callable[[bool], int] | None,
    ) -> None:
        if recorded.prefetch and num_micro_batches is None:
            raise ValueError("prefetch needs num_micro_batches: the end of each pass")
        bound = recorded.hint_memory_mb
        self.max_host_bytes = None if bound is None else bound * 2**20
        self._folders = folders
        self._recorded = recorded
        self._num_positions = num_positions
        self._num_micro_batches = num_micro_batches
        # Of each stage on this rank, by the identity of its sites.
        self._readers: dict[int, list[Samples]] = {}
        self._passes: dict[int, RecordedPass] = {}
        self._process: HintReader | None = None

    def next(
        self, data_iterator: Iterator[Indices], sites: TraceSites, *, training: bool
    ) -> tuple[Indices, MicroBatch]:
        """Gives the next micro-batch of a stage, and the indices of its samples; a collective.

        With prefetch, its first call in a pass takes all indices of the pass from the iterator; see
        `RecordedPass` for why that is safe.

        Args:
            data_iterator: Gives `SampleIndices` in batches.
            sites: `TraceSites` of the stage.
            training: Whether the pass trains.

        Raises:
            LookupError: A hint is missing, and `missing_hints` is `error`.
            ValueError: A sample does not fit the model or its hints.
        """
        if self._recorded.prefetch:
            current = self._current_pass(data_iterator, sites, training=training)
            indices, build = current.next_indices(data_iterator), current.next_micro_batch
        else:
            indices = next(data_iterator)
            build = partial(self._read, indices, sites)
        if sites.groups.pp.size() == 1 and dist.get_world_size() > 1:
            return indices, agreed(build, all_ranks())
        # Stages of a pipeline come by at different times: the launcher ends them all.
        return indices, build()

    def close(self) -> None:
        """Ends what reads ahead."""
        for ahead in self._passes.values():
            ahead.close()
        self._passes.clear()
        if self._process is not None:
            self._process.close()
            self._process = None

    def _read(self, indices: Indices, sites: TraceSites) -> MicroBatch:
        folder = self._folders[part_of(indices)]
        return read_micro_batch(
            [folder[index].sample for index in indices["sample"].tolist()],
            folder.hints,
            sites,
            max_host_bytes=self.max_host_bytes,
            num_positions=self._num_positions,
            packed=self._recorded.pack_samples,
        )

    def _current_pass(
        self, data_iterator: Iterator[Indices], sites: TraceSites, *, training: bool
    ) -> RecordedPass:
        current = self._passes.get(id(sites))
        if current is not None and not current.is_over:
            return current
        if id(sites) not in self._readers:
            self._readers[id(sites)] = [folder.with_own_reader() for folder in self._folders]
        if self._process is None and wants_process(
            self._recorded.hint_reader, sites.device, self._folders[0].hints
        ):
            self._process = HintReader(sites.device)  # One for all stages of this rank.
        assert self._num_micro_batches is not None, "checked at the start"
        self._passes[id(sites)] = RecordedPass(
            data_iterator,
            self._num_micro_batches(training),
            self._readers[id(sites)],
            sites,
            max_host_bytes=self.max_host_bytes,
            num_positions=self._num_positions,
            packed=self._recorded.pack_samples,
            reader=self._process,
        )
        return self._passes[id(sites)]
