"""Hint rows follow tokens through Megatron's dispatchers."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEFlexTokenDispatcher,
)

from megatron_trace.models.moe import HostSplitsDispatcher
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.training.dispatch import (
    dispatch_rows,
    dispatch_slot_rows,
    token_of_each_row,
)

NUM_EXPERTS = 4
H = 8


def _dispatcher(kind, **overrides):
    config = tiny_moe_config("E", num_moe_experts=NUM_EXPERTS, moe_router_topk=2, **overrides)
    return kind(
        NUM_EXPERTS,
        list(range(NUM_EXPERTS)),
        config=config,
        pg_collection=get_default_pg_collection(),
    )


def _dispatched(dispatcher, routing_map: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the token number of every dispatched row, as hidden states and hint rows carry it."""
    num_tokens = len(routing_map)
    tokens = torch.arange(num_tokens)
    hidden = tokens.float().view(-1, 1, 1).expand(num_tokens, 1, H).contiguous()
    probs = routing_map.float()
    hidden, probs = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
    hidden, probs = dispatcher.token_dispatch(hidden, probs)
    hidden, _, _ = dispatcher.dispatch_postprocess(hidden, probs)
    rows = dispatch_rows(dispatcher, tokens.int().unsqueeze(-1).view(torch.uint8))
    return hidden[:, 0].long(), rows.contiguous().view(torch.int32).flatten().long()


def _top2(num_tokens: int, experts: int = NUM_EXPERTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = torch.rand(num_tokens, experts, generator=generator).topk(2).indices
    return torch.zeros(num_tokens, NUM_EXPERTS, dtype=torch.bool).scatter(1, chosen, True)


@pytest.mark.parametrize("kind", [HostSplitsDispatcher, MoEAllGatherTokenDispatcher])
@pytest.mark.parametrize(
    "routing_map",
    [_top2(19), _top2(1), _top2(6, experts=2), _top2(0)],
    ids=["19 tokens", "one token", "two experts without tokens", "no tokens"],
)
def test_every_dispatched_row_carries_its_tokens_hint(kind, routing_map) -> None:
    hidden, rows = _dispatched(_dispatcher(kind), routing_map)
    assert len(rows) == int(routing_map.sum())
    assert torch.equal(rows, hidden)


@pytest.mark.parametrize("kind", [HostSplitsDispatcher, MoEAllGatherTokenDispatcher])
def test_every_dispatched_row_carries_the_hint_of_its_slot(kind) -> None:
    """Slots in the order of the router's choice, which is not that of the experts."""
    generator = torch.Generator().manual_seed(5)
    experts = torch.rand(19, NUM_EXPERTS, generator=generator).topk(2).indices
    routing_map = torch.zeros(19, NUM_EXPERTS, dtype=torch.bool).scatter(1, experts, True)
    dispatcher = _dispatcher(kind)
    hidden, _ = _dispatched(dispatcher, routing_map)
    numbers = (10 * torch.arange(19).unsqueeze(-1) + torch.arange(2)).int().unsqueeze(-1)
    rows = dispatch_slot_rows(dispatcher, numbers.view(torch.uint8), experts)
    expert = routing_map.T.nonzero()[:, 0]
    slot = (experts[hidden] == expert.unsqueeze(-1)).int().argmax(-1)
    assert set(slot.tolist()) == {0, 1}
    assert torch.equal(rows.contiguous().view(torch.int32).flatten().long(), 10 * hidden + slot)


def test_a_token_elsewhere_than_its_routing_record_says_carries_zeros() -> None:
    routing_map = torch.zeros(2, NUM_EXPERTS, dtype=torch.bool)
    routing_map[0, [1, 2]] = routing_map[1, [0, 3]] = True
    experts = torch.tensor([[2, 1], [0, 1]])
    dispatcher = _dispatcher(HostSplitsDispatcher)
    _dispatched(dispatcher, routing_map)
    rows = torch.tensor([[[11], [12]], [[21], [22]]], dtype=torch.uint8)
    assert dispatch_slot_rows(dispatcher, rows, experts).flatten().tolist() == [21, 12, 11, 0]


def test_fused_permutation_orders_rows_like_the_plain_one() -> None:
    dispatcher = _dispatcher(HostSplitsDispatcher)
    routing_map = _top2(19)
    _dispatched(dispatcher, routing_map)
    plain = dispatcher.reversed_local_input_permutation_mapping
    assert torch.equal(token_of_each_row(routing_map, plain, fused=False), plain)
    assert torch.equal(token_of_each_row(routing_map, torch.empty(0), fused=True), plain)


def test_an_unknown_dispatcher_is_refused() -> None:
    dispatcher = object.__new__(MoEFlexTokenDispatcher)
    with pytest.raises(ValueError, match="alltoall or allgather"):
        dispatch_rows(dispatcher, torch.zeros(1, 4, dtype=torch.uint8))


def test_capacity_padding_is_refused() -> None:
    dispatcher = _dispatcher(HostSplitsDispatcher)
    dispatcher.drop_and_pad = True
    with pytest.raises(ValueError, match="moe_pad_expert_input_to_capacity"):
        dispatch_rows(dispatcher, torch.zeros(1, 4, dtype=torch.uint8))
