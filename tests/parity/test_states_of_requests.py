"""States of Gated DeltaNets follow their requests: an FP32 engine = the FP32 full forward.

In FP32, what a wrong, lost or mixed state changes cannot hide in roundings: log-probs agree to 1e-6
however requests are queued, packed, cut in chunks, evicted, or continued from the prefix cache.
"""

from __future__ import annotations

import pytest
import torch

from megatron_trace.compat import inference_mode_of_process
from megatron_trace.config import TraceConfig
from megatron_trace.models.hybrid import build_hybrid_model, causal_mask
from megatron_trace.rollout.model import engine_modules
from megatron_trace.rollout.recorder import Recorder
from megatron_trace.rollout.sampling import SamplingSettings
from megatron_trace.rollout.serving import EngineLimits, Server
from megatron_trace.rollout.sites import RolloutSites
from megatron_trace.testing.assertions import tolerance
from megatron_trace.testing.single_process import QWEN_FIELDS, tiny_moe_config

PATTERN = "GEGEGE*E"
MAX_SEQUENCE_LENGTH = 192
EOD = 15
# Log-probs of about 2.8; a full forward and a decode step add up in other orders. Measured: 4.8e-7.
TOLERANCE = tolerance(cpu=1e-6, gpu=1e-5)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = build_hybrid_model(
        tiny_moe_config(PATTERN, **QWEN_FIELDS),
        pattern=PATTERN,
        vocab_size=EOD + 1,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        modules=engine_modules(
            # What is tested is where states are; fla's products are TF32.
            delta_rule="torch",
        ),
        rotary_percent=0.25,
    )
    return model.eval().requires_grad_(False)


@pytest.fixture
def server(model):
    """Gives a server of the model with pages of 16 tokens and room for 4 requests."""

    def build(**limits):
        limits = {"max_requests": 4, "block_size_tokens": 16, **limits}
        return Server(
            model,
            RolloutSites(TraceConfig(method="bf16"), Recorder([])),
            packed=False,
            eod_token=EOD,
            limits=EngineLimits(MAX_SEQUENCE_LENGTH, **limits),
        )

    return build


def _prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, EOD, (n,), generator=generator).tolist() for n in lengths]


def _serve(server, prompts, new_tokens=8, stop_tokens=(), next_turn=None):
    sampling = SamplingSettings(max_new_tokens=new_tokens, stop_tokens=stop_tokens)
    names = [f"s{number}" for number in range(len(prompts))]
    return server.run(
        prompts,
        names,
        sampling=sampling,
        seeds=range(len(prompts)),
        keep=False,
        next_turn=next_turn,
    )


def _largest_distance(model, served):
    """Gives the largest difference of a log-prob from that of one forward of the whole sample."""
    worst = 0.0
    for sample in served:
        tokens = torch.tensor([sample.tokens], device=torch.cuda.current_device())
        size = tokens.shape[1] - 1
        positions = torch.arange(size, device=tokens.device)[None]
        logits = model(tokens[:, :-1], positions, causal_mask(size).to(tokens.device))[0]
        chosen = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        expected = chosen[sample.num_prompt_tokens - 1 :].cpu()
        assert len(expected) == len(sample.sampled.logprobs)
        distances = (sample.sampled.logprobs - expected).abs()
        if sample.given is not None:
            distances = distances[sample.given == 0]
        worst = max(worst, distances.max().item())
    return worst


QUEUED = _prompts(1, 2, 3, 4, 5, 17, 33, 64, 70)
LONG = _prompts(150, 4, 130, 100)


def test_queued_and_packed_requests(model, server):
    """Nine requests in four slots; prompts shorter than the convolution, and of several pages."""
    assert _largest_distance(model, _serve(server(), QUEUED)) < TOLERANCE


def test_prompts_in_chunks(model, server):
    """Of at most 64 tokens, beside requests that decode."""
    small = server(max_step_tokens=64)
    assert small.context.max_tokens == 64
    assert _largest_distance(model, _serve(small, LONG)) < TOLERANCE


@pytest.mark.parametrize("lost", ["mamba_conv_states", "mamba_ssm_states"])
def test_a_state_lost_between_chunks_is_seen(model, server, monkeypatch, lost):
    """The control of the tests of this file."""
    small = server(max_step_tokens=64)
    prepare = small.context.initialize_attention_state

    def forget_and_prepare(**kwargs):
        getattr(small.context, lost).zero_()
        return prepare(**kwargs)

    monkeypatch.setattr(small.context, "initialize_attention_state", forget_and_prepare)
    # Measured: .13 without the convolution's, 7e-3 without the recurrent one.
    assert _largest_distance(model, _serve(small, LONG)) > 100 * TOLERANCE


def test_a_prefix_in_the_cache_continues_from_its_states(model, server):
    """Prompts that begin alike, in one rollout and in the next."""
    cached = server(prefix_caching=True)
    (prefix,) = _prompts(83)
    first, second = ([prefix + rest for rest in _prompts(3, 9, 40, seed=s)] for s in (1, 2))
    assert _largest_distance(model, _serve(cached, first)) < TOLERANCE
    assert _largest_distance(model, _serve(cached, second)) < TOLERANCE
    # Five pages of 16 tokens, of each of the three prompts.
    assert cached.context.counts["prefix_tokens"] == 3 * 80


def test_a_prompt_one_token_longer_than_its_pages_starts_from_states_that_were_kept(model, server):
    """Megatron computes at least two tokens; it would skip to a page without states."""
    cached = server(prefix_caching=True)
    prompts = _prompts(49) * 3
    assert _largest_distance(model, _serve(cached, prompts)) < TOLERANCE
    assert _largest_distance(model, _serve(cached, prompts)) < TOLERANCE


def test_chunks_and_prefixes_together(model, server):
    cached = server(prefix_caching=True, max_step_tokens=64)
    (prefix,) = _prompts(130)
    for seed in (1, 2, 3):
        prompts = [
            prefix[:cut] + r
            for cut, r in zip((130, 64, 100), _prompts(3, 30, 9, seed=seed), strict=True)
        ]
        assert _largest_distance(model, _serve(cached, prompts)) < TOLERANCE
    assert cached.context.counts["prefix_tokens"] > 0


@pytest.mark.parametrize("limits", [{}, {"max_step_tokens": 64}], ids=["whole", "in chunks"])
def test_evicted_requests_go_on_with_their_states(model, server, limits):
    """The cache holds less than the requests need, so that some leave it for host memory."""
    crowded = server(cache_tokens=MAX_SEQUENCE_LENGTH + 16, **limits)
    assert _largest_distance(model, _serve(crowded, _prompts(45, 47, 60, 46, 62))) < TOLERANCE
    assert crowded.context.counts["evictions"] > 0


def test_chunks_prefixes_and_evictions_at_once(model, server):
    """An evicted request has found a prefix before, and comes back with the states it left with."""
    crowded = server(prefix_caching=True, max_step_tokens=64, cache_tokens=18 * 16)
    (prefix,) = _prompts(83)
    prompts = [prefix + rest for rest in _prompts(3, 9, 40, 5, 7, 22)]
    assert _largest_distance(model, _serve(crowded, prompts, new_tokens=40)) < TOLERANCE
    assert crowded.context.counts["evictions"] > 0
    assert crowded.context.counts["prefix_tokens"] > 0


@pytest.mark.parametrize(
    "limits",
    [{}, {"prefix_caching": True, "max_step_tokens": 64, "cache_tokens": 14 * 16}],
    ids=["with room", "crowded"],
)
def test_a_turn_that_follows_continues_from_the_states_of_the_last(model, server, limits):
    def next_turn(turn):
        return [1, 2, 3, 4, 5] if turn.number < 4 else None

    # Every second token ends a turn.
    served = _serve(
        server(**limits),
        _prompts(3, 20, 50, 16, 33),
        30,
        stop_tokens=tuple(range(8)),
        next_turn=next_turn,
    )
    assert sum(sample.given is not None and int(sample.given.sum()) == 15 for sample in served) >= 3
    assert _largest_distance(model, served) < TOLERANCE


def test_case_25_buffers_that_move_between_rollouts_are_found(model, server):
    """A suspended engine may come back with other memory, and in it what others left there."""
    moved = server()
    before = _serve(moved, QUEUED)
    with inference_mode_of_process():
        moved._engine.suspend()
        moved._engine.resume()
    for name in ("mamba_conv_states", "mamba_ssm_states"):
        states = getattr(moved.context, name)
        setattr(moved.context, name, torch.full_like(states, torch.nan))
    after = _serve(moved, QUEUED)
    for ours, theirs in zip(after, before, strict=True):
        assert ours.tokens == theirs.tokens
        assert torch.equal(ours.sampled.logprobs, theirs.sampled.logprobs)


def test_the_cache_has_the_pages_that_were_asked_for_beside_the_states(server):
    context = server().context
    assert context.kv_block_allocator.total_count == 4 * MAX_SEQUENCE_LENGTH // 16 + 1
    # 3 layers, 4 requests; 256 channels x 4 taps, 8 heads x 16 x 16.
    assert context.mamba_conv_states.shape == (3, 4, 256, 4)
    assert context.mamba_ssm_states.shape == (3, 4, 8, 16, 16)
    assert context.mamba_ssm_states.dtype == torch.float32


def test_speculative_decoding_is_refused(server, monkeypatch):
    speculative = server()
    monkeypatch.setattr(speculative.context, "num_speculative_tokens", 2)
    with pytest.raises(ValueError, match="num_speculative_tokens=2 is not supported with Gated"):
        _serve(speculative, QUEUED[:1])
