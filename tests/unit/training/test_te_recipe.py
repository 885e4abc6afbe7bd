"""The TE quantisers on the CPU: what they hold, how they copy, update and pickle.

Transformer Engine is no requirement of ours; where it is missing these tests are skipped. Its
products need a GPU: `tools/check_te_guided.py` runs them.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import pickle

import pytest
import torch

pytest.importorskip(
    "transformer_engine.pytorch", reason="Transformer Engine is not installed", exc_type=ImportError
)

from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.module._split_quantization import _split_quantize
from transformer_engine.pytorch.quantization import QuantizerRole
from transformer_engine.pytorch.tensor import (
    HybridQuantizer,
    IdentityQuantizer,
    IdentityTensor,
    NVFP4TensorStorage,
)

from megatron_trace.formats import decode, unpack_codes
from megatron_trace.testing.moe_reference import quantised, quantised_weight
from megatron_trace.testing.roundings import recorded_rounding
from megatron_trace.training.rounding import Rounding
from megatron_trace.training.te_recipe import (
    GuidedFakeQuantizer,
    GuidedNVFP4Quantizer,
    WeightFakeQuantizer,
    WeightNVFP4Quantizer,
    guided_fake_quantizer_factory,
    guided_nvfp4_quantizer_factory,
    tiled_scales,
    weight_fake_quantizer_factory,
)
from megatron_trace.training.te_rows import LinearCall, linear_call
from megatron_trace.training.weights import WeightRule, quantise_weight

SPLITS = (5, 0, 9)
K = 48
SCALE = 2.0**-9
INPUT = QuantizerRole("grouped_linear", "input", "experts.linear_fc1")
WEIGHT = QuantizerRole("grouped_linear", "weight", "experts.linear_fc1")
FACTORIES = (
    weight_fake_quantizer_factory,
    guided_fake_quantizer_factory,
    guided_nvfp4_quantizer_factory,
)
RULE = WeightRule(torch.bfloat16, power_of_two_scales=False)


def _call_with(values: torch.Tensor, *weights: torch.Tensor) -> LinearCall:
    forms = [quantise_weight(weight, RULE) for weight in weights]
    return LinearCall("fc1", values, Rounding(SCALE), zip(weights, forms, strict=True))


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(sum(SPLITS), K, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture
def rounding(values) -> Rounding:
    rollout = values + 0.01 * torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
    return recorded_rounding(rollout, SCALE, num_bits=1)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(32, K, generator=torch.Generator().manual_seed(2)).bfloat16()


def test_te_splits_an_input_into_guided_parts(values, rounding) -> None:
    quantizers = [guided_fake_quantizer_factory(INPUT) for _ in SPLITS]
    for quantizer in quantizers:
        quantizer.internal = True
    call = LinearCall("fc1", values, rounding)
    with linear_call(call):
        parts, _ = _split_quantize(values, SPLITS, quantizers, torch.bfloat16)
    held = torch.cat([part.dequantize() for part in parts])
    assert torch.equal(held, quantised(rounding, values))
    assert call.was_quantised


def test_a_quantiser_outside_of_a_call_is_refused(values) -> None:
    with pytest.raises(LookupError, match="outside of a TRACE grouped linear"):
        GuidedFakeQuantizer()(values)


@pytest.mark.parametrize(
    "kind", [GuidedFakeQuantizer, WeightFakeQuantizer, GuidedNVFP4Quantizer, WeightNVFP4Quantizer]
)
def test_a_copy_keeps_its_kind_and_flags(kind) -> None:
    quantizer = kind(columnwise=True)
    quantizer.internal = quantizer.optimize_for_gemm = True
    copied = quantizer.copy()
    assert type(copied) is kind
    assert vars(copied) == vars(quantizer)


def test_weights_are_rounded_like_the_trainers(values, weight) -> None:
    with linear_call(_call_with(values, weight)):
        held = WeightFakeQuantizer()(weight).dequantize()
    assert torch.equal(held, quantise_weight(weight, RULE).values)
    assert torch.equal(held, quantised_weight(weight))


def test_a_cached_weight_is_updated_to_the_quantised_new_one(values, weight) -> None:
    changed = 2.5 * weight
    with linear_call(_call_with(values, weight, changed)):
        cached = WeightFakeQuantizer()(weight)
        assert isinstance(cached, IdentityTensor)
        cached.quantize_(changed)
    assert torch.equal(cached.dequantize(), quantised_weight(changed))


def test_nvfp4_parts_decode_to_the_guided_values(values, rounding) -> None:
    parts = []
    with linear_call(LinearCall("fc1", values, rounding)):
        for part in torch.split(values, SPLITS):
            quantizer = GuidedNVFP4Quantizer()
            quantizer.internal = True
            parts.append(quantizer(part))
    decoded = []
    for part, rows in zip(parts, SPLITS, strict=True):
        assert isinstance(part, NVFP4TensorStorage)
        assert part._rowwise_scale_inv.shape == (128 if rows else 0, 4)
        assert part._amax_rowwise.item() == SCALE * 6 * 448
        scales = part._rowwise_scale_inv[:rows, : K // 16]
        codes = unpack_codes(part._rowwise_data)
        decoded.append(decode(codes, scales, SCALE, torch.bfloat16))
    assert torch.equal(torch.cat(decoded), quantised(rounding, values))


def test_an_nvfp4_weight_holds_the_trainers_codes(values, weight) -> None:
    changed = 2.0 * weight
    expected = quantise_weight(changed, RULE)
    with linear_call(_call_with(values, weight, changed)):
        held = WeightNVFP4Quantizer()(weight)
        held.quantize_(changed)
    assert torch.equal(held._rowwise_data, expected.packed_codes)
    assert torch.equal(held._rowwise_scale_inv[:32, : K // 16], expected.scale_bytes)


def test_scales_are_filled_up_with_zeros_to_whole_tiles() -> None:
    scales = torch.full((130, 5), 7, dtype=torch.uint8)
    tiled = tiled_scales(scales)
    assert tiled.shape == (256, 8)
    assert torch.equal(tiled[:130, :5], scales)
    assert int(tiled.sum()) == 7 * 130 * 5


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize(
    "role",
    [
        None,
        QuantizerRole(),
        QuantizerRole("linear", "input", "linear_qkv"),
        QuantizerRole("linear", "weight", "router"),
        QuantizerRole("grouped_linear", "grad_output", "experts.linear_fc1"),
        QuantizerRole("dpa", "qkv", ""),
    ],
)
def test_nothing_but_routed_experts_is_quantised(factory, role) -> None:
    assert type(factory(role)) is IdentityQuantizer


def test_factories_give_our_quantisers_for_routed_experts() -> None:
    assert type(guided_fake_quantizer_factory(INPUT)) is GuidedFakeQuantizer
    assert type(guided_fake_quantizer_factory(WEIGHT)) is WeightFakeQuantizer
    assert type(weight_fake_quantizer_factory(INPUT)) is IdentityQuantizer
    assert type(weight_fake_quantizer_factory(WEIGHT)) is WeightFakeQuantizer
    for role, kind in ((INPUT, GuidedNVFP4Quantizer), (WEIGHT, WeightNVFP4Quantizer)):
        quantizer = guided_nvfp4_quantizer_factory(role)
        assert isinstance(quantizer, HybridQuantizer)
        assert type(quantizer.rowwise_quantizer) is kind
        assert type(quantizer.columnwise_quantizer) is IdentityQuantizer


@pytest.mark.parametrize("factory", FACTORIES)
def test_recipes_pickle_and_stay_equal_so_that_te_keeps_its_quantisers(factory) -> None:
    recipe = CustomRecipe(qfactory=factory)
    assert pickle.loads(pickle.dumps(recipe)) == recipe == CustomRecipe(qfactory=factory)


def test_backward_never_rounds_again() -> None:
    assert not GuidedFakeQuantizer().is_requantization_safe()
