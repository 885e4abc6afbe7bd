"""Parity of a block of Qwen3.5, `GEGEGE*E`: decode = full forward, and the trainer = the engine.

Log-probs are compared, not tokens: a lost recurrent state can leave greedy tokens as they are.
Numbers in comments were measured on an AMD EPYC with AVX-512 BF16; after a semicolon on an H200,
where fla multiplies other blocks of tokens in a prefill than in a decode, and rounds between.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from modelopt.torch.quantization.nn import TensorQuantizer

from megatron_trace.config import HINT_SITES
from megatron_trace.hints.types import Site
from megatron_trace.metrics import logprob_gap
from megatron_trace.models.gated_delta_net import LocalGatedDeltaNet
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model, causal_mask
from megatron_trace.models.norm import UncentredRMSNorm
from megatron_trace.rollout import SamplingSettings
from megatron_trace.rollout.gated_delta_net import EngineGatedDeltaNet, delta_nets
from megatron_trace.testing.assertions import assert_same_bytes, tolerance
from megatron_trace.testing.single_process import QWEN_FIELDS, tiny_moe_config
from megatron_trace.testing.tiny_rollout import (
    MAX_SEQUENCE_LENGTH,
    VOCAB_SIZE,
    random_prompts,
    roll_out,
    tiny_engine,
    tiny_weights,
)
from megatron_trace.testing.tiny_trainer import copy_weights, tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs

QWEN = {"pattern": "GEGEGE*E", "config": QWEN_FIELDS}
ROTARY = {"rotary_percent": 0.25}
GUIDED = (Site.FC1, Site.K, Site.V)


@pytest.fixture(scope="module")
def weights():
    """BF16 values in FP32, so that models of either dtype start from the same numbers."""
    return {n: value.bfloat16().float() for n, value in tiny_weights(seed=1, **QWEN).items()}


@pytest.fixture(scope="module")
def plain_engine(weights):
    return tiny_engine(weights, "bf16", max_requests=8, **QWEN, **ROTARY)


def _sampled(engine):
    """More requests than slots; prompts shorter than the convolution and longer than a page."""
    prompts = [*random_prompts(6, longest=3), *random_prompts(10, shortest=20, longest=40)]
    return roll_out(engine, prompts, max_new_tokens=16)[0]


@pytest.fixture(scope="module")
def samples(plain_engine):
    return _sampled(plain_engine)


def _model(weights, dtype):
    model = build_hybrid_model(
        tiny_moe_config(QWEN["pattern"], **QWEN_FIELDS, params_dtype=dtype),
        pattern=QWEN["pattern"],
        vocab_size=VOCAB_SIZE,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        modules=HybridModules(),
        **ROTARY,
    )
    copy_weights(model, weights)
    return model


@pytest.fixture(scope="module")
def full_forward(weights, samples):
    """Gives the samples' log-probs in one forward of whole sequences, by dtype."""

    def logprobs(dtype):
        model, results = _model(weights, dtype), []
        for sample in samples:
            tokens = torch.tensor(
                [[*sample.prompt_tokens, *sample.response_tokens]],
                device=torch.cuda.current_device(),
            )
            size = tokens.shape[1] - 1
            with torch.no_grad():
                positions = torch.arange(size, device=tokens.device)[None]
                mask = causal_mask(size).to(tokens.device)
                logits = model(tokens[:, :-1], positions, mask)[0].float()
            chosen = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
            results.append(chosen[len(sample.prompt_tokens) - 1 :].cpu())
        return torch.cat(results)

    return {dtype: logprobs(dtype) for dtype in (torch.bfloat16, torch.float32)}


@pytest.fixture(scope="module")
def floor(full_forward):
    """Mean distance of BF16 from FP32, both in one forward: what rounding alone does."""
    return (full_forward[torch.bfloat16] - full_forward[torch.float32]).abs().mean()


def _distance(samples, expected):
    return (torch.cat([sample.logprobs for sample in samples]) - expected).abs()


def test_decode_after_prefill_gives_the_log_probs_of_a_full_forward(samples, full_forward, floor):
    distance = _distance(samples, full_forward[torch.bfloat16])
    # Measured: mean 2e-4, largest 4.6e-3, where BF16 is 2e-2 from FP32 (5e-3 without the layer);
    # 1.4e-2 of 2e-2, the largest at least 9.5e-2.
    assert distance.mean() < tolerance(cpu=0.05, gpu=1) * floor
    assert distance.max() < tolerance(cpu=2e-2, gpu=0.3)


@pytest.mark.parametrize("lost", ["conv", "recurrent"])
def test_a_lost_state_is_seen_in_the_log_probs(
    plain_engine, full_forward, floor, samples, monkeypatch, lost
):
    """The control of the test above: it would fail."""
    step = EngineGatedDeltaNet._step

    def forgetting_step(self, projected, conv, recurrent, slots, bounds=None):
        mixed = step(self, projected, conv, recurrent, slots, bounds)
        {"conv": conv, "recurrent": recurrent}[lost][slots] = 0
        return mixed

    monkeypatch.setattr(EngineGatedDeltaNet, "_step", forgetting_step)
    forced = _sampled(plain_engine)
    # Until the first difference both sampled the same tokens, whose log-probs are compared.
    distances = []
    for ours, theirs in zip(forced, samples, strict=True):
        same = [a == b for a, b in zip(ours.response_tokens, theirs.response_tokens, strict=False)]
        count = next((i for i, equal in enumerate(same) if not equal), len(same))
        distances.append((ours.logprobs[:count] - theirs.logprobs[:count]).abs())
    # Measured: .16 without the convolution's state, .09 without the recurrent one.
    assert torch.cat(distances).mean() > 2 * floor


def test_a_second_rollout_starts_from_empty_states(plain_engine, samples):
    """Case 25, as far as it goes without suspension: slots keep what the first left there."""
    again = _sampled(plain_engine)
    assert [s.response_tokens for s in again] == [s.response_tokens for s in samples]
    for ours, theirs in zip(again, samples, strict=True):
        assert torch.equal(ours.logprobs, theirs.logprobs)


def test_the_digest_of_a_plain_push_covers_the_layers_parameters(plain_engine, weights):
    before = plain_engine.push_weights(weights, policy_version=0)
    for name in ("A_log", "dt_bias", "conv1d.weight", "in_proj.weight", "out_norm.weight"):
        full = f"decoder.layers.2.self_attention.{name}"
        changed = weights | {full: weights[full] + 0.25}
        assert plain_engine.push_weights(changed, policy_version=1) != before, name
    assert plain_engine.push_weights(weights, policy_version=0) == before


def test_a_push_without_a_parameter_of_the_layer_is_refused(plain_engine, weights):
    lacking = {n: w for n, w in weights.items() if n != "decoder.layers.0.self_attention.dt_bias"}
    with pytest.raises(ValueError, match=r"1 of \d+ pushed parameters are missing"):
        plain_engine.push_weights(lacking, policy_version=1)


@pytest.fixture(scope="module")
def engine(weights):
    return tiny_engine(
        weights, hint_layers="all", hint_sites=HINT_SITES, diagnostic_share=1.0, **QWEN, **ROTARY
    )


@pytest.fixture(scope="module")
def rollout(engine):
    return roll_out(engine, random_prompts(16, shortest=16, longest=30), max_new_tokens=20)


def _score(weights, engine, rollout, method, **options):
    """Gives the gap of a trainer's log-probs to the rollout's, and its report."""
    model, sites = tiny_trainer(
        method,
        weights=weights,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        settings=engine.settings,
        **QWEN,
        **ROTARY,
        **{"dtype": torch.bfloat16, **options},
    )
    sites.diagnostics = method != "bf16"
    samples, store = rollout
    micro_batch = make_micro_batch(samples, store, sites)
    with torch.no_grad(), sites.micro_batch(micro_batch):
        logprobs = token_logprobs(model, sites, micro_batch)
    gap = logprob_gap(micro_batch.rollout_logprobs, logprobs, micro_batch.loss_mask)
    return gap, sites.report()


@pytest.fixture(scope="module")
def run(weights, engine, rollout):
    """Gives a function that scores the rollout by a trainer of a method."""
    return partial(_score, weights, engine, rollout)


def assert_as_recorded(counts):
    """Codes are the rollout's; on a GPU but for values that moved beyond what a bit can tell."""
    assert counts.unexplained == counts.misread_scale == 0
    # Measured 0; 9.0e-5, and of what rounding to nearest gives another code 8e-3.
    assert counts.guided_share <= tolerance(cpu=0, gpu=3e-4)
    assert counts.guided_different <= tolerance(cpu=0, gpu=0.03) * counts.rtn_different


@pytest.mark.parametrize("attention", ["sdpa", "megatron"])
def test_guided_codes_are_the_rollouts(run, attention):
    _, report = run("trace", attention=attention)
    for site in GUIDED:
        counts = report.code_mismatch[site]
        assert counts.guided_values == counts.values > 0
        assert report.sites[site].coverage == 1.0
        assert_as_recorded(counts)  # of 605,184 (fc1), 75,648 (k, v); 265,728 (fc1)


def test_records_of_shared_cut_and_evicted_requests_guide_a_trainer_to_their_codes(weights):
    """Prompts that begin alike, chunks of 64 tokens, and pages for some of the requests only."""
    limits = {"prefix_caching": True, "max_step_tokens": 64, "cache_tokens": 17 * 16}
    recorded = {"hint_layers": "all", "hint_sites": HINT_SITES, "diagnostic_share": 1.0}
    engine = tiny_engine(weights, limits=limits, max_requests=20, **recorded, **QWEN, **ROTARY)
    long = random_prompts(5, shortest=32, longest=48)
    prompts = [*long, long[0][:16] + long[1][16:], [*long[2][:33], 1, 2, 3]]
    for seed in (0, 1):
        rollout = roll_out(engine, prompts, seed=seed, max_new_tokens=14, samples_per_prompt=3)
        assert engine.report.num_evictions > 0
        assert engine.report.prefix_tokens > 0
        gap, report = _score(weights, engine, rollout, "trace")
        for site in GUIDED:
            assert_as_recorded(report.code_mismatch[site])
            assert report.sites[site].coverage == 1.0
        assert gap.mean < tolerance(cpu=3e-3, gpu=5e-2)  # measured 3e-4 and 4e-4; not measured


def test_weights_that_are_pushed_leave_no_state_of_the_old_ones(weights):
    """The prefix cache's states would be found by the same prompts."""
    changed = {name: value * 1.01 for name, value in weights.items()}
    prompts = random_prompts(4, shortest=40, longest=48)
    caching = {"limits": {"prefix_caching": True}, **QWEN, **ROTARY}
    used = tiny_engine(weights, "bf16", **caching)
    roll_out(used, prompts)
    used.push_weights(changed, policy_version=1)
    fresh = tiny_engine(changed, "bf16", **caching)
    for ours, theirs in zip(roll_out(used, prompts)[0], roll_out(fresh, prompts)[0], strict=True):
        assert ours.response_tokens == theirs.response_tokens
        assert torch.equal(ours.logprobs, theirs.logprobs)


def test_guidance_closes_the_gap_to_the_rollout(run):
    """With Megatron's attention, which rounds elsewhere than the engine's."""
    trace, qat, bf16 = (run(m, attention="megatron")[0] for m in ("trace", "qat", "bf16"))
    # Measured: 1.7e-3, 3.6e-3, 9.3e-2; of qat and bf16 4.0e-2 and .103.
    assert trace.mean < 0.75 * qat.mean
    assert qat.mean < tolerance(cpu=0.2, gpu=0.5) * bf16.mean
    assert trace.max <= tolerance(cpu=5e-2, gpu=0.3)  # measured 1.6e-2; not measured


def test_of_an_fp32_trainers_codes_every_exception_is_explained(run):
    """Its activations are 1 % from the engine's BF16 ones here, so that a bit cannot see all."""
    _, report = run("trace", dtype=torch.float32)
    for site in GUIDED:
        counts = report.code_mismatch[site]
        assert counts.guided_share <= 5e-3  # measured 1.7e-3, without guidance 7e-2
        assert counts.rtn_different > 10 * counts.guided_different
        assert counts.unexplained == 0


def test_nothing_of_a_gated_delta_net_is_quantised(engine, weights):
    nets = delta_nets(engine.model)
    assert len(nets) == 3
    for number, net in zip((0, 2, 4), nets, strict=True):
        enabled = [
            name
            for name, module in net.named_modules()
            if isinstance(module, TensorQuantizer) and module.is_enabled
        ]
        assert not enabled
        for name, parameter in net.named_parameters():
            pushed = weights[f"decoder.layers.{number}.self_attention.{name}"].bfloat16()
            assert_same_bytes(parameter.detach().cpu(), pushed, name)
    cached = {layer for layer, site in engine.sites.calls if site in (Site.K, Site.V)}
    assert cached == {3}


def test_a_trainers_gated_delta_nets_are_plain_and_have_no_site():
    model, sites = tiny_trainer("trace", **QWEN)
    experts = {(layer, site) for layer in range(4) for site in (Site.FC1, Site.FC2)}
    assert set(sites.shape.places) == experts | {(3, Site.K), (3, Site.V)}
    assert sites.shape.attention_layers == (3,)
    for layer in model.decoder.layers[0:6:2]:
        kinds = {type(module) for module in layer.self_attention.modules()}
        plain = {ColumnParallelLinear, RowParallelLinear, torch.nn.Conv1d, UncentredRMSNorm}
        assert kinds == plain | {LocalGatedDeltaNet}


@pytest.mark.parametrize("on_push", ["keep", "recompute"])
def test_a_push_amid_samples_keeps_their_states_or_computes_them_anew(weights, on_push):
    """After it, a recomputed sample goes on as one that the new weights prefill at once."""
    changed = {name: value + 0.05 * value.abs().mean() for name, value in weights.items()}
    engine = tiny_engine(weights, "bf16", eod_token=VOCAB_SIZE, **QWEN, **ROTARY)
    prompts = random_prompts(2, shortest=6, longest=9)
    session = engine.open_session(
        store=None, sampling=SamplingSettings(max_new_tokens=6, greedy=True), on_push=on_push
    )
    session.add(prompts, ["s0", "s1"], seed=0)
    for _ in range(4):
        session.step()
    engine.push_weights(changed, policy_version=1)
    while session.num_unfinished:
        session.step()
    samples = session.take(["s0", "s1"])
    session.close()
    for sample in samples:
        so_far = sample.tokens[: len(sample.prompt_tokens) + 4]
        (again,), _ = roll_out(engine, [so_far], max_new_tokens=1, greedy=True)
        distance = (again.logprobs[0] - sample.logprobs[4]).abs().item()
        if on_push == "recompute":
            assert again.response_tokens[0] == sample.response_tokens[4]
            assert distance <= 3e-2  # measured 0
        else:
            assert distance > 3e-2  # measured .09 and .3: states of the old weights
