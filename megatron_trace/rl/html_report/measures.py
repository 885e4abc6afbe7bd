"""What of a step's record is shown: where it lies, what it is called, and on which axis it goes.

The fields are those of `docs/metrics.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Curve:
    """A number of each step, drawn over the steps and summarised in the tables.

    Attributes:
        path: Where it lies in the record. Of an object there, the largest number below it counts.
        title: What it is called.
        unit: Its unit; empty for a share or ratio.
        meaning: One sentence.
        is_main: Whether it is in the first table.
        axis: `log` where values span decades; `share` from 0 to 1.
        section: Heading that it is under.
    """

    path: tuple[str, ...]
    title: str
    meaning: str
    section: str
    unit: str = ""
    is_main: bool = False
    axis: Literal["linear", "log", "share"] = "linear"

    def of(self, record: Mapping[str, Any]) -> float:
        """Gives the number of a record; NaN where it has none, or one that is not finite."""
        value: Any = record
        for name in self.path:
            value = value.get(name) if isinstance(value, Mapping) else None
        numbers = [number for number in _numbers(value) if math.isfinite(number)]
        return max(numbers, default=math.nan)


def _numbers(value: Any) -> Sequence[float]:
    if isinstance(value, Mapping):
        return [number for part in value.values() for number in _numbers(part)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return []
    return [float(value)]


_LEARNING, _AGREEMENT = "What is learned", "Do rollout and training agree"
_QUANTISERS, _UPDATE = "Quantisers and hints", "The update"
_COST = "Cost"

CURVES = (
    Curve(
        ("reward",),
        "Reward",
        "Mean reward of the step's samples.",
        _LEARNING,
        is_main=True,
        axis="share",
    ),
    Curve(
        ("groups_with_spread",),
        "Groups with spread",
        "Share of prompt groups whose rewards differ; the others teach nothing.",
        _LEARNING,
        axis="share",
    ),
    Curve(
        ("entropy",), "Entropy", "Of what is sampled from.", _LEARNING, unit="nats", is_main=True
    ),
    Curve(
        ("response_tokens",), "Response length", "Mean of the samples.", _LEARNING, "tokens", True
    ),
    Curve(
        ("gap", "mean"),
        "Log-prob gap, mean",
        "Mean |training's log-prob - rollout's| of the sampled tokens.",
        _AGREEMENT,
        unit="nats",
        is_main=True,
        axis="log",
    ),
    Curve(
        ("gap", "p99"),
        "Log-prob gap, p99",
        "Its 99th percentile.",
        _AGREEMENT,
        unit="nats",
        is_main=True,
        axis="log",
    ),
    Curve(("gap", "max"), "Log-prob gap, max", "The largest.", _AGREEMENT, unit="nats", axis="log"),
    Curve(
        ("gap", "kl"),
        "KL(rollout, train)",
        "Estimate, a token.",
        _AGREEMENT,
        unit="nats",
        is_main=True,
        axis="log",
    ),
    Curve(
        ("rho_asym",),
        "rho_asym",
        "TRIAGE's early warning: about 1.34 in health, 1.85 before a collapse.",
        _AGREEMENT,
        is_main=True,
    ),
    Curve(
        ("importance_ratio_std",),
        "Spread of the importance ratio",
        "Standard deviation of exp(train - rollout), neither capped nor masked.",
        _AGREEMENT,
        axis="log",
    ),
    Curve(
        ("health", "router_disagreement"),
        "Router disagreement",
        "Share of (token, MoE layer) whose own router would choose other experts.",
        _AGREEMENT,
    ),
    Curve(
        ("health", "code_mismatch"),
        "Codes that differ, as trained",
        "Share of values whose code is not the rollout's; the largest of the sites.",
        _QUANTISERS,
        is_main=True,
        axis="log",
    ),
    Curve(
        ("health", "nearest_mismatch"),
        "Codes that would differ, to nearest",
        "What rounding to nearest would give in the same pass; it drifts unseen behind hints.",
        _QUANTISERS,
        is_main=True,
        axis="log",
    ),
    Curve(
        ("health", "d_act"),
        "D_act, as trained",
        "Relative difference of the quantised activations; the largest of sites and layers.",
        _QUANTISERS,
        axis="log",
    ),
    Curve(
        ("health", "coverage"),
        "Hint coverage",
        "Share of rows that a hint guided.",
        _QUANTISERS,
        is_main=True,
        axis="share",
    ),
    Curve(
        ("health", "guard_rejections"),
        "Guard rejections",
        "Share of rows whose hint the guard refused.",
        _QUANTISERS,
    ),
    Curve(
        ("health", "saturation"),
        "Saturation",
        "Share of blocks beyond what the static scale holds; the largest of the sites.",
        _QUANTISERS,
    ),
    Curve(
        ("health", "lag_mean"),
        "Lag",
        "Policy versions by which the samples are older than the weights.",
        _UPDATE,
        "versions",
    ),
    Curve(("loss",), "Loss", "Mean over the optimizer steps.", _UPDATE),
    Curve(("grad_norm",), "Gradient norm", "Before clipping.", _UPDATE, axis="log"),
    Curve(("learning_rate",), "Learning rate", "Of Megatron's schedule.", _UPDATE, axis="log"),
    Curve(
        ("clipped_share",),
        "Clipped share",
        "Share of tokens that the objective's bounds leave without gradient.",
        _UPDATE,
    ),
    Curve(("kl_old",), "KL(old, now)", "Estimate, a token.", _UPDATE, "nats"),
    Curve(("seconds", "rollout"), "Rollout", "Recording included.", _COST, "s", True),
    Curve(
        ("seconds", "train"), "Training", "Rewards, batches, forward, backward.", _COST, "s", True
    ),
    Curve(
        ("seconds", "wait"),
        "Waiting for micro-batches",
        "Part of the training: for rollouts, and for hints that are read.",
        _COST,
        "s",
    ),
    Curve(("seconds", "record"), "Recording hints", "Part of the rollout.", _COST, "s"),
    Curve(("seconds", "push"), "Weight push", "With digests.", _COST, "s"),
    Curve(("hint_bytes_per_token",), "Hint bytes", "In the store.", _COST, "bytes / token"),
    Curve(("kv_bytes_per_token",), "KV cache bytes", "Keys and values.", _COST, "bytes / token"),
)
SECTIONS = tuple(dict.fromkeys(curve.section for curve in CURVES))
