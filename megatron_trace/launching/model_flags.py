"""Reads the flags of a run that decide whether it fits its job, without Megatron's parser.

Megatron's parser takes seconds, and on some clusters a GPU; a job is checked on a login node. Flags
that are not known here are left alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn, override

from megatron_trace.config import TraceConfig


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Flags of Megatron and ours, by their names; None where Megatron derives the default."""

    hybrid_layer_pattern: str = ""
    hidden_size: int = 0
    num_attention_heads: int = 0
    num_query_groups: int | None = None
    kv_channels: int | None = None
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_ffn_hidden_size: int | None = None
    ffn_hidden_size: int | None = None
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    seq_length: int = 0
    trace_method: str = "trace"
    trace_number_format: str = "nvfp4"
    trace_hint_sites: tuple[str, ...] = ("fc1", "k", "v")
    trace_hint_layers: str = "all"
    trace_hint_bits: int = 1
    trace_hint_scales: str = "raw"
    trace_hint_memory_mb: int | None = None
    trace_metrics_dir: str = ""
    trace_delta_rule: str = "auto"
    deterministic_mode: bool = False

    @property
    def trace_settings(self) -> dict[str, Any]:
        """Fields of TraceConfig among the flags, by name."""
        prefix = "trace_"
        known = {field.name for field in fields(TraceConfig)}
        values = ((name.removeprefix(prefix), value) for name, value in vars(self).items())
        return {name: value for name, value in values if name in known}

    @property
    def trains_with_fla(self) -> bool:
        """Whether Gated DeltaNet layers would compute with flash-linear-attention on a GPU."""
        is_torch = self.trace_delta_rule == "torch"
        is_torch |= self.trace_delta_rule == "auto" and self.deterministic_mode
        return "G" in self.decoder_pattern and not is_torch

    @property
    def expert_tp(self) -> int:
        """Ranks that share an expert; Megatron's default is those of a tensor."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_ranks(self) -> int:
        """Ranks of one replica of the dense part."""
        return (
            self.tensor_model_parallel_size
            * self.pipeline_model_parallel_size
            * self.context_parallel_size
        )

    @property
    def expert_ranks(self) -> int:
        """Ranks of one replica of the experts."""
        return self.expert_tp * self.expert_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def expert_width(self) -> int:
        """Hidden size of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def kv_width(self) -> int:
        """Values of a token's key, or value, in one layer."""
        groups = self.num_query_groups or self.num_attention_heads
        channels = self.kv_channels or self.hidden_size // max(self.num_attention_heads, 1)
        return groups * channels

    @property
    def decoder_pattern(self) -> str:
        """The pattern without the layers of multi-token prediction."""
        return self.hybrid_layer_pattern.split("/")[0]


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of ending the program."""

    @override
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def read_flags(arguments: Sequence[str]) -> RunFlags:
    """Gives the flags of a command line, with `@FILE` for the flags of a file.

    Args:
        arguments: The command line of the trainer.

    Raises:
        ValueError: A flag has a value of another kind, or a file is missing.
    """
    parser = _Parser(fromfile_prefix_chars="@", add_help=False, allow_abbrev=False)
    for field in fields(RunFlags):
        flag = "--" + field.name.replace("_", "-")
        if str(field.type).startswith("tuple"):
            parser.add_argument(flag, nargs="+", default=field.default)
        elif field.type == "bool":
            parser.add_argument(flag, action="store_true")
        else:
            kind = int if "int" in str(field.type) else str
            parser.add_argument(flag, type=kind, default=field.default)
    known, _ = parser.parse_known_args(list(arguments))
    values: dict[str, Any] = vars(known)
    values["trace_hint_sites"] = tuple(values["trace_hint_sites"])
    return RunFlags(**values)
