"""Tasks from a JSONL prompt file, their split, and a character tokenizer made from them.

One task a line: {"prompt": str, "answer": str or null, "task": str, "entry": object}. `task` names
a reasoning-gym task, `entry` is what its scorer needs; `tools/export_tasks.py` writes such files.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from megatron_trace.rl.tokenizer import Message, Tokenizer

PADDING_TOKEN = 0
END_TOKEN = 1
_NUM_SPECIAL_TOKENS = 2
# What a sampled special token decodes to: no answer contains it, so none is credited by accident.
_NOT_TEXT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class TaskItem:
    """One problem.

    Attributes:
        prompt: Text given to the model.
        answer: One right answer, or None where the scorer alone decides.
        task: Name of the reasoning-gym task whose scorer applies.
        entry: What that scorer needs.
        source: Where the item stands (file and line), for error messages.
    """

    prompt: str
    answer: str | None
    task: str
    entry: Mapping[str, Any]
    source: str = ""

    def __str__(self) -> str:
        """Names the item for error messages."""
        return self.source or repr(self.prompt)


def load_tasks(path: str | Path) -> list[TaskItem]:
    """Reads a JSONL prompt file; a name that ends in .gz is decompressed.

    Raises:
        ValueError: A line is not such an object (the message names file and line), or the file has
            no item.
    """
    items = [_parsed(record, source) for source, record in json_lines(Path(path))]
    if not items:
        raise ValueError(f"{path} has no task; write one with tools/export_tasks.py")
    return items


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the objects of a JSONL file with where each stands, for error messages.

    Args:
        path: The file; one whose name ends in .gz is decompressed. Empty lines are passed over.

    Raises:
        ValueError: A line is no object; the message names file and line.
    """
    with _opened(path, "rt") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            source = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{source}: not valid JSON ({error}); expected one object a line"
                ) from error
            if not isinstance(record, dict):
                raise ValueError(f"{source}: expected a JSON object; got {type(record).__name__}")
            yield source, record


def _parsed(record: Mapping[str, Any], source: str) -> TaskItem:
    types = {"prompt": (str,), "answer": (str, type(None)), "task": (str,), "entry": (dict,)}
    for name, allowed in types.items():
        if name not in record:
            raise ValueError(f"{source}: {name!r} is missing; expected {', '.join(types)}")
        if not isinstance(record[name], allowed):
            raise ValueError(
                f"{source}: {name!r} must be {' or '.join(kind.__name__ for kind in allowed)}; got "
                f"{type(record[name]).__name__}"
            )
    if not record["prompt"]:
        raise ValueError(f"{source}: 'prompt' is empty; the model needs at least one token")
    return TaskItem(record["prompt"], record["answer"], record["task"], record["entry"], source)


def save_tasks(path: str | Path, items: Iterable[TaskItem]) -> None:
    """Writes a JSONL prompt file under a temporary name and renames it; .gz is compressed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"tmp-{path.name}")
    with _opened(temporary, "wt") as lines:
        for item in items:
            record = {name: getattr(item, name) for name in ("prompt", "answer", "task", "entry")}
            lines.write(json.dumps(record, ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def items_digest(items: Iterable[TaskItem]) -> str:
    """Gives the SHA-256 of what items ask and are scored by, in this order, wherever they stand."""
    digest = hashlib.sha256()
    for item in items:
        record = [item.prompt, item.answer, item.task, item.entry]
        # A record of Parquet may hold what JSON has not, such as dates.
        digest.update(json.dumps(record, default=repr).encode())
    return digest.hexdigest()


def _opened(path: Path, mode: Literal["rt", "wt"]) -> TextIO:
    opened = gzip.open if path.suffix == ".gz" else open
    return cast("TextIO", opened(path, mode, encoding="utf-8"))


def split_tasks(
    items: Sequence[TaskItem], *, num_held_out: int, seed: int
) -> tuple[list[TaskItem], list[TaskItem]]:
    """Splits into training and held-out items, the same way for the same items and seed.

    Items with the same prompt stay on the same side, so that no held-out prompt is trained on.

    Args:
        items: Items to split.
        num_held_out: Distinct prompts that are held out.
        seed: Seed of the shuffle, which also orders both sides.

    Raises:
        ValueError: Too few distinct prompts to leave one on each side.
    """
    prompts = sorted({item.prompt for item in items})
    if not 1 <= num_held_out < len(prompts):
        raise ValueError(
            f"num_held_out must be from 1 to {len(prompts) - 1}, as there are {len(prompts)} "
            f"distinct prompts; got {num_held_out}"
        )
    random.Random(seed).shuffle(prompts)
    order = {prompt: position for position, prompt in enumerate(prompts)}
    ordered = sorted(items, key=lambda item: order[item.prompt])
    held_out = [item for item in ordered if order[item.prompt] < num_held_out]
    return ordered[len(held_out) :], held_out


@dataclass(frozen=True)
class CharTokenizer:
    """One token for each character; padding is 0, the end of a response is 1.

    Attributes:
        characters: The distinct characters in ascending order; the first one has token 2.
    """

    characters: str

    def __post_init__(self) -> None:
        """Raises ValueError unless the characters are distinct and ascending."""
        if not self.characters or list(self.characters) != sorted(set(self.characters)):
            raise ValueError(
                f"characters must be non-empty, distinct and ascending; got {self.characters!r}"
            )

    @classmethod
    def of_tasks(cls, items: Iterable[TaskItem]) -> CharTokenizer:
        """Gives the tokenizer of every character in the prompts and answers of a file.

        Build it from all items, held-out ones included: token ids must not depend on the split.
        """
        return cls(
            "".join(sorted({c for item in items for c in item.prompt + (item.answer or "")}))
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included."""
        return _NUM_SPECIAL_TOKENS + len(self.characters)

    @property
    def end_token(self) -> int:
        """Token that ends a response."""
        return END_TOKEN

    def prompt_text(self, prompt: str | Sequence[Message], **context: Any) -> str:
        """Gives the prompt as it is.

        Raises:
            ValueError: It is a conversation.
        """
        if not isinstance(prompt, str):
            raise ValueError(
                "a conversation needs a tokenizer with a chat template; give its folder as "
                "--trace-tokenizer"
            )
        return prompt

    def continuation(self, reply: str | Sequence[Message]) -> list[int]:
        """Gives the tokens of a text that follows a turn.

        Raises:
            ValueError: As of `prompt_text` and `encode`.
        """
        return self.encode(self.prompt_text(reply))

    def encode(self, text: str) -> list[int]:
        """Gives one token per character.

        Raises:
            ValueError: A character is not in the vocabulary.
        """
        tokens = [self.characters.find(character) for character in text]
        if -1 in tokens:
            raise ValueError(
                f"{text[tokens.index(-1)]!r} of {text!r} is not in the vocabulary "
                f"{self.characters!r}; build the tokenizer from a file that has it"
            )
        return [_NUM_SPECIAL_TOKENS + token for token in tokens]

    def decode(self, tokens: Iterable[int]) -> str:
        """Gives the text; a special token, or one of no vocabulary, becomes U+FFFD.

        A policy samples the latter where its vocabulary is padded.
        """
        text = []
        for token in map(int, tokens):
            is_text = _NUM_SPECIAL_TOKENS <= token < self.vocab_size
            text.append(self.characters[token - _NUM_SPECIAL_TOKENS] if is_text else _NOT_TEXT)
        return "".join(text)


def encode_prompts(
    items: Iterable[TaskItem], tokenizer: Tokenizer, *, context: int, max_response_tokens: int
) -> list[list[int]]:
    """Gives the tokens of every prompt, none of which is cut.

    Args:
        items: Items whose prompts are encoded.
        tokenizer: Tokenizer of the model.
        context: Tokens that the model can hold, prompt and response together.
        max_response_tokens: Tokens that a response may have, its end token included.

    Raises:
        ValueError: A prompt leaves less than `max_response_tokens` of the context.
    """
    encoded = []
    for item in items:
        tokens = tokenizer.encode(item.prompt)
        if len(tokens) + max_response_tokens > context:
            raise ValueError(
                f"prompt of {len(tokens)} tokens and a response of {max_response_tokens} do not "
                f"fit into the context of {context} tokens ({item}); shorten the prompt "
                "or raise the context"
            )
        encoded.append(tokens)
    return encoded
