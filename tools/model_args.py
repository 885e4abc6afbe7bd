"""Writes Megatron's flags of a published model, one a line, for `@FILE` on a command line.

    python tools/model_args.py Qwen3.5-35B-A3B [--stages 4] [--mtp] > mine.args
    python tools/model_args.py Qwen3.8-2.4T-A95B --gdn-key-heads N --gdn-value-heads N \\
        --gdn-key-head-dim N --gdn-value-head-dim N
    python tools/model_args.py --all launch/models     every model that is known whole
    python tools/model_args.py                         lists the models and their parameters

`python examples/pretrain_trace.py @launch/models/qwen3.5-35b-a3b.args @launch/trace.args ...` reads
such files; a later flag replaces an earlier one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_trace.models.architecture import Architecture
from megatron_trace.models.parameter_counts import parameter_counts
from megatron_trace.models.presets import PRESETS, UNKNOWN_FIELDS, preset

UNKNOWN = sorted({field for fields in UNKNOWN_FIELDS.values() for field in fields})


def main() -> None:
    """Writes as the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="name of the model")
    parser.add_argument("--stages", type=int, default=1, help="pipeline times virtual stages")
    parser.add_argument("--mtp", action="store_true", help="with multi-token prediction")
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="write every known model")
    for field in UNKNOWN:
        parser.add_argument("--" + field.replace("_", "-"), type=int)
    args = parser.parse_args()
    if args.all is not None:
        for architecture in PRESETS.values():
            path = args.all / file_name(architecture)
            path.write_text(text(architecture))
            print(path)
    elif args.model is None:
        for architecture in PRESETS.values():
            print(described(architecture))
    else:
        given = {field: getattr(args, field) for field in UNKNOWN}
        try:
            architecture = preset(
                args.model, **{field: value for field, value in given.items() if value is not None}
            )
            print(text(architecture, num_stages=args.stages, mtp=args.mtp), end="")
        except ValueError as error:
            raise SystemExit(str(error)) from None


def file_name(architecture: Architecture) -> str:
    """Gives the name of a model's file in launch/models."""
    return f"{architecture.name.lower()}.args"


def text(architecture: Architecture, *, num_stages: int = 1, mtp: bool = False) -> str:
    """Gives the content of a model's file."""
    return "\n".join(architecture.flags(num_stages=num_stages, mtp=mtp)) + "\n"


def described(architecture: Architecture) -> str:
    """Gives a line: parameters, advertised ones, and what is not the published model's."""
    counts = parameter_counts(architecture)
    advertised = [architecture.advertised_parameters, architecture.advertised_active]
    said = " / ".join("?" if n is None else f"{n / 1e9:g}B" for n in advertised)
    line = (
        f"{architecture.name}: {counts.total / 1e9:.2f}B parameters, {counts.active / 1e9:.2f}B "
        f"active (advertised {said}), MTP {counts.mtp / 1e9:.2f}B more"
    )
    if architecture.inferred:
        line += f"; inferred: {', '.join(architecture.inferred)}"
    if architecture.left_out:
        line += f"; left out: {', '.join(architecture.left_out)}"
    return line


if __name__ == "__main__":
    main()
