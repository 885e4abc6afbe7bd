"""Settings of losses, health and tasks of a run: `--trace-*` flags, like those of config.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

Objective = Literal["auto", "grpo", "dapo", "gspo", "tbpo", "score_centering"]
Correction = Literal["auto", "none", "tis", "icepop", "mis_token", "mis_sequence"]
StaleSamples = Literal["drop", "error"]
StaleBy = Literal["oldest", "token"]


@dataclass(frozen=True)
class LossConfig:
    """What is maximised, and how samples of another arithmetic or version are weighed.

    `auto` and what is left out follow from method and objective (`rl.objectives.settings`).

    Attributes:
        objective: `grpo` and `dapo` (clipped token ratios; dapo leaves out groups without spread),
            `gspo` and `tbpo` (sequence ratios), `score_centering`; `auto` is tbpo for method qarl,
            score_centering for method score_centering, grpo for the others.
        correction: Weight of a token for what its rollout probability differs: `tis` (ratio up to
            the cap), `icepop` (ratio from floor to cap, else 0), `mis_token` and `mis_sequence`
            (ratio up to the cap, else 0), or `none`; `auto` is tis, and none for tbpo, which has a
            weight of its own. score_centering takes tis or none.
        clip_low: The ratio of the new to the old policy is clipped below 1 - clip_low; .2, and
            3e-4 for sequence ratios, where it is left out.
        clip_high: The same above 1 + clip_high; .28, and 4e-4 for sequence ratios.
        importance_cap: Largest weight, old policy over rollout: 5 for tis and icepop, 2 for mis_*,
            tbpo and score_centering, where it is left out.
        importance_floor: Smallest ratio that icepop keeps; .5 where it is left out.
        center_top_k: The rollout's most likely tokens that score_centering reads at each position;
            128 where it is left out.
        max_lag: Most policy versions that a sample may be older than the policy it trains; no bound
            where it is left out.
        stale_samples: What happens to older samples: `drop` (left out, counted) or `error`.
        stale_by: What of a sample that several versions made is too old: all of it by its `oldest`
            version, or each `token` by the one that sampled it.
    """

    objective: Objective = "auto"
    correction: Correction = "auto"
    clip_low: float | None = None
    clip_high: float | None = None
    importance_cap: float | None = None
    importance_floor: float | None = None
    center_top_k: int | None = None
    max_lag: int | None = None
    stale_samples: StaleSamples = "drop"
    stale_by: StaleBy = "oldest"

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range or on contradictory settings."""
        for name, choices in (
            ("objective", Objective),
            ("correction", Correction),
            ("stale_samples", StaleSamples),
            ("stale_by", StaleBy),
        ):
            known, value = get_args(choices), getattr(self, name)
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; got {value!r}")
        for name, ok, expected in (
            ("clip_low", lambda value: 0.0 <= value < 1.0, "in [0, 1)"),
            ("clip_high", lambda value: value >= 0.0, ">= 0"),
            (
                "importance_cap",
                lambda value: value >= 1.0,
                ">= 1, or equal policies are weighted down",
            ),
            (
                "importance_floor",
                lambda value: 0.0 <= value <= 1.0,
                "in [0, 1], or equal policies are left out",
            ),
            ("center_top_k", lambda value: value >= 1, ">= 1"),
            ("max_lag", lambda value: value >= 0, ">= 0"),
        ):
            value = getattr(self, name)
            if value is not None and not ok(value):
                raise ValueError(f"{name} must be {expected}; got {value}")
        for name, default in (("stale_samples", "drop"), ("stale_by", "oldest")):
            if getattr(self, name) != default and self.max_lag is None:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect without max_lag, as no sample is "
                    "too old then; set max_lag or leave it out"
                )

    @property
    def given(self) -> dict[str, object]:
        """What is set, by its name."""
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if getattr(self, field.name) != field.default
        }


@dataclass(frozen=True)
class HealthConfig:
    """What a run does about what its steps report.

    Attributes:
        alarms: `NAME=THRESHOLD:ACTION` each, such as `gap_mean=0.1:stop`; docs/metrics.md lists the
            names. Actions are `warn`, `drop` (a sample beyond the threshold adds nothing to the
            step), `bf16` (rollout and training go on in BF16) and `stop` (with a checkpoint). What
            is given replaces the default ones; `none` sets no alarm.
        max_skipped_steps: Steps with NaN or Inf, in loss or gradient, that a run survives: their
            update is skipped; one more stops the run with a checkpoint.
    """

    alarms: tuple[str, ...] = (
        "gap_mean=0.5:warn",
        "saturation=0.05:warn",
        "guard_rejections=0.5:warn",
        "staleness=2:warn",
    )
    max_skipped_steps: int = 3

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range; `rl.health` reads the alarms."""
        if self.max_skipped_steps < 0:
            raise ValueError(f"max_skipped_steps must be >= 0; got {self.max_skipped_steps}")


@dataclass(frozen=True)
class TaskConfig:
    """Prompts, rewards and environments of one's own (docs/my_data.md).

    Attributes:
        reward: Function that scores a sample, as `module:function` or `path/to/file.py:function`.
            The prompt file then is one's own; left out, it is as tools/export_tasks.py writes it.
        environment: Function that answers a turn of the model, named likewise; left out, a sample
            has one turn.
        tokenizer: Folder of a Hugging Face tokenizer; left out, every character of the prompts and
            answers is a token.
        prompt_field: Field of a record that holds its prompt: a text, or a list of messages.
        function_workers: Processes that call each function.
        function_timeout_s: Seconds that a call may take.
        failed_reward: Reward of a sample whose call raised, took too long, ended its process or
            gave no number; left out, the sample is left out of the step.
    """

    reward: str | None = None
    environment: str | None = None
    tokenizer: str | None = None
    prompt_field: str = "prompt"
    function_workers: int = 4
    function_timeout_s: float = 10.0
    failed_reward: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range, or one without effect."""
        if self.function_workers < 1:
            raise ValueError(f"function_workers must be >= 1; got {self.function_workers}")
        if not 0 < self.function_timeout_s < math.inf:
            raise ValueError(
                f"function_timeout_s must be > 0 and finite; got {self.function_timeout_s}"
            )
        if self.failed_reward is not None and not math.isfinite(self.failed_reward):
            raise ValueError(f"failed_reward must be finite; got {self.failed_reward}")
        if self.reward is not None:
            return
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("reward", "tokenizer") and value != field.default:
                raise ValueError(
                    f"{field.name}={value} has no effect without reward, as the scorers of "
                    "reasoning-gym apply then; name a reward function or leave it out"
                )
