"""Makes and shows the shared folder of a run (megatron_trace/rl/exchange.py); no model is loaded.

python tools/exchange.py create RUN --steps 100 --prompts-per-batch 32 [--max-lag 1 ...]
python tools/exchange.py show RUN               versions, batches, claims
python tools/exchange.py pause RUN              workers end after their batch
python tools/exchange.py unpause RUN
python tools/exchange.py finished RUN           exit status 0 if all steps are done, else 1
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from megatron_trace.arguments import attribute_docs
from megatron_trace.rl.exchange import Exchange, ExchangeSettings

COMMANDS = ("create", "show", "pause", "unpause", "finished")


def main() -> None:
    """Does what the command line says."""
    args = parsed_flags()
    try:
        if args.command == "create":
            names = [field.name for field in dataclasses.fields(ExchangeSettings)]
            exchange = Exchange.create(
                args.run, ExchangeSettings(**{name: getattr(args, name) for name in names})
            )
        else:
            exchange = Exchange(args.run)
        version = exchange.published_version()
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if args.command == "pause":
        exchange.pause()
    elif args.command == "unpause":
        exchange.unpause()
    elif args.command == "finished":
        raise SystemExit(0 if version >= exchange.settings.steps else 1)
    show(exchange, version)


def parsed_flags() -> argparse.Namespace:
    """Gives the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        command = commands.add_parser(name)
        command.add_argument("run", type=Path)
        if name == "create":
            docs = attribute_docs(ExchangeSettings)
            for field in dataclasses.fields(ExchangeSettings):
                needed = field.default is dataclasses.MISSING
                command.add_argument(
                    "--" + field.name.replace("_", "-"),
                    type=float if field.type == "float" else int,
                    required=needed,
                    default=None if needed else field.default,
                    help=docs[field.name] + ("" if needed else f" Default {field.default}."),
                )
    return parser.parse_args()


def show(exchange: Exchange, version: int) -> None:
    """Prints how far a run is."""
    settings = exchange.settings
    print(
        f"{exchange.folder}: version {version} of {settings.steps} is published, "
        f"{exchange.num_complete()} of {settings.num_batches} batches are complete, lag at most "
        f"{settings.max_lag}{', paused' if exchange.paused else ''}"
    )
    for number, worker in exchange.claims().items():
        print(f"  batch {number} is claimed by {worker}")


if __name__ == "__main__":
    main()
