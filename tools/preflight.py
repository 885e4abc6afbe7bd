"""Says why a job would fail, before it waits in a queue; launch/submit.sh and the jobs call it.

    python tools/preflight.py --train-nodes 4 --gpus-per-node 8 [--rollout-nodes 2] \\
        [--run RUN] [--time-limit-s 14400] -- THE TRAINER'S FLAGS

Exit status 0 if nothing speaks against it, else 1 with a sentence for each reason.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from megatron_trace.launching.model_flags import read_flags
from megatron_trace.launching.preflight import Job, reasons_against


def main() -> None:
    """Checks what the command line says."""
    own, trainer = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, trainer = own[:at], own[at + 1 :]
    args = parsed_flags(own)
    try:
        flags = read_flags(trainer)
    except ValueError as error:
        raise SystemExit(f"preflight: {error}") from None
    reasons = reasons_against(asked(args), flags)
    for reason in reasons:
        print(f"preflight: {reason}", file=sys.stderr)
    raise SystemExit(1 if reasons else 0)


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
    parser.add_argument("--count-gpus", action="store_true", help="look for this node's GPUs")
    parser.add_argument("--run", type=Path, help="the run's folder, for its free space")
    parser.add_argument("--samples-per-step", type=int)
    parser.add_argument("--steps-kept", type=int, default=2, help="default 2")
    parser.add_argument("--host-gib", type=float, help="memory of a node")
    parser.add_argument("--time-limit-s", type=float)
    parser.add_argument("--signal-s", type=float, default=300)
    parser.add_argument("--step-s", type=float, default=0)
    return parser.parse_args(arguments)


def asked(args: argparse.Namespace) -> Job:
    """Gives the job that flags describe."""
    return Job(
        training_nodes=args.train_nodes,
        rollout_nodes=args.rollout_nodes,
        gpus_per_node=args.gpus_per_node,
        slurm_nodes=args.slurm_nodes,
        visible_devices=args.visible_devices,
        gpus_found=len(list(Path("/dev").glob("nvidia[0-9]*"))) if args.count_gpus else None,
        steps_kept=args.steps_kept,
        samples_per_step=args.samples_per_step,
        free_disk_bytes=free_bytes(args.run),
        host_memory_bytes=None if args.host_gib is None else int(args.host_gib * 2**30),
        time_limit_s=args.time_limit_s,
        signal_s=args.signal_s,
        step_s=args.step_s,
    )


def free_bytes(run: Path | None) -> int | None:
    """Gives the free bytes where a folder is, or will be."""
    if run is None:
        return None
    there = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


if __name__ == "__main__":
    main()
