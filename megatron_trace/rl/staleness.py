"""Samples that are too old for the policy they train, and when one may be begun."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from megatron_trace.hints.types import RolloutSample
from megatron_trace.rl_config import LossConfig


class StaleSampleError(ValueError):
    """A sample is older than the bound, and the run is to stop then."""


def batches_in_reach(
    version: int, max_lag: int, *, num_batches: int, batches_per_step: int = 1
) -> range:
    """Gives the batches that may be begun with a version, so that none is trained at a larger lag.

    Batch b belongs to step b // batches_per_step, and step s trains version s.

    Args:
        version: Latest version that can be rolled out.
        max_lag: Most versions that a sample may be older than the policy it trains.
        num_batches: Batches of the run.
        batches_per_step: Batches that a step trains on.
    """
    end = (version + max_lag + 1) * batches_per_step
    return range(version * batches_per_step, min(end, num_batches))


def version_of(sample: RolloutSample, config: LossConfig) -> int:
    """Gives the version that decides whether a sample is too old: its oldest, or its latest."""
    if config.stale_by == "oldest" or not sample.response_tokens:
        return sample.policy_version
    return int(sample.token_versions.max())


def without_stale_tokens(
    sample: RolloutSample, policy_version: int, config: LossConfig
) -> RolloutSample:
    """Gives a sample whose tokens that are too old count as given ones: read, but not trained on.

    Args:
        sample: The sample.
        policy_version: Version of the weights that are trained.
        config: The bound; nothing changes unless it is by token.
    """
    if config.max_lag is None or config.stale_by == "oldest":
        return sample
    stale = sample.token_versions < policy_version - config.max_lag
    if not stale.any():
        return sample
    given = stale if sample.given is None else stale | (sample.given > 0)
    return dataclasses.replace(sample, given=given.to(torch.uint8))


def fresh_samples(
    versions: Mapping[str, int], policy_version: int, config: LossConfig
) -> Sequence[str]:
    """Gives the names of the samples that are young enough, in their order.

    Args:
        versions: Policy version of each sample by its name.
        policy_version: Version of the weights that are trained.
        config: The bound, and what happens to older samples.

    Raises:
        StaleSampleError: A sample is older, and `stale_samples` is `error`.
        ValueError: A sample is of a later policy than the one that is trained.
    """
    for name, version in versions.items():
        if version > policy_version:
            raise ValueError(
                f"sample {name} is of policy version {version}, but version {policy_version} is "
                "trained; resume from the checkpoint that the rollout took its weights from"
            )
    if config.max_lag is None:
        return list(versions)
    oldest = policy_version - config.max_lag
    fresh = [name for name, version in versions.items() if version >= oldest]
    if len(fresh) < len(versions) and config.stale_samples == "error":
        name, version = min(versions.items(), key=lambda item: item[1])
        raise StaleSampleError(
            f"{len(versions) - len(fresh)} of {len(versions)} samples are more than "
            f"max_lag={config.max_lag} versions older than policy {policy_version} (the oldest is "
            f"{name} of version {version}); roll out anew, or set stale_samples=drop"
        )
    return fresh
