"""Hint rows follow tokens to the experts of another rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_trace.hints.sharding import local_experts
from megatron_trace.testing.ranks import run_ranks

NUM_EXPERTS = 4
TOKENS_OF_RANK = (7, 4)
H = 8


@pytest.mark.distributed
@pytest.mark.parametrize("size", ["expert_model_parallel_size", "expert_tensor_parallel_size"])
def test_every_row_of_two_ranks_carries_its_tokens_hint(size: str) -> None:
    run_ranks(__file__, "dispatch_on_rank", world_size=2, parallel={size: 2})


def dispatch_on_rank(rank: int) -> None:
    for kind in ("alltoall", "allgather"):
        _dispatch(rank, kind)


def _dispatch(rank: int, kind: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    from megatron_trace.models.moe import HostSplitsDispatcher
    from megatron_trace.testing.single_process import tiny_moe_config
    from megatron_trace.training.dispatch import dispatch_rows, dispatch_slot_rows

    ep_size = parallel_state.get_expert_model_parallel_world_size()
    num_local = NUM_EXPERTS // ep_size
    first = num_local * parallel_state.get_expert_model_parallel_rank()
    config = tiny_moe_config(
        "E",
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=2,
        expert_model_parallel_size=ep_size,
        expert_tensor_parallel_size=2 // ep_size,
        moe_token_dispatcher_type=kind,
    )
    dispatcher = {"alltoall": HostSplitsDispatcher, "allgather": MoEAllGatherTokenDispatcher}[kind](
        num_local,
        list(range(first, first + num_local)),
        config=config,
        pg_collection=get_default_pg_collection(),
    )
    # The all-gather dispatcher wants as many tokens on every rank.
    num_tokens = TOKENS_OF_RANK[rank] if kind == "alltoall" else TOKENS_OF_RANK[0]
    tokens = torch.arange(num_tokens) + 100 * rank
    chosen = torch.rand(num_tokens, NUM_EXPERTS).topk(2).indices
    routing_map = torch.zeros(num_tokens, NUM_EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
    hidden = tokens.float().view(-1, 1, 1).expand(num_tokens, 1, H).contiguous()
    hidden, probs = dispatcher.dispatch_preprocess(hidden, routing_map, routing_map.float())
    hidden, probs = dispatcher.token_dispatch(hidden, probs)
    hidden, per_expert, _ = dispatcher.dispatch_postprocess(hidden, probs)
    rows = dispatch_rows(dispatcher, tokens.int().unsqueeze(-1).view(torch.uint8))
    carried = rows.contiguous().view(torch.int32).flatten()
    wanted = hidden[:, 0].int()
    assert set((wanted >= 100).tolist()) == {True, False}, (
        f"{kind}: tokens of both ranks should arrive"
    )
    assert torch.equal(carried, wanted), (
        f"rank {rank}, {kind}: {carried.tolist()} != {wanted.tolist()}"
    )
    # A slot's row says token and expert; an expert's rows arrive together, in its order.
    numbers = (1000 * tokens.unsqueeze(-1) + chosen).int().unsqueeze(-1)
    slots = dispatch_slot_rows(dispatcher, numbers.view(torch.uint8), chosen)
    carried = slots.contiguous().view(torch.int32).flatten()
    assert torch.equal(carried // 1000, wanted), f"rank {rank}, {kind}: slots of other tokens"
    experts = torch.arange(first, first + num_local).repeat_interleave(per_expert.cpu())
    assert torch.equal(carried % 1000, experts.int()), f"rank {rank}, {kind}: slots of others"
    # Those of its own experts, of the tokens of both ranks, in this order.
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, chosen.tolist())
    routing = [slots for rows in of_ranks for slots in rows]
    names = [t + 100 * r for r, rows in enumerate(of_ranks) for t in range(len(rows))]
    own = local_experts(NUM_EXPERTS, ep_size, first // num_local)
    # Expert after expert, tokens ascending.
    expected = sorted(
        (expert, token) for token, slots in enumerate(routing) for expert in slots if expert in own
    )
    expected = [1000 * names[token] + expert for expert, token in expected]
    assert carried.tolist() == expected, f"rank {rank}, {kind}: other rows than its experts' own"
