"""A tiny trainer model, and samples whose hints another tiny model recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.config import DEFAULT_HINT_SITES, Method, NumberFormatName, TraceConfig
from megatron_trace.hints.store import HintSink, HintStore, RecordKind
from megatron_trace.hints.types import QuantizerSettings, RolloutSample
from megatron_trace.testing.recorded_samples import calibrate, random_samples, record
from megatron_trace.testing.rollouts import record_of
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.training.model import TrainerAttention
from megatron_trace.training.pipeline import build_trainer_chunks
from megatron_trace.training.sites import TraceSites

VOCAB_SIZE = 16
MAX_SEQUENCE_LENGTH = 32
# (prompt, response) tokens; one response is empty.
LENGTHS = ((5, 3), (3, 0), (7, 4), (2, 6))


def tiny_trainer(
    method: Method = "trace", *, weights: Mapping[str, torch.Tensor] | None = None, **arguments: Any
) -> tuple[HybridModel, TraceSites]:
    """Builds a trainer model, or this rank's pipeline stage.

    Args:
        method: Method of TRACE.
        weights: Parameters to take instead of those of the seed.
        **arguments: Of `tiny_trainer_chunks`.
    """
    ((model, sites),) = tiny_trainer_chunks(method, **arguments)
    if weights is not None:
        copy_weights(model, weights)
    return model, sites


@torch.no_grad()
def copy_weights(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Gives every parameter the value of its name, in its own dtype."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def tiny_trainer_chunks(
    method: Method = "trace",
    *,
    pattern: str = "*E*E",
    dtype: torch.dtype = torch.float32,
    attention: TrainerAttention = "sdpa",
    max_sequence_length: int = MAX_SEQUENCE_LENGTH,
    rotary_base: int = 10_000,
    rotary_percent: float = 1.0,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    settings: QuantizerSettings | None = None,
    **trace: Any,
) -> list[tuple[HybridModel, TraceSites]]:
    """Builds the chunks of a trainer model whose weights depend on the seed and the stage only.

    Args:
        method: Method of TRACE.
        pattern: Hybrid layer pattern.
        dtype: dtype of the trainer.
        attention: Arithmetic of the core attention.
        max_sequence_length: Longest sequence in tokens.
        rotary_base: Base period of RoPE.
        rotary_percent: Share of the head dim that RoPE rotates.
        config: Fields of `TransformerConfig` to set otherwise.
        seed: Seed of the weights.
        settings: Quantiser settings to give to the sites, unless the method is bf16.
        **trace: Fields of `TraceConfig`; all layers are recorded unless it says otherwise.
    """
    torch.manual_seed(seed)
    chunks = build_trainer_chunks(
        tiny_moe_config(pattern, **config or {}),
        pattern=pattern,
        vocab_size=VOCAB_SIZE,
        max_sequence_length=max_sequence_length,
        trace=TraceConfig(method=method, **{"hint_layers": "all", **trace}),
        dtype=dtype,
        attention=attention,
        rotary_base=rotary_base,
        rotary_percent=rotary_percent,
    )
    for _, sites in chunks:
        if settings is not None and sites.quantises:
            sites.settings = settings
    return chunks


@dataclass(frozen=True)
class RecordedRollout:
    """A store with the hints of some samples.

    Attributes:
        store: The hints.
        samples: The samples.
        settings: Settings of the quantisers that were recorded.
    """

    store: HintStore
    samples: list[RolloutSample]
    settings: QuantizerSettings

    def put_records(self, sink: HintSink, kinds: Iterable[RecordKind] = (RecordKind.HINT,)) -> None:
        """Puts the records of all samples, of the kinds that are asked for, elsewhere too."""
        for sample in self.samples:
            for kind in kinds:
                for layer, site in self.store.places(sample.sample_id, kind):
                    sink.put(record_of(self.store, sample, layer, site, kind), kind)


def recorded_rollout(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    *,
    pattern: str = "*E*E",
    seed: int = 0,
    num_experts: int | None = None,
    sites: Sequence[str] = DEFAULT_HINT_SITES,
    number_format: NumberFormatName = "nvfp4",
    **recorded: Any,
) -> RecordedRollout:
    """Records samples from a BF16 model with the weights of `tiny_trainer`.

    Args:
        lengths: (prompt, response) tokens of each sample.
        pattern: Hybrid layer pattern.
        seed: Seed of tokens and routing.
        num_experts: Experts below which routing stays; None uses all.
        sites: Sites that are recorded in every layer.
        number_format: Number format of the recording model.
        **recorded: Arguments of `record`.
    """
    model, own = tiny_trainer(
        "qat", pattern=pattern, dtype=torch.bfloat16, number_format=number_format
    )
    samples = random_samples(
        lengths, own.shape, vocab_size=VOCAB_SIZE, seed=seed, num_experts=num_experts
    )
    calibrate(model, own, samples)
    store = HintStore()
    recorded.setdefault("places", [p for p in own.shape.places if str(p[1]) in sites])
    samples = record(model, own, samples, store, **recorded)
    return RecordedRollout(store, samples, own.settings)
