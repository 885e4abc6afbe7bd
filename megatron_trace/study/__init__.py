"""The fixed-policy study: where rollout and training come apart, and what each hint buys."""
