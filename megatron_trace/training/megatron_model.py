"""A trainer model as Megatron's training loop builds it: from flags, per stage, inside DDP."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import ClassVar, override

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from megatron.training.argument_utils import hybrid_config_from_args
from megatron.training.models.hybrid import HybridModelBuilder, HybridModelConfig
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_trace.config import TraceConfig
from megatron_trace.hints.types import QuantizerSettings
from megatron_trace.training.model import TrainerAttention, build_trainer_model
from megatron_trace.training.sites import TraceSites


@dataclass(kw_only=True)
class TraceModelConfig(HybridModelConfig):
    """Megatron's model configuration with ours; give it to `pretrain` in its config container.

    Attributes:
        trace: Settings of TRACE.
        attention: Core attention, see `build_trainer_model`.
        quantizer_settings: Settings of the rollout's quantisers; None for method bf16.
    """

    builder: ClassVar[str] = "megatron_trace.training.megatron_model.TraceModelBuilder"
    trace: TraceConfig = field(default_factory=TraceConfig)
    attention: TrainerAttention = "megatron"
    quantizer_settings: QuantizerSettings | None = None


class TraceModelBuilder(HybridModelBuilder):
    """Builds the stages of a `TraceModelConfig`; `trace_sites` gives the sites of each."""

    _model_config: TraceModelConfig

    @override
    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> HybridModel:
        """Builds one stage.

        Args:
            pg_collection: Process groups; those of Megatron's parallel state.
            pre_process: Whether the stage has the embedding; None asks the parallel state.
            post_process: Whether it has the output layer; None likewise.
            vp_stage: Virtual pipeline stage.

        Raises:
            ValueError: The configuration asks for something that TRACE does not support.
        """
        config = self._model_config
        _require_supported(config)
        assert config.vocab_size is not None, "hybrid_config_from_args sets it"
        assert config.hybrid_layer_pattern is not None, "checked by _require_supported"
        vocab_size = config.vocab_size
        if config.should_pad_vocab:
            vocab_size = calculate_padded_vocab_size(
                vocab_size,
                config.make_vocab_size_divisible_by,
                config.transformer.tensor_model_parallel_size,
            )
        model, sites = build_trainer_model(
            config.transformer,
            pattern=config.hybrid_layer_pattern,
            vocab_size=vocab_size,
            max_sequence_length=config.seq_length,
            trace=config.trace,
            dtype=config.transformer.params_dtype,
            attention=config.attention,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            vp_stage=vp_stage,
        )
        if config.quantizer_settings is not None and sites.quantises:
            sites.settings = config.quantizer_settings
        # Where a training loop, which gets models only, finds the sites again.
        object.__setattr__(model, "trace_sites", sites)
        return model


def trace_sites(model: object) -> TraceSites:
    """Gives the sites of a stage, which may be wrapped in DDP and the like.

    Raises:
        RuntimeError: `TraceModelBuilder` did not build it.
    """
    try:
        sites = get_attr_wrapped_model(model, "trace_sites", allow_none=False)
    except RuntimeError:
        raise RuntimeError(
            f"{type(model).__name__} has no TraceSites; build it from a TraceModelConfig"
        ) from None
    assert isinstance(sites, TraceSites), "only TraceModelBuilder sets the attribute"
    return sites


def trace_model_config_from_args(
    args: Namespace,
    trace: TraceConfig,
    attention: TrainerAttention,
    settings: QuantizerSettings | None,
) -> TraceModelConfig:
    """Gives the model configuration that Megatron's parsed flags describe.

    Args:
        args: What Megatron's `parse_and_validate_args` returned.
        trace: Settings of TRACE.
        attention: Core attention.
        settings: Settings of the rollout's quantisers; None for method bf16.

    Raises:
        ValueError: A flag of Megatron contradicts TRACE; the message names it.
    """
    require_vocabulary_of_one_rank(args)
    config = hybrid_config_from_args(args, model_config_cls=TraceModelConfig)
    config.trace, config.attention, config.quantizer_settings = trace, attention, settings
    return config


def require_vocabulary_of_one_rank(args: Namespace) -> None:
    """Checks that tensor parallelism does not add padding to the vocabulary.

    The rollout's softmax has no such tokens, and a checkpoint of one rank no weights for them:
    Megatron would leave those as they are, and every log-probability would differ.

    Args:
        args: What Megatron's `parse_and_validate_args` returned.

    Raises:
        ValueError: It does.
    """
    if args.vocab_size is None:
        return
    divisor = args.make_vocab_size_divisible_by
    sizes = [
        calculate_padded_vocab_size(args.vocab_size, divisor, ranks, logging_enabled=False)
        for ranks in (1, args.tensor_model_parallel_size)
    ]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} pads the vocabulary "
            f"to {sizes[1]} tokens, one rank, like the rollout's, to {sizes[0]}; set --vocab-size "
            f"{sizes[0]} and a --make-vocab-size-divisible-by that, times the ranks, divides it"
        )


def _require_supported(config: TraceModelConfig) -> None:
    unsupported = {
        "no --hybrid-layer-pattern": config.hybrid_layer_pattern is None,
        "--spec": config.hybrid_stack_spec is not None,
        f"--position-embedding-type {config.position_embedding_type}": (
            config.position_embedding_type != "rope"
        ),
        "tied embeddings (no --untie-embeddings-and-output-weights)": (
            config.share_embeddings_and_output_weights
        ),
        "--rotary-seq-len-interpolation-factor": config.seq_len_interpolation_factor is not None,
    }
    for name, present in unsupported.items():
        if present:
            raise ValueError(f"--trace-method {config.trace.method} does not support {name}")
