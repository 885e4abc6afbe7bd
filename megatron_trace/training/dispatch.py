"""Takes hint rows the way that tokens go to their experts.

Megatron's dispatchers move hidden states only. These functions repeat, for rows of bytes, the moves
that a dispatcher has just made, from the indices and split sizes that it keeps for the way back.

Legend: T tokens of this rank, k expert slots of a token, N rows that this rank's experts receive.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)


def dispatch_rows(dispatcher: MoETokenDispatcher, rows: torch.Tensor) -> torch.Tensor:
    """Gives for every row that the local experts receive the row of its token.

    Call it after the dispatcher's `dispatch_postprocess` and before its next forward; with more
    than one rank it communicates, like the dispatch itself.

    Args:
        dispatcher: A dispatcher that has just dispatched the T tokens.
        rows: uint8 [T, bytes], in the order of the tokens.

    Returns:
        uint8 [N, bytes], in the order of the dispatched rows.

    Raises:
        ValueError: The dispatcher is of a kind whose moves are unknown.

    Source: Megatron-Core 0.19.2, transformer/moe/token_dispatcher.py.
    """
    return _dispatched(dispatcher, rows, None)


def dispatch_slot_rows(
    dispatcher: MoETokenDispatcher, rows: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Gives for every row that the local experts receive the row of its token and expert slot.

    Args:
        dispatcher: A dispatcher that has just dispatched the T tokens, see `dispatch_rows`.
        rows: uint8 [T, k, bytes], in the order of tokens and slots.
        experts: int64 [T, k]; the expert of each slot.

    Returns:
        uint8 [N, bytes]; zeros where the token has no slot of the expert, so that its routing is
        not the one that `experts` says.

    Raises:
        ValueError: The dispatcher is of a kind whose moves are unknown.
    """
    return _dispatched(dispatcher, rows, experts)


def token_of_each_row(
    routing_map: torch.Tensor, permutation: torch.Tensor, *, fused: bool
) -> torch.Tensor:
    """Gives the token index of every row of a permutation by expert.

    Args:
        routing_map: bool [T, experts].
        permutation: What Megatron's `permute` returns: int64 [N] token indices, or with the fused
            kernel a map in TE's own format, which is then not used.
        fused: Whether the fused kernel permuted.

    Returns:
        int64 [N]; tokens ascending within each expert.
    """
    return routing_map.T.nonzero()[:, 1] if fused else permutation


def keeps_all_rows(dispatcher: MoETokenDispatcher) -> bool:
    """Says whether a dispatcher only sorts its own tokens: each expert is on this rank, whole."""
    if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        known = not dispatcher.drop_and_pad
    else:
        known = isinstance(dispatcher, MoEAllGatherTokenDispatcher)
    return known and dispatcher.ep_size == 1 and dispatcher.tp_size == 1


def rows_of_experts(dispatcher: MoETokenDispatcher) -> torch.Tensor | None:
    """Gives which tokens the local experts got; None where rows of other ranks are among theirs.

    An expert's rows are its tokens in their order. What is given is no copy, and stays as it is
    when the dispatcher dispatches again.

    Args:
        dispatcher: A dispatcher that has just dispatched the T tokens.

    Returns:
        bool [T, experts].
    """
    if not keeps_all_rows(dispatcher):
        return None
    if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        return dispatcher.routing_map
    assert isinstance(dispatcher, MoEAllGatherTokenDispatcher), "keeps_all_rows knows no other"
    return dispatcher.local_map


def _dispatched(
    dispatcher: MoETokenDispatcher, rows: torch.Tensor, experts: torch.Tensor | None
) -> torch.Tensor:
    if isinstance(dispatcher, MoEAlltoAllTokenDispatcher):
        return _all_to_all(dispatcher, rows, experts)
    if isinstance(dispatcher, MoEAllGatherTokenDispatcher):
        return _all_gather(dispatcher, rows, experts)
    raise ValueError(
        f"hint rows cannot follow tokens through {type(dispatcher).__name__}; use "
        "moe_token_dispatcher_type=alltoall or allgather"
    )


def _copies(
    rows: torch.Tensor,
    experts: torch.Tensor | None,
    token: torch.Tensor,
    routing_map: torch.Tensor,
    first_expert: int,
) -> torch.Tensor:
    """Gives the row of each copy of a token, of which `token` [copies] says the token."""
    if experts is None:
        return rows.index_select(0, token)
    expert = first_expert + routing_map.T.nonzero()[:, 0]
    here = experts.index_select(0, token) == expert.unsqueeze(-1)
    chosen = rows[token, here.to(torch.uint8).argmax(-1)]
    return chosen * here.any(-1, keepdim=True)


def _all_to_all(
    dispatcher: MoEAlltoAllTokenDispatcher, rows: torch.Tensor, experts: torch.Tensor | None
) -> torch.Tensor:
    if dispatcher.drop_and_pad:
        raise ValueError(
            "hint rows cannot follow tokens with moe_pad_expert_input_to_capacity, which drops "
            "tokens and pads experts; switch it off"
        )
    token = token_of_each_row(
        dispatcher.routing_map,
        dispatcher.reversed_local_input_permutation_mapping,
        fused=dispatcher.config.moe_permute_fusion,
    )
    rows = all_to_all(
        dispatcher.ep_group,
        _copies(rows, experts, token, dispatcher.routing_map, 0),
        dispatcher.output_splits,
        dispatcher.input_splits,
    )
    if dispatcher.tp_size > 1:
        splits = dispatcher.output_splits_tp
        rows = gather_from_sequence_parallel_region(
            rows,
            group=dispatcher.tp_group,
            output_split_sizes=None if splits is None else splits.tolist(),
        )
    if dispatcher.num_local_experts > 1:
        rows, _ = sort_chunks_by_idxs(
            rows,
            dispatcher.num_global_tokens_per_local_expert.ravel(),
            dispatcher.sort_input_by_local_experts,
        )
    return rows


def _all_gather(
    dispatcher: MoEAllGatherTokenDispatcher, rows: torch.Tensor, experts: torch.Tensor | None
) -> torch.Tensor:
    if dispatcher.tp_size > 1 or dispatcher.ep_size > 1:
        rows = gather_from_sequence_parallel_region(rows, group=dispatcher.tp_ep_group)
        if experts is not None:
            experts = gather_from_sequence_parallel_region(experts, group=dispatcher.tp_ep_group)
    token = token_of_each_row(
        dispatcher.local_map,
        dispatcher.reversed_local_input_permutation_mapping,
        fused=dispatcher.config.moe_permute_fusion,
    )
    return _copies(rows, experts, token, dispatcher.local_map, dispatcher.local_expert_indices[0])
