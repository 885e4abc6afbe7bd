"""A task of one's own: a reward function, and an environment that answers turns.

    def score(turns, record): ...     a number
    def reply(turns, record): ...     None (the sample ends), a text, or a list of messages

`record` is the prompt's record as its file has it. `turns` are the messages after the prompt:
{"role": "assistant", "content": text, "finished": bool} of the model, the environment's between
them; the last one is the model's. It is finished if its end token was sampled.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from megatron_trace.hints.types import RolloutSample
from megatron_trace.rl.function_pool import Failure, FunctionPool
from megatron_trace.rl.tasks import TaskItem
from megatron_trace.rl.tokenizer import Tokenizer
from megatron_trace.rl_config import TaskConfig
from megatron_trace.rollout.callbacks import NextTurn, Turn

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scores:
    """The rewards of samples.

    Attributes:
        rewards: One for each sample; NaN where it has none, and is to be left out.
        failures: Failed calls by kind.
    """

    rewards: list[float]
    failures: dict[str, int] = field(default_factory=dict)


class OwnTask:
    """Scores samples, and answers their turns, by functions in processes of their own.

    Args:
        config: Names and limits of the functions; `reward` is given.
        tokenizer: Tokenizer of the model.

    Attributes:
        tokenizer: The same.
        next_turn: For `RolloutEngine.generate`; None without an environment.

    Raises:
        ValueError: A function cannot be loaded.
    """

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer) -> None:
        assert config.reward is not None, "checked by the caller"
        self.tokenizer = tokenizer
        self._failed_reward = math.nan if config.failed_reward is None else config.failed_reward
        limits = {"num_workers": config.function_workers, "timeout_s": config.function_timeout_s}
        self._reward = FunctionPool(config.reward, result="number", **limits)
        self._environment = (
            None
            if config.environment is None
            else FunctionPool(config.environment, result="reply", **limits)
        )
        self.next_turn: NextTurn | None = None if self._environment is None else self._next_turn
        self._items: dict[str, TaskItem] = {}
        # By sample: messages so far, those of each answer, and tokens before the running turn.
        self._turns: dict[str, list[dict[str, Any]]] = {}
        self._replies: dict[str, list[list[dict[str, Any]]]] = {}
        self._num_tokens: dict[str, int] = {}
        self._failed_turns: dict[str, Failure] = {}

    def begin(self, items: Mapping[str, TaskItem]) -> None:
        """Tells which item each sample of the next rollout answers."""
        self._forget(items)
        self._items |= items

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            for by_sample in (self._items, self._turns, self._replies, self._num_tokens):
                by_sample.pop(name, None)
            self._failed_turns.pop(name, None)

    def _next_turn(self, turn: Turn) -> list[int] | None:
        assert self._environment is not None, "else the engine was given no such function"
        name, turns = turn.sample_id, self._turns.setdefault(turn.sample_id, [])
        sampled = turn.tokens[self._num_tokens.get(name, turn.num_prompt_tokens) :]
        turns.append(self._message(sampled))
        (reply,) = self._environment.results([(turns, self._items[name].entry)])
        if reply is None:
            return None
        if isinstance(reply, Failure):
            self._failed_turns[name] = reply
            return None
        try:
            tokens = self.tokenizer.continuation(reply)
        except ValueError as error:
            self._failed_turns[name] = Failure("invalid", str(error))
            return None
        messages = [{"role": "tool", "content": reply}] if isinstance(reply, str) else reply
        turns += messages
        self._replies.setdefault(name, []).append(messages)
        self._num_tokens[name] = len(turn.tokens) + len(tokens)
        return tokens

    def scores(self, samples: Sequence[RolloutSample], items: Sequence[TaskItem]) -> Scores:
        """Gives the rewards; that of a failed call, here or in a turn, is as the caller chose.

        Args:
            samples: Samples of rollouts that `begin` announced; what it knew of them is forgotten.
            items: The item of each.
        """
        calls = {
            row: (self._turns_of(sample), item.entry)
            for row, (sample, item) in enumerate(zip(samples, items, strict=True))
            if sample.sample_id not in self._failed_turns
        }
        results: list[Any] = [self._failed_turns.get(sample.sample_id) for sample in samples]
        for row, result in zip(calls, self._reward.results(list(calls.values())), strict=True):
            results[row] = result
        failed = [row for row, result in enumerate(results) if isinstance(result, Failure)]
        failures = Counter(results[row].kind for row in failed)
        if failed:
            first = failed[0]
            done = "left out" if math.isnan(self._failed_reward) else f"given {self._failed_reward}"
            _logger.error(
                "reward or environment failed on %d of %d samples, which are %s; first: sample %s "
                "(%s): %s",
                len(failed),
                len(samples),
                done,
                samples[first].sample_id,
                items[first],
                results[first].reason.strip(),
            )
        self._forget(sample.sample_id for sample in samples)
        rewards = [
            self._failed_reward if isinstance(result, Failure) else result for result in results
        ]
        return Scores(rewards, dict(failures))

    def close(self) -> None:
        """Ends the processes."""
        self._reward.close()
        if self._environment is not None:
            self._environment.close()

    def _turns_of(self, sample: RolloutSample) -> list[dict[str, Any]]:
        """Gives the messages of a sample; an answer for which there was no room is not of it."""
        response = list(sample.response_tokens)
        given = [0] * len(response) if sample.given is None else sample.given.tolist()
        replies = iter(self._replies.get(sample.sample_id, []))
        turns: list[dict[str, Any]] = []
        for is_given, places in groupby(range(len(response)), key=given.__getitem__):
            if is_given:
                turns += next(replies)
            else:
                turns.append(self._message([response[place] for place in places]))
        return turns

    def _message(self, tokens: Sequence[int]) -> dict[str, Any]:
        finished = bool(tokens) and tokens[-1] == self.tokenizer.end_token
        text = self.tokenizer.decode(tokens[:-1] if finished else tokens)
        return {"role": "assistant", "content": text, "finished": finished}
