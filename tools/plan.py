"""Plans a TRACE run of a published model: layout, memory, traffic, time, and hints to record.

    python tools/plan.py Qwen3.5-35B-A3B --gpu H200 --gpus 64 --response-tokens 32768
    python tools/plan.py Qwen3.5-122B-A10B --gpu B200 --sweep        8 to 4096 GPUs, a line each
    ... --gpus 128 --rollout-gpus 64      some GPUs roll out while the others train
    ... --set memory_gib=180 disk_gb_s=20 host_gib=1500               your own machines
    ... --assume compute=0.3 memory=0.6                               your own shares of the peaks

Times come from what must be computed, read and sent, at shares of the makers' peaks that are
printed, in training from the operations that the host launches, and in decoding from small kernels
as they were measured. Scheduling and waiting for the longest response are not in them, so they tell
what limits a run, and what a change buys, not what a clock will show.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from megatron_trace.models.presets import PRESET_NAMES, UNKNOWN_FIELDS, preset
from megatron_trace.planning.hardware import HARDWARE, Efficiency
from megatron_trace.planning.plan import DoesNotFit, make_plan
from megatron_trace.planning.report import report, summary
from megatron_trace.planning.request import Request
from megatron_trace.planning.sizes import HintChoice

SWEEP = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
UNKNOWN = sorted({field for fields in UNKNOWN_FIELDS.values() for field in fields})


def main() -> None:
    """Plans as the flags say."""
    args = parsed_flags()
    try:
        request = asked(args)
        if not args.sweep:
            print(report(make_plan(request)))
            return
    except ValueError as error:
        raise SystemExit(str(error)) from None
    print(
        f"{request.architecture.name}, {request.num_samples} samples of "
        f"{request.prompt_tokens} + {request.response_tokens} tokens a step"
    )
    for num_gpus in SWEEP:
        try:
            print(summary(make_plan(request.with_gpus(num_gpus))))
        except DoesNotFit as error:
            print(f"{num_gpus:5d} {request.hardware.name}: {error}")


def parsed_flags() -> argparse.Namespace:
    """Gives the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help=", ".join(PRESET_NAMES))
    for field in UNKNOWN:
        parser.add_argument("--" + field.replace("_", "-"), type=int, help="where not public")
    parser.add_argument("--gpu", choices=HARDWARE, default="H200")
    parser.add_argument("--gpus", type=int, default=64, help="default 64")
    parser.add_argument("--rollout-gpus", type=int, default=0, help="default 0: by turns")
    parser.add_argument("--sweep", action="store_true", help="8 to 4096 GPUs instead")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--response-tokens", type=int, default=8192)
    parser.add_argument("--samples", type=int, default=4096, help="of a step, default 4096")
    parser.add_argument("--number-format", default="nvfp4")
    parser.add_argument("--hint-sites", nargs="+", help="default: the best that is affordable")
    with_sites = "default %s; with --hint-sites only"
    parser.add_argument(
        "--hint-layers", choices=("all", "latter_half"), help=with_sites % HintChoice.layers
    )
    parser.add_argument(
        "--hint-bits", type=int, choices=(1, 2, 4), help=with_sites % HintChoice.bits
    )
    parser.add_argument(
        "--hint-scales", choices=("raw", "residue"), help=with_sites % HintChoice.scales
    )
    parser.add_argument("--no-packed-activations", action="store_true")
    parser.add_argument("--experts", choices=("te", "local"), default="te", help="of the trainer")
    parser.add_argument("--max-hint-share", type=float, default=0.25)
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=NUMBER", dest="changes")
    parser.add_argument("--assume", nargs="+", default=[], metavar="FIELD=SHARE")
    return parser.parse_args()


def asked(args: argparse.Namespace) -> Request:
    """Gives the request that flags describe.

    Raises:
        ValueError: They contradict each other, or a name is unknown.
    """
    given = {field: getattr(args, field) for field in UNKNOWN}
    hints = None
    how = {"layers": args.hint_layers, "bits": args.hint_bits, "scales": args.hint_scales}
    how = {name: value for name, value in how.items() if value is not None}
    if args.hint_sites is not None:
        hints = HintChoice(tuple(args.hint_sites), **how)
    elif how:
        raise ValueError(
            f"--hint-{' --hint-'.join(how)} has no effect without --hint-sites, as the plan then "
            "chooses the hints; name the sites or leave it out"
        )
    return Request(
        architecture=preset(args.model, **{f: n for f, n in given.items() if n is not None}),
        hardware=changed(HARDWARE[args.gpu], args.changes),
        num_gpus=args.gpus,
        rollout_gpus=args.rollout_gpus,
        prompt_tokens=args.prompt_tokens,
        response_tokens=args.response_tokens,
        num_samples=args.samples,
        number_format=args.number_format,
        hints=hints,
        packed_activations=not args.no_packed_activations,
        experts=args.experts,
        max_hint_share=args.max_hint_share,
        efficiency=changed(Efficiency(), args.assume),
    )


def changed(settings: Any, changes: list[str]) -> Any:
    """Gives a dataclass with other numbers.

    Args:
        settings: The dataclass.
        changes: `FIELD=NUMBER` each.

    Raises:
        ValueError: There is no such field, or it is no number.
    """
    fields = {f.name: f.type for f in dataclasses.fields(settings) if f.type in ("int", "float")}
    values = {}
    for change in changes:
        name, _, text = change.partition("=")
        if name not in fields:
            raise ValueError(f"{name!r} is none of {', '.join(fields)}")
        try:
            values[name] = int(text) if fields[name] == "int" else float(text)
        except ValueError:
            kind = "a whole number" if fields[name] == "int" else "a number"
            raise ValueError(f"{name} must be {kind}; got {text!r}") from None
    return dataclasses.replace(settings, **values)


if __name__ == "__main__":
    main()
