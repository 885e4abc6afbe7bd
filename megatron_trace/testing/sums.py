"""Ten problems with answers of one character, and weights that answer some of them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rl.tasks import CharTokenizer, TaskItem
from megatron_trace.rl.warm_start import WarmStartSettings, warm_start

CONTEXT = 16
ITEMS = [
    TaskItem(f"{n}+{n}=", str(2 * n % 10), "chain_sum", {"answer": str(2 * n % 10)})
    for n in range(10)
]
TOKENIZER = CharTokenizer.of_tasks(ITEMS)


def warm_weights(
    config: TransformerConfig, *, pattern: str, **rotary: Any
) -> dict[str, torch.Tensor]:
    """Gives parameters of a model that answers some problems right: samples differ in reward.

    Args:
        config: The model's configuration.
        pattern: Hybrid layer pattern.
        **rotary: `rotary_percent` and `rotary_base`, where they are not the usual ones.
    """
    torch.manual_seed(0)
    model = build_hybrid_model(
        config,
        pattern=pattern,
        vocab_size=TOKENIZER.vocab_size,
        max_sequence_length=CONTEXT,
        modules=HybridModules(),
        **rotary,
    )
    settings = WarmStartSettings(steps=12, batch_size=16, learning_rate=5e-3, warmup_steps=2)
    warm_start(model, ITEMS, TOKENIZER, settings, progress=False)
    return {name: value.detach().clone() for name, value in model.named_parameters()}
