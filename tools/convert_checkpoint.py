"""Converts checkpoints of the Qwen3.5 MoE family, and Qwen3-Next, for Megatron and back.

    python tools/convert_checkpoint.py hf-to-megatron HF_FOLDER CHECKPOINT [--mtp] [--model PRESET]
    python tools/convert_checkpoint.py megatron-to-hf CHECKPOINT HF_FOLDER --like ORIGINAL_HF_FOLDER

CHECKPOINT is what Megatron's `--load` and `--save` name; it loads in any layout. Both directions
are exact, go by parts, and need memory for the largest of them: the matrix of an expert, or an
embedding. On the way back, files, names and dtypes are those of the original, from which vision,
tokenizer and configuration are copied; so is multi-token prediction, if it was not converted.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import logging
from pathlib import Path

from megatron_trace.conversion.convert import Converted, hf_to_megatron, megatron_to_hf
from megatron_trace.conversion.published_folder import published_architecture
from megatron_trace.models.architecture import Architecture, size_differences
from megatron_trace.models.presets import PRESETS, preset_like
from megatron_trace.testing.single_process import single_process


def main() -> None:
    """Converts as the flags say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser("hf-to-megatron")
    to_megatron.add_argument("published", type=Path, metavar="HF_FOLDER")
    to_megatron.add_argument("output", type=Path, metavar="CHECKPOINT")
    to_megatron.add_argument("--mtp", action="store_true", help="multi-token prediction, too")
    to_megatron.add_argument(
        "--model", metavar="PRESET", help="refuse the checkpoint unless it has these sizes"
    )
    to_hf = commands.add_parser("megatron-to-hf")
    to_hf.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    to_hf.add_argument("output", type=Path, metavar="HF_FOLDER")
    to_hf.add_argument("--like", type=Path, required=True, metavar="ORIGINAL_HF_FOLDER")
    args = parser.parse_args()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        with single_process(seed=0):
            if args.command == "hf-to-megatron":
                expected = None
                if args.model is not None:
                    expected = preset_like(args.model, published_architecture(args.published))
                done = hf_to_megatron(args.published, args.output, mtp=args.mtp, model=expected)
                print_flags(done.architecture, mtp=args.mtp)
            else:
                done = megatron_to_hf(args.checkpoint, args.like, args.output)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    print_summary(done, args.command, args.output)


def print_flags(architecture: Architecture, *, mtp: bool) -> None:
    """Prints the flags with which Megatron builds the model, or the file that has them."""
    for name, known in PRESETS.items():
        if not size_differences(architecture, known) and not mtp:
            print(f"flags: @launch/models/{name.lower()}.args @launch/trace.args")
            return
    print("flags: @launch/trace.args", *architecture.flags(mtp=mtp))


def print_summary(done: Converted, command: str, output: Path) -> None:
    """Prints what was converted and what was not."""
    print(f"{output}: {done.num_parameters:,} parameters of {done.architecture.name}")
    if done.left_out:
        fate = "not converted" if command == "hf-to-megatron" else "copied from the original"
        kinds = sorted({".".join(name.split(".")[:2]) for name in done.left_out})
        print(f"{len(done.left_out)} tensors {fate}: {', '.join(kinds)}")
    if done.rounded:
        count, first = len(done.rounded), done.rounded[0]
        print(f"{count} tensors rounded to the original's dtype, such as {first}")
    if done.widened:
        count, first = len(done.widened), done.widened[0]
        print(
            f"{count} tensors are wider in the original, such as {first}: values that training did "
            "not change are the original's"
        )


if __name__ == "__main__":
    main()
