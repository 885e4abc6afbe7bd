"""Prompts of one's own: JSONL, Parquet, and folders as `datasets` writes them.

One prompt a record: its prompt field holds a text, or a conversation as a list of messages. All of
the record goes to the reward function; of it we read only `answer` (a text that the warm start and
the calibration use), and `tools` (a list for the chat template).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_trace.rl.tasks import TaskItem, json_lines
from megatron_trace.rl.tokenizer import Tokenizer

# Name of the task of such items, of which reasoning-gym knows nothing.
OWN_TASK = "own"


def load_records(path: str | Path) -> list[tuple[str, dict[str, Any]]]:
    """Reads the records of a prompt file with where each stands, for error messages.

    Args:
        path: A file .jsonl, .jsonl.gz or .parquet; a folder of such files (in the order of their
            names); or a folder that `datasets`' `save_to_disk` wrote (of one split).

    Raises:
        ValueError: It is none of them, a record is no object, or there is none.
        ImportError: The format needs pyarrow.
    """
    path = Path(path)
    records = list(_records(path))
    if not records:
        raise ValueError(f"{path} has no prompt")
    return records


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if (path / "state.json").is_file():
        for file in json.loads((path / "state.json").read_text())["_data_files"]:
            yield from _of_arrow(path / file["filename"])
    elif (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
        raise ValueError(f"{path} has the splits {', '.join(splits)}; give the folder of one")
    elif path.is_dir():
        files = [p for p in sorted(path.iterdir()) if p.name.endswith(_READERS)]
        for file in files:
            yield from _records(file)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from json_lines(path)
    elif path.name.endswith(".parquet"):
        yield from _of_parquet(path)
    else:
        there = "cannot be read as" if path.exists() else "does not exist; it must be"
        raise ValueError(
            f"{path} {there} a .jsonl, .jsonl.gz or .parquet file, or a folder of them"
        )


_READERS = (".jsonl", ".jsonl.gz", ".parquet")


def _of_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    _require_pyarrow(path)
    import pyarrow.parquet  # An extra, which JSONL files do not need.

    yield from _numbered(path, pyarrow.parquet.ParquetFile(path).iter_batches())


def _of_arrow(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    _require_pyarrow(path)
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        yield from _numbered(path, pa.ipc.open_stream(source))


def _numbered(path: Path, batches: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    for batch in batches:
        for record in batch.to_pylist():
            yield f"{path}, row {number}", record
            number += 1


def _require_pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{path} needs pyarrow; pip install 'megatron-trace[own]', or give JSONL"
        ) from error


def make_items(
    records: list[tuple[str, dict[str, Any]]], tokenizer: Tokenizer, *, prompt_field: str
) -> list[TaskItem]:
    """Gives the items of records, with prompts as texts.

    Args:
        records: See `load_records`.
        tokenizer: Writes the prompts.
        prompt_field: Field of the prompt.

    Raises:
        ValueError: A record has no usable prompt or answer; the message names it.
    """
    return [_item(source, record, tokenizer, prompt_field) for source, record in records]


def plain_texts(records: list[tuple[str, dict[str, Any]]], *, prompt_field: str) -> list[str]:
    """Gives prompts and answers, for a tokenizer that is made of them.

    Raises:
        ValueError: A prompt is no text.
    """
    texts = []
    for source, record in records:
        prompt = _prompt(source, record, prompt_field)
        if not isinstance(prompt, str):
            raise ValueError(
                f"{source}: {prompt_field!r} is a conversation, which needs a tokenizer with a "
                "chat template; give its folder as --trace-tokenizer"
            )
        texts += [prompt, _answer(source, record) or ""]
    return texts


def _item(source: str, record: dict[str, Any], tokenizer: Tokenizer, prompt_field: str) -> TaskItem:
    prompt = _prompt(source, record, prompt_field)
    tools = record.get("tools")
    context = {} if isinstance(prompt, str) or tools is None else {"tools": tools}
    try:
        text = tokenizer.prompt_text(prompt, **context)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    return TaskItem(text, _answer(source, record), OWN_TASK, record, source)


def _prompt(source: str, record: dict[str, Any], field: str) -> str | list[dict[str, Any]]:
    if field not in record:
        raise ValueError(
            f"{source}: {field!r} is missing, it has {', '.join(sorted(record))}; name the field "
            "of the prompt by --trace-prompt-field"
        )
    prompt = record[field]
    is_conversation = (
        isinstance(prompt, list)
        and all(isinstance(message, dict) for message in prompt)
        and all(isinstance(message.get("role"), str) for message in prompt)
    )
    if not prompt or not (isinstance(prompt, str) or is_conversation):
        raise ValueError(
            f"{source}: {field!r} must be a text that is not empty, or a list of messages with "
            f'"role" and "content"; got {prompt!r:.80}'
        )
    return prompt


def _answer(source: str, record: dict[str, Any]) -> str | None:
    answer = record.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(
            f"{source}: 'answer' must be a text or left out; got {type(answer).__name__}"
        )
    return answer
