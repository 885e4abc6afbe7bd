"""Guided fake quantisation in Megatron: hint lookup, routing replay, experts, attention."""
