"""Model specs from Megatron-Core's modules that rollout and training share."""
