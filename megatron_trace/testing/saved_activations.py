"""Bytes of activations that autograd keeps for backward, measured by its hooks."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.models.hybrid import decoder_layers, named_expert_linears
from megatron_trace.training.micro_batch import MicroBatch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.sites import TraceSites

OTHER = "other"


def saved_activation_bytes(
    model: HybridModel, sites: TraceSites, micro_batch: MicroBatch
) -> dict[str, int]:
    """Gives the bytes kept for backward by a forward pass, by the part that first keeps them.

    A storage counts once and whole, as it is alive once and whole: a view keeps all of its tensor.
    Weights, their quantised forms and the micro-batch do not count; they are there anyway.

    Args:
        model: Trainer model.
        sites: Its `TraceSites`.
        micro_batch: What is forwarded.

    Returns:
        Bytes of `experts` (the routed experts' forward, after dispatch and before combining),
        `moe` (the rest of the MoE layers), `attention`, and `other` (norms, output layer, loss).
    """
    parts: dict[torch.nn.Module, str] = {}
    for layer in decoder_layers(model):
        for module, name in ((layer.attention, "attention"), (layer.moe, "moe")):
            if module is not None:
                parts[module] = name
        experts: Any = getattr(layer.moe, "experts", None)
        if experts is not None:
            parts[experts] = "experts"
    # The first pass quantises the weights.
    with torch.no_grad(), sites.micro_batch(micro_batch):
        token_logprobs(model, sites, micro_batch)
    kept: dict[int, tuple[str, int]] = {}
    known = {_storage(tensor) for tensor in _there_anyway(model, micro_batch)}
    with _running_part(parts) as part:

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            key = _storage(tensor)
            if key not in known:
                kept.setdefault(key, (part(), tensor.untyped_storage().nbytes()))
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
            sites.micro_batch(micro_batch),
        ):
            # The result keeps the graph alive, and with it the storages: no address is used twice.
            logprobs = token_logprobs(model, sites, micro_batch)
    totals: Counter[str] = Counter(dict.fromkeys((*parts.values(), OTHER), 0))
    for name, size in kept.values():
        totals[name] += size
    del logprobs
    return dict(totals)


@contextlib.contextmanager
def _running_part(parts: Mapping[torch.nn.Module, str]) -> Iterator[Callable[[], str]]:
    """Gives a function that names the innermost running module of some."""
    running: list[str] = []
    handles = []
    for module, name in parts.items():
        handles += [
            module.register_forward_pre_hook(lambda *_, name=name: running.append(name)),
            module.register_forward_hook(lambda *_: running.pop() and None),
        ]
    try:
        yield lambda: running[-1] if running else OTHER
    finally:
        for handle in handles:
            handle.remove()


def _there_anyway(model: HybridModel, micro_batch: MicroBatch) -> Iterable[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for layer in decoder_layers(model):
        for _, _, module in named_expert_linears(layer):
            place: Any = getattr(module, "place", None)
            if place is not None:
                quantised, _ = place.weight.current(module.weight, place.sites.weight_rule)
                yield quantised.values
    yield from (micro_batch.tokens, micro_batch.positions, micro_batch.routing, micro_batch.valid)
    for rows in (micro_batch.token_rows, micro_batch.attention_rows):
        yield from (rows.positions, rows.real)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
