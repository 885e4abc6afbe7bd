"""Reinforcement learning on top of rollout and training: advantages, losses, the step, tasks."""
