"""Whether the experts of a model compute different things, and whether tokens use them.

Legend: N rows (tokens), H hidden size, E experts, k top-k.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.models.hybrid import decoder_layers
from megatron_trace.study.model import plain_logits


@dataclass(frozen=True)
class ExpertsOfLayer:
    """How far the experts of one layer differ.

    Attributes:
        cosine: Mean cosine of the outputs of two experts for the same input, over all pairs of
            experts and all tokens: 1 for copies, about 0 for unrelated experts.
        largest_cosine: Largest mean over tokens of a pair.
        experts_in_use: exp of the entropy of the experts' shares of the tokens: E if all get the
            same number of tokens, 1 if one gets all.
    """

    cosine: float
    largest_cosine: float
    experts_in_use: float


@torch.no_grad()
def experts_differ(
    model: HybridModel, token_batches: Iterable[torch.Tensor], *, max_rows: int = 512
) -> dict[int, ExpertsOfLayer]:
    """Gives how far the experts of every MoE layer differ, on the hidden states of some tokens.

    Every expert gets every token, whatever the router chose.

    Args:
        model: A model of one process with plain modules (method bf16).
        token_batches: int64 [B, S] each, without padding.
        max_rows: Tokens that the experts are compared on, the first ones.

    Returns:
        By decoder layer.
    """
    inputs: dict[int, list[torch.Tensor]] = {}
    layers = [layer for layer in decoder_layers(model) if layer.moe is not None]

    def note(index: int, _: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        inputs.setdefault(index, []).append(args[0].flatten(0, 1))

    hooks = [
        layer.moe.register_forward_pre_hook(partial(note, layer.index))
        for layer in layers
        if layer.moe is not None
    ]
    was_training = model.training
    model.eval()
    try:
        for batch in token_batches:
            plain_logits(model, batch)
        found = {}
        for layer in layers:
            rows_NH = torch.cat(inputs[layer.index])
            found[layer.index] = _compare(layer.moe, rows_NH, max_rows)
        return found
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()


def _compare(moe: Any, rows_NH: torch.Tensor, max_rows: int) -> ExpertsOfLayer:
    outputs_ENH = torch.stack(
        [expert(rows_NH[:max_rows], None)[0].float() for expert in moe.experts.local_experts]
    )
    unit_ENH = torch.nn.functional.normalize(outputs_ENH, dim=-1)
    cosine_EE = torch.einsum("anh,bnh->ab", unit_ENH, unit_ENH) / unit_ENH.shape[1]
    pairs = cosine_EE[~torch.eye(len(cosine_EE), dtype=torch.bool, device=cosine_EE.device)]
    _, routing_map = moe.router(rows_NH.unsqueeze(1))
    shares = routing_map.float().sum(0) / routing_map.sum()
    entropy = -(shares * shares.clamp(min=1e-12).log()).sum()
    return ExpertsOfLayer(
        cosine=pairs.mean().item(),
        largest_cosine=pairs.max().item(),
        experts_in_use=entropy.exp().item(),
    )
