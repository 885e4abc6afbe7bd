"""StagingJob: reads a micro-batch into one piece of host memory, by what a `StagingPlan` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from megatron_trace.hints.files import HintSource
from megatron_trace.hints.types import RolloutSample
from megatron_trace.training.batch_content import BatchContent, map_tensors
from megatron_trace.training.batch_hints import planned_records, read_codes, read_hints
from megatron_trace.training.batch_rows import order_of, require_samples, rows_of_samples
from megatron_trace.training.staging import StagingMemory, aligned_bytes
from megatron_trace.training.staging_plan import StagingPlan


class StagingJob:
    """The reading of one micro-batch: what it will take is known before a hint is read.

    Args:
        samples: Finished rollouts; an empty response is allowed and contributes no loss.
        store: Where the hints are.
        plan: What is read for the model.
        padding_token: Token id of padding.
        num_positions: S or T; None takes the least.
        packed: Whether samples stand one after another.

    Raises:
        ValueError: The samples do not fit the model, S or T.
    """

    def __init__(
        self,
        samples: Sequence[RolloutSample],
        store: HintSource | None,
        plan: StagingPlan,
        *,
        padding_token: int = 0,
        num_positions: int | None = None,
        packed: bool = False,
    ) -> None:
        require_samples(samples, plan)
        self._samples, self._store, self._plan = samples, store, plan
        self._order = order_of(samples, plan, num_positions, packed=packed)
        self._padding_token = padding_token

    @cached_property
    def _record_bytes(self) -> list[int]:
        parts = planned_records(self._samples, self._store, self._plan, self._order)
        return [size for part in parts for size in part]

    @cached_property
    def _rows(self) -> BatchContent:
        return rows_of_samples(self._samples, self._plan, self._order, self._padding_token)

    @property
    def hint_bytes(self) -> int:
        """`hint_bytes` of the content; of every recorded place, also where hints may be missing."""
        return sum(self._record_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that `content` needs.

        Raises:
            ValueError: The samples do not fit the model or each other.
        """
        sizes = list(self._record_bytes)
        map_tensors(self._rows, lambda tensor: sizes.append(tensor.nbytes) or tensor)
        return sum(map(aligned_bytes, sizes))

    def content(self, memory: StagingMemory) -> BatchContent:
        """Reads the micro-batch; all its tensors are parts of the memory.

        Raises:
            LookupError: A recorded place has no hint, and `missing_hints` is `error`.
            ValueError: Hints are of another policy version, other quantiser settings, or another
                shape, or there is no store.
        """
        read = self._samples, self._store, self._plan, self._order, memory
        hints, num_hinted = read_hints(*read)
        rows = map_tensors(self._rows, memory.copy_of)
        return replace(rows, hints=hints, num_hinted=num_hinted, codes=read_codes(*read))
