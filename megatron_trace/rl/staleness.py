"""Samples that are too old for the policy they train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_trace.rl_config import LossConfig


class StaleSampleError(ValueError):
    """A sample is older than the bound, and the run is to stop then."""


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
