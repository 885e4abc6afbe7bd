"""Writes docs/flags.md from the dataclasses that the `--trace-*` flags are made of.

python tools/make_flag_reference.py            writes it
python tools/make_flag_reference.py --check    says whether it is up to date (exit status 1: no)
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

from megatron_trace import arguments  # noqa: E402  After the stand-in for the CUDA runtime.
from megatron_trace.config import RecordedConfig, TraceConfig  # noqa: E402
from megatron_trace.rl_config import HealthConfig, LossConfig, TaskConfig  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "flags.md"
# Heading, dataclass, what adds its flags, and which programs have them.
GROUPS: tuple[tuple[str, type, Callable[[ArgumentParser], ArgumentParser], str], ...] = (
    ("What is quantised and recorded", TraceConfig, arguments.add_trace_arguments, "all programs"),
    (
        "Objective and corrections",
        LossConfig,
        arguments.add_loss_arguments,
        "`examples/tiny_rl/run.py`, `examples/pretrain_trace.py`",
    ),
    (
        "Health and alarms",
        HealthConfig,
        arguments.add_health_arguments,
        "`examples/tiny_rl/run.py`, `examples/pretrain_trace.py`; names of alarms in "
        "[metrics.md](metrics.md#alarms)",
    ),
    (
        "Task of one's own",
        TaskConfig,
        arguments.add_task_arguments,
        "`examples/tiny_rl/run.py`, `record_rollouts.py`, `evaluate.py`, `rollout_worker.py`; see "
        "[my_data.md](my_data.md)",
    ),
    (
        "Training on recorded rollouts",
        RecordedConfig,
        arguments.add_recorded_arguments,
        "`examples/pretrain_trace.py`",
    ),
)
HEAD = (
    "# Flags\n\nWritten by `tools/make_flag_reference.py` from the settings' dataclasses; a test "
    "compares both. Megatron's own flags are in its `--help`; those of\nthe examples, such as "
    "`--rollout-tasks`, in theirs. `@FILE` stands for the flags of a file, one a line.\n"
)


def reference() -> str:
    """Gives the text of the page."""
    return HEAD + "".join(_section(*group) for group in GROUPS)


def _section(
    title: str, settings: type, add: Callable[[ArgumentParser], ArgumentParser], programs: str
) -> str:
    lines = [f"\n## {title}\n", f"`{settings.__name__}`: {programs}.\n"]
    lines += ["| flag | default | meaning |", "|---|---|---|", *_rows(settings, add)]
    return "\n".join(lines) + "\n"


def _rows(settings: type, add: Callable[[ArgumentParser], ArgumentParser]) -> Iterator[str]:
    actions = {action.dest: action for action in add(ArgumentParser(allow_abbrev=False))._actions}
    texts = arguments.attribute_docs(settings)
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(typing.cast("Any", settings)):
        names = ", ".join(f"`{name}`" for name in actions[f"trace_{field.name}"].option_strings)
        choices = _choices(hints[field.name])
        text = texts[field.name] + (f" One of {choices}." if choices else "")
        yield f"| {names} | {_default(field.default)} | {_cell(text)} |"


def _choices(hint: Any) -> str:
    if typing.get_origin(hint) is not typing.Literal:
        return ""
    return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))


def _default(value: Any) -> str:
    if value is None:
        return "left out"
    if value is dataclasses.MISSING:
        return "must be given"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(f"`{part}`" for part in value) or "none"
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(arguments: list[str] | None = None) -> None:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    text = reference()
    if options.check:
        if not PAGE.is_file() or PAGE.read_text() != text:
            raise SystemExit(f"{PAGE} is not up to date; run tools/make_flag_reference.py")
        return
    PAGE.write_text(text)
    print(PAGE)


if __name__ == "__main__":
    main()
