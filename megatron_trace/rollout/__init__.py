"""Rollouts on Megatron's dynamic inference engine, in FP4 and with recorded hints."""

from megatron_trace.rollout.engine import RolloutEngine
from megatron_trace.rollout.sampling import SamplingSettings

__all__ = ["RolloutEngine", "SamplingSettings"]
