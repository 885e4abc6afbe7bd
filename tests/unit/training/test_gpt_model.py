"""A GPTModel computes what a HybridModel of the pattern `*E*E` does, by the same modules."""

from __future__ import annotations

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
    gpt_compatible_layer_maps,
    retarget_sharded_state_dict_to_gpt_checkpoint,
)

from megatron_trace.compat import checkpoint_writes_in_process
from megatron_trace.config import HINT_SITES, TraceConfig
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.recorded_samples import seen_values
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.testing.tiny_trainer import MAX_SEQUENCE_LENGTH, VOCAB_SIZE
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import build_gpt_trainer_model, token_logprobs
from megatron_trace.training.weights import expert_weight_digest

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


# A Gated DeltaNet in the first layer, full attention in the second.
DELTA_NET = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2}


def _gpt(method, rolled, config=None, **trace):
    torch.manual_seed(1)
    config = config or {}
    # Two decoder layers; the letter G brings the sizes of Gated DeltaNet.
    letters = "GE" if "experimental_attention_variant" in config else "EE"
    model, sites = build_gpt_trainer_model(
        tiny_moe_config(letters, **config),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=MAX_SEQUENCE_LENGTH,
        trace=TraceConfig(method=method, **{"hint_layers": "all", **trace}),
        dtype=torch.float32,
    )
    if sites.quantises:
        sites.settings = rolled.settings
    return model, sites


def _gpt_name(name: str) -> str:
    """Gives the name in a GPTModel of a parameter of a HybridModel `*E*E`."""
    parts = name.replace("decoder.final_norm", "decoder.final_layernorm").split(".")
    if "layers" in parts:
        index = parts.index("layers") + 1
        parts[index] = str(int(parts[index]) // 2)
    return ".".join(parts)


def _trained(model, sites, rolled):
    model.train()
    micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
    with sites.micro_batch(micro_batch), seen_values(sites) as seen:
        logprobs = token_logprobs(model, sites, micro_batch)
    logprobs[micro_batch.loss_mask].sum().backward()
    sites.assert_ran()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return logprobs.detach(), grads, seen, sites.report()


@pytest.mark.parametrize("config", [{}, FULL, DELTA_NET], ids=["plain", "recomputed", "delta-net"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("bf16", {}),
        ("qat", {}),
        ("trace", {"hint_sites": HINT_SITES, "save_packed_activations": True}),
    ],
    ids=["bf16", "qat", "trace"],
)
def test_log_probs_gradients_and_codes_are_those_of_the_hybrid_model(
    build, rollout, method, options, config
):
    pattern = "GE*E" if config is DELTA_NET else "*E*E"
    rolled = rollout(sites=HINT_SITES, pattern=pattern)
    own_config = {} if config is DELTA_NET else config
    hybrid, own = build(
        method, pattern=pattern, settings=rolled.settings, config=own_config, **options
    )
    gpt, sites = _gpt(method, rolled, config, **options)
    with torch.no_grad():
        parameters = dict(gpt.named_parameters())
        for name, parameter in hybrid.named_parameters():
            parameters.pop(_gpt_name(name)).copy_(parameter)
    assert not parameters
    assert sites.shape == own.shape
    logprobs, grads, seen, report = _trained(hybrid, own, rolled)
    again, gpt_grads, gpt_seen, gpt_report = _trained(gpt, sites, rolled)
    assert_same_bytes(again, logprobs, "log-probs")
    for name, grad in grads.items():
        assert_same_bytes(gpt_grads[_gpt_name(name)], grad, name)
    assert gpt_seen.keys() == seen.keys()
    for place, values in seen.items():
        for got, expected in zip(gpt_seen[place].outputs, values.outputs, strict=True):
            assert_same_bytes(got, expected, f"{place}")
    assert gpt_report == report
    if method != "bf16":
        assert expert_weight_digest(gpt, sites) == expert_weight_digest(hybrid, own)


def test_a_gpt_checkpoint_loads_into_the_hybrid_model_by_megatrons_translation(
    build, rollout, tmp_path
):
    """Each expert is a tensor of its own in neither: both stack a layer's experts alike."""
    rolled = rollout()
    gpt, sites = _gpt("trace", rolled)
    with checkpoint_writes_in_process():
        dist_checkpointing.save(gpt.sharded_state_dict(), str(tmp_path))
    hybrid, own = build("trace", settings=rolled.settings)
    state = hybrid.sharded_state_dict()
    maps = gpt_compatible_layer_maps("*E*E")
    retarget_sharded_state_dict_to_gpt_checkpoint(state, maps)
    hybrid.load_state_dict(dist_checkpointing.load(state, str(tmp_path)))
    expected = dict(gpt.named_parameters())
    for name, parameter in hybrid.named_parameters():
        assert_same_bytes(parameter, expected[_gpt_name(name)], name)
    logprobs = [_trained(*pair, rolled)[0] for pair in ((gpt, sites), (hybrid, own))]
    assert_same_bytes(logprobs[1], logprobs[0], "log-probs")


@pytest.mark.parametrize(
    ("config", "name"),
    [({"moe_layer_freq": [1, 0]}, "moe_layer_freq"), ({"mtp_num_layers": 1}, "mtp_num_layers")],
)
def test_layers_of_several_kinds_are_refused(rollout, config, name):
    with pytest.raises(ValueError, match=f"{name}=.*HybridModel"):
        _gpt("bf16", None, config)


def test_another_variant_of_attention_is_refused():
    with pytest.raises(ValueError, match="got experimental_attention_variant=dsa"):
        _gpt("bf16", None, {"experimental_attention_variant": "dsa"})


def test_a_choice_of_kernels_without_a_layer_that_has_them_is_refused():
    with pytest.raises(ValueError, match="delta_rule=torch has no effect"):
        _gpt("bf16", None, delta_rule="torch")
