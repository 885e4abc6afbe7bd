"""The trainer model: plain when it should be, refusing what it cannot do."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel

from megatron_trace.config import TraceConfig
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model, causal_mask
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.training.experts import QuantisedWeightFc1
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import build_trainer_model, token_logprobs


def _plain_model(dtype) -> HybridModel:
    torch.manual_seed(0)
    return build_hybrid_model(
        tiny_moe_config("*E*E", params_dtype=dtype, bf16=dtype == torch.bfloat16),
        pattern="*E*E",
        vocab_size=16,
        max_sequence_length=32,
        modules=HybridModules(),
    )


def _forward(model, tokens):
    tokens = tokens.to(torch.cuda.current_device())
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, causal_mask(tokens.shape[1]).to(tokens.device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_method_bf16_gives_the_bits_of_the_plain_model_and_its_gradients(build, dtype):
    tokens = torch.arange(24).view(3, 8) % 16
    model, _ = build("bf16", dtype=dtype)
    plain = _plain_model(dtype)
    for each in (model, plain):
        _forward(each, tokens).float().square().mean().backward()
    assert_same_bytes(_forward(model, tokens), _forward(plain, tokens), "logits")
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert_same_bytes(parameter.grad, expected[name].grad, name)


def test_method_bf16_plugs_in_no_module_of_ours_that_quantises(build):
    model, sites = build("bf16")
    names = {type(module).__name__ for module in model.modules()}
    assert not names & {"GuidedCoreAttention", "GuidedMoELayer", "QuantisedWeightFc1"}
    sites.assert_ran()


@pytest.mark.parametrize("method", ["qat", "trace"])
def test_parameters_have_the_names_and_shapes_of_the_plain_model(build, method):
    shapes = {name: p.shape for name, p in build(method)[0].named_parameters()}
    assert shapes == {name: p.shape for name, p in _plain_model(torch.float32).named_parameters()}


def test_the_model_configuration_given_is_not_changed(build):
    config = tiny_moe_config("*E*E")
    before = dict(vars(config))
    build("bf16", dtype=torch.bfloat16)
    assert vars(config) == before


@pytest.mark.parametrize("method", ["qat", "trace"])
def test_parameters_have_the_dtype_asked_for(build, method):
    for dtype in (torch.bfloat16, torch.float32):
        model, _ = build(method, dtype=dtype)
        assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"hidden_dropout": 0.1}, "hidden_dropout"),
        ({"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion"),
        ({"moe_input_jitter_eps": 0.01}, "moe_input_jitter_eps"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"kv_channels": 24}, "kv_channels=24"),
        ({"moe_ffn_hidden_size": 40}, "moe_ffn_hidden_size=40"),
    ],
)
def test_what_would_break_agreement_with_the_rollout_is_refused_by_name(build, config, name):
    with pytest.raises(ValueError, match=name):
        build("trace", config=config)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"tensor_model_parallel_size": 2}, {}, "contradicts sequence_parallel=False"),
        (
            {"expert_tensor_parallel_size": 8},
            {},
            r"would split blocks of 16 of the experts' 64 columns.* one of \[1, 2, 4\]",
        ),
        (
            {"context_parallel_size": 2},
            {"attention": "megatron"},
            "context_parallel_size=2 contradicts attention=megatron",
        ),
    ],
)
def test_a_layout_that_cannot_hold_whole_blocks_or_heads_is_refused(
    build, config, arguments, message
):
    with pytest.raises(ValueError, match=message):
        build("trace", config=config, **arguments)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"overlap_moe_expert_parallel_comm": True}, "overlap_moe_expert_parallel_comm"),
        ({"delay_wgrad_compute": True}, "delay_wgrad_compute"),
        (
            {"overlap_dispatch_backward_with_experts_wgrad": True},
            "overlap_dispatch_backward_with_experts_wgrad",
        ),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl=local"),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing"),
        ({"moe_router_force_biased": 1.0}, "moe_router_force_biased"),
        ({"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type=flex"),
        ({"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap"),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "2 ranks with virtual stages, but not overlap_p2p_comm=True",
        ),
        ({"pipeline_model_parallel_size": 2}, "pipeline group has 1 ranks"),
    ],
)
def test_schedules_that_would_lose_the_micro_batch_or_its_rows_are_refused_by_name(fields, name):
    """Set after Megatron's own checks of the configuration, some of which refuse them too."""
    config = tiny_moe_config("*E*E", bf16=True, params_dtype=torch.bfloat16)
    for field, value in fields.items():
        setattr(config, field, value)
    with pytest.raises(ValueError, match=name):
        build_trainer_model(
            config,
            pattern="*E*E",
            vocab_size=16,
            max_sequence_length=32,
            trace=TraceConfig(method="trace"),
        )


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        # Megatron 0.19.2 would build the first stage only.
        ("*E|*E", r"has 2 stages \(parted by \|\), but pipeline_model_parallel_size=1"),
        ("*E||*E", "stage without layers"),
    ],
)
def test_a_pattern_whose_stages_do_not_fit_is_refused(build, pattern, message):
    with pytest.raises(ValueError, match=message):
        build("trace", pattern=pattern)


def test_another_dtype_is_refused(build):
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        build("qat", dtype=torch.float16)


def test_logprobs_outside_of_the_scope_are_refused(build, rollout):
    rolled = rollout()
    model, sites = build("trace")
    sites.settings = rolled.settings
    micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
    with pytest.raises(RuntimeError, match="the micro-batch to forward is not in force"):
        token_logprobs(model, sites, micro_batch)


def test_logprobs_are_normalised_at_the_temperature_of_sampling(build, rollout):
    rolled = rollout()
    model, sites = build("bf16")
    micro_batch = make_micro_batch(rolled.samples, None, sites)
    with torch.no_grad(), sites.micro_batch(micro_batch):
        tokens = micro_batch.tokens
        mask = causal_mask(micro_batch.num_positions).to(sites.device)
        logits = model(tokens[:, :-1], micro_batch.positions, mask)
        got = token_logprobs(model, sites, micro_batch, temperature=0.5)
    expected = (logits / 0.5).log_softmax(-1)[2, 3, tokens[2, 4]]
    torch.testing.assert_close(got[2, 3], expected, rtol=0, atol=0)


def test_weights_are_quantised_where_they_are_used(build):
    model, _ = build("qat")
    linears = [m for m in model.modules() if isinstance(m, QuantisedWeightFc1)]
    assert len(linears) == 32
    assert all(linear.place is not None for linear in linears)
