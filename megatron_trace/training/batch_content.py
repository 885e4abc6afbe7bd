"""What a micro-batch holds: on the host, where it is read, or on the model's device.

Legend: B samples, S positions (longest sample's tokens - 1, padded), P of them on this rank where a
site sees them, N rows of a site on this rank (P * B in [P, B] order, or those of a pack), T tokens
of a pack on this context-parallel rank, L MoE layers, k top-k, K most likely tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from megatron_trace.hints.types import Site
from megatron_trace.training.hint_rows import HintRows
from megatron_trace.training.layout import TOKEN_SITES
from megatron_trace.training.row_order import RowOrder
from megatron_trace.training.shape import Place


@dataclass(frozen=True, eq=False)
class RankRows:
    """The rows of a micro-batch that a site of this rank sees.

    Attributes:
        positions: int64 [P], ascending, which all samples have in common; of a pack [N].
        real: bool [N]; rows of tokens, not of padding.
        samples: int64 [N]; of a pack, the sample at each row; None if they stand side by side.
        num_real: How many are real; counted once, on the host, where `real` is before it is moved.
    """

    positions: torch.Tensor
    real: torch.Tensor
    samples: torch.Tensor | None = None
    num_real: int = -1

    def __post_init__(self) -> None:
        """Counts the real rows."""
        if self.num_real < 0:
            object.__setattr__(self, "num_real", int(self.real.sum()))

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Gives what values [B, S, ...] have at the rows: [B, P, ...], of a pack [1, N, ...]."""
        if self.samples is None:
            return values[:, self.positions]
        return values[self.samples, self.positions].unsqueeze(0)


@dataclass(frozen=True, eq=False)
class BatchContent:
    """What a micro-batch holds, on the host or on a device.

    Attributes:
        order: Where the samples stand among the rows.
        sample_ids: [B] names.
        tokens: int64 [B, S + 1].
        loss_mask: bool [B, S]; True where token s + 1 was sampled as part of the response.
        rollout_logprobs: FP32 [B, S]; the rollout's log-probability of token s + 1, 0 elsewhere.
        valid: bool [S, B]; real tokens.
        token_rows: Rows of the router and the experts: those of this rank's tokens.
        attention_rows: Rows of K and V: those of this context-parallel rank's tokens.
        routing: int64 [L, N, k]; the rollout's experts of the token rows, and evenly spread ones
            for padding, in the L MoE layers of the model chunk.
        hints: Hints of this rank's rows and columns by (decoder layer, site), at fc2 of all its
            tokens' columns; empty unless the method is trace.
        codes: The rollout's full codes likewise, for metrics only.
        settings_digest: Digest of the quantiser settings of all samples.
        top_tokens: int64 [B, S, K]; the rollout's K most likely tokens after token s, 0 outside the
            response; None if the samples have none.
        top_logprobs: FP32 [B, S, K]; their log-probabilities in the rollout, -Inf where there is
            none.
        token_rows_of_samples: int64 [B, S]; of a pack, which of the rows of all context-parallel
            ranks, one after another, has a token; their number where no row has. None otherwise.
        slot_orders: int32 [N * k] of decoder layers whose fc2 has hints or codes, where this rank
            has all experts: the slots of the token rows by expert, and of an expert by row, as
            `routing` says. Sorted on the host, where nothing waits for it.
        num_hinted: Rows of `hints` that have one; counted on the host, as a device would be asked.
    """

    order: RowOrder
    sample_ids: tuple[str, ...]
    tokens: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    valid: torch.Tensor
    token_rows: RankRows
    attention_rows: RankRows
    routing: torch.Tensor
    hints: Mapping[Place, HintRows]
    codes: Mapping[Place, HintRows]
    settings_digest: str
    top_tokens: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    token_rows_of_samples: torch.Tensor | None = None
    slot_orders: Mapping[int, torch.Tensor] = field(default_factory=dict)
    num_hinted: Mapping[Place, int] = field(default_factory=dict)

    @property
    def hint_bytes(self) -> int:
        """Bytes of the tensors of its hints and codes."""
        return sum(rows.num_bytes for rows in (*self.hints.values(), *self.codes.values()))

    @property
    def num_positions(self) -> int:
        """Positions S of a padded sample."""
        return self.valid.shape[0]

    @property
    def forward_shape(self) -> tuple[int, int]:
        """Positions and sequences that the model forwards, over all ranks: (S, B) or (T, 1)."""
        sequences = 1 if self.order.packed else len(self.sample_ids)
        return self.order.num_positions, sequences

    @property
    def positions(self) -> torch.Tensor:
        """int64 [B, P], or [1, T]; positions that this context-parallel rank forwards."""
        positions = self.attention_rows.positions
        return positions.expand(self.forward_shape[1], -1)

    @property
    def inputs(self) -> torch.Tensor:
        """int64 [B, P], or [1, T]; the tokens that this context-parallel rank forwards."""
        return self.attention_rows.take(self.tokens)

    @property
    def targets(self) -> torch.Tensor:
        """int64 [B, P], or [1, T]; the token that follows each of `inputs`."""
        return self.attention_rows.take(self.tokens[:, 1:])

    @property
    def own_positions(self) -> torch.Tensor:
        """bool [B, S]; tokens that this context-parallel rank forwards."""
        own, rows = torch.zeros_like(self.loss_mask), self.attention_rows
        if rows.samples is None:
            own[:, rows.positions] = True
        else:
            own[rows.samples[rows.real], rows.positions[rows.real]] = True
        return own

    def rows_at(self, site: Site) -> RankRows:
        """Gives the rows that a site of this rank sees; of fc2 those of its tokens."""
        return self.token_rows if site in TOKEN_SITES else self.attention_rows

    def row_name(self, site: Site, row: int) -> str:
        """Names one of the N rows of a site for messages."""
        rows = self.rows_at(site)
        if rows.samples is None:
            local, column = divmod(row, len(self.sample_ids))
            position = int(rows.positions[local])
        else:
            column, position = int(rows.samples[row]), int(rows.positions[row])
        kind = "token" if rows.real[row] else "padding"
        return f"sample {self.sample_ids[column]}, {kind} {position}"


def map_tensors(
    content: BatchContent, move: Callable[[torch.Tensor], torch.Tensor]
) -> BatchContent:
    """Gives the same content in other tensors, such as copies; each is moved once."""
    rows = (
        RankRows(
            move(part.positions),
            move(part.real),
            None if part.samples is None else move(part.samples),
            part.num_real,
        )
        for part in (content.token_rows, content.attention_rows)
    )
    hints, codes = (
        {place: records.mapped(move) for place, records in by_place.items()}
        for by_place in (content.hints, content.codes)
    )
    names = ("tokens", "loss_mask", "rollout_logprobs", "valid", "routing")
    tensors = {name: move(getattr(content, name)) for name in names}
    if content.top_tokens is not None and content.top_logprobs is not None:
        tensors["top_tokens"] = move(content.top_tokens)
        tensors["top_logprobs"] = move(content.top_logprobs)
    if content.token_rows_of_samples is not None:
        tensors["token_rows_of_samples"] = move(content.token_rows_of_samples)
    token_rows, attention_rows = rows
    slot_orders = {layer: move(order) for layer, order in content.slot_orders.items()}
    return replace(
        content,
        **tensors,
        token_rows=token_rows,
        attention_rows=attention_rows,
        hints=hints,
        codes=codes,
        slot_orders=slot_orders,
    )
