"""Says why a job would fail, before it waits in a queue; launch/submit.sh and the jobs call it.

    python tools/preflight.py --train-nodes 4 --gpus-per-node 8 [--rollout-nodes 2] \\
        [--run RUN] [--time-limit-s 14400] -- THE TRAINER'S FLAGS
    python tools/preflight.py --train-nodes 1 --gpus-per-node 8 --run RUN \\
        --published HF_FOLDER [--recipes vanilla h_scale] -- THE MODEL'S FLAGS        an export
    python tools/preflight.py --this-node -- THE TRAINER'S FLAGS     what its GPU cannot train with

Exit status 0 if nothing speaks against it, else 1 with a sentence for each reason. What a node
itself lacks, launch/node.sh says on each.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shutil
import sys
from pathlib import Path

import torch

from megatron_trace.conversion.published_folder import PublishedFolder
from megatron_trace.launching.model_flags import RunFlags, read_flags
from megatron_trace.launching.preflight import Job, reasons_against, reasons_against_node
from megatron_trace.models.fla_backward import fla_setup
from megatron_trace.ptq.recipe_names import RECIPE_NAMES


def main() -> None:
    """Checks what the command line says."""
    own, trainer = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, trainer = own[:at], own[at + 1 :]
    try:
        if own == ["--this-node"]:
            reasons = reasons_on_this_node(read_flags(trainer))
        else:
            reasons = reasons_against(asked(parsed_flags(own)), read_flags(trainer))
    except ValueError as error:
        raise SystemExit(f"preflight: {error}") from None
    for reason in reasons:
        print(f"preflight: {reason}", file=sys.stderr)
    raise SystemExit(1 if reasons else 0)


def reasons_on_this_node(flags: RunFlags) -> list[str]:
    """Gives why this node cannot train the model; a node without a GPU is not asked."""
    # Imports take ten seconds, and only some models need an answer.
    if not flags.trains_with_fla or not torch.cuda.is_available():
        return []
    has_fla = importlib.util.find_spec("fla") is not None
    return reasons_against_node(flags, fla_setup() if has_fla else None)


def parsed_flags(arguments: list[str]) -> argparse.Namespace:
    """Gives the flags of this program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train-nodes", type=int, required=True)
    parser.add_argument("--rollout-nodes", type=int, default=0)
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--slurm-nodes", type=int, help="SLURM_NNODES, of both components")
    parser.add_argument("--visible-devices", help="CUDA_VISIBLE_DEVICES")
    parser.add_argument("--run", type=Path, help="the run's folder")
    parser.add_argument("--samples-per-step", type=int)
    parser.add_argument("--steps-kept", type=int, default=2, help="default 2")
    parser.add_argument("--host-gib", type=float, help="memory of a node")
    parser.add_argument("--time-limit-s", type=float)
    parser.add_argument("--signal-s", type=float, default=300)
    parser.add_argument("--step-s", type=float, default=0)
    parser.add_argument(
        "--needs", action="append", default=[], metavar="NAME=PATH", help="what must be there"
    )
    parser.add_argument("--published", type=Path, help="checkpoint like which is exported")
    parser.add_argument("--recipes", nargs="+", default=[], help="post-training quantisation")
    return parser.parse_args(arguments)


def asked(args: argparse.Namespace) -> Job:
    """Gives the job that flags describe."""
    return Job(
        training_nodes=args.train_nodes,
        rollout_nodes=args.rollout_nodes,
        gpus_per_node=args.gpus_per_node,
        slurm_nodes=args.slurm_nodes,
        visible_devices=args.visible_devices,
        steps_kept=args.steps_kept,
        run=args.run,
        samples_per_step=args.samples_per_step,
        free_disk_bytes=free_bytes(args.run),
        host_memory_bytes=None if args.host_gib is None else int(args.host_gib * 2**30),
        time_limit_s=args.time_limit_s,
        signal_s=args.signal_s,
        step_s=args.step_s,
        needed={name: Path(path) for name, _, path in (one.partition("=") for one in args.needs)},
        export_bytes=0 if args.published is None else export_bytes(args.published, args.recipes),
    )


def free_bytes(run: Path | None) -> int | None:
    """Gives the bytes that hints can take where a run's folder is, or will be: free, or theirs."""
    if run is None:
        return None
    there = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    hints = 0
    for path in (run / "rollouts").rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # A worker removes what is too old.
            hints += path.stat().st_size
    return shutil.disk_usage(there).free + hints


def export_bytes(published: Path, recipes: list[str]) -> int:
    """Gives what an export takes: the model in BF16, and with FP4 experts for each recipe.

    Raises:
        ValueError: The folder holds no checkpoint, or a recipe is not known.
    """
    unknown = [name for name in recipes if name not in RECIPE_NAMES]
    if unknown:
        raise ValueError(
            f"there is no recipe {', '.join(unknown)}; PTQ_RECIPES may name "
            f"{', '.join(RECIPE_NAMES)}"
        )
    folder = PublishedFolder(published)
    sizes = {name: folder.stored(name).num_bytes for name in folder.names}
    # A value of a block of 16 takes 4 bits and a sixteenth of a byte, of 16 bits.
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    quantised = sum(sizes.values()) - experts * (16 - 4.5) / 16
    return sum(sizes.values()) + int(quantised * max(1, len(recipes)))


if __name__ == "__main__":
    main()
