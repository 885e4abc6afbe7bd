"""Every preset at reduced size, of its own pattern and ratios: rolled out and trained on a CPU."""

import pytest
import torch

from megatron_trace.config import HINT_SITES, TraceConfig
from megatron_trace.models.local_config import architecture_config
from megatron_trace.models.presets import NAME_2_4T, PRESETS, UNKNOWN_FIELDS, preset
from megatron_trace.rl.optimizer import OptimizerSettings
from megatron_trace.rl.run import RunSettings, build_run, calibration_batches, start
from megatron_trace.rl.step import rl_step
from megatron_trace.testing.sums import CONTEXT, ITEMS, TOKENIZER, warm_weights

# Of no published configuration: any that fit do for what is tested here.
GDN_2_4T = dict(zip(UNKNOWN_FIELDS[NAME_2_4T], (16, 64, 128, 128), strict=True))


@pytest.mark.parametrize(
    "architecture", [*PRESETS.values(), preset(NAME_2_4T, **GDN_2_4T)], ids=lambda a: a.name
)
def test_two_steps_roll_out_and_train_under_the_rollouts_codes(architecture, one_rank):
    small = architecture.reduced()
    rotary = {"rotary_percent": small.rope_share, "rotary_base": small.rope_base}
    weights = warm_weights(architecture_config(small), pattern=small.pattern(), **rotary)
    run = build_run(
        RunSettings(
            trace=TraceConfig(hint_layers="all", hint_sites=HINT_SITES, diagnostic_share=0.5),
            optimizer=OptimizerSettings(learning_rate=3e-4),
            prompts_per_step=4,
            samples_per_prompt=8,
            micro_batch_samples=16,
            max_response_tokens=3,
            context=CONTEXT,
            # Fewer than the 32 samples of a step: slots of states are used again.
            max_requests=8,
        ),
        architecture_config(small),
        pattern=small.pattern(),
        items=ITEMS,
        tokenizer=TOKENIZER,
        **rotary,
    )
    start(run, weights, calibration_batches(ITEMS, TOKENIZER, num_samples=10))
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
        # K and V of the attention layers, the inputs of the experts of all.
        calls = {site: counts["calls"] for site, counts in quantisers["sites"].items()}
        attentions, experts = map(small.pattern().count, "*E")
        assert calls["k"] == calls["v"] == calls["fc1"] * attentions // experts > 0
        # Measured: 9e-5 to 5.2e-4, of about 70 tokens; 1.0e-3 in one of twenty steps, whose largest
        # is .009. Rounding to nearest gives the demo .03.
        assert metrics["gap"]["mean"] < 2e-3
    # Norms and decays are near 1, where a BF16 value has no room for two small steps.
    matrices = [name for name in before if name.endswith(("proj.weight", "1d.weight"))]
    assert len(matrices) >= 3 * small.pattern().count("G") + attentions
    after = run.named_weights()
    assert not [name for name in matrices if torch.equal(after[name], before[name])]
