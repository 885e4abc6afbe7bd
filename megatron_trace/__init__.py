"""Rollout-guided FP4 quantisation (TRACE) for Megatron-Core."""

__version__ = "0.1.0"
