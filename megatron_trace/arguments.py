"""Our settings as `--trace-*` flags of Megatron's parser; the only file that knows argparse."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from argparse import Action, ArgumentParser, Namespace

import torch
from megatron.training.argument_utils import ArgumentGroupFactory

from megatron_trace.config import RecordedConfig, TraceConfig
from megatron_trace.rl_config import HealthConfig, LossConfig, TaskConfig

_PREFIX = "trace_"
# Shorter names, beside the fields' own.
_ALIASES = {
    "method": "--trace-mode",
    "number_format": "--trace-format",
    "hint_sites": "--trace-sites",
    "hint_layers": "--trace-layers",
    "missing_hints": "--trace-on-missing",
}


class _DocumentedFactory(ArgumentGroupFactory):
    """Megatron's factory, which by itself finds help only below the fields in a source file."""

    def __init__(self, flags: type, documented: type) -> None:
        self.documented = documented
        super().__init__(flags)

    def _get_field_docstrings(self, src_cfg_class: type) -> dict[str, str]:
        return {_PREFIX + name: text for name, text in attribute_docs(self.documented).items()}


def add_trace_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds one flag for every field of TraceConfig; usable as Megatron's `extra_args_provider`.

    `hint_bits` becomes `--trace-hint-bits`, and what is on by default `--no-trace-guard`. `@FILE`
    stands for the flags of a file, one a line as `--name=value`, such as `launch/models/*.args`.

    Args:
        parser: Parser to extend; an ArgumentParser of argparse.

    Returns:
        The same parser.
    """
    parser.fromfile_prefix_chars = "@"
    return _add_flags(parser, TraceConfig, "trace")


def add_loss_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds one flag for every field of LossConfig.

    Args:
        parser: Parser to extend.

    Returns:
        The same parser.
    """
    return _add_flags(parser, LossConfig, "trace, objective")


def add_health_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds one flag for every field of HealthConfig.

    Args:
        parser: Parser to extend.

    Returns:
        The same parser.
    """
    return _add_flags(parser, HealthConfig, "trace, health")


def add_task_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds one flag for every field of TaskConfig.

    Args:
        parser: Parser to extend.

    Returns:
        The same parser.
    """
    return _add_flags(parser, TaskConfig, "trace, task of one's own")


class _OnGpu(Action):
    """A flag without value that ends the program where there is no GPU for what it asks for."""

    def __init__(self, *args: typing.Any, **kwargs: typing.Any) -> None:
        super().__init__(*args, nargs=0, default=False, **kwargs)

    def __call__(
        self, parser: ArgumentParser, args: Namespace, values: object, flag: str | None = None
    ) -> None:
        if not torch.cuda.is_available():
            parser.exit(2, f"error: {flag} requires a GPU, and there is none; leave it out\n")
        setattr(args, self.dest, True)


def add_cuda_graphs_argument(group: typing.Any) -> None:
    """Adds `--rollout-cuda-graphs` to a parser or group of flags."""
    group.add_argument(
        "--rollout-cuda-graphs",
        action=_OnGpu,
        help="capture decode steps in CUDA graphs, which requires a GPU; docs/rollout.md",
    )


def add_recorded_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the flags of training on recorded rollouts, all but those of `add_task_arguments`.

    Args:
        parser: Parser to extend.

    Returns:
        The same parser.
    """
    add_health_arguments(add_loss_arguments(add_trace_arguments(parser)))
    return _add_flags(parser, RecordedConfig, "trace, recorded rollouts")


def trace_config_from_args(args: Namespace) -> TraceConfig:
    """Gives the TraceConfig that parsed flags describe.

    Args:
        args: What a parser returned that `add_trace_arguments` extended.

    Raises:
        ValueError: A value is out of range, or settings contradict each other.
    """
    return _from_args(args, TraceConfig)


def loss_config_from_args(args: Namespace) -> LossConfig:
    """Gives the LossConfig that parsed flags describe.

    Args:
        args: What a parser returned that `add_loss_arguments` extended.

    Raises:
        ValueError: A value is out of range, or settings contradict each other.
    """
    return _from_args(args, LossConfig)


def health_config_from_args(args: Namespace) -> HealthConfig:
    """Gives the HealthConfig that parsed flags describe.

    Args:
        args: What a parser returned that `add_health_arguments` extended.

    Raises:
        ValueError: A value is out of range.
    """
    return _from_args(args, HealthConfig)


def task_config_from_args(args: Namespace) -> TaskConfig:
    """Gives the TaskConfig that parsed flags describe.

    Args:
        args: What a parser returned that `add_task_arguments` extended.

    Raises:
        ValueError: A value is out of range, or has no effect.
    """
    return _from_args(args, TaskConfig)


def recorded_config_from_args(args: Namespace) -> RecordedConfig:
    """Gives the RecordedConfig that parsed flags describe.

    Args:
        args: What a parser returned that `add_recorded_arguments` extended.

    Raises:
        ValueError: A value is out of range.
    """
    return _from_args(args, RecordedConfig)


def require_agreement(args: Namespace, trace: TraceConfig, recorded: RecordedConfig) -> None:
    """Checks that Megatron's flags and ours do not contradict each other.

    Args:
        args: What Megatron's `parse_and_validate_args` returned.
        trace: What `trace_config_from_args` made of it.
        recorded: What `recorded_config_from_args` made of it.

    Raises:
        ValueError: They do; the message names both.
    """
    ours = (args.fp4_quantizer_factory or "").startswith("megatron_trace.")
    contradictions = {
        "--use-megatron-fsdp, which shards what the quantisers read": args.use_megatron_fsdp,
        "--use-torch-fsdp2, which shards what the quantisers read": args.use_torch_fsdp2,
        "no --calculate-per-token-loss: the loss is a mean over the tokens of a step": (
            not args.calculate_per_token_loss
        ),
        "--fp4-format without a --fp4-quantizer-factory of megatron_trace": (
            args.fp4 is not None and not ours
        ),
        "--fp8-format: the quantised operands would be rounded again": args.fp8 is not None,
        f"--cuda-graph-impl {args.cuda_graph_impl}: hints differ from replay to replay": (
            args.cuda_graph_impl != "none"
        ),
        "no --moe-enable-routing-replay (or say --no-trace-replay-routing)": (
            args.num_experts is not None
            and recorded.replay_routing
            and not args.moe_enable_routing_replay
        ),
        "--pipeline-model-parallel-size with --trace-pack-samples: packs have their own lengths, "
        "which the stages would have to know beforehand": (
            recorded.pack_samples and args.pipeline_model_parallel_size > 1
        ),
        "--moe-token-dispatcher-type allgather over ranks with --trace-pack-samples: it wants as "
        "many tokens on every rank": (
            recorded.pack_samples
            and args.moe_token_dispatcher_type == "allgather"
            and args.expert_model_parallel_size > 1
        ),
        "--perform-rl-step: it is Megatron's own RL loop": args.perform_rl_step,
    }
    for name, present in contradictions.items():
        if present:
            raise ValueError(f"--trace-method {trace.method} contradicts {name}")


def _add_flags(parser: ArgumentParser, settings: type, title: str) -> ArgumentParser:
    types = typing.get_type_hints(settings)
    fields = []
    for field in dataclasses.fields(settings):
        own = "--" + (_PREFIX + field.name).replace("_", "-")
        names = {"arg_names": [own, _ALIASES[field.name]]} if field.name in _ALIASES else {}
        flag = dataclasses.field(default=field.default, metadata={"argparse_meta": names})
        fields.append((_PREFIX + field.name, _flag_type(types[field.name]), flag))
    flags = dataclasses.make_dataclass("TraceFlags", fields, namespace={"__doc__": title})
    _DocumentedFactory(flags, settings).build_group(parser, title=title)
    return parser


def _from_args[T](args: Namespace, settings: type[T]) -> T:
    values: dict[str, typing.Any] = {}
    for field in dataclasses.fields(typing.cast("typing.Any", settings)):
        value = getattr(args, _PREFIX + field.name)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return settings(**values)


def attribute_docs(documented: type) -> dict[str, str]:
    """Gives the text of each entry in the Attributes section of a class's docstring."""
    _, _, section = (inspect.getdoc(documented) or "").partition("\nAttributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _flag_type(annotation: typing.Any) -> typing.Any:
    """Gives the type that Megatron's factory understands: a tuple is a list on the command line."""
    if typing.get_origin(annotation) is tuple:
        return list[typing.get_args(annotation)[0]]
    return annotation
