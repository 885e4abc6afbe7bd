"""Weights that an overlapped parameter gather brings in are quantised anew."""

from __future__ import annotations

import pytest
import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_trace.testing.ranks import run_ranks
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.weights import expert_weight_digest


@pytest.mark.distributed
def test_an_overlapped_parameter_gather_gives_the_weights_and_codes_of_one_that_waits() -> None:
    """The gather of a module's weights ends when the module is called, after the step."""
    run_ranks(__file__, "train_on_rank", world_size=2, parallel={"tensor_model_parallel_size": 1})


def train_on_rank(rank: int) -> None:
    runs = {overlap: _train(rank, overlap) for overlap in (False, True)}
    (logprobs, digests, quantised), (again, other_digests, other_quantised) = runs.values()
    for step, (one, other) in enumerate(zip(logprobs, again, strict=True)):
        assert torch.equal(one, other), f"rank {rank}: log-probs of step {step} differ"
    assert len(set(digests)) == len(digests) > 1, f"every step should change the weights: {digests}"
    assert digests == other_digests, f"rank {rank}: {digests} != {other_digests}"
    # Measured 64, 62, 62: an expert without tokens gets no gradient and stays.
    assert quantised == other_quantised, f"{quantised} != {other_quantised}"
    assert min(quantised) > 56, f"{quantised}"


def _train(rank: int, overlap: bool):
    rolled = recorded_rollout()
    model, sites = tiny_trainer("trace", settings=rolled.settings)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=overlap, overlap_param_gather=overlap
    )
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        params_dtype=torch.float32,
        weight_decay=0.0,
        use_distributed_optimizer=True,
        overlap_param_gather=overlap,
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    micro_batch = make_micro_batch(rolled.samples[2 * rank :][:2], rolled.store, sites)
    logprobs, digests, quantised = [], [], []
    for _ in range(3):
        sites.reset_report()
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        with sites.micro_batch(micro_batch):
            logprobs.append(token_logprobs(ddp, sites, micro_batch))
            logprobs[-1][micro_batch.loss_mask].sum().backward()
        if overlap:
            ddp.finish_grad_sync()
        else:
            finalize_model_grads([ddp])
        sites.assert_ran()
        # The digest is taken after the forward pass, which waits for the gathered weights.
        digests.append(expert_weight_digest(model, sites))
        quantised.append(sites.report().weights_quantised)
        optimizer.step()
    return [each.detach() for each in logprobs], digests, quantised
