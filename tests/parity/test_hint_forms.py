"""Parity with smaller hints: 2 bits, or residues of block scales, give the engine's codes too."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.hints import Site
from megatron_trace.testing.tiny_rollout import (
    MAX_SEQUENCE_LENGTH,
    random_prompts,
    roll_out,
    tiny_engine,
    tiny_weights,
)
from megatron_trace.testing.tiny_trainer import tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs


@pytest.fixture(scope="module")
def weights():
    """BF16 values in FP32, so that a trainer of either dtype starts from the engine's bits."""
    return {name: value.bfloat16().float() for name, value in tiny_weights(seed=1).items()}


@pytest.fixture(scope="module")
def score(weights):
    """Gives a function that rolls out and scores with hints of a form, once for each form."""
    known = {}

    def scored(hint_bits, hint_scales):
        form = {"hint_bits": hint_bits, "hint_scales": hint_scales}
        if not known.get((hint_bits, hint_scales)):
            engine = tiny_engine(
                weights, hint_layers="all", hint_sites=HINT_SITES, diagnostic_share=1.0, **form
            )
            samples, store = roll_out(engine, random_prompts(8, longest=8))
            model, sites = tiny_trainer(
                "trace",
                weights=weights,
                max_sequence_length=MAX_SEQUENCE_LENGTH,
                settings=engine.settings,
                dtype=torch.float32,
                hint_sites=HINT_SITES,
                **form,
            )
            sites.diagnostics = True
            micro_batch = make_micro_batch(samples, store, sites)
            with torch.no_grad(), sites.micro_batch(micro_batch):
                logprobs = token_logprobs(model, sites, micro_batch)
            sites.assert_ran()
            tokens = [sample.tokens for sample in samples]
            num_bytes = sum(rows.stored_bytes for rows in micro_batch.hints.values())
            known[hint_bits, hint_scales] = tokens, num_bytes, logprobs, sites.report()
        return known[hint_bits, hint_scales]

    return scored


# Values of a token: fc1 128, fc2 4 x 64, k and v 64 each, 2 layers; bytes as stored.
@pytest.mark.parametrize(
    ("hint_bits", "hint_scales", "num_bytes"),
    [(1, "residue", 154), (2, "raw", 320), (2, "residue", 282), (4, "residue", 538)],
)
def test_codes_scales_and_log_probs_are_those_of_full_codes(
    score, hint_bits, hint_scales, num_bytes
):
    tokens, got_bytes, logprobs, report = score(hint_bits, hint_scales)
    expected_tokens, _, expected, _ = score(4, "raw")
    assert tokens == expected_tokens
    assert got_bytes == num_bytes
    for site in Site:
        counts = report.code_mismatch[site]
        assert counts.guided_values == counts.values > 0
        # Measured 0: the trainer computes in FP32 what the engine did in BF16.
        assert counts.guided_share <= 1e-4
        assert (counts.misread_scale, counts.unexplained) == (0, 0)
        assert report.sites[site].coverage == 1.0
    assert (logprobs - expected).abs().max() <= 1e-5  # measured 0
