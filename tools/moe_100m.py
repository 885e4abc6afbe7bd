"""Makes the problems of the study's 100M MoE, and trains it.

Examples:
    python tools/moe_100m.py tasks out/moe_100m.jsonl.gz
    python tools/moe_100m.py train out/moe_100m.jsonl.gz --work out/moe_100m --log out/log.json
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import json
import logging
import platform
from pathlib import Path

import torch

from megatron_trace.rl.tasks import save_tasks
from megatron_trace.study import moe_100m
from megatron_trace.testing.single_process import single_process


def main(arguments: list[str] | None = None) -> None:
    """Makes problems or trains."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    tasks = commands.add_parser("tasks", help="write the problems as a JSONL prompt file")
    tasks.add_argument("output", type=Path, help="file to write; .gz is compressed")
    tasks.add_argument("--items-per-task", type=int, default=moe_100m.ITEMS_PER_TASK)
    train = commands.add_parser("train", help="train, or continue, and print what was reached")
    train.add_argument("tasks", type=Path, help="file of the problems")
    train.add_argument("--work", type=Path, required=True, help="folder for the state")
    train.add_argument("--log", type=Path, help="JSON file that gets facts of the trained model")
    options = parser.parse_args(arguments)
    if options.command == "tasks":
        items = moe_100m.make_tasks(items_per_task=options.items_per_task)
        save_tasks(options.output, items)
        print(f"{options.output}: {len(items)} problems, such as")
        for part in moe_100m.MIX:
            item = next(item for item in items if item.task == part.task)
            print(f"  {part.task:24} {item.prompt} {item.answer}")
        return
    if not options.tasks.is_file():
        parser.error(f"{options.tasks} is no file; `{parser.prog} tasks` writes it")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with single_process(seed=0):
        model = moe_100m.load(options.work, tasks=options.tasks)
    machine = torch.cuda.get_device_name()
    facts = {"device": machine, "torch": torch.__version__, "python": platform.python_version()}
    facts |= model.facts
    print(json.dumps(facts, indent=1))
    if options.log:
        options.log.parent.mkdir(parents=True, exist_ok=True)
        options.log.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
