"""Writes any reasoning-gym task as a JSONL prompt file.

Example:
    python tools/export_tasks.py chain_sum out/tasks.jsonl --size 20000 --drop ' ' \\
        --prompt '{metadata[expression]}=' --parameters min_terms=2 max_terms=2 max_digits=2
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from megatron_trace.rl.export import make_items
from megatron_trace.rl.tasks import save_tasks


def parse_parameter(text: str) -> tuple[str, Any]:
    """Gives name and value of `name=value`; the value is JSON, or else a string."""
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise argparse.ArgumentTypeError(f"task parameter must be name=value; got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def main(arguments: list[str] | None = None) -> None:
    """Exports one task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", help="name of the reasoning-gym task")
    parser.add_argument("output", help="JSONL file to write")
    parser.add_argument("--size", type=int, default=1000, help="items to generate (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the task (default 0)")
    parser.add_argument(
        "--prompt", default="{question}", help="template over the entry (default {question})"
    )
    parser.add_argument("--drop", default="", help="characters removed from prompts")
    parser.add_argument(
        "--parameters",
        nargs="+",
        default=[],
        type=parse_parameter,
        metavar="NAME=VALUE",
        help="parameters of the task",
    )
    options = parser.parse_args(arguments)
    try:
        items = make_items(
            options.task,
            size=options.size,
            seed=options.seed,
            parameters=dict(options.parameters),
            prompt_template=options.prompt,
            drop_characters=options.drop,
        )
        save_tasks(options.output, items)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(
        f"{options.output}: {len(items)} tasks of {options.task} "
        f"({options.size - len(items)} of {options.size} repeated a prompt)"
    )


if __name__ == "__main__":
    main()
