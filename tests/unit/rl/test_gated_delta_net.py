"""An RL run of a block of Qwen3.5: Gated DeltaNet, gated attention, experts beside a shared one."""

import pytest
import torch

from megatron_trace.config import HINT_SITES, TraceConfig
from megatron_trace.rl.optimizer import OptimizerSettings
from megatron_trace.rl.run import RunSettings, build_run, calibration_batches, start
from megatron_trace.rl.step import rl_step
from megatron_trace.testing.single_process import QWEN_FIELDS, tiny_moe_config
from megatron_trace.testing.sums import CONTEXT, ITEMS, TOKENIZER, warm_weights

PATTERN = "GEGEGE*E"
ROTARY = {"rotary_percent": 0.25, "rotary_base": 10_000_000}


@pytest.fixture(scope="module")
def weights(one_process):
    return warm_weights(tiny_moe_config(PATTERN, **QWEN_FIELDS), pattern=PATTERN, **ROTARY)


@pytest.fixture
def run(weights):
    run = build_run(
        RunSettings(
            trace=TraceConfig(hint_layers="all", hint_sites=HINT_SITES, diagnostic_share=0.5),
            optimizer=OptimizerSettings(learning_rate=3e-4),
            prompts_per_step=4,
            samples_per_prompt=8,
            micro_batch_samples=8,
            max_response_tokens=3,
            context=CONTEXT,
            # Fewer than the 32 samples of a step: slots of states are used again.
            max_requests=8,
        ),
        tiny_moe_config(PATTERN, **QWEN_FIELDS),
        pattern=PATTERN,
        items=ITEMS,
        tokenizer=TOKENIZER,
        **ROTARY,
    )
    start(run, weights, calibration_batches(ITEMS, TOKENIZER, num_samples=10))
    return run


def test_two_steps_train_every_mixer_and_follow_the_rollouts_codes(run):
    before = {name: value.clone() for name, value in run.named_weights().items()}
    for version in range(2):
        metrics = rl_step(run)
        assert metrics["policy_version"] == version
        assert metrics["groups_with_spread"] > 0, "the weights must give mixed rewards"
        quantisers = metrics["quantisers"]
        for site, codes in quantisers["code_mismatch"].items():
            assert codes["guided_values"] == codes["values"] > 0, site
            assert codes["guided_different"] == 0, site
        for site, counts in quantisers["sites"].items():
            assert counts["coverage"] == 1.0, site
        # K and V of one layer, the inputs of four layers' experts.
        calls = {site: counts["calls"] for site, counts in quantisers["sites"].items()}
        assert calls["fc1"] == 4 * calls["k"] == 4 * calls["v"]
        assert metrics["gap"]["mean"] < 1e-3  # measured 7e-6 and 1.3e-5
    # Norms and decays are near 1, where a BF16 value has no room for two small steps.
    matrices = [
        n for n in before if ".self_attention." in n and n.endswith(("proj.weight", "1d.weight"))
    ]
    assert len(matrices) == 3 * 3 + 1
    after = run.named_weights()
    assert not [name for name in matrices if torch.equal(after[name], before[name])]
