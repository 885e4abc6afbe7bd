"""Gated DeltaNet layers: Megatron's function and parameters, on a CPU, padded or packed."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, common

from megatron_trace import compat
from megatron_trace.models import delta_rule, fla_backward
from megatron_trace.models.delta_rule import normalise
from megatron_trace.models.fla_backward import FlaSetup, fla_setup, why_fla_cannot_train
from megatron_trace.models.gated_delta_net import LocalGatedDeltaNet, _require_supported
from megatron_trace.models.hybrid import (
    HybridModules,
    build_hybrid_model,
    causal_mask,
    gated_delta_net_spec,
)
from megatron_trace.rollout.gated_delta_net import EngineGatedDeltaNet
from megatron_trace.testing.single_process import QWEN_FIELDS, single_process, tiny_moe_config

# What is tested is the layer, not fla's kernels, whose products are TF32.
TORCH = HybridModules(delta_rule="torch")


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    with single_process(seed=0):
        yield


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build_hybrid_model(
        tiny_moe_config("GEGEGE*E", **QWEN_FIELDS),
        pattern="GEGEGE*E",
        vocab_size=16,
        max_sequence_length=32,
        modules=TORCH,
        rotary_percent=0.25,
    )


@pytest.fixture
def layer(model):
    layer = model.decoder.layers[0].self_attention
    assert isinstance(layer, LocalGatedDeltaNet)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return layer


def _hidden(*size):
    return torch.randn(*size, 128, device=torch.cuda.current_device())


@pytest.mark.parametrize("zero_centred", [True, False])
def test_output_and_gradients_are_those_of_megatrons_layer(layer, monkeypatch, zero_centred):
    """Megatron's deterministic path; fla's normalisation, which it calls, is replaced by ours."""
    monkeypatch.setattr(common, "l2norm", lambda x, **_: normalise(x))
    config = tiny_moe_config(
        "GEGEGE*E",
        **QWEN_FIELDS | {"layernorm_zero_centered_gamma": zero_centred},
        deterministic_mode=True,
    )
    groups = layer.pg_collection
    submodules = gated_delta_net_spec(HybridModules()).submodules
    given = {"layer_number": 1, "pg_collection": groups}
    ours = LocalGatedDeltaNet(config, submodules, delta_rule="torch", **given)
    with compat.fla_not_needed():
        theirs = GatedDeltaNet(config, submodules, **given)
    for net in (ours, theirs):
        net.load_state_dict(layer.state_dict())
        net.to(torch.cuda.current_device())
    hidden, results = _hidden(70, 2), []
    for net in (ours, theirs):
        leaf = hidden.clone().requires_grad_()
        output, _ = net(leaf, None)
        grads = torch.autograd.grad(output.square().sum(), [leaf, *net.parameters()])
        results.append((output, *grads))
    for mine, other in zip(*results, strict=True):
        # Measured: 1.6e-5 of the largest, of A_log, whose gradient is a sum of many that cancel.
        torch.testing.assert_close(mine, other, atol=1e-4 * other.abs().max().item(), rtol=0)


def test_a_qwen_block_trains_and_every_parameter_gets_a_gradient(model):
    device = torch.cuda.current_device()
    tokens = torch.randint(0, 16, (2, 24), device=device)
    positions = torch.arange(24, device=device).expand(2, -1)
    mask = causal_mask(24).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        assert not [name for name, p in model.named_parameters() if not p.grad.any()]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_padding_on_the_right_changes_no_earlier_position(layer):
    hidden = _hidden(20, 1)
    padded = torch.cat((hidden, _hidden(11, 1)))
    # Measured: 3e-8 of outputs around 0.1.
    torch.testing.assert_close(
        layer(padded, None)[0][:20], layer(hidden, None)[0], atol=1e-6, rtol=0
    )


def test_case_46_packed_sequences_are_computed_as_separate_ones(layer):
    hidden = _hidden(40, 1)
    bounds = torch.tensor([0, 15, 40], dtype=torch.int32, device=hidden.device)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    together, _ = layer(hidden, None, packed_seq_params=packed)
    alone = torch.cat([layer(part, None)[0] for part in hidden.split([15, 25])])
    # Measured: 2.1e-7 of outputs up to 0.6; products of other sizes.
    torch.testing.assert_close(together, alone, atol=2e-6, rtol=0)
    without_bounds, _ = layer(hidden, None)
    assert (without_bounds[15:] - alone[15:]).abs().max() > 1e-3


def test_bounds_that_do_not_end_with_the_tokens_are_refused(layer):
    bounds = torch.tensor([0, 15, 30], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    with pytest.raises(ValueError, match="does not match"):
        layer(_hidden(40, 1), None, packed_seq_params=packed)


def test_the_states_after_a_sequence_continue_it(layer):
    projected, _ = layer.in_proj(_hidden(30, 1))
    projected = projected.transpose(0, 1)
    whole, *_ = layer.advance(projected)
    _, conv, recurrent = layer.advance(projected[:, :13], keep_states=True)
    assert conv.shape == (1, *layer.conv_state_shape)
    assert recurrent.shape == (1, *layer.recurrent_state_shape)
    rest, *_ = layer.advance(projected[:, 13:], conv, recurrent)
    # Measured: 1.2e-6 of values up to 1; other chunks.
    torch.testing.assert_close(rest, whole[:, 13:], atol=1e-5, rtol=0)


def test_the_fla_flag_is_what_it_was_also_after_an_error():
    before = common.HAVE_FLA
    with contextlib.suppress(KeyboardInterrupt), compat.fla_not_needed():
        assert common.HAVE_FLA
        raise KeyboardInterrupt
    assert before == common.HAVE_FLA


@pytest.mark.parametrize(
    ("overrides", "sizes", "match"),
    [
        ({"activation_func": torch.nn.functional.gelu}, (1, 1), "have SiLU"),
        ({"linear_num_value_heads": 6}, (1, 1), "multiple of linear_num_key_heads=4"),
        ({"linear_num_key_heads": 1}, (2, 1), "linear_num_key_heads=1 must be a multiple of the 2"),
        ({}, (4, 2), "linear_num_key_heads=4 must be a multiple of the 8"),
        ({}, (2, 1), "contradicts sequence_parallel=False"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(overrides, sizes, match):
    tp, cp = (SimpleNamespace(size=lambda size=size: size) for size in sizes)
    config = tiny_moe_config("GE", **overrides)
    with pytest.raises(ValueError, match=match):
        _require_supported(config, SimpleNamespace(tp=tp, cp=cp))


def test_a_choice_of_kernels_without_a_layer_that_has_them_is_refused():
    with pytest.raises(ValueError, match="delta_rule=torch has no effect with pattern"):
        build_hybrid_model(
            tiny_moe_config("*E"),
            pattern="*E",
            vocab_size=16,
            max_sequence_length=32,
            modules=HybridModules(delta_rule="torch"),
        )


@pytest.mark.parametrize("kind", [LocalGatedDeltaNet, EngineGatedDeltaNet])
def test_hopper_without_tilelang_is_refused_at_the_build_of_a_layer_that_trains(kind, monkeypatch):
    """Not of the engine's, which has no backward pass."""
    hopper = FlaSetup((9, 0), "3.6.0", "tilelang is not installed")
    monkeypatch.setattr(fla_backward, "fla_setup", lambda: hopper)
    monkeypatch.setattr(delta_rule, "_device_is_gpu", lambda: True)
    monkeypatch.setattr(delta_rule.megatron_gdn, "HAVE_FLA", True)
    build = partial(
        build_hybrid_model,
        tiny_moe_config("GE"),
        pattern="GE",
        vocab_size=16,
        max_sequence_length=8,
        modules=HybridModules(gated_delta_net=kind),
    )
    if kind is EngineGatedDeltaNet:
        assert not build().decoder.layers[0].self_attention.kernels.are_torchs
        return
    with pytest.raises(RuntimeError, match=r"no right backward pass .* tilelang is not installed"):
        build()


@pytest.mark.gpu
def test_a_layers_gradients_by_flas_kernels_are_those_by_torchs():
    """A BF16 layer with the heads of Qwen3.5, its parameters too, against an FP32 one."""
    reason = why_fla_cannot_train(fla_setup())
    if reason is not None:
        pytest.skip(reason)
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    dims = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    config = tiny_moe_config("GEGEGE*E", **QWEN_FIELDS, **heads, **dims)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    submodules = gated_delta_net_spec(HybridModules()).submodules
    torch.manual_seed(0)
    nets = [
        LocalGatedDeltaNet(
            config, submodules, layer_number=1, pg_collection=groups, delta_rule=choice
        ).cuda()
        for choice in ("torch", "fla")
    ]
    nets[1].load_state_dict(nets[0].state_dict())
    nets[0].bfloat16().float()
    nets[1].bfloat16()
    hidden, weights = (torch.randn(1000, 2, 128, device="cuda").bfloat16() for _ in range(2))
    results = []
    for net in nets:
        leaf = hidden.to(net.A_log.dtype).requires_grad_()
        output, _ = net(leaf)
        grads = torch.autograd.grad(output, [leaf, *net.parameters()], weights.to(output.dtype))
        results.append((output, *grads))
    names = ("output", "hidden", *(name for name, _ in nets[0].named_parameters()))
    errors = {
        name: ((mine - other.float()).norm() / mine.norm()).item()
        for name, mine, other in zip(names, *results, strict=True)
    }
    # Of torch's rule in BF16 too, on a CPU: 1.3e-2 (A_log); fla's rule alone, on an H200: 4.4e-3.
    assert max(errors.values()) < 3e-2, errors
