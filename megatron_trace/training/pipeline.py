"""The chunks of a pipelined trainer model, and the forward step of Megatron's schedules.

Legend: S positions, B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig

from megatron_trace.training.micro_batch import MicroBatch
from megatron_trace.training.model import (
    build_trainer_model,
    forward_micro_batch,
    logprobs_of_logits,
)
from megatron_trace.training.sites import TraceSites

# Of FP32 log-probabilities [B, S] and their micro-batch: what Megatron takes from a loss function,
# (loss, numbers to report) or (loss, tokens, numbers to report).
PipelineLoss = Callable[[torch.Tensor, MicroBatch], tuple[Any, ...]]
ForwardStep = Callable[[Iterator[MicroBatch], torch.nn.Module], tuple[torch.Tensor, Any]]


def build_trainer_chunks(
    model_config: TransformerConfig, **arguments: Any
) -> list[tuple[HybridModel, TraceSites]]:
    """Builds the chunks of this rank: one, or one for each of its virtual pipeline stages.

    Args:
        model_config: Model configuration; not changed.
        **arguments: Further arguments of `build_trainer_model`.

    Raises:
        ValueError: See `build_trainer_model`.
    """
    virtual = model_config.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else range(virtual)
    return [build_trainer_model(model_config, vp_stage=stage, **arguments) for stage in stages]


def trainer_forward_step(loss: PipelineLoss, *, temperature: float = 1.0) -> ForwardStep:
    """Gives the forward step for Megatron's `get_forward_backward_func`.

    Its data iterators (with virtual stages one for each chunk) give the micro-batches that
    `make_micro_batch` made for the `TraceSites` of the chunk, in the same order on every stage.
    Make them all within `over_ranks.agreed`: a stage that lacks hints would leave others waiting.

    Args:
        loss: Called on the last stage.
        temperature: Temperature of the rollout's sampling.
    """

    def loss_of_output(micro_batch: MicroBatch, output: torch.Tensor) -> tuple[Any, ...]:
        return loss(logprobs_of_logits(output, micro_batch, temperature=temperature), micro_batch)

    def forward_step(
        micro_batches: Iterator[MicroBatch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Any]:
        micro_batch = next(micro_batches)
        sites = micro_batch.made_for
        with sites.micro_batch(micro_batch):
            output = forward_micro_batch(model, sites, micro_batch)
        return output, partial(loss_of_output, micro_batch)

    return forward_step
