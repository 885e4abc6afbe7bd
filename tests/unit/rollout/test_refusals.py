"""What an engine refuses, and that it works again afterwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_trace.config import TraceConfig
from megatron_trace.hints import HintStore
from megatron_trace.rollout import RolloutEngine, SamplingSettings
from megatron_trace.rollout.quantize import BACKEND
from megatron_trace.testing.rollouts import assert_same_rollout
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.testing.tiny_rollout import random_prompts, roll_out, tiny_engine


@pytest.mark.parametrize(
    ("prompts", "ids", "message"),
    [
        ([[1], [2]], ["a"], "2 prompts, but 1 sample ids"),
        ([[1], [2]], ["a", "a"], "unique; used twice: a"),
        ([[1], []], ["a", "b"], "sample b: the prompt is empty"),
        ([[1] * 59], ["a"], "sample a: a prompt of 59 tokens .*=6 exceed the context of 64"),
        ([[1, 16]], ["a"], "sample a: tokens must lie in 0 to 15; the prompt has 1 to 16"),
        ([[-1]], ["a"], "sample a: tokens must lie in 0 to 15"),
        ([[1], [2]], "ab", r"sample_ids must be several names; got one string, give \['ab'\]"),
        ([[1], [1.0]], ["a", "b"], r"prompt 1 must be a sequence of integers, .*; got \[1.0\]"),
        (["12"], ["a"], "prompt 0 must be a sequence of integers, .*; got '12'"),
        ([torch.ones(1, 2).long()], ["a"], r"prompt 0 must be .* one dim; got tensor\(\[\[1, 1"),
        ([np.ones(2)], ["a"], r"prompt 0 must be .*; got array\(\[1., 1.\]\)"),
    ],
    ids=[
        *("counts", "twice", "empty", "too long", "token", "negative", "one name"),
        *("float", "text", "two dims", "float array"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(trace_engine, prompts, ids, message):
    with pytest.raises(ValueError, match=message):
        roll_out(trace_engine, prompts, sample_ids=ids)


@pytest.mark.parametrize("made", [torch.tensor, np.array], ids=["torch", "numpy"])
def test_prompts_that_are_tensors_or_arrays_give_what_lists_give(trace_engine, made):
    prompts = random_prompts(3)
    expected = roll_out(trace_engine, prompts)
    assert_same_rollout(expected, roll_out(trace_engine, [made(prompt) for prompt in prompts]))


def test_a_prompt_that_just_fits_is_used(trace_engine):
    (sample,), _ = roll_out(trace_engine, [[1] * 58])
    assert len(sample.tokens) <= 64


def test_a_sample_that_the_store_has_is_refused_before_it_is_rolled_out(trace_engine):
    _, store = roll_out(trace_engine, [[1]])
    with pytest.raises(ValueError, match="sample s0 has records in the hint store"):
        roll_out(trace_engine, [[1]], store=store)
    store.drop_sample("s0")
    roll_out(trace_engine, [[1]], store=store)


def test_generating_before_calibration_or_weights_is_refused(weights):
    engine = tiny_engine(None)
    with pytest.raises(RuntimeError, match="generate needs the quantisers' global scales"):
        roll_out(engine, [[1]])
    engine = tiny_engine(None, "bf16")
    with pytest.raises(RuntimeError, match="generate needs weights; call push_weights"):
        roll_out(engine, [[1]])
    engine.load_weights(weights)
    with pytest.raises(RuntimeError, match="generate needs weights; call push_weights"):
        roll_out(engine, [[1]])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": 120, "num_attention_heads": 4}, "hidden_size .* site fc1; got 120"),
        ({"moe_ffn_hidden_size": 72}, "moe_ffn_hidden_size .* site fc2; got 72"),
        ({"kv_channels": 24}, "kv_channels .* site k and v; got 24"),
        ({"expert_model_parallel_size": 2}, "on one rank; got expert_model_parallel_size=2"),
    ],
    ids=["fc1", "fc2", "kv", "ep"],
)
def test_a_model_that_cannot_be_rolled_out_is_refused_when_the_engine_is_built(overrides, message):
    with pytest.raises(ValueError, match=message):
        _build(TraceConfig(), **overrides)


@pytest.mark.parametrize(
    ("number_format", "overrides", "message"),
    [
        ("mxfp4", {"kv_channels": 16}, "kv_channels must be a multiple of 32, the block of mxfp4"),
        ("mxfp4", {"moe_ffn_hidden_size": 80}, "of 32, the block of mxfp4, .* site fc2; got 80"),
        ("mxfp4_w4a8", {"moe_ffn_hidden_size": 80}, "of 32, the block of mxfp8, .* site fc2"),
    ],
)
def test_a_width_that_is_not_whole_blocks_of_the_format_is_refused(
    number_format, overrides, message
):
    with pytest.raises(ValueError, match=message):
        _build(TraceConfig(number_format=number_format), **overrides)


def test_a_width_that_is_not_quantised_may_be_any():
    trace = TraceConfig(number_format="mxfp4", quantised_parts="experts")
    assert _build(trace, kv_channels=16).kv_bytes_per_token == 2 * 2 * 2 * 16 * 2


def _build(trace, **overrides):
    return RolloutEngine(
        tiny_moe_config("*E*E", **overrides),
        pattern="*E*E",
        vocab_size=16,
        max_sequence_length=32,
        trace=trace,
        eod_token=15,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"temperature": 0.0}, r"temperature must be at least 1e-6 \(greedy=True"),
        ({"temperature": 1e-40}, "temperature must be at least 1e-6"),
        ({"temperature": float("inf")}, "temperature must be .* finite"),
        ({"top_p": 1.5}, "top_p must be from 0 to 1"),
        ({"top_k": -1}, "top_k must be >= 0"),
        ({"logprobs": "model"}, "logprobs must be sampling or raw"),
        ({"top_logprobs": -1}, "top_logprobs must be >= 0"),
        ({"greedy": True, "top_k": 2}, "greedy=True contradicts"),
    ],
    ids=str,
)
def test_contradictory_sampling_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingSettings(**({"max_new_tokens": 4} | settings))


def _poisoned(weights, name, row, value=float("nan")):
    poisoned = dict(weights)
    poisoned[name] = weights[name].clone()
    poisoned[name][row] = value
    return poisoned


# Only the second prompt has token 7.
PROMPTS = [[1, 2, 3], [4, 7, 5], [1, 2]]
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.mark.parametrize("method", ["trace", "bf16"])
def test_a_nan_names_layer_site_and_sample_and_the_engine_works_again(request, method, weights):
    engine = request.getfixturevalue(f"{method}_engine")
    engine.push_weights(weights, 0)
    expected = roll_out(engine, PROMPTS)
    instances = list(RouterReplay.global_router_replay_instances)
    engine.push_weights(_poisoned(weights, EMBEDDING, 7), 1)
    store = HintStore()
    with pytest.raises(
        RuntimeError, match=r"NaN or Inf .* layer 0, site k, sample s1, position 1 \(1 rows\)"
    ):
        roll_out(engine, PROMPTS, store=store)
    assert len(store) == 0
    assert not InferenceMode.is_active()
    assert RouterReplay.global_router_replay_instances == instances
    engine.push_weights(weights, 0)
    assert_same_rollout(roll_out(engine, PROMPTS), expected)


def test_a_nan_inside_an_expert_names_the_sample_and_leaves_no_quantiser_behind(
    trace_engine, weights
):
    linear = megatron_layers.linear_with_grad_accumulation_and_async_allreduce
    frozen = megatron_layers.linear_with_frozen_weight
    trace_engine.push_weights(weights, 0)
    (sample,), _ = expected = roll_out(trace_engine, [PROMPTS[0]])
    expert = int(sample.routing[2, 0, 0])
    linear_fc1 = trace_engine.layers[0].moe.experts.local_experts[expert].linear_fc1
    linear_fc1.weight.data.fill_(float("nan"))
    users = {int(row) for row in (sample.routing[:3, 0] == expert).any(-1).nonzero()}
    with pytest.raises(
        RuntimeError, match=rf"layer 0, site fc2, sample s0, position {min(users)} "
    ):
        roll_out(trace_engine, [PROMPTS[0]])
    assert megatron_layers.linear_with_grad_accumulation_and_async_allreduce is linear
    assert megatron_layers.linear_with_frozen_weight is frozen
    trace_engine.push_weights(weights, 0)
    assert_same_rollout(roll_out(trace_engine, [PROMPTS[0]]), expected)


def test_without_the_check_logits_that_are_not_finite_are_an_error(weights):
    engine = tiny_engine(weights, "bf16", check_finite=False)
    engine.push_weights(_poisoned(weights, EMBEDDING, 7), 1)
    with pytest.raises(RuntimeError, match="NaN or Inf logits in the rollout"):
        roll_out(engine, PROMPTS)


def test_a_rollout_that_cannot_be_stored_leaves_nothing_in_the_store(trace_engine, weights):
    class FullStore(HintStore):
        def put(self, *args, **kwargs):
            if len(self) == 5:
                raise MemoryError
            super().put(*args, **kwargs)

    trace_engine.push_weights(weights, 0)
    store = FullStore()
    with pytest.raises(MemoryError):
        roll_out(trace_engine, PROMPTS, store=store)
    assert len(store) == 0
    assert_same_rollout(roll_out(trace_engine, PROMPTS), roll_out(trace_engine, PROMPTS))


def test_a_quantiser_that_did_not_run_is_an_error(weights):
    engine = tiny_engine(weights, "qat")
    for layer in engine.layers:
        layer.moe.dispatch_input_quantizer.disable()
    named = "at 2 of 8 places: layer 0 site fc1, layer 1 site fc1;"
    with pytest.raises(RuntimeError, match=f"called no quantiser {named}"):
        roll_out(engine, [[1, 2]])


def test_a_foreign_quantiser_is_an_error(weights):
    engine = tiny_engine(weights, "qat")
    layer = engine.layers[0]
    layer.moe.experts.local_experts[3].linear_fc1.output_quantizer.enable()
    with pytest.raises(RuntimeError, match=r"outside the sites .* enabled: .*output_quantizer"):
        roll_out(engine, [[1, 2]])


def test_a_foreign_quantiser_with_our_backend_cannot_run(weights):
    engine = tiny_engine(weights, "qat")
    quantiser = engine.layers[0].attention.linear_qkv.input_quantizer
    quantiser.backend = BACKEND
    quantiser.enable()
    with pytest.raises(RuntimeError, match="ran outside the sites of TRACE"):
        roll_out(engine, [[1, 2]])


@pytest.mark.parametrize(
    "call", ["push_weights", "load_weights", "calibrate", "generate", "open_session"]
)
def test_what_would_change_a_running_rollout_is_refused_in_its_callbacks(
    trace_engine, weights, other_weights, call
):
    trace_engine.push_weights(weights, 0)
    expected = roll_out(trace_engine, [[1, 2]])
    digest, sampling = trace_engine._weights_digest, SamplingSettings(max_new_tokens=6)
    calls = {
        "push_weights": lambda: trace_engine.push_weights(other_weights, 1),
        "load_weights": lambda: trace_engine.load_weights(other_weights),
        "calibrate": lambda: trace_engine.calibrate([]),
        "generate": lambda: roll_out(trace_engine, [[3]]),
        "open_session": lambda: trace_engine.open_session(
            store=None, sampling=sampling, on_push="keep"
        ),
    }
    with pytest.raises(RuntimeError, match=f"{call} from a callback of generate"):
        trace_engine.generate(
            [[1, 2]],
            ["s0"],
            store=None,
            sampling=sampling,
            seed=0,
            on_tokens=lambda tokens: calls[call](),
        )
    assert trace_engine._weights_digest == digest
    assert_same_rollout(roll_out(trace_engine, [[1, 2]]), expected)


@pytest.mark.parametrize("step", [0, 2])
def test_an_interrupted_rollout_leaves_the_engine_usable(trace_engine, weights, monkeypatch, step):
    trace_engine.push_weights(weights, 0)
    prompts = random_prompts(70)
    expected = roll_out(trace_engine, prompts)
    context = trace_engine._server.context
    steps = []

    def interrupt(*args, **kwargs):
        steps.append(1)
        if len(steps) > step:
            raise KeyboardInterrupt
        return update(*args, **kwargs)

    update = context.update_requests
    with monkeypatch.context() as patch:
        patch.setattr(context, "update_requests", interrupt)
        with pytest.raises(KeyboardInterrupt):
            roll_out(trace_engine, prompts)
    assert not InferenceMode.is_active()
    assert not RouterReplay.global_router_replay_instances
    assert_same_rollout(roll_out(trace_engine, prompts), expected)
