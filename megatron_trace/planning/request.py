"""What a plan is asked for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from megatron_trace.formats.number_format import FORMAT_SETS
from megatron_trace.models.architecture import Architecture
from megatron_trace.planning.hardware import GIB, Efficiency, Hardware
from megatron_trace.planning.sizes import HintChoice


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run to plan.

    Attributes:
        architecture: The model.
        hardware: Its GPUs.
        num_gpus: GPUs of the run.
        rollout_gpus: Those that only roll out, while the others train; 0 if all do both by turns.
        prompt_tokens: Tokens of a prompt.
        response_tokens: Tokens of a response, all as long as this.
        num_samples: Samples of a step, prompts times samples of each.
        number_format: Formats of the run.
        hints: Hints to record; None lets the plan choose.
        packed_activations: Whether training keeps the experts' inputs as codes.
        experts: The trainer's experts, as `--trace-experts`: Transformer Engine's or local ones.
        max_hint_share: Share of a step that writing and reading hints may take, behind other work.
        efficiency: What share of the peaks is reached.
    """

    architecture: Architecture
    hardware: Hardware
    num_gpus: int
    rollout_gpus: int = 0
    prompt_tokens: int = 1024
    response_tokens: int = 8192
    num_samples: int = 4096
    number_format: str = "nvfp4"
    hints: HintChoice | None = None
    packed_activations: bool = True
    experts: Literal["te", "local"] = "te"
    max_hint_share: float = 0.25
    efficiency: Efficiency = field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        """Raises ValueError on counts that no run has."""
        for name in ("num_gpus", "prompt_tokens", "response_tokens", "num_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not 0 < self.max_hint_share <= 1:
            raise ValueError(f"max_hint_share must be in (0, 1]; got {self.max_hint_share}")
        if not 0 <= self.rollout_gpus < self.num_gpus:
            raise ValueError(
                f"rollout_gpus={self.rollout_gpus} must leave some of num_gpus={self.num_gpus} to "
                "train"
            )
        if self.number_format not in FORMAT_SETS:
            raise ValueError(f"number_format must be one of {', '.join(FORMAT_SETS)}")

    @property
    def training_gpus(self) -> int:
        """GPUs that train."""
        return self.num_gpus - self.rollout_gpus

    @property
    def generating_gpus(self) -> int:
        """GPUs that roll out."""
        return self.rollout_gpus or self.num_gpus

    def with_gpus(self, num_gpus: int) -> Request:
        """Gives the same run with other GPUs: their share that only rolls out, at least one of each
        kind, stays."""
        share = 0
        if self.rollout_gpus:
            share = max(1, self.rollout_gpus * num_gpus // self.num_gpus)
        return dataclasses.replace(self, num_gpus=num_gpus, rollout_gpus=share)

    @property
    def gpus_of_host(self) -> int:
        """GPUs of a host that the run has."""
        return min(self.num_gpus, self.hardware.gpus_per_node)

    @property
    def num_hosts(self) -> int:
        """Hosts of the run."""
        return -(-self.num_gpus // self.hardware.gpus_per_node)

    @property
    def usable_bytes(self) -> float:
        """Memory of a GPU that a program gets."""
        return self.hardware.memory_bytes * self.efficiency.usable_memory

    @property
    def usable_host_bytes(self) -> float:
        """Memory of a host that hints and what waits there may take."""
        return self.hardware.host_gib * GIB * self.efficiency.usable_host

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a sample."""
        return self.prompt_tokens + self.response_tokens

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.num_samples * self.sequence_tokens
