"""Names of expert weights: one linear per expert, or one grouped linear for all.

    local    decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight
    grouped  decoder.layers.1.mlp.experts.linear_fc1.weight3

Both hold the same matrix, gate above up. Weights are exchanged under their local names, which are
those of the rollout engine.
"""

from __future__ import annotations

import re

_GROUPED = re.compile(r"(.*\bexperts)\.(linear_fc[12])\.weight(\d+)")


def local_name(name: str) -> str:
    """Gives the name that a parameter has where every expert is a linear of its own."""
    grouped = _GROUPED.fullmatch(name)
    if grouped is None:
        return name
    experts, linear, expert = grouped.groups()
    return f"{experts}.local_experts.{expert}.{linear}.weight"
