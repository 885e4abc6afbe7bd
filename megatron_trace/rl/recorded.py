"""Training on recorded rollouts inside Megatron's own loop: data, forward step, loss.

Megatron's sampler hands out indices of samples, which every rank of a model-parallel group and
every pipeline stage gets alike; each then makes the micro-batch, and reads the hints, that its part
of the model needs.

Legend: B samples of a micro-batch, S positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from megatron_trace.config import RecordedConfig, TraceConfig
from megatron_trace.hints.types import Site
from megatron_trace.rl.exchange_folder import ExchangeFolder, open_samples
from megatron_trace.rl.loop_health import LoopHealth
from megatron_trace.rl.loop_record import SampleOrigin
from megatron_trace.rl.losses import LossSums, count_units, summed_loss
from megatron_trace.rl.objectives.settings import loss_settings
from megatron_trace.rl.objectives.values import PolicyBatch
from megatron_trace.rl.recorded_data import index_datasets
from megatron_trace.rl.recorded_pass import Indices, RecordedMicroBatches, part_of
from megatron_trace.rl_config import LossConfig
from megatron_trace.training.megatron_model import trace_sites
from megatron_trace.training.micro_batch import MicroBatch
from megatron_trace.training.model import (
    forward_micro_batch,
    logprobs_of_logits,
    top_logprobs_of_logits,
)
from megatron_trace.training.over_ranks import all_ranks, summed_report
from megatron_trace.training.report import SiteReport, TraceReport
from megatron_trace.training.rounding import NonFiniteError
from megatron_trace.training.sites import TraceSites

Report = dict[str, torch.Tensor]
LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Report]]


class RecordedTraining:
    """What Megatron's `pretrain` calls: `datasets` and `forward_step`; `close` it at the end.

    Args:
        trace: Settings of TRACE.
        recorded: Folders and how they are trained on.
        loss: Settings of the objective.
        num_positions: Positions of every micro-batch, which pipeline stages must know beforehand;
            None takes as many as its samples need.
        num_micro_batches: Gives how many micro-batches Megatron's next pass will forward, of
            whether it trains; read by prefetch only.
        health: Alarms on the training steps; None has none.

    Attributes:
        folders: The folder to train on, and the one to evaluate on, if any.

    Raises:
        ValueError: No folder is given, a folder has no sample to train on, or the folders were made
            under different quantiser settings or by another method; or a setting has no effect.
    """

    def __init__(
        self,
        trace: TraceConfig,
        recorded: RecordedConfig,
        loss: LossConfig | None = None,
        *,
        num_positions: int | None = None,
        num_micro_batches: Callable[[bool], int] | None = None,
        health: LoopHealth | None = None,
    ) -> None:
        if not recorded.hint_dir:
            raise ValueError("--trace-hint-dir is needed: the folder of rollouts to train on")
        for name in ("prefetch", "hint_memory_mb"):
            if getattr(recorded, name) and trace.method != "trace":
                flag = name.replace("_", "-")
                raise ValueError(
                    f"--trace-{flag} has no effect with --trace-method {trace.method}, which reads "
                    "no hints; leave it out"
                )
        self.trace = trace
        self.recorded = recorded
        self.health = health
        loss = loss or LossConfig()
        if loss.stale_by != "oldest":
            raise ValueError(
                f"stale_by={loss.stale_by} is for RL runs: recorded rollouts are left out as whole "
                "samples, by their oldest version"
            )
        self._loss = loss_settings(trace.method, loss)
        self.folders = [
            open_samples(
                path,
                loss,
                quantised=trace.method != "bf16",
                drop_without_spread=self._loss.objective == "dapo",
            )
            for path in (recorded.hint_dir, recorded.valid_hint_dir)
            if path
        ]
        self.settings = self.folders[0].settings
        self._require_one_kind_of_rollout()
        # Sites of the stages that ran since the last check, and what all did before it.
        self._running: dict[int, TraceSites] = {}
        self._counts: dict[Site, Counter[str]] = {}
        # Whether that was a training step whose update is skipped, of which nothing is kept.
        self._skipped = False
        self._micro_batches = RecordedMicroBatches(
            self.folders,
            recorded,
            num_positions=num_positions,
            num_micro_batches=num_micro_batches,
        )

    def datasets(
        self, num_samples: Sequence[int]
    ) -> tuple[Dataset[Any], Dataset[Any] | None, None]:
        """Gives the datasets of training, validation and test.

        Args:
            num_samples: Samples that the run takes of each.

        Raises:
            ValueError: The run evaluates, but there is nothing to evaluate on.
        """
        return index_datasets(self.folders, num_samples)

    def forward_step(
        self, data_iterator: Iterator[Indices], model: torch.nn.Module
    ) -> tuple[torch.Tensor, LossFunction]:
        """Forwards one micro-batch through one stage.

        Args:
            data_iterator: Gives `SampleIndices` in batches.
            model: The stage.

        Returns:
            The stage's output, and the loss of the last stage's logits.

        Raises:
            LookupError: A hint is missing, and `missing_hints` is `error`.
            ValueError: A sample does not fit the model or its hints.
        """
        sites = trace_sites(model)
        self._running[id(sites)] = sites
        if self.health is not None:
            self.health.prepare(sites, trains=model.training)
        health = self.health if model.training else None
        with nullcontext() if health is None else health.waiting():
            indices, micro_batch = self._micro_batches.next(
                data_iterator, sites, training=model.training
            )
        folder, numbers = self.folders[part_of(indices)], indices["sample"].tolist()
        advantages = torch.tensor([folder.advantage(n) for n in numbers], device=sites.device)
        origin = SampleOrigin(
            rewards=tuple(map(folder.reward, numbers)),
            lags=tuple(lag for lag in map(folder.lag, numbers) if lag is not None),
            spreads=tuple(map(folder.has_spread, numbers)),
        )
        replay = self.recorded.replay_routing and sites.shape.num_experts > 0
        with sites.micro_batch(micro_batch, replay_routing=replay):
            output = forward_micro_batch(model, sites, micro_batch)
        return output, partial(
            self.loss, micro_batch, advantages, origin=origin, trains=model.training
        )

    def loss(
        self,
        micro_batch: MicroBatch,
        advantages: torch.Tensor,
        logits: torch.Tensor,
        *,
        origin: SampleOrigin | None = None,
        trains: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, Report]:
        """Gives the summed loss of a micro-batch, what its mean is over, and what Megatron logs.

        Each of them is that of this rank's positions: Megatron adds them up over the data- and
        context-parallel ranks, and divides by the tokens, or sequences, of the step. The policy
        before the step is the trainer's own: every sample takes part in one step.

        Args:
            micro_batch: The samples.
            advantages: FP32 [B].
            logits: Output of the last stage.
            origin: What is known of the samples beside their tokens, for the log.
            trains: Whether alarms apply, as they do not while Megatron evaluates.
        """
        temperature = self.recorded.temperature
        logprobs = logprobs_of_logits(logits, micro_batch, temperature=temperature)
        own, mask = micro_batch.own_positions, micro_batch.loss_mask
        delta = logprobs.detach() - micro_batch.rollout_logprobs
        health = self.health if trains else None
        dropped = torch.zeros_like(mask[:, 0]) if health is None else health.dropped(delta, mask)
        batch = PolicyBatch(
            theta=logprobs,
            old=logprobs.detach(),
            rollout=micro_batch.rollout_logprobs,
            advantages=advantages,
            mask=mask & ~dropped[:, None],
            own=own,
            **self._most_likely(logits, micro_batch),
        )
        num_units = count_units(mask, self._loss, own)
        gaps = delta[mask & own]
        try:
            loss, sums = summed_loss(batch, self._loss)
        except NonFiniteError as error:
            if health is None:
                raise
            health.note_non_finite(error)
            loss, sums = 0.0 * logprobs.sum(), LossSums(num_tokens=gaps.numel())
        if health is not None:
            groups = micro_batch.made_for.groups
            health.add(gaps, sums, groups)
            if origin is not None:
                health.add_samples(origin, mask, dropped, groups)

        def over(number: int, total: torch.Tensor | float) -> torch.Tensor:
            total = torch.as_tensor(total, dtype=torch.float32, device=loss.device)
            return torch.stack([total.detach(), total.new_tensor(float(number))])

        per_token = partial(over, sums.num_tokens)
        report = {
            "policy loss": over(num_units, loss),
            "log-prob gap": over(gaps.numel(), gaps.abs().sum()),
            "kl rollout": per_token(sums.kl_rollout),
            "importance weight": per_token(sums.weight),
            "importance masked": per_token(sums.masked),
            "clipped": per_token(sums.clipped),
            "entropy": per_token(sums.surprise),
            "dropped": over(gaps.numel(), (mask & own & dropped[:, None]).sum()),
        }
        return loss, torch.tensor(num_units, dtype=torch.int32, device=loss.device), report

    def _most_likely(
        self, logits: torch.Tensor, micro_batch: MicroBatch
    ) -> dict[str, torch.Tensor | None]:
        if self._loss.objective != "score_centering":
            return {}
        temperature = self.recorded.temperature
        return {
            "top_theta": top_logprobs_of_logits(logits, micro_batch, temperature=temperature),
            "top_rollout": micro_batch.top_logprobs,
        }

    def end_step(self, iteration: int, chunks: Sequence[torch.nn.Module]) -> str:
        """Raises the alarms of a training step, between its last backward pass and its update.

        A collective: every rank calls it. With NaN or Inf anywhere the update is skipped
        (`LoopHealth.skips`), and what the quantisers did in the step is forgotten.

        Args:
            iteration: Number of the step, as Megatron logs it.
            chunks: The model's on this rank, each inside DDP.

        Returns:
            Why the run must end after the step; empty if it may go on.
        """
        if self.health is None:
            return ""
        if self.health.skips(chunks):
            for sites in self._running.values():
                sites.reset_report()
            self._running.clear()
            self._skipped = True
            return self.health.stop_reason
        own = sum((sites.report() for sites in self._running.values()), TraceReport())
        self.health.check(iteration, own)
        return self.health.stop_reason

    def require_weights(self, version: int, digest: Callable[[], str]) -> str | None:
        """Checks that the weights before a step are those that rolled its samples out.

        Of a running exchange, whose versions are the trainer's, and of samples of this version: the
        weights of earlier ones are gone. A collective where there is something to check, which all
        ranks find alike.

        Args:
            version: Policy version of the weights.
            digest: Gives the digest of the trainer's quantised weights; a collective.

        Returns:
            The digest; None if there was nothing to check.

        Raises:
            RuntimeError: The two sides have other weights, or quantise them otherwise.
        """
        folder = self.folders[0]
        expected = folder.weights_digests(version) if isinstance(folder, ExchangeFolder) else set()
        if not expected:
            return None
        own = digest()
        if expected != {own}:
            raise RuntimeError(
                f"policy version {version} has digest {own} in the trainer, but was rolled out "
                f"with {', '.join(sorted(expected))}: a checkpoint was changed by hand, or the two "
                "sides quantise otherwise"
            )
        return own

    def assert_ran(self) -> None:
        """Checks that the quantisers of every stage ran since the last check, then forgets it.

        A training step whose update is skipped is not judged. Every rank judges its own counts:
        stages come by at different times, so none may wait here.

        Raises:
            RuntimeError: A quantiser did not run, no micro-batch was forwarded, no row of a site
                was guided, or more were rejected than `guard_max_rejected_rows` allows.
        """
        if self._skipped and not self._running:
            self._skipped = False
            return
        if not self._running:
            raise RuntimeError("no micro-batch was forwarded: nothing was trained")
        for sites in self._running.values():
            sites.assert_ran()
            sites.assert_guided("the last training or evaluation step")
            for site, counts in sites.report().sites.items():
                self._counts.setdefault(site, Counter()).update(asdict(counts))
            sites.reset_report()
        self._running.clear()

    def summary(self) -> str:
        """Says how many rows were rounded how since the start, up to the last check; a collective.

        Training and evaluation, over all ranks: every rank calls it at the end.
        """
        own = TraceReport({site: SiteReport(**counts) for site, counts in self._counts.items()})
        lines = []
        for site, counts in summed_report(own, all_ranks()).sites.items():
            others = ("rejected", "missing", "rerouted", "not_recorded")
            told = ", ".join(f"{getattr(counts, name)} {name}" for name in others)
            guided = f"{counts.coverage:.1%} of the rows guided; {told}"
            hinted = counts.guided + counts.rejected + counts.missing + counts.rerouted > 0
            lines.append(f"  {site}: {guided if hinted else 'all rounded to nearest, no hints'}")
        return "\n".join(lines)

    def close(self) -> None:
        """Ends what reads ahead."""
        self._micro_batches.close()

    def _require_one_kind_of_rollout(self) -> None:
        for folder in self.folders:
            quantised = folder.settings is not None
            if quantised != (self.trace.method != "bf16"):
                raise ValueError(
                    f"--trace-method {self.trace.method} contradicts {folder.folder}, whose "
                    f"rollouts are {'quantised' if quantised else 'BF16'}"
                )
            if folder.settings != self.settings:
                raise ValueError(
                    f"{folder.folder} was rolled out under other quantiser settings than "
                    f"{self.folders[0].folder}; evaluate on rollouts of the same engine settings"
                )
