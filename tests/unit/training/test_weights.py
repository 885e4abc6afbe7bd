"""Quantised expert weights: the engine's rule, a cache that cannot be stale, the digest."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.formats import encode, global_scale_from_amax, pack_codes
from megatron_trace.models.hybrid import decoder_layers, named_expert_linears
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.recorded_samples import calibrate, random_samples
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.weights import (
    ExpertWeight,
    WeightRule,
    expert_weight_digest,
    quantise_weight,
)

LENGTHS = ((5, 3), (3, 0), (7, 4))


@pytest.fixture
def ready(build):
    other, calibrated = build("qat")
    calibrate(other, calibrated, random_samples(LENGTHS, calibrated.shape, vocab_size=16))
    model, sites = build("qat")
    sites.settings = calibrated.settings
    samples = random_samples(
        LENGTHS, sites.shape, vocab_size=16, settings_digest=sites.settings.digest()
    )
    return model, sites, make_micro_batch(samples, None, sites)


def _forward(model, sites, micro_batch):
    sites.reset_report()
    with sites.micro_batch(micro_batch):
        return token_logprobs(model, sites, micro_batch)


def test_the_bf16_weight_is_quantised_with_one_amax_for_gate_and_up():
    weight = torch.randn(64, 128)
    weight[32:] *= 10
    got = quantise_weight(weight, WeightRule(torch.bfloat16, power_of_two_scales=False))
    scale = global_scale_from_amax(weight.bfloat16().abs().amax())
    codes, scale_bytes = encode(weight.bfloat16(), scale)
    assert_same_bytes(got.global_scale, scale, "global scale")
    assert_same_bytes(got.packed_codes, pack_codes(codes), "codes")
    assert_same_bytes(got.scale_bytes, scale_bytes, "scale bytes")


def test_modelopt_gives_the_same_codes_scales_and_values():
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = quantise_weight(weight, WeightRule(torch.bfloat16, power_of_two_scales=False))
    tensor, scales, scale = NVFP4QTensor.quantize(weight, 16)
    assert_same_bytes(got.global_scale, scale.float().reshape(()), "global scale")
    assert_same_bytes(got.packed_codes, tensor._quantized_data, "codes")
    assert_same_bytes(got.scale_bytes, scales.view(torch.uint8), "scale bytes")


def test_a_weight_of_zeros_gives_zeros():
    got = quantise_weight(
        torch.zeros(32, 32), WeightRule(torch.bfloat16, power_of_two_scales=False)
    )
    assert not got.values.any()
    assert not got.scale_bytes.any()


def test_weights_are_quantised_once_until_they_change(ready):
    model, sites, micro_batch = ready
    for expected in (64, 0, 0):
        _forward(model, sites, micro_batch)
        report = sites.report()
        assert (report.weight_uses, report.weights_quantised) == (64, expected)


def _in_place(weight):
    with torch.no_grad():
        weight.mul_(1.5)


def _behind_the_version_counter(weight):
    weight.data.mul_(1.5)


def _new_storage(weight):
    weight.data = weight.data * 1.5


def _one_value(weight):
    weight.data[3, 5] += 1.0


def _one_sign_of_zero(weight):
    weight.data[3, 5] = -0.0


@pytest.mark.parametrize(
    "change", [_in_place, _behind_the_version_counter, _new_storage, _one_value]
)
def test_a_changed_weight_is_never_served_from_the_cache(build, ready, change):
    model, sites, micro_batch = ready
    before = _forward(model, sites, micro_batch)
    weight = model.decoder.layers[1].mlp.experts.local_experts[2].linear_fc2.weight
    change(weight)
    after = _forward(model, sites, micro_batch)
    assert sites.report().weights_quantised == 1
    assert not torch.equal(before, after)
    fresh, fresh_sites = build("qat")
    fresh.load_state_dict(model.state_dict())
    fresh_sites.settings = sites.settings
    samples = random_samples(
        LENGTHS, sites.shape, vocab_size=16, settings_digest=sites.settings.digest()
    )
    expected = _forward(fresh, fresh_sites, make_micro_batch(samples, None, fresh_sites))
    assert_same_bytes(after, expected, "log-probs")


def test_the_sign_of_a_zero_counts_as_a_change():
    weight = torch.randn(16, 16).bfloat16()
    weight[3, 5] = 0.0
    kept = ExpertWeight()
    rule = WeightRule(torch.bfloat16, power_of_two_scales=False)
    assert kept.current(weight, rule)[1]
    assert not kept.current(weight, rule)[1]
    _one_sign_of_zero(weight)
    assert kept.current(weight, rule)[1]


def test_a_loaded_checkpoint_is_quantised_anew(ready):
    model, sites, micro_batch = ready
    _forward(model, sites, micro_batch)
    state = {name: value * 2 for name, value in model.state_dict().items() if value is not None}
    model.load_state_dict(state)
    _forward(model, sites, micro_batch)
    assert sites.report().weights_quantised == 64


def test_the_gradient_lands_on_the_parameter(ready):
    model, sites, micro_batch = ready
    with sites.micro_batch(micro_batch):
        token_logprobs(model, sites, micro_batch)[micro_batch.loss_mask].sum().backward()
    for layer in decoder_layers(model):
        for expert, matrix, linear in named_expert_linears(layer):
            assert linear.weight.grad is not None, (layer.index, expert, matrix)
            assert linear.weight.grad.dtype == linear.weight.dtype


def test_the_digest_changes_with_any_weight_and_comes_back(ready):
    model, sites, _ = ready
    first = expert_weight_digest(model, sites)
    assert expert_weight_digest(model, sites) == first
    weight = model.decoder.layers[3].mlp.experts.local_experts[15].linear_fc1.weight
    kept = weight.detach().clone()
    weight.data[0] = weight.data[0] * 2
    assert expert_weight_digest(model, sites) != first
    weight.data.copy_(kept)
    assert expert_weight_digest(model, sites) == first


def test_the_digest_does_not_depend_on_the_trainers_dtype(build):
    digests = set()
    for dtype in (torch.float32, torch.bfloat16):
        model, sites = build("qat", dtype=dtype)
        samples = random_samples(LENGTHS, sites.shape, vocab_size=16)
        calibrate(model, sites, samples)
        digests.add(expert_weight_digest(model, sites))
    assert len(digests) == 1


def test_method_bf16_has_no_digest(build):
    model, sites = build("bf16")
    with pytest.raises(ValueError, match="quantises no expert weights"):
        expert_weight_digest(model, sites)
