"""Compares evaluations of quantised policies with that of the same policy in BF16.

    python tools/compare_evaluations.py FOLDER/bf16 FOLDER/vanilla FOLDER/h_scale [--output FILE]

Each folder has the `evaluation.json` that `examples/evaluate.py` wrote, of the same checkpoint and
prompts; the first one is the reference, and the folders' names are those of the table. `lost` and
`gained` are prompts that only the reference answers right, and only the other one; p is the
probability of so uneven a split by chance (exact sign test).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from megatron_trace.ptq.comparison import HEADS, REFERENCE, Comparison, aligned


def main() -> None:
    """Prints a table, and writes it as JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reference", type=Path, metavar="FOLDER/bf16")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--output", type=Path, help="file of the same, as JSON")
    args = parser.parse_args()
    try:
        results = compared(args.reference, args.folders)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    print(aligned([HEADS, *(comparison.cells() for comparison, _ in results)]))
    if args.output is not None:
        records = [
            dataclasses.asdict(comparison) | {"weights_digest": evaluation["weights_digest"]}
            for comparison, evaluation in results
        ]
        args.output.write_text(json.dumps(records, indent=1) + "\n")


def compared(reference: Path, folders: list[Path]) -> list[tuple[Comparison, dict[str, Any]]]:
    """Gives what each folder shows against the reference, which comes first, and its evaluation.

    Raises:
        ValueError: The evaluations are of different checkpoints or prompts, one does not say of
            which, or the reference is not in BF16.
    """
    evaluations = {
        folder: json.loads((folder / "evaluation.json").read_text())
        for folder in (reference, *folders)
    }
    first = evaluations[reference]
    if first["method"] != REFERENCE:
        raise ValueError(f"{reference} is of method {first['method']}; it must be {REFERENCE}")
    for folder, evaluation in evaluations.items():
        if evaluation["checkpoint"] != first["checkpoint"]:
            raise ValueError(
                f"{folder} is of {evaluation['checkpoint']}, {reference} of {first['checkpoint']}"
            )
        if "prompts_digest" not in evaluation:
            raise ValueError(f"{folder} does not say which prompts it asked; evaluate it anew")
        if evaluation["prompts_digest"] != first["prompts_digest"]:
            raise ValueError(
                f"{folder} asked other prompts than {reference}, so that answers cannot be "
                "compared one by one; evaluate both with the same --rollout-tasks"
            )
    return [
        (
            Comparison.of(
                REFERENCE if folder == reference else folder.name,
                evaluation["solved"],
                first["solved"],
            ),
            evaluation,
        )
        for folder, evaluation in evaluations.items()
    ]


if __name__ == "__main__":
    main()
