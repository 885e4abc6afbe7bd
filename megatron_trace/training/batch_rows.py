"""Samples as the rows of a micro-batch: tokens, masks, log-probs and routing, without hints.

Legend: B samples, S positions (longest sample's tokens - 1, padded), M rows of all ranks, N of this
one, L MoE layers, k top-k.
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megatron_trace.hints.types import RolloutSample, Site
from megatron_trace.training.batch_content import BatchContent, RankRows
from megatron_trace.training.even_experts import even_experts
from megatron_trace.training.row_order import RowOrder, row_order
from megatron_trace.training.staging_plan import StagingPlan


def require_samples(samples: Sequence[RolloutSample], plan: StagingPlan) -> None:
    """Raises ValueError if samples do not fit a model and its quantiser settings."""
    if not samples:
        raise ValueError("a micro-batch needs at least one sample; got none")
    if max(sample.num_rows for sample in samples) < 1:
        raise ValueError(
            "a micro-batch needs a token to forward, but no sample has more than one: "
            + ", ".join(sample.sample_id for sample in samples)
        )
    model = plan.shape
    digest = None if plan.settings is None else plan.settings.digest()
    for sample in samples:
        if not sample.prompt_tokens:
            raise ValueError(f"sample {sample.sample_id} has no prompt token to start from")
        if sample.num_rows > model.max_sequence_length:
            raise ValueError(
                f"sample {sample.sample_id} forwards {sample.num_rows} tokens (prompt "
                f"{len(sample.prompt_tokens)}, response {len(sample.response_tokens)}), more than "
                f"the model's context of {model.max_sequence_length}; shorten the prompt or the "
                "response"
            )
        least, most = (int(end) for end in _token_ids(sample).aminmax())
        if not 0 <= least <= most < model.vocab_size:
            raise ValueError(
                f"sample {sample.sample_id} has tokens {least} to {most}, but the model's "
                f"vocabulary is 0 to {model.vocab_size - 1}; it was rolled out by another model"
            )
        if digest is not None and sample.settings_digest != digest:
            raise ValueError(
                f"sample {sample.sample_id} was rolled out under quantiser settings "
                f"{sample.settings_digest or '(none: BF16)'}, but this trainer has {digest}; "
                "give TraceSites the settings of the engine that made the sample"
            )


def order_of(
    samples: Sequence[RolloutSample], plan: StagingPlan, num_positions: int | None, *, packed: bool
) -> RowOrder:
    """Gives where samples stand among the rows of this rank.

    Args:
        samples: The samples.
        plan: What is read for the model.
        num_positions: S or T; None takes the least.
        packed: Whether samples stand one after another.

    Raises:
        ValueError: They do not fit S or T, or the model cannot forward packs.
    """
    if packed and not plan.forwards_packs:
        raise ValueError(
            "this model cannot forward packed samples: Megatron's DotProductAttention refuses "
            "them, and Gated DeltaNet under context parallelism; choose attention=sdpa, or do not "
            "pack"
        )
    lengths = tuple(sample.num_rows for sample in samples)
    return row_order(lengths, plan.shape.layout, num_positions=num_positions, packed=packed)


def rows_of_samples(
    samples: Sequence[RolloutSample], plan: StagingPlan, order: RowOrder, padding_token: int
) -> BatchContent:
    """Gives the content of a micro-batch but for its hints and codes.

    Args:
        samples: The samples, which `require_samples` has checked.
        plan: What is read for the model.
        order: Where they stand among the rows.
        padding_token: Token id of padding.

    Raises:
        ValueError: Their routing or most likely tokens do not fit the model or each other.
    """
    length = order.sample_positions + 1
    tokens = torch.full((len(samples), length), padding_token, dtype=torch.int64)
    loss_mask = torch.zeros(len(samples), length - 1, dtype=torch.bool)
    rollout_logprobs = torch.zeros(len(samples), length - 1)
    valid = torch.zeros(length - 1, len(samples), dtype=torch.bool)
    for b, sample in enumerate(samples):
        response = slice(len(sample.prompt_tokens) - 1, sample.num_rows)
        own = _token_ids(sample)
        tokens[b, : len(own)] = own
        loss_mask[b, response] = True if sample.given is None else sample.given == 0
        rollout_logprobs[b, response] = sample.logprobs.float()
        valid[: sample.num_rows, b] = True
    rows = order.rows()
    routing = _routing(samples, rows, plan)[:, order.own(Site.FC1)]
    return BatchContent(
        order=order,
        sample_ids=tuple(sample.sample_id for sample in samples),
        tokens=tokens,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        valid=valid,
        token_rows=_rank_rows(Site.FC1, order, rows),
        attention_rows=_rank_rows(Site.K, order, rows),
        routing=routing,
        hints={},
        codes={},
        settings_digest=samples[0].settings_digest,
        **_most_likely_tokens(samples, length - 1),
        token_rows_of_samples=_rows_of_samples(rows, valid) if order.packed else None,
        slot_orders={
            layer: slot_order(routing[plan.shape.moe_layers.index(layer)])
            for layer in plan.sorted_layers
        },
    )


def _token_ids(sample: RolloutSample) -> torch.Tensor:
    """Gives int64 [T], by way of an array: torch asks each Python number by itself.

    What reads ahead does this beside the training, and until it is done no other thread of Python
    has a turn.
    """
    return torch.frombuffer(array("q", sample.tokens), dtype=torch.int64)


def _most_likely_tokens(samples: Sequence[RolloutSample], num_positions: int) -> dict[str, Any]:
    """Gives the fields `top_tokens` and `top_logprobs`; neither if no sample has them."""
    widths = {0 if of.top_tokens is None else of.top_tokens.shape[1] for of in samples}
    if len(widths) > 1:
        raise ValueError(
            f"samples {samples[0].sample_id} to {samples[-1].sample_id} must have equally many "
            f"top_tokens at a position; got {sorted(widths)}"
        )
    shape = (len(samples), num_positions, widths.pop())
    if shape[-1] == 0:
        return {}
    tokens = torch.zeros(shape, dtype=torch.int64)
    logprobs = torch.full(shape, -torch.inf)
    for b, sample in enumerate(samples):
        assert sample.top_tokens is not None, "all have the same width"
        assert sample.top_logprobs is not None, "both or none"
        response = slice(len(sample.prompt_tokens) - 1, sample.num_rows)
        tokens[b, response] = sample.top_tokens.to(torch.int64)
        logprobs[b, response] = sample.top_logprobs
    return {"top_tokens": tokens, "top_logprobs": logprobs}


# Of the M rows of all ranks: samples and positions, int64 [M] each, and bool [M], whether real.
_Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _rank_rows(site: Site, order: RowOrder, rows: _Rows) -> RankRows:
    samples, positions, real = (part[order.own(site)] for part in rows)
    if order.packed:
        return RankRows(positions, real, samples)
    return RankRows(positions[:: len(order.lengths)], real)


def slot_order(experts: torch.Tensor) -> torch.Tensor:
    """Gives the slots of rows by expert, and of an expert by row, int32 [N * k].

    Args:
        experts: int64 [N, k], on the host, in less than 32768 experts.
    """
    # Of 16 bits, numpy sorts by digits.
    keys = experts.to(torch.int16).flatten().numpy()
    return torch.from_numpy(np.argsort(keys, kind="stable").astype(np.int32))


def _rows_of_samples(rows: _Rows, valid: torch.Tensor) -> torch.Tensor:
    samples, positions, real = rows
    found = torch.full(valid.T.shape, len(real))
    found[samples[real], positions[real]] = real.nonzero()[:, 0]
    return found


def _routing(samples: Sequence[RolloutSample], rows: _Rows, plan: StagingPlan) -> torch.Tensor:
    """Gives the experts of the M rows of all ranks, int64 [L, M, k]."""
    model = plan.shape
    expected = (len(model.model_moe_layers), model.top_k)
    for sample in samples:
        if tuple(sample.routing.shape[1:]) != expected:
            raise ValueError(
                f"sample {sample.sample_id} has routing of (MoE layers, top-k) "
                f"{tuple(sample.routing.shape[1:])}, but the model has {expected}; it was rolled "
                "out by another model"
            )
    records = torch.cat([sample.routing for sample in samples]).to(torch.int64)
    _require_experts(records, model.num_experts, samples)
    records = records[:, model.routing_records].transpose(0, 1)
    of_samples, positions, real = rows
    routing = torch.zeros(len(model.moe_layers), len(real), model.top_k, dtype=torch.int64)
    first_rows = torch.tensor([0] + [sample.num_rows for sample in samples]).cumsum(0)
    routing[:, real] = records[:, (first_rows[of_samples] + positions)[real]]
    padding = ~real
    num_padding = int(padding.sum())
    if num_padding:
        for layer in routing:
            loads = torch.bincount(layer[real].flatten(), minlength=model.num_experts)
            layer[padding] = even_experts(loads, num_padding, model.top_k)
    return routing


def _require_experts(
    rows: torch.Tensor, num_experts: int, samples: Sequence[RolloutSample]
) -> None:
    """Checks the records of samples, int64 [rows of one after those of another, layers, k]."""
    wrong = ((rows < 0) | (rows >= num_experts)).any(-1)
    ordered = rows.sort(-1).values
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    for name, bad in ((f"not all of 0 to {num_experts - 1}", wrong), ("not distinct", repeated)):
        if bad.any():
            row, layer = bad.nonzero()[0].tolist()
            ends = [*itertools.accumulate(len(sample.routing) for sample in samples)]
            index = bisect.bisect_right(ends, row)
            own_row = row - (ends[index] - len(samples[index].routing))
            raise ValueError(
                f"sample {samples[index].sample_id}: the experts of row {own_row} in MoE layer "
                f"{layer} are {name}: {rows[row, layer].tolist()}"
            )
