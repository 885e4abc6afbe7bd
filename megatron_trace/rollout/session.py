"""A rollout that goes on while weights are pushed, one step of the engine at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from megatron_trace.hints import RolloutSample
from megatron_trace.rollout.prompts import Prompt, token_lists
from megatron_trace.rollout.running import Served
from megatron_trace.rollout.sampling import SamplingSettings, sample_seed
from megatron_trace.rollout.serving import Server

OnPush = Literal["keep", "recompute"]


class RolloutSession:
    """Samples in flight: added at any time, computed step by step, taken when they are over.

    A push in between leaves tokens and log-probs as they were sampled. With `keep`, keys, values,
    states of Gated DeltaNet and records of the rows so far stay too: later tokens attend to what
    an older version computed, and its hints say what that was. With `recompute`, the engine
    computes these rows anew with the new weights, records them anew, and forgets the old ones.
    Either way a row's hint is of the codes that later tokens attend to, and each row and each
    sampled token carry the version that made them (`RolloutSample.record_spans`, `version_spans`).

    Args:
        server: What serves.
        sampling: How tokens are sampled.
        on_push: See above.
        keep: Whether rows are recorded.
        policy_version: Version of the weights that serve.
        weights_digest: Their digest.
        seconds: Of the engine: `rollout` and `record` are added to.
        require_usable: Raises ValueError on prompts and sample ids that cannot be used.
        require_quantisers_ran: Raises RuntimeError if a quantiser did not run.
        finished: Makes samples of what was served.

    Attributes:
        weights_digests: Digest of the weights of every version that may have computed a sample.
        policy_version: Version of the weights that serve.
        num_steps: Steps of the engine since the session began.
    """

    def __init__(
        self,
        server: Server,
        *,
        sampling: SamplingSettings,
        on_push: OnPush,
        keep: bool,
        policy_version: int,
        weights_digest: str,
        seconds: dict[str, float],
        require_usable: Callable[[Sequence[Sequence[int]], Sequence[str]], None],
        require_quantisers_ran: Callable[[], None],
        finished: Callable[[Sequence[str], Sequence[Served | None]], list[RolloutSample]],
    ) -> None:
        if on_push not in get_args(OnPush):
            raise ValueError(f"on_push must be {' or '.join(get_args(OnPush))}; got {on_push!r}")
        self._server, self._on_push, self._seconds = server, on_push, seconds
        self._require_usable = require_usable
        self._require_quantisers_ran = require_quantisers_ran
        self._finished = finished
        self._added: set[str] = set()
        self.weights_digests = {policy_version: weights_digest}
        self.policy_version = policy_version
        self.num_steps = self._steps_reported = 0
        server.sites.begin_rollout()
        self._run = server.begin(sampling=sampling, keep=keep)
        server.note_version(policy_version)

    @property
    def is_open(self) -> bool:
        """Whether it was not closed, by `close` or by an error of the engine."""
        return self._server.serves(self._run)

    @property
    def num_in_flight(self) -> int:
        """Samples that were added and not taken."""
        return len(self._added)

    @property
    def num_unfinished(self) -> int:
        """Those of them that are not over."""
        return self._run.num_unfinished if self.is_open else 0

    def add(self, prompts: Sequence[Prompt], sample_ids: Sequence[str], *, seed: int) -> None:
        """Adds samples; they begin when the engine has room.

        Args:
            prompts: Token ids, a prompt for each sample; as of `RolloutEngine.generate`.
            sample_ids: Name of each sample.
            seed: As of `RolloutEngine.generate`.

        Raises:
            RuntimeError: The session is closed.
            ValueError: They cannot be used.
        """
        self._require_open("add")
        prompts = token_lists(prompts)
        self._require_usable(prompts, sample_ids)
        if again := self._added.intersection(sample_ids):
            raise ValueError(f"sample {min(again)} is in flight already")
        with self._server.computing():
            self._server.add(prompts, sample_ids, [sample_seed(seed, name) for name in sample_ids])
        self._added.update(sample_ids)

    def step(self) -> None:
        """Does one step of the engine, for all samples that have room.

        Raises:
            RuntimeError: The session is closed, nothing is unfinished, an activation is NaN or Inf,
                or the engine lost a request; after an error of the engine the session is closed.
        """
        self._require_open("step")
        if not self.num_unfinished:
            raise RuntimeError("step has nothing to do: every sample of the session is over")
        started, recorder = time.perf_counter(), self._server.sites.recorder
        recorded_before_s = recorder.seconds
        with self._server.computing():
            self._run.step()
        self.num_steps += 1
        self._seconds["record"] += recorder.seconds - recorded_before_s
        self._seconds["rollout"] += time.perf_counter() - started

    def is_over(self, sample_ids: Sequence[str]) -> bool:
        """Whether all of these samples in flight can be taken."""
        self._require_open("is_over")
        return self._run.is_finished(sample_ids)

    def take(self, sample_ids: Sequence[str]) -> list[RolloutSample]:
        """Gives samples that are over; their records are in the store then.

        The engine's report counts them, and the quantised values since the last call.

        Raises:
            RuntimeError: The session is closed, a sample is not over, or a quantiser did not run.
        """
        if not self.is_over(sample_ids):
            raise RuntimeError("take needs samples that are over; do more steps")
        if self.num_steps > self._steps_reported:
            self._require_quantisers_ran()
        served = self._server.take(sample_ids)
        self._added.difference_update(sample_ids)
        samples = self._finished(sample_ids, served)
        self._server.sites.begin_rollout()
        self._server.context.counts.clear()
        self._steps_reported = self.num_steps
        return samples

    def require_later(self, policy_version: int) -> None:
        """Raises ValueError unless a version is later than the one that serves."""
        if policy_version <= self.policy_version:
            raise ValueError(
                f"a push of policy version {policy_version} amid a session that has version "
                f"{self.policy_version}: rows could not be told apart; push later versions only"
            )

    def pushed(self, policy_version: int, weights_digest: str) -> None:
        """Goes on with the weights that the engine has now."""
        self.weights_digests[policy_version] = weights_digest
        self.policy_version = policy_version
        self._server.note_version(policy_version)
        if self._on_push == "recompute":
            with self._server.computing():
                self._run.compute_anew()

    def close(self) -> None:
        """Drops all samples in flight; the engine can be used otherwise again."""
        if self.is_open:
            self._server.reset()
        self._added.clear()

    def _require_open(self, call: str) -> None:
        if not self.is_open:
            raise RuntimeError(
                f"{call}: the session is closed, by close or by an error of the engine; open "
                "another one"
            )
