"""Static scales of an engine's quantisers, from what ModelOpt sees of calibration tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import modelopt.torch.quantization as mtq
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch.utils.hooks import RemovableHandle

from megatron_trace import compat
from megatron_trace.formats import FormatSet
from megatron_trace.hints import Site, site_format
from megatron_trace.models.hybrid import DecoderLayer, causal_mask
from megatron_trace.rollout.moe import EngineMoELayer
from megatron_trace.rollout.prompts import require_tokens
from megatron_trace.rollout.quantize import is_dispatched, site_quantisers

_logger = logging.getLogger(__name__)


def calibrate(
    model: HybridModel,
    layers: Sequence[DecoderLayer],
    token_batches: Iterable[torch.Tensor],
    formats: FormatSet,
    *,
    power_of_two: bool,
) -> tuple[dict[tuple[int, Site], float], dict[int, tuple[int, ...]]]:
    """Gives the global scale of every place from what these tokens give, and warns of idle experts.

    Args:
        model: Model of the engine, with quantisers and unquantised weights.
        layers: Its decoder layers.
        token_batches: integer [B, S] each.
        formats: Formats that have global scales.
        power_of_two: Whether scales are rounded up to powers of two.

    Returns:
        scales and unseen, as of `calibrated_scales`.

    Raises:
        RuntimeError: A site saw no data, or an activation is NaN or Inf.
        ValueError: A token is outside the vocabulary.
    """
    batches = list(token_batches)
    require_tokens(batches, model.vocab_size)

    @torch.no_grad()
    def forward_loop(model: HybridModel) -> None:
        for batch in batches:
            tokens = batch.to(torch.cuda.current_device())
            positions = torch.arange(tokens.shape[1], device=tokens.device)
            mask = causal_mask(tokens.shape[1]).to(tokens.device)
            model(tokens, positions.expand_as(tokens), mask)

    _collect_amax(model, layers, forward_loop)
    scales, unseen = calibrated_scales(layers, formats, power_of_two=power_of_two)
    _warn_of(unseen)
    return scales, unseen


def calibrated_scales(
    layers: Iterable[DecoderLayer], formats: FormatSet, *, power_of_two: bool
) -> tuple[dict[tuple[int, Site], float], dict[int, tuple[int, ...]]]:
    """Gives the global scale of every place from what the quantisers saw.

    The experts of a layer share the amax of fc2's input, also those that got no token. ModelOpt
    does not share it once SequentialMLP is subclassed with a forward of its own.

    Args:
        layers: Decoder layers of the engine's model, calibrated.
        formats: Formats that have global scales.
        power_of_two: Whether scales are rounded up to powers of two.

    Returns:
        scales: By (decoder layer, site).
        unseen: By decoder layer, the experts that got no calibration token.

    Raises:
        RuntimeError: A quantiser saw nothing (for fc2: those of all experts of a layer).
    """
    scales: dict[tuple[int, Site], float] = {}
    unseen: dict[int, tuple[int, ...]] = {}
    for layer in layers:
        for site, quantisers in site_quantisers(layer).items():
            seen = {
                key: cast("torch.Tensor", quantiser.amax)
                for key, quantiser in quantisers.items()
                if quantiser.amax is not None
            }
            if not seen:
                raise RuntimeError(
                    f"layer {layer.index}, site {site}: "
                    + ("no expert of the layer" if site == Site.FC2 else "the quantiser never")
                    + " saw a calibration token; calibrate with more tokens"
                )
            amax = torch.stack([value.float().reshape(()) for value in seen.values()]).max()
            for quantiser in quantisers.values():
                quantiser.amax = amax.clone()
            scale = site_format(formats, site).global_scale_from_amax(amax, power_of_two)
            assert scale is not None, "formats without global scales are not calibrated"
            scales[layer.index, site] = float(scale)
            if site == Site.FC2:
                unseen[layer.index] = tuple(key for key in quantisers if key not in seen)
    return scales, unseen


def _collect_amax(
    model: HybridModel, layers: Sequence[DecoderLayer], forward_loop: Callable[[Any], None]
) -> None:
    """Lets ModelOpt collect the amax of the activations anew.

    Args:
        model: Model of the engine, with quantisers and unquantised weights.
        layers: Its decoder layers.
        forward_loop: Runs the calibration tokens through the model, [B, S] at a time.

    Raises:
        RuntimeError: An activation is NaN or Inf; names layer, site and sequence.
    """
    quantisers = [
        quantiser
        for layer in layers
        for by_expert in site_quantisers(layer).values()
        for quantiser in by_expert.values()
    ]
    for quantiser in quantisers:
        quantiser.reset_amax()
    checks = _finite_checks(model, layers)
    try:
        mtq.calibrate(model, "max", cast("Any", forward_loop))
    finally:
        for check in checks:
            check.remove()
        compat.restore_linear_functions()
        for quantiser in quantisers:
            quantiser.enable_quant()
            quantiser.disable_calib()


def _finite_checks(model: HybridModel, layers: Iterable[DecoderLayer]) -> list[RemovableHandle]:
    """Lets every quantiser check its input; ModelOpt would stop too, but not say where."""
    num_sequences: list[int] = []

    def note_batch(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        num_sequences.append(args[0].shape[0])

    def check(layer: DecoderLayer, site: Site, expert: int, _: Any, args: Any) -> None:
        (x,) = args
        if torch.isfinite(x).all():
            return
        dispatched = is_dispatched(layer, site)
        rows = x if dispatched else x.flatten(0, 1).flatten(1)
        token = int((~torch.isfinite(rows)).any(-1).nonzero()[0])
        if dispatched:
            token = cast("EngineMoELayer", layer.moe).token_of_row(expert, token)
        position, sequence = divmod(token, num_sequences[-1])
        raise RuntimeError(
            f"NaN or Inf activation in the calibration at layer {layer.index}, site {site}, batch "
            f"{len(num_sequences) - 1}, sequence {sequence}, position {position}; check the "
            "weights that were loaded"
        )

    return [
        model.register_forward_pre_hook(note_batch),
        *(
            quantiser.register_forward_pre_hook(partial(check, layer, site, expert))
            for layer in layers
            for site, by_expert in site_quantisers(layer).items()
            for expert, quantiser in by_expert.items()
        ),
    ]


def _warn_of(unseen: Mapping[int, tuple[int, ...]]) -> None:
    for layer, experts in unseen.items():
        if experts:
            _logger.warning(
                "layer %d: no calibration token reached %d experts (%s); they take the fc2 "
                "scale of the layer's other experts",
                layer,
                len(experts),
                ", ".join(map(str, experts)),
            )
