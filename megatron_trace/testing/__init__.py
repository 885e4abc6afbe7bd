"""Shared by tests, tools and examples: assertions, hard inputs, rank spawner, CPU stand-in."""
