"""What quantisers would see in a dense model: inputs of its MLPs' fc1 and fc2, and K and V.

TRACE does not quantise a dense MLP, but its activations are those of a really pretrained model.
Two forwards of the same tokens, such as one in FP32 and one in BF16, play trainer and rollout: how
often do their codes differ, to nearest and guided? Nothing that is quantised is fed back, so each
place is compared under what arithmetic alone makes different.

Legend: B sequences, S positions, N rows (tokens, B * S in [S, B] order), K values of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megatron_trace.formats import NVFP4, NumberFormat, pack_bits
from megatron_trace.hints.types import Site
from megatron_trace.metrics import CodeMismatch, UsedHints, compare_codes
from megatron_trace.models.hybrid import decoder_layers
from megatron_trace.study.model import StudyModel, plain_logits

Place = tuple[int, Site]


@torch.no_grad()
def captured_activations(
    model: StudyModel, token_batches: Sequence[torch.Tensor], *, dtype: torch.dtype
) -> dict[Place, torch.Tensor]:
    """Gives what goes into the dense MLPs' linears and the attention, without any quantiser.

    Args:
        model: A model with dense MLPs.
        token_batches: int64 [B, S] each, without padding; they are forwarded one after another.
        dtype: dtype of parameters and computation, BF16 or FP32.

    Returns:
        By (decoder layer, site): FP32 [N, K], on the CPU. Site fc1 is the normalised input of an
        MLP, fc2 its product of gate and up, k and v are taken after RoPE.
    """
    hybrid = model.unquantised(dtype)
    seen: dict[Place, list[torch.Tensor]] = {}

    def note(sites: Mapping[Site, int], layer: int, _: Any, arguments: Any) -> None:
        for site, argument in sites.items():
            rows = arguments[argument].flatten(2).flatten(0, 1)
            seen.setdefault((layer, site), []).append(rows.float().cpu())

    for layer in decoder_layers(hybrid):
        watched: list[tuple[Any, Mapping[Site, int]]] = []
        if layer.attention is not None:
            watched += [(layer.attention.core_attention, {Site.K: 1, Site.V: 2})]
        if layer.mlp is not None:
            watched += [
                (layer.mlp.linear_fc1, {Site.FC1: 0}),
                (layer.mlp.linear_fc2, {Site.FC2: 0}),
            ]
        for module, sites in watched:
            module.register_forward_pre_hook(partial(note, sites, layer.index))
    for batch in token_batches:
        plain_logits(hybrid, batch)
    return {place: torch.cat(rows) for place, rows in seen.items()}


@torch.no_grad()
def code_mismatches(
    train: Mapping[Place, torch.Tensor],
    rollout: Mapping[Place, torch.Tensor],
    *,
    number_format: NumberFormat = NVFP4,
) -> dict[Place, CodeMismatch]:
    """Compares the codes of two forwards of the same tokens, to nearest and with 1-bit hints.

    Args:
        train: FP32 [N, K] by place.
        rollout: The same of the forward that quantises to nearest and is recorded. Global scales
            are calibrated on it.
        number_format: Format of the values.

    Returns:
        By place.

    Raises:
        ValueError: The two have other places or shapes.
    """
    if {p: x.shape for p, x in train.items()} != {p: x.shape for p, x in rollout.items()}:
        raise ValueError(
            "train and rollout must be forwards of the same tokens by models of one shape; got "
            f"{len(train)} and {len(rollout)} places"
        )
    found = {}
    for place, recorded in rollout.items():
        global_scale = number_format.global_scale_from_amax(recorded.abs().amax())
        scale = None if global_scale is None else global_scale.item()
        codes, scale_bytes = number_format.specification.encode(
            recorded, scale, **number_format.rules
        )
        everywhere = torch.ones(len(recorded), dtype=torch.bool)
        used = UsedHints(everywhere, pack_bits(codes & 1), scale_bytes, num_bits=1)
        found[place] = compare_codes(train[place], codes, scale_bytes, scale, used, number_format)
    return found
