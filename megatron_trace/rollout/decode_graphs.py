"""Decode steps as captured CUDA graphs: one for each padded number of requests.

The forward of a decode step launches some thousand small kernels. Captured once and replayed, it
costs the host one launch. Megatron's own graphs (0.19.2, `CudaGraphManager`) capture when the
engine is built, before there are weights and scales, want all of a layer's Python to have no effect
beside its outputs, and know nothing of recording. What they prepare is used all the same: Megatron
pads a decode step to the next of given sizes, keeps what the forward reads in buffers whose
addresses stay, and has routing recorded there too. Captured here is the whole forward and the
recorder's `gather`, at the second step of a size, after the first one has compiled what there is to
compile; all graphs share one memory pool.

Not part of the replay is what a forward does on the host. Quantisers count their calls and values,
and the recorder what was put: both are noted when captured, and done again for each replay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.config import TraceConfig
from megatron_trace.hints import Site
from megatron_trace.models.hybrid import decoder_layers
from megatron_trace.rollout.attention import PagedSelfAttention
from megatron_trace.rollout.context import RolloutContext
from megatron_trace.rollout.recorder import Place

_Key = tuple[int, bool]


@dataclass(frozen=True)
class DecodeGraphs:
    """How decode steps are captured.

    Attributes:
        sizes: Numbers of requests to which a decode step is padded, ascending; steps of more
            requests than the last run as they come.
        captured: Whether they are captured. False computes the same padded steps kernel by kernel,
            on any device: to find out what cannot be captured, or what a graph changes.
    """

    sizes: tuple[int, ...]
    captured: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError on sizes that no step can have."""
        if not self.sizes or any(size < 1 for size in self.sizes):
            raise ValueError(f"cuda_graphs needs batch sizes of at least 1; got {self.sizes}")
        object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))

    @classmethod
    def of_setting(
        cls, setting: bool | Sequence[int] | DecodeGraphs, max_requests: int
    ) -> DecodeGraphs | None:
        """Gives what the engine's setting means; None for False.

        Args:
            setting: True for sizes that waste a third of the rows at most, or the sizes.
            max_requests: Requests that run at a time.

        Raises:
            ValueError: A size is beyond the largest batch, or none.
        """
        if isinstance(setting, DecodeGraphs):
            graphs = setting
        elif isinstance(setting, bool):
            if not setting:
                return None
            graphs = cls(default_sizes(max_requests))
        else:
            graphs = cls(tuple(int(size) for size in setting))
        if graphs.sizes[-1] > max_requests:
            raise ValueError(
                f"cuda_graphs names a batch of {graphs.sizes[-1]}, but max_requests={max_requests}"
            )
        return graphs


def default_sizes(max_requests: int) -> tuple[int, ...]:
    """Gives 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, and the largest batch."""
    powers = [2**exponent for exponent in range(max_requests.bit_length())]
    sizes = {size for power in powers for size in (power, power * 3 // 2) if size < max_requests}
    return (*sorted(sizes), max_requests)


@dataclass(frozen=True)
class _Captured:
    """A captured forward.

    Attributes:
        graph: The graph.
        logits: [1, M, V], which a replay overwrites.
        calls: Calls of quantisers by place.
        row_values: Values that they watched by place, for each row that is no padding.
        times_put: What the recorder was given, by place.
        rotary: What RoPE reads. Megatron keeps it in a cache of 32 for the whole process, which
            forgets it while other models run.
    """

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    calls: Counter[Place]
    row_values: dict[Place, int]
    times_put: Counter[Place]
    rotary: torch.Tensor | None


class EngineForward(GPTInferenceWrapper):
    """Megatron's wrapper of the model: the forward of a step, and what the recorder does after it.

    Args:
        model: Model of the engine.
        context: Its context.
        captures: Whether decode steps of Megatron's padded sizes are captured.

    Attributes:
        num_captured: Forwards that were captured since construction.
        num_replayed: Steps that a graph computed.
    """

    inference_context: RolloutContext

    def __init__(self, model: HybridModel, context: RolloutContext, *, captures: bool) -> None:
        super().__init__(cast("Any", model), context)
        self._captures = captures
        self._pool: Any = None
        self._graphs: dict[_Key, _Captured | None] = {}
        self._settings_version = 0
        self.num_captured = self.num_replayed = 0

    def _forward(self, inference_input: dict[str, Any]) -> torch.Tensor:
        context = self.inference_context
        if self._captures and context.using_cuda_graph_this_step():
            logits = self._by_graph(inference_input)
        else:
            logits = self._computed(inference_input)
        # Behind the forward's launch, so that the host does this while the device computes.
        context.sites.begin_check()
        context.note_written()
        context.sites.recorder.send()
        return logits

    def _computed(self, inference_input: dict[str, Any]) -> torch.Tensor:
        logits = super()._forward(inference_input)
        self.inference_context.sites.recorder.gather()
        return logits

    def _by_graph(self, inference_input: dict[str, Any]) -> torch.Tensor:
        sites = self.inference_context.sites
        if self._settings_version != sites.settings_version:
            # Scales are read where they lay, and largest values are numbers in the kernels.
            self._graphs.clear()
            self._pool = None  # It went with its last graph.
            self._settings_version = sites.settings_version
        key = inference_input["tokens"].shape[1], sites.recorder.is_recording
        if key not in self._graphs:
            logits = self._computed(inference_input)
            self._graphs[key] = None
            return logits
        captured = self._graphs[key]
        if captured is not None:
            captured.graph.replay()
            self._note(captured)
        else:
            captured = self._graphs[key] = self._capture(inference_input)
            captured.graph.replay()
        self.num_replayed += 1
        return captured.logits

    def _note(self, captured: _Captured) -> None:
        """Does what a forward does on the host."""
        sites = self.inference_context.sites
        sites.calls.update(captured.calls)
        num_rows = sites.recorder.num_rows or 0
        for place, values in captured.row_values.items():
            sites.quantised_values[place] += values * num_rows
        sites.recorder.note(captured.times_put)

    def _capture(self, inference_input: dict[str, Any]) -> _Captured:
        sites = self.inference_context.sites
        calls, values = Counter(sites.calls), Counter(sites.quantised_values)
        rotary = self._rotary(inference_input["tokens"].shape[1])
        try:
            graph, logits = self._captured_forward(inference_input)
        except torch.OutOfMemoryError:  # A RuntimeError of another kind, with another remedy.
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"a decode step of {inference_input['tokens'].shape[1]} rows cannot be captured "
                f"in a CUDA graph: {error}; if its forward waits for the device, build the engine "
                "with cuda_graphs=False"
            ) from error
        self.num_captured += 1
        num_rows = sites.recorder.num_rows
        assert num_rows, "a step computes rows"
        return _Captured(
            graph,
            logits,
            sites.calls - calls,
            {
                place: count // num_rows
                for place, count in (sites.quantised_values - values).items()
            },
            sites.recorder.noted(),
            rotary,
        )

    def _captured_forward(
        self, inference_input: dict[str, Any]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._computed(inference_input)
        return graph, logits

    def _rotary(self, num_rows: int) -> torch.Tensor | None:
        """Gives what the model asks its RoPE for, by the call that it makes."""
        model: Any = self.model
        if getattr(model, "position_embedding_type", None) != "rope":
            return None
        length = max(self.inference_context.max_sequence_length, num_rows)
        return model.rotary_pos_emb(length, packed_seq=False)


def require_capturable(context: RolloutContext, model: HybridModel) -> None:
    """Checks that there is a GPU for which attention and experts of decode steps do not wait.

    Raises:
        ValueError: They do, or there is none.
    """
    if context.sites.trace.packed_experts == "torch":
        raise ValueError(
            "cuda_graphs contradicts packed_experts=torch, which asks the device for the experts "
            "that were chosen; choose cuda, auto or off"
        )
    device = next(model.parameters()).device
    reason = _why_attention_waits(context, model, device)
    if reason is not None:
        raise ValueError(
            "cuda_graphs needs decode attention that does not wait for the device, which that of "
            f"plain torch does: {reason}"
        )
    if device.type != "cuda":
        raise ValueError(f"cuda_graphs needs a GPU, and the model lies on {device}")


def _why_attention_waits(
    context: RolloutContext, model: HybridModel, device: torch.device
) -> str | None:
    attentions = [layer.attention for layer in decoder_layers(model) if layer.attention is not None]
    setting = cast("PagedSelfAttention", attentions[0]).kv_attention
    if setting == "torch":
        return "kv_attention=torch asks for it"
    if context.sites.trace.quantises_kv:
        number_format = context.sites.format_of(Site.K)
        if (number_format.element.code_bits, number_format.scale_encoding) != (4, "e4m3"):
            return f"a cache of {number_format.name} has no other"
        return None
    if device.type != "cuda":
        return None
    # Only here: Triton looks for a GPU driver when it is imported.
    from megatron_trace.rollout.kernels import plain_attention

    head_dim = context.hidden_size_per_attention_head
    return plain_attention.why_not(head_dim, context.params_dtype, device)


def require_static_experts(trace: TraceConfig) -> None:
    """Checks that the experts' numbers do not depend on shapes that only the device knows.

    Raises:
        ValueError: They do.
    """
    if trace.compensates_residual:
        raise ValueError(
            f"cuda_graphs contradicts method={trace.method}, whose experts choose channels from "
            "the rows that each gets; leave one of them out"
        )
