"""One rollout on Megatron's engine: requests in, what they sampled and computed out.

Legend: R response tokens of a sample, K most probable tokens that are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.inference.engines import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequestRecord, Status

from megatron_trace.rollout.callbacks import NextTurn, OnTokens, StreamedToken, Turn
from megatron_trace.rollout.context import RolloutContext
from megatron_trace.rollout.prompts import require_several_names
from megatron_trace.rollout.row_sampler import RowSampler, Sampled
from megatron_trace.rollout.sampling import SamplingSettings
from megatron_trace.rollout.saved_rows import SavedRows


@dataclass(frozen=True)
class Served:
    """A sample that is finished.

    Attributes:
        tokens: Prompt and response.
        num_prompt_tokens: How many of them are the prompt.
        given: uint8 [R]; 1 where a response token was given, not sampled. None if none was.
        sampled: What was sampled, [R]; log-prob 0 and no top tokens where a token was given.
        rows: What the engine computed.
        finish_reason: `stop`, `length`, or `abort`.
    """

    tokens: tuple[int, ...]
    num_prompt_tokens: int
    given: torch.Tensor | None
    sampled: Sampled
    rows: SavedRows
    finish_reason: str


@dataclass
class _Sample:
    """A sample that is running: prompt and response, and which response tokens were given."""

    sample_id: str
    tokens: list[int]
    num_prompt_tokens: int
    given: list[int] = field(default_factory=list)
    num_turns: int = 0
    num_told: int = 0
    finish_reason: str = ""
    rows: SavedRows | None = None

    @property
    def num_sampled(self) -> int:
        """Response tokens that were sampled, in turns that are over."""
        return len(self.given) - sum(self.given)


class Run:
    """One rollout.

    Args:
        engine: Megatron's engine.
        context: Its context.
        sampler: Its sampler, begun.
        sampling: How tokens are sampled.
        end_tokens: Tokens that end a turn.
        shares_prefixes: Whether pages of prompts are shared through the prefix cache.
        on_tokens: Is told of every token.
        next_turn: Says how samples go on.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        context: RolloutContext,
        sampler: RowSampler,
        *,
        sampling: SamplingSettings,
        end_tokens: Sequence[int],
        shares_prefixes: bool,
        on_tokens: OnTokens | None,
        next_turn: NextTurn | None,
    ) -> None:
        self._engine: Any = engine
        self._context, self._sampler = context, sampler
        self._sampling, self._end_tokens = sampling, frozenset(end_tokens)
        self._shares_prefixes = shares_prefixes
        self._on_tokens, self._next_turn = on_tokens, next_turn
        self._parameters = sampling.to_megatron(end_tokens[0])
        self._samples: dict[int, _Sample] = {}
        self._numbers: dict[str, int] = {}
        self._num_added = 0
        self._aborted: dict[int, bool] = {}
        self._dropped: set[int] = set()
        self._evictions = -engine.evicted_request_count
        context.keeps_pages = next_turn is not None
        context.finished.clear()

    @property
    def num_evictions(self) -> int:
        """Requests that lost their pages for a while."""
        return self._evictions + self._engine.evicted_request_count

    @property
    def num_unfinished(self) -> int:
        """Samples that run or wait."""
        return len(self._engine.requests)

    def next_numbers(self, count: int) -> range:
        """Gives the numbers, which are the requests' ids, of the samples that are added next."""
        return range(self._num_added, self._num_added + count)

    def add(self, prompts: Sequence[Sequence[int]], sample_ids: Sequence[str]) -> None:
        """Begins samples.

        Args:
            prompts: Token ids of each prompt.
            sample_ids: Name of each sample.
        """
        numbers = self.next_numbers(len(sample_ids))
        for number, sample_id, prompt in zip(numbers, sample_ids, prompts, strict=True):
            self._samples[number] = _Sample(sample_id, list(prompt), len(prompt))
            self._numbers[sample_id] = number
            self._add(number)
        self._num_added = numbers.stop

    def abort(self, sample_ids: Iterable[str], *, keep: bool) -> None:
        """Ends samples that are running.

        A sample that has not begun is dropped, whatever `keep` says: it has no token yet. One that
        is over already stays as it is.

        Args:
            sample_ids: Their names.
            keep: Whether a sample stays, as far as it is with the running step; if not, it leaves
                nothing.

        Raises:
            ValueError: A sample is not of this rollout, or the names are one string.
        """
        require_several_names(sample_ids)
        for sample_id in sample_ids:
            number = self._numbers.get(sample_id)
            if number is None:
                raise ValueError(f"sample {sample_id} cannot be aborted: it is not of this rollout")
            if not self._samples[number].finish_reason:
                self._aborted[number] = keep

    def step(self) -> None:
        """Does one step of Megatron's engine.

        Raises:
            RuntimeError: Megatron's engine refused or lost a request, or makes no progress.
        """
        waiting = len(self._engine.waiting_request_ids)
        step = self._engine.step_modern()
        self._stream()
        for record in step["finished_request_records"]:
            self._end_turn(record)
        self._drop_waiting()
        if not step["finished_request_records"]:
            self._require_progress(waiting)

    def is_finished(self, sample_ids: Iterable[str]) -> bool:
        """Whether all of these samples are over."""
        return not any(
            self._numbers[sample_id] in self._engine.requests for sample_id in sample_ids
        )

    def take(self, sample_ids: Iterable[str]) -> list[Served | None]:
        """Gives samples that are over, and forgets them.

        Args:
            sample_ids: Their names.

        Returns:
            In the order of the names; None where a sample was aborted and dropped.

        Raises:
            RuntimeError: Megatron's engine lost a request.
        """
        numbers = [self._numbers.pop(sample_id) for sample_id in sample_ids]
        sampled = self._sampler.take(numbers)
        self._context.sites.recorder.forget(numbers)
        served = [self._served(number, sampled) for number in numbers]
        for number in numbers:
            del self._samples[number]
        return served

    def compute_anew(self) -> None:
        """Makes the engine compute all that the running samples have so far, with its weights now.

        They keep their tokens and log-probs, and give up their pages, records and states.
        """
        running = list(self._engine.requests)
        for number in running:
            record, sample = self._engine.requests[number].record, self._samples[number]
            response = [int(token) for part in record.requests for token in part.generated_tokens]
            sample.tokens += response
            sample.given += [0] * len(response)
        self._evictions += self._engine.evicted_request_count
        self._engine.reset()
        for number in running:
            self._add(number)

    def _require_progress(self, num_waited: int) -> None:
        queue, context = self._engine.waiting_request_ids, self._context
        is_busy = context.total_request_count or context.chunked_prefill_request_id >= 0
        if queue and len(queue) == num_waited and not is_busy:
            raise RuntimeError(
                f"{num_waited} requests wait, the first of sample "
                f"{self._samples[queue[0]].sample_id}, but Megatron's engine begins none of them"
            )

    def finished_ids(self, active_ids: Sequence[int]) -> set[int]:
        """Says which active requests end with the token that was just sampled (Megatron's hook)."""
        ends = {number for number in active_ids if number in self._aborted}
        if len(self._end_tokens) > 1:
            last = self._sampler.last_tokens()
            ends |= {number for number in active_ids if last.get(number) in self._end_tokens}
        return ends - {self._context.chunked_prefill_request_id}

    def _add(self, number: int) -> None:
        sample = self._samples[number]
        left = self._sampling.max_new_tokens - sample.num_sampled
        left = min(left, self._context.max_sequence_length - len(sample.tokens))
        parameters = dataclasses.replace(self._parameters, num_tokens_to_generate=left)
        self._engine.add_request(number, list(sample.tokens), parameters)
        if not self._shares_prefixes or sample.num_turns:
            # A page is found by the hash of its tokens; without hashes it is of one request alone.
            self._engine.get_request(number).precomputed_block_hashes = []

    def _end_turn(self, record: DynamicInferenceRequestRecord) -> None:
        number, status = record.request_id, record[-1].status
        sample = self._samples[number]
        if status != Status.COMPLETED:
            raise RuntimeError(f"sample {sample.sample_id}: Megatron's engine left it {status}")
        response = [int(token) for part in record.requests for token in part.generated_tokens]
        sample.tokens += response
        sample.given += [0] * len(response)
        sample.num_turns += 1
        ended = response[-1] in self._end_tokens
        sample.rows = self._context.finished.pop(number)
        goes_on = ended and number not in self._aborted
        more = self._tokens_of_next_turn(sample) if goes_on else None
        if number in self._aborted:  # `next_turn` may have done it.
            sample.finish_reason = "abort"
            return
        if not more:
            sample.finish_reason = "stop" if ended else "length"
            return
        self._context.continued[number] = sample.rows
        sample.rows = None
        sample.tokens += more
        sample.given += [1] * len(more)
        sample.num_told += len(more)
        self._add(number)

    def _tokens_of_next_turn(self, sample: _Sample) -> list[int]:
        """Gives the tokens that a sample goes on with; none if there is no room to sample one."""
        if self._next_turn is None or sample.num_sampled >= self._sampling.max_new_tokens:
            return []
        turn = Turn(
            sample.sample_id, tuple(sample.tokens), sample.num_prompt_tokens, sample.num_turns
        )
        answer = self._next_turn(turn)
        more = [] if answer is None else [int(token) for token in answer]
        vocab_size = self._engine.controller.vocab_size
        if more and not 0 <= min(more) <= max(more) < vocab_size:
            raise ValueError(
                f"sample {sample.sample_id}: the tokens of its next turn must lie in 0 to "
                f"{vocab_size - 1}; got {min(more)} to {max(more)}"
            )
        room = self._context.max_sequence_length - len(sample.tokens) - len(more)
        return more if room > 0 else []

    def _stream(self) -> None:
        if self._on_tokens is None:
            return
        tokens = []
        for number, token, logprob in self._sampler.last_step():
            sample = self._samples[number]
            tokens.append(StreamedToken(sample.sample_id, sample.num_told, token, logprob))
            sample.num_told += 1
        if tokens:
            self._on_tokens(tokens)

    def _drop_waiting(self) -> None:
        """Takes aborted requests out of the queue; an evicted one keeps what it has."""
        for number, keep in self._aborted.items():
            is_waiting = number in self._engine.waiting_request_ids
            if not is_waiting or number == self._context.chunked_prefill_request_id:
                continue
            self._engine.waiting_request_ids.remove(number)
            entry = self._engine.requests.pop(number)
            sample = self._samples[number]
            sample.rows = self._context.continued.pop(number, None)
            sample.finish_reason = "abort"
            if sample.rows is None or not keep:
                self._dropped.add(number)
                continue
            response = [int(t) for part in entry.record.requests for t in part.generated_tokens]
            if sample.given and sample.given[-1] and not response:
                # The turn that was given is not computed yet.
                given = sample.given[::-1].index(0)
                del sample.tokens[-given:], sample.given[-given:]
            sample.tokens += response
            sample.given += [0] * len(response)

    def _served(self, number: int, sampled: Mapping[int, Sampled]) -> Served | None:
        sample = self._samples[number]
        if number in self._dropped or (
            self._aborted.get(number) is False and (sample.finish_reason == "abort")
        ):
            return None
        if not sample.finish_reason or sample.rows is None:
            raise RuntimeError(f"sample {sample.sample_id}: Megatron's engine lost it")
        own = sampled[number]
        response = torch.tensor(sample.tokens[sample.num_prompt_tokens :])
        given = torch.tensor(sample.given, dtype=torch.uint8)
        is_sampled = given == 0
        if not torch.equal(response[is_sampled], own.tokens):
            raise RuntimeError(
                f"sample {sample.sample_id}: Megatron's engine returned other tokens than were "
                "sampled"
            )
        return Served(
            tuple(sample.tokens),
            sample.num_prompt_tokens,
            None if is_sampled.all() else given,
            own if is_sampled.all() else _spread(own, is_sampled, response),
            sample.rows,
            sample.finish_reason,
        )


def _spread(sampled: Sampled, is_sampled: torch.Tensor, response: torch.Tensor) -> Sampled:
    """Gives what was sampled among the tokens that were given."""
    num_tokens = len(response)
    logprobs = torch.zeros(num_tokens)
    logprobs[is_sampled] = sampled.logprobs
    versions = None
    if sampled.versions is not None:  # A given token counts to the token before it.
        versions = sampled.versions[is_sampled.long().cumsum(0) - 1]
    if sampled.top_tokens is None or sampled.top_logprobs is None:
        return Sampled(response, logprobs, versions=versions)
    num_top = sampled.top_tokens.shape[1]
    top_tokens = torch.arange(num_top, dtype=torch.int32).repeat(num_tokens, 1)
    top_logprobs = torch.full((num_tokens, num_top), -torch.inf)
    top_tokens[is_sampled], top_logprobs[is_sampled] = sampled.top_tokens, sampled.top_logprobs
    return Sampled(response, logprobs, top_tokens, top_logprobs, versions)
