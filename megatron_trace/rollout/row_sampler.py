"""The engine's sampler: a token for each request from its own distribution and random numbers.

Legend: N requests of a step, V tokens of the vocabulary, K most probable tokens, R sampled tokens
of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.inference.sampling import Sampling

from megatron_trace.rollout.sampling import (
    SamplingSettings,
    draw,
    sampling_logprobs,
    uniform_numbers,
)

# Stands for a token where a logit is NaN or Inf.
_NOT_FINITE = -1


@dataclass(frozen=True)
class Sampled:
    """What was sampled for one request.

    Attributes:
        tokens: int64 [R].
        logprobs: FP32 [R].
        top_tokens: int32 [R, K]; None if not asked for.
        top_logprobs: FP32 [R, K], in falling order.
        versions: int64 [R]; policy version that sampled each token; None if none was noted.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    top_tokens: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    versions: torch.Tensor | None = None

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sampled:
        """Gives a change of every tensor that is there."""
        return Sampled(**{n: change(value) for n, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class _Step:
    request_ids: np.ndarray
    sampled: Sampled


class RowSampler(Sampling):
    """Samples on FP32 logits, and keeps what it sampled and how probable that was.

    The number that decides a token follows from the sample's seed and the token's position, so
    that neither the other samples nor their number change it. Megatron 0.19.2's own sampler has one
    generator for all, samples from the softmax of BF16 logits, and reports log-probs of FP32 ones.

    Attributes:
        policy_version: Version of the weights that compute, noted of each token; None to note none.
    """

    def __init__(self) -> None:
        self._settings = SamplingSettings(max_new_tokens=1)
        self._seeds: dict[int, int] = {}
        self.policy_version: int | None = None
        self._steps: list[_Step] = []
        self._num_told = 0

    def begin(self, settings: SamplingSettings, seeds: Mapping[int, int]) -> None:
        """Begins a rollout.

        Args:
            settings: How tokens are sampled.
            seeds: Seed of each request, by the engine's id.
        """
        self._settings, self._seeds, self.policy_version = settings, dict(seeds), None
        self._steps, self._num_told = [], 0

    def add(self, seeds: Mapping[int, int]) -> None:
        """Adds requests to the rollout, with a seed each."""
        self._seeds |= seeds

    def end(self) -> None:
        """Forgets what was sampled."""
        self._seeds, self._steps, self._num_told = {}, [], 0

    def sample_kernel(
        self,
        logits: torch.Tensor,
        n: int,
        context: Any,
        *,
        gather_indices: torch.Tensor | None = None,
        token_to_request_index: torch.Tensor | None = None,
        output: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Gives token ids int64 [n] sampled from logits [rows >= n, V] (Megatron's hook).

        Where a logit is NaN or Inf it gives -1, which `require_finite_logits` finds once the tokens
        have come to the host: looking here would wait for the forward.
        """
        assert token_to_request_index is None, "the engine does not decode speculatively"
        logits = (logits[:n] if gather_indices is None else logits[gather_indices[:n]]).float()
        active = slice(context.paused_request_count, context.total_request_count)
        request_ids = context.request_ids[active].numpy().copy()
        offsets, lengths = context.request_kv_length_offsets, context.request_query_lengths
        positions = (offsets[active] + lengths[active]).numpy()
        sampled = self._sample(logits, request_ids, positions)
        # The last request is sampled for although its prompt goes on; nobody uses that token.
        is_real = request_ids != context.chunked_prefill_request_id
        self._steps.append(_of_rows(request_ids, sampled, is_real))
        if output is None:
            return sampled.tokens
        output.copy_(sampled.tokens)
        return output

    def log_probs_kernel(self, logits: torch.Tensor, context: Any, **kwargs: Any) -> torch.Tensor:
        """Raises RuntimeError: Megatron is not asked for log-probs."""
        raise RuntimeError("log-probs of a rollout are those that its sampler kept")

    def last_tokens(self) -> dict[int, int]:
        """Gives the tokens of the running step by request."""
        step = self._steps[-1]
        return dict(zip(step.request_ids.tolist(), step.sampled.tokens.tolist(), strict=True))

    def last_step(self) -> list[tuple[int, int, float]]:
        """Gives request, token and log-prob of what was sampled since it was asked last."""
        steps, self._num_told = self._steps[self._num_told :], len(self._steps)
        return [
            row
            for step in steps
            for row in zip(
                step.request_ids.tolist(),
                step.sampled.tokens.tolist(),
                step.sampled.logprobs.tolist(),
                strict=True,
            )
        ]

    def take(self, request_ids: Iterable[int]) -> dict[int, Sampled]:
        """Gives what was sampled for some requests, in host memory, and forgets these requests."""
        every = self.sampled()
        taken: dict[int, Sampled] = {}
        for request_id in request_ids:
            self._seeds.pop(request_id, None)
            if request_id in every:
                taken[request_id] = every.pop(request_id)
        device = self._steps[-1].sampled.tokens.device if self._steps else None
        self._steps = [
            _Step(
                np.full(len(sampled.tokens), request_id),
                sampled.changed(lambda value: value.to(device)),
            )
            for request_id, sampled in every.items()
        ]
        self._num_told = len(self._steps)
        return taken

    def sampled(self) -> dict[int, Sampled]:
        """Gives what was sampled since `begin` for each request, in host memory."""
        if not self._steps:
            return {}
        request_ids = np.concatenate([step.request_ids for step in self._steps])
        order = np.argsort(request_ids, kind="stable")
        every = [step.sampled for step in self._steps]
        fields = {
            name: torch.cat([getattr(sampled, name) for sampled in every]).cpu()[order]
            for name in ("tokens", "logprobs", "top_tokens", "top_logprobs", "versions")
            if getattr(every[0], name) is not None
        }
        ids, counts = np.unique(request_ids, return_counts=True)
        parts = {name: values.split(counts.tolist()) for name, values in fields.items()}
        return {
            int(request_id): Sampled(**{name: part[index] for name, part in parts.items()})
            for index, request_id in enumerate(ids)
        }

    def _sample(
        self, logits: torch.Tensor, request_ids: np.ndarray, positions: np.ndarray
    ) -> Sampled:
        settings = self._settings
        logprobs = sampling_logprobs(logits, settings)
        if settings.greedy:
            tokens = logits.argmax(-1)
        else:
            seeds = [self._seeds[request_id] for request_id in request_ids.tolist()]
            uniform = torch.from_numpy(uniform_numbers(seeds, positions))
            tokens = draw(logprobs, uniform.to(logits.device, non_blocking=True))
        if settings.logprobs == "raw":
            logprobs = logits.log_softmax(-1)
        tokens = tokens.clamp(max=logits.shape[1] - 1)  # Beyond it only where a logit is NaN.
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        # FP32 cannot overflow a sum in FP64, which is NaN or Inf if a logit is.
        tokens = tokens.masked_fill(
            ~torch.isfinite(logits.sum(-1, dtype=torch.float64)), _NOT_FINITE
        )
        versions = None
        if self.policy_version is not None:
            versions = torch.full_like(tokens, self.policy_version, dtype=torch.int64)
        if not settings.top_logprobs:
            return Sampled(tokens, chosen, versions=versions)
        top = logprobs.topk(settings.top_logprobs, dim=-1)
        return Sampled(tokens, chosen, top.indices.to(torch.int32), top.values, versions)


def require_finite_logits(tokens: torch.Tensor) -> None:
    """Raises RuntimeError if a logit was NaN or Inf from which `RowSampler` gave tokens, [n]."""
    if (tokens == _NOT_FINITE).any():
        raise RuntimeError("NaN or Inf logits in the rollout; check the weights that were pushed")


def _of_rows(request_ids: np.ndarray, sampled: Sampled, rows: np.ndarray) -> _Step:
    if rows.all():
        return _Step(request_ids, sampled)
    index = torch.from_numpy(rows.nonzero()[0]).to(sampled.tokens.device)
    return _Step(request_ids[rows], sampled.changed(lambda value: value[index]))
