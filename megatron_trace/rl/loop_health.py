"""Health of the steps inside Megatron's own training loop: alarms, skipped steps, records.

A step with NaN or Inf is skipped and counted, as in an RL run.

The alarms, their names and thresholds are those of RL runs (`rl.health`). A rank adds up what its
micro-batches show; between the last backward pass of a step and its update all ranks settle it
together, so that all of them raise the same alarms.

Legend: B samples of a micro-batch, S positions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_trace.config import TraceConfig
from megatron_trace.rl.health import (
    MEASURES,
    Alarm,
    alarm_texts,
    must_stop,
    non_finite_alarm,
    parse_alarms,
    raised,
    require_measurable,
    samples_to_drop,
)
from megatron_trace.rl.loop_record import SampleOrigin, StepMeasures
from megatron_trace.rl.losses import LossSums
from megatron_trace.rl_config import HealthConfig
from megatron_trace.training import gradients
from megatron_trace.training.over_ranks import all_ranks, largest
from megatron_trace.training.report import TraceReport
from megatron_trace.training.rounding import NonFiniteError
from megatron_trace.training.sites import TraceSites

_logger = logging.getLogger(__name__)


class LoopHealth:
    """What the steps of a run inside Megatron's loop measure, and the alarms that they raise.

    Args:
        config: The alarms; default ones that the loop cannot raise are left out.
        trace: Settings of TRACE.
        saves: Whether the run saves checkpoints, so that one is left when it stops.
        skips: Whether the optimizer skips a step whose gradients are Inf, as Megatron's does with
            16-bit weights and `--loss-scale`; if not, NaN or Inf is an error.
        logs: Whether steps are logged, so that all that a step has is measured, not only what the
            alarms watch.

    Attributes:
        alarms: The alarms that are checked.
        num_skipped: Steps whose update was skipped as something was NaN or Inf, since the start of
            the process.
        stop_reason: Why the run must end after the step that was checked last; empty if it may go
            on.

    Raises:
        ValueError: An alarm is written wrongly, can never be raised, or has an action that cannot
            follow in Megatron's loop; or skipped steps are to be counted where none is skipped.
    """

    def __init__(
        self,
        config: HealthConfig,
        trace: TraceConfig,
        *,
        saves: bool,
        skips: bool = True,
        logs: bool = False,
    ) -> None:
        require_measurable(config, trace)
        _require_possible(config, saves=saves)
        self.alarms = tuple(alarm for alarm in parse_alarms(config) if MEASURES[alarm.name].in_loop)
        if not skips and config.max_skipped_steps != HealthConfig.max_skipped_steps:
            raise ValueError(
                f"max_skipped_steps={config.max_skipped_steps} has no effect in Megatron's loop "
                "without --bf16: its FP32 optimizer skips no step; leave it out"
            )
        self.config = config
        self.can_skip = skips
        self.num_skipped = 0
        self.stop_reason = ""
        self.logs = logs
        watched = {alarm.name for alarm in self.alarms}
        self._codes = any(MEASURES[name].needs == "diagnostics" for name in watched)
        self._codes |= logs and trace.diagnostic_share > 0
        self._routing = logs or "router_disagreement" in watched
        self._p99 = logs or "gap_p99" in watched
        self._record: dict[str, Any] = {}
        self._settled = 0.0
        self._forget()

    def _forget(self) -> None:
        self._measures = StepMeasures()
        self._is_finite = True

    def prepare(self, sites: TraceSites, *, trains: bool) -> None:
        """Lets a stage compare what alarms and the log need; call it before micro-batches are made.

        Args:
            sites: Of the stage.
            trains: Whether it is a training step that NaN or Inf skips, not an evaluation.
        """
        sites.on_non_finite = self.note_non_finite if trains and self.can_skip else None
        sites.diagnostics = self._codes
        sites.compares_replayed_routing = self._routing

    def waiting(self) -> AbstractContextManager[None]:
        """Gives a context in which a training step waits for its next micro-batch."""
        return self._measures.waiting()

    def note_non_finite(self, error: NonFiniteError) -> None:
        """Lets the update of the training step that is under way be skipped.

        Raises:
            NonFiniteError: No step can be skipped.
        """
        if not self.can_skip:
            raise error
        if self._is_finite:  # The first of a step tells where it came from.
            _logger.warning("nothing is updated in this step: %s", error)
        self._is_finite = False

    def skips(self, chunks: Sequence[torch.nn.Module]) -> bool:
        """Says whether a step's update is skipped, and lets Megatron skip it; a collective.

        It is if anything was NaN or Inf on any rank. The gradients are Inf then, for which an
        optimizer with `--loss-scale` leaves weights and its state as they are.

        Args:
            chunks: The model's on this rank, each inside DDP, after the last backward pass.
        """
        if not self.can_skip:
            return False
        is_bad = not (self._is_finite and gradients.are_finite(chunks))
        if not largest([is_bad], all_ranks())[0]:
            return False
        gradients.make_infinite(chunks)
        self.num_skipped += 1
        if dist.get_rank() == 0:
            _logger.warning(
                "a step is skipped: something was NaN or Inf on some rank; %d so far, %d allowed",
                self.num_skipped,
                self.config.max_skipped_steps,
            )
        self._settle({"alarms": [non_finite_alarm(self.config, self.num_skipped)]})
        return True

    def dropped(self, delta: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Gives which samples of a micro-batch an alarm leaves out; bool [B].

        Args:
            delta: FP32 [B, S]; training's log-probs before the step less the rollout's, of whole
                samples: every rank that has a part of one decides alike.
            mask: bool [B, S]; response tokens.
        """
        return samples_to_drop(self.alarms, delta, mask)

    def add(self, gaps: torch.Tensor, sums: LossSums, groups: ProcessGroupCollection) -> None:
        """Adds a micro-batch of a training step, on a rank of the last stage.

        Args:
            gaps: FP32 [tokens]; training's log-probs less the rollout's of this rank's tokens.
            sums: What its loss adds up.
            groups: The model's; tensor-parallel ranks have the same tokens, and one counts.
        """
        if (self.alarms or self.logs) and groups.tp.rank() == 0:
            self._measures.add(gaps, sums)

    def add_samples(
        self,
        origin: SampleOrigin,
        mask: torch.Tensor,
        dropped: torch.Tensor,
        groups: ProcessGroupCollection,
    ) -> None:
        """Adds the samples of a micro-batch of a training step, on a rank of the last stage.

        Args:
            origin: What is known of them beside their tokens.
            mask: bool [B, S]; response tokens, of whole samples.
            dropped: bool [B]; samples that an alarm leaves out.
            groups: The model's; context-parallel ranks have parts of the same samples, too.
        """
        if self.logs and groups.tp.rank() == 0 and groups.cp.rank() == 0:
            self._measures.add_samples(origin, mask.sum(1), dropped)

    def check(self, step: int, report: TraceReport) -> list[dict[str, Any]]:
        """Gives the alarms of a step, the same on all ranks, and warns on one; a collective.

        Sets `stop_reason`, and forgets what was added.

        Args:
            step: Number of the step, for the warning.
            report: What the quantisers on this rank did in the step.
        """
        if not (self.alarms or self.logs):
            self._forget()
            return []
        record = self._measures.record(step, report, all_ranks(), p99=self._p99, codes=self._codes)
        found = raised(self.alarms, record, warns=dist.get_rank() == 0)
        self._settle(record | {"alarms": found})
        return found

    def _settle(self, record: dict[str, Any]) -> None:
        """Keeps the record of a step until its update is done, and forgets what was added."""
        self.stop_reason = must_stop(record)
        if self.logs:
            # The first stage begins first.
            (elapsed,) = largest([self._measures.elapsed_s], all_ranks())
            self._settled = time.perf_counter()
            self._record = record | {"seconds": {"train": elapsed, "wait": self._measures.wait_s}}
        self._forget()

    def take_record(self) -> dict[str, Any]:
        """Gives the record of the step whose update was just done; empty if steps are not logged.

        Its seconds are those from the first micro-batch on that a rank asked for, and of them those
        in which this rank waited for one.
        """
        record, self._record = self._record, {}
        if record:
            record["seconds"]["train"] += time.perf_counter() - self._settled
        return record


def _require_possible(config: HealthConfig, *, saves: bool) -> None:
    """Checks that every alarm that was set, not left at its default, fits Megatron's loop."""
    for text, alarm in zip(alarm_texts(config), parse_alarms(config), strict=True):
        if text in HealthConfig.alarms:
            continue
        reason = _hindrance(alarm, saves=saves)
        if reason:
            raise ValueError(f"alarm {text} cannot be in Megatron's loop: {reason}")


def _hindrance(alarm: Alarm, *, saves: bool) -> str:
    if not MEASURES[alarm.name].in_loop:
        known = ", ".join(name for name, measure in MEASURES.items() if measure.in_loop)
        return f"a step there has no {alarm.name}, but {known}"
    if alarm.action == "bf16":
        return (
            "others made its rollouts, before or meanwhile, and go on in their precision; choose "
            "warn, drop or stop"
        )
    if alarm.action == "stop" and not saves:
        return "it would stop without a checkpoint; give --save, or choose warn"
    return ""
