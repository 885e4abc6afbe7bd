"""Alarms of an RL run: what is watched, from which threshold, and what is done.

An alarm is checked once a step, on the step's record as it is logged (`docs/metrics.md`). A measure
that the step does not have (None) raises no alarm. `drop` is checked earlier, sample by sample,
before a sample adds to the gradient.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.rl_config import HealthConfig

Action = Literal["warn", "drop", "bf16", "stop"]
Record = Mapping[str, Any]
# Name of the alarm of steps with NaN or Inf, which has a setting of its own.
NON_FINITE = "non_finite"
# What stands for no alarm, as a flag cannot be given without a value.
NO_ALARMS = ("none",)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measure:
    """Something that can raise an alarm.

    Attributes:
        of: Gives it from a step's record; None where the step does not have it.
        needs: What the run must have: `diagnostics` (full codes of some samples), `hints`,
            `quantisers`, or nothing.
        below: Whether the alarm is raised below the threshold instead of above it.
        in_loop: Whether a step of Megatron's own loop has it too (`rl.loop_health`).
        of_sample: Gives it for every sample from training's less the rollout's log-probs [B, S] and
            the mask; None where a sample has none of its own.
    """

    of: Callable[[Record], float | None]
    needs: str = ""
    below: bool = False
    in_loop: bool = False
    of_sample: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None


def _field(*path: str) -> Callable[[Record], float | None]:
    def of(record: Record) -> float | None:
        value: Any = record
        for name in path:
            value = value[name]
        return value

    return of


def _largest(*path: str) -> Callable[[Record], float | None]:
    """Gives the largest number of a field that has them by site, or by site and layer; or NaN."""
    get: Callable[[Record], Any] = _field(*path)

    def numbers(value: Any) -> list[float]:
        if isinstance(value, Mapping):
            return [number for part in value.values() for number in numbers(part)]
        return [] if value is None else [float(value)]

    def of(record: Record) -> float | None:
        found = numbers(get(record))
        return math.nan if any(map(math.isnan, found)) else max(found, default=None)

    return of


def _mean_gap(delta: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (delta.abs() * mask).sum(1) / mask.sum(1).clamp(min=1)


def _largest_gap(delta: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (delta.abs() * mask).amax(1)


def _kl(delta: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ((torch.expm1(delta) - delta) * mask).sum(1) / mask.sum(1).clamp(min=1)


MEASURES: dict[str, Measure] = {
    "code_mismatch": Measure(_largest("health", "code_mismatch"), "diagnostics", in_loop=True),
    "nearest_mismatch": Measure(
        _largest("health", "nearest_mismatch"), "diagnostics", in_loop=True
    ),
    "scale_mismatch": Measure(_largest("health", "scale_mismatch"), "diagnostics", in_loop=True),
    "d_act": Measure(_largest("health", "d_act"), "diagnostics", in_loop=True),
    "d_act_nearest": Measure(_largest("health", "d_act_nearest"), "diagnostics", in_loop=True),
    # How far the rounding that hints hide has drifted: the gap cannot tell, see `nearest_growth`.
    "staleness": Measure(_field("health", "nearest_growth"), "diagnostics"),
    "lag": Measure(_field("health", "lag_max")),
    "coverage": Measure(_field("health", "coverage"), "hints", below=True, in_loop=True),
    "guard_rejections": Measure(_field("health", "guard_rejections"), "hints", in_loop=True),
    "saturation": Measure(_largest("health", "saturation"), "quantisers", in_loop=True),
    "rollout_saturation": Measure(_field("health", "rollout_saturation"), "quantisers"),
    "gap_mean": Measure(_field("gap", "mean"), in_loop=True, of_sample=_mean_gap),
    "gap_p99": Measure(_field("gap", "p99"), in_loop=True),
    "gap_max": Measure(_field("gap", "max"), in_loop=True, of_sample=_largest_gap),
    "kl": Measure(_field("gap", "kl"), in_loop=True, of_sample=_kl),
    "ratio_spread": Measure(_field("importance_ratio_std"), in_loop=True),
    "clipped_share": Measure(_field("clipped_share"), in_loop=True),
    "masked_share": Measure(_field("importance_masked_share"), in_loop=True),
    "router_disagreement": Measure(_field("health", "router_disagreement"), in_loop=True),
    "rho_asym": Measure(_field("rho_asym"), in_loop=True),
    "entropy": Measure(_field("entropy"), below=True, in_loop=True),
    "response_tokens": Measure(_field("response_tokens")),
    "unfinished": Measure(_field("unfinished")),
    "degenerate": Measure(_field("health", "degenerate")),
    "grad_norm": Measure(_field("grad_norm")),
    "reward_failed": Measure(_field("reward_failed")),
}


@dataclass(frozen=True)
class Alarm:
    """An alarm that is set.

    Attributes:
        name: What is watched, of `MEASURES`.
        threshold: Beyond it the alarm is raised.
        action: What is done then.
    """

    name: str
    threshold: float
    action: Action

    def is_beyond(self, value: float) -> bool:
        """Whether a value raises the alarm; one that is NaN does."""
        below = MEASURES[self.name].below
        return math.isnan(value) or (value < self.threshold if below else value > self.threshold)


def parse_alarms(config: HealthConfig) -> tuple[Alarm, ...]:
    """Gives the alarms that are set.

    Raises:
        ValueError: One is not of the form NAME=THRESHOLD:ACTION, or is set twice; a name, threshold
            or action is unknown; or an action cannot follow from what is watched.
    """
    alarms = [_parse(text) for text in alarm_texts(config)]
    names = [(alarm.name, alarm.action) for alarm in alarms]
    for name, action in names:
        if names.count((name, action)) > 1:
            raise ValueError(f"alarms has {name} with action {action} twice; leave one out")
    return tuple(alarms)


def alarm_texts(config: HealthConfig) -> tuple[str, ...]:
    """Gives the alarms that are set, as they were written."""
    return () if config.alarms == NO_ALARMS else config.alarms


def _parse(text: str) -> Alarm:
    found = re.fullmatch(r"([a-z0-9_]+)=([^:=]+):([a-z0-9]+)", text)
    if found is None:
        raise ValueError(f"alarms must be NAME=THRESHOLD:ACTION, such as kl=0.1:warn; got {text!r}")
    name, threshold, action = found.groups()
    if name not in MEASURES:
        raise ValueError(f"alarms: {name!r} is none of {', '.join(MEASURES)}")
    if action not in get_args(Action):
        raise ValueError(f"alarms: {action!r} is none of {', '.join(get_args(Action))} ({text})")
    if action == "drop" and MEASURES[name].of_sample is None:
        others = [other for other, measure in MEASURES.items() if measure.of_sample is not None]
        more = "; set max_lag, which drops old samples" if name == "lag" else ""
        raise ValueError(
            f"alarms: {name} is of a whole step, so that no sample can be dropped for it; "
            f"{', '.join(others)} can{more} ({text})"
        )
    try:
        value = float(threshold)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"alarms: the threshold must be a number; got {threshold!r} ({text})")
    return Alarm(name, value, action)  # pyright: ignore[reportArgumentType]


def require_measurable(config: HealthConfig, trace: TraceConfig) -> None:
    """Checks that every alarm that was set, not left at its default, can be raised in a run.

    Raises:
        ValueError: What an alarm watches does not exist under the method or its settings, or its
            action changes nothing.
    """
    missing = {
        "diagnostics": trace.diagnostic_share == 0,
        "hints": trace.method != "trace",
        "quantisers": not trace.trained_sites,
    }
    for text, alarm in zip(alarm_texts(config), parse_alarms(config), strict=True):
        needs = MEASURES[alarm.name].needs
        if text in HealthConfig.alarms:
            continue
        if missing.get(needs):
            raise ValueError(
                f"alarm {text} has no effect with method={trace.method} and diagnostic_share="
                f"{trace.diagnostic_share}: it needs {needs}; leave it out"
            )
        if alarm.action == "bf16" and trace.method == "bf16":
            raise ValueError(f"alarm {text} has no effect with method=bf16: it is in BF16 already")


def raised(alarms: Sequence[Alarm], record: Record, *, warns: bool = True) -> list[dict[str, Any]]:
    """Gives the alarms of a step as plain values that JSON can hold, and warns of each.

    Args:
        alarms: The alarms of the run; those with action `drop` are checked by sample instead.
        record: The step's record.
        warns: Whether to warn; of several ranks with the same record, one does.
    """
    found = []
    for alarm in alarms:
        value = None if alarm.action == "drop" else MEASURES[alarm.name].of(record)
        if value is None or not alarm.is_beyond(value):
            continue
        found.append(
            {"alarm": alarm.name, "value": value, "threshold": alarm.threshold}
            | {"action": alarm.action}
        )
        if not warns:
            continue
        _logger.warning(
            "step %s: alarm %s, %.4g is %s %.4g; action: %s",
            record["step"],
            alarm.name,
            value,
            "below" if MEASURES[alarm.name].below else "above",
            alarm.threshold,
            alarm.action,
        )
    return found


def non_finite_alarm(config: HealthConfig, skipped: int) -> dict[str, Any]:
    """Gives the alarm of a step with NaN or Inf, whose update was skipped.

    Args:
        config: How many of them the run survives.
        skipped: Updates of the run that were skipped so far.
    """
    limit = config.max_skipped_steps
    action = "stop" if skipped > limit else "warn"
    return {"alarm": NON_FINITE, "value": skipped, "threshold": limit, "action": action}


def samples_to_drop(
    alarms: Sequence[Alarm], delta: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Gives which samples of a micro-batch are beyond the threshold of an alarm that drops them.

    Args:
        alarms: The alarms of the run.
        delta: FP32 [B, S]; training's log-probs before the step less the rollout's.
        mask: bool [B, S]; response tokens.

    Returns:
        bool [B].
    """
    dropped = torch.zeros_like(mask[:, 0])
    delta = torch.where(mask, delta, 0.0)
    for alarm in alarms:
        of_sample = MEASURES[alarm.name].of_sample
        if alarm.action == "drop" and of_sample is not None:
            dropped |= of_sample(delta, mask) > alarm.threshold
    return dropped


def must_stop(record: Record) -> str:
    """Gives why a run must stop after a step, as its record says; empty if it may go on."""
    reasons = [
        f"{alarm['alarm']} is {alarm['value']:.4g} (threshold {alarm['threshold']:.4g})"
        for alarm in record["alarms"]
        if alarm["action"] == "stop"
    ]
    return "; ".join(reasons)
