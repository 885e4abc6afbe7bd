"""A trainer with Transformer Engine's experts gives what one with local experts gives.

Transformer Engine's own code runs, under a stand-in for its CUDA products (`te_on_cpu`). On a GPU
`tools/check_te_trainer.py` runs the same, within tolerances: its products round in another order.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "transformer_engine.pytorch", reason="Transformer Engine is not installed", exc_type=ImportError
)

from megatron.core import dist_checkpointing

from megatron_trace import compat
from megatron_trace.config import TraceConfig
from megatron_trace.models.expert_names import local_name
from megatron_trace.testing import cpu_runtime
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.recorded_samples import seen_values
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.testing.te_on_cpu import te_on_cpu
from megatron_trace.testing.te_trainer import (
    load_local,
    local_weights,
    train_steps,
    trainer_with,
)
from megatron_trace.testing.tiny_trainer import (
    MAX_SEQUENCE_LENGTH,
    VOCAB_SIZE,
    recorded_rollout,
    tiny_trainer,
)
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import (
    build_gpt_trainer_model,
    build_trainer_model,
    token_logprobs,
)
from megatron_trace.training.te_choice import FAKE_FACTORY, NVFP4_FACTORY
from megatron_trace.training.te_specs import UnweightedTEGroupedMLP
from megatron_trace.training.weights import expert_weight_digest

KINDS = ("te", "te_recipe")
RECIPE = {"fp4": "e2m1", "fp4_recipe": "custom", "fp4_quantizer_factory": FAKE_FACTORY}
SITES = ("fc1", "fc2", "k", "v")
FULL_RECOMPUTATION = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

bits_of_the_stand_in = pytest.mark.skipif(
    not cpu_runtime.is_installed(),
    reason="equal bits of te_on_cpu's products; on a GPU tools/check_te_trainer.py compares",
)


@pytest.fixture(scope="module", autouse=True)
def _te(_one_rank):
    with te_on_cpu():
        yield


@pytest.fixture(scope="module")
def rolled():
    """Samples of 5 of the 16 experts, so that most get no token."""
    return recorded_rollout(num_experts=5, sites=SITES, codes=True)


@pytest.fixture(scope="module")
def weights():
    return local_weights(tiny_trainer(dtype=torch.bfloat16)[0])


@pytest.fixture(scope="module")
def local(rolled, weights):
    return train_steps(*trainer_with("local", rolled, weights), rolled)


@bits_of_the_stand_in
@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_give_the_bits_of_local_experts(rolled, weights, local, kind):
    ours = train_steps(*trainer_with(kind, rolled, weights), rolled)
    assert ours.digests == local.digests
    assert len(set(ours.digests)) == 3
    for got, expected in zip(ours.logprobs, local.logprobs, strict=True):
        assert_same_bytes(got, expected, "log-probs")
    for step in (0, 1):
        assert ours.gradients[step].keys() == local.gradients[step].keys()
        for name, expected in local.gradients[step].items():
            assert_same_bytes(ours.gradients[step][name], expected, f"step {step}, {name}")


@bits_of_the_stand_in
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_a_gated_delta_net_gives_the_bits_of_local_experts(kind):
    rolled = recorded_rollout(pattern="GE*E", sites=SITES)
    own = local_weights(tiny_trainer(dtype=torch.bfloat16, pattern="GE*E")[0])
    local, ours = (
        train_steps(*trainer_with(experts, rolled, own, pattern="GE*E"), rolled, num_steps=1)
        for experts in ("local", kind)
    )
    assert ours.digests == local.digests
    for got, expected in zip(ours.logprobs, local.logprobs, strict=True):
        assert_same_bytes(got, expected, "log-probs")
    for name, expected in local.gradients[0].items():
        assert_same_bytes(ours.gradients[0][name], expected, name)


@bits_of_the_stand_in
@pytest.mark.parametrize("kind", KINDS)
def test_packed_samples_give_the_bits_of_local_experts(rolled, weights, kind):
    local, ours = (
        train_steps(*trainer_with(experts, rolled, weights), rolled, num_steps=1, packed=True)
        for experts in ("local", kind)
    )
    for got, expected in zip(ours.logprobs, local.logprobs, strict=True):
        assert_same_bytes(got, expected, "log-probs")
    for name, expected in local.gradients[0].items():
        assert_same_bytes(ours.gradients[0][name], expected, name)
    guided = [{s: c.guided for s, c in of.reports[0].sites.items()} for of in (ours, local)]
    assert guided[0] == guided[1]
    assert min(guided[0].values()) > 0


@bits_of_the_stand_in
@pytest.mark.parametrize("kind", KINDS)
def test_counters_and_coverage_are_those_of_local_experts(rolled, weights, local, kind):
    ours = train_steps(*trainer_with(kind, rolled, weights), rolled)
    for got, expected in zip(ours.reports, local.reports, strict=True):
        assert got.weight_uses == expected.weight_uses
        assert got.weights_quantised == expected.weights_quantised
        for site, counts in expected.sites.items():
            kinds = ("guided", "rejected", "missing", "padding", "not_recorded", "blocks")
            assert [getattr(got.sites[site], k) for k in kinds] == [
                getattr(counts, k) for k in kinds
            ], site
    assert all(counts.coverage > 0.9 for counts in ours.reports[0].sites.values())
    # The digest quantised all before the first step; after it, those that Adam changed.
    assert ours.reports[0].weights_quantised == 0
    assert ours.reports[1].weights_quantised == 0
    assert ours.reports[0].weight_uses == 2 * 2 * 2 * 16


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_the_product_adds_to_main_grad_are_those_added_after_it(
    rolled, weights, kind
):
    """The sum is then FP32, instead of a BF16 gradient that is added; measured 1.7e-3 relative."""
    fused = {"gradient_accumulation_fusion": True}
    model, sites = trainer_with(kind, rolled, weights, config=fused)
    ours = train_steps(model, sites, rolled, num_steps=1)
    linear = model.decoder.layers[1].mlp.experts.linear_fc1
    assert linear.fuse_wgrad_accumulation
    assert not model.config.gradient_accumulation_fusion
    plain = train_steps(*trainer_with(kind, rolled, weights), rolled, num_steps=1)
    for name, expected in plain.gradients[0].items():
        got = ours.gradients[0][name]
        assert got.any() == expected.any(), name
        assert torch.allclose(got, expected, rtol=2**-7, atol=1e-4), name


@bits_of_the_stand_in
@pytest.mark.parametrize("kind", KINDS)
def test_activations_get_the_codes_of_local_experts(rolled, weights, kind):
    seen_of = {}
    for experts in ("local", kind):
        model, sites = trainer_with(experts, rolled, weights)
        micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
        with seen_values(sites) as seen, sites.micro_batch(micro_batch), torch.no_grad():
            token_logprobs(model, sites, micro_batch)
        seen_of[experts] = seen
    for place, expected in seen_of["local"].items():
        rows = torch.cat(seen_of[kind][place].outputs)
        if kind == "te_recipe" and place[1] in ("fc1", "fc2"):
            # Rows of padding are zeros; a token's row is there once for each of its experts.
            rows = rows[rows.any(-1)]
            values = torch.cat(expected.outputs)
            values = values[values.any(-1)]
            assert_same_bytes(rows.unique(dim=0), values.unique(dim=0), f"{place}")
        else:
            assert_same_bytes(rows, torch.cat(expected.outputs), f"{place}")


@bits_of_the_stand_in
@pytest.mark.parametrize("config", [{}, FULL_RECOMPUTATION], ids=["plain", "recomputed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpt_model_gives_the_bits_of_one_with_local_experts(rolled, kind, config):
    """Two micro-batches are forwarded before either's backward, which recomputes."""
    results: dict[str, tuple] = {}
    for experts in ("local", kind):
        torch.manual_seed(3)
        model, sites = build_gpt_trainer_model(
            tiny_moe_config("EE", **config),
            vocab_size=VOCAB_SIZE,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            trace=TraceConfig(hint_layers="all", hint_sites=SITES, experts=experts),
        )
        sites.settings = rolled.settings
        weights = results["local"][2] if results else local_weights(model)
        load_local(model, weights)
        model.train()
        logprobs = []
        for samples in (rolled.samples[:2], rolled.samples[2:]):
            micro_batch = make_micro_batch(samples, rolled.store, sites)
            with sites.micro_batch(micro_batch):
                logprobs.append(token_logprobs(model, sites, micro_batch))
        for part in logprobs:
            part.sum().backward()
        sites.assert_ran()
        grads = {local_name(name): p.grad for name, p in model.named_parameters()}
        results[experts] = ([part.detach() for part in logprobs], grads, weights)
    for got, expected in zip(results[kind][0], results["local"][0], strict=True):
        assert_same_bytes(got, expected, "log-probs")
    assert results[kind][1].keys() == results["local"][1].keys()
    for name, expected in results["local"][1].items():
        assert_same_bytes(results[kind][1][name], expected, name)


@bits_of_the_stand_in
@pytest.mark.parametrize("number_format", ["nvfp4_4over6", "mxfp4", "mxfp4_w4a8"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_format_gives_the_bits_of_local_experts(weights, kind, number_format):
    rolled = recorded_rollout(sites=SITES, number_format=number_format)
    of_kind = [
        train_steps(
            *trainer_with(experts, rolled, weights, number_format=number_format),
            rolled,
            num_steps=1,
        )
        for experts in ("local", kind)
    ]
    assert of_kind[1].digests == of_kind[0].digests
    for name, expected in of_kind[0].gradients[0].items():
        assert_same_bytes(of_kind[1].gradients[0][name], expected, name)


def test_experts_stay_plain_where_only_the_kv_cache_is_quantised():
    fields = {"quantised_parts": "kv", "hint_sites": ("k", "v")}
    model, _ = tiny_trainer(experts="te", dtype=torch.bfloat16, **fields)
    assert type(model.decoder.layers[1].mlp.experts) is UnweightedTEGroupedMLP
    with pytest.raises(ValueError, match="experts=te_recipe has no effect with method=trace"):
        tiny_trainer(experts="te_recipe", dtype=torch.bfloat16, **fields)


@bits_of_the_stand_in
def test_method_bf16_quantises_nothing(rolled, weights):
    model, sites = trainer_with("te", rolled, weights, method="bf16")
    ours = train_steps(model, sites, rolled, num_steps=1)
    expected = train_steps(
        *trainer_with("local", rolled, weights, method="bf16"), rolled, num_steps=1
    )
    for got, wanted in zip(ours.logprobs, expected.logprobs, strict=True):
        assert_same_bytes(got, wanted, "log-probs")


@pytest.mark.parametrize("saved", ["local", "te", "te_recipe"])
@pytest.mark.parametrize("loaded", ["local", "te", "te_recipe"])
def test_a_checkpoint_of_one_kind_loads_into_another(rolled, weights, tmp_path, saved, loaded):
    source, source_sites = trainer_with(saved, rolled, weights)
    with compat.checkpoint_writes_in_process():
        dist_checkpointing.save(source.sharded_state_dict(), str(tmp_path))
    zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
    target, sites = trainer_with(loaded, rolled, zeros)
    state = dist_checkpointing.load(target.sharded_state_dict(), str(tmp_path))
    target.load_state_dict(state)
    for name, value in local_weights(target).items():
        assert_same_bytes(value, weights[name], name)
    assert expert_weight_digest(target, sites) == expert_weight_digest(source, source_sites)


def test_a_nan_at_fc2_names_expert_and_token(rolled, weights):
    broken = {name: value.clone() for name, value in weights.items()}
    name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    broken[name][0] = torch.inf
    for kind in KINDS:
        model, sites = trainer_with(kind, rolled, broken)
        micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
        with (
            sites.micro_batch(micro_batch),
            pytest.raises(ValueError, match=r"layer 0, site fc2, expert 3, sample sample-\d, "),
        ):
            token_logprobs(model, sites, micro_batch)


def test_grouped_experts_have_the_names_of_local_ones_and_other_parameters_their_own(weights):
    experts = "decoder.layers.1.mlp.experts"
    local = f"{experts}.local_experts.11.linear_fc2.weight"
    assert local in weights
    assert local_name(f"{experts}.linear_fc2.weight11") == local
    assert all(local_name(name) == name for name in weights)


def test_megatrons_recipe_flags_choose_the_recipes_experts(rolled, weights):
    model, sites = trainer_with("auto", rolled, weights, config=RECIPE)
    assert type(model.decoder.layers[1].mlp).__name__ == "TraceTEMoELayer"
    # It checks that nothing else quantises, among it that the FP4 recipe is ours.
    train_steps(model, sites, rolled, num_steps=1)


@pytest.mark.parametrize(
    ("experts", "config", "fields", "message"),
    [
        ("te", RECIPE, {}, "experts=te contradicts fp4_quantizer_factory"),
        ("local", RECIPE, {}, "experts=local contradicts fp4_quantizer_factory"),
        ("te", {"fp4": "e2m1"}, {}, "experts=te contradicts fp4=e2m1"),
        ("te", {}, {"save_packed_activations": True}, "save_packed_activations contradicts"),
        ("te_recipe", {}, {"method": "bf16"}, "experts=te_recipe has no effect with method=bf16"),
        ("local", {"gradient_accumulation_fusion": True}, {}, "fusion with experts=local"),
        (
            "te_recipe",
            RECIPE | {"fp4_quantizer_factory": NVFP4_FACTORY},
            {},
            r"capability \(10, 0\) or higher .* got \(9, 0\)",
        ),
    ],
)
def test_contradictory_settings_are_refused(experts, config, fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_trainer(experts=experts, config=config, dtype=torch.bfloat16, **fields)


def test_fp32_is_refused():
    with pytest.raises(ValueError, match=r"experts=te needs BF16; got torch\.float32"):
        tiny_trainer(experts="te", dtype=torch.float32)


def test_a_machine_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="experts=te needs a CUDA device, and there is none"):
        build_trainer_model(
            tiny_moe_config("*E"),
            pattern="*E",
            vocab_size=VOCAB_SIZE,
            max_sequence_length=8,
            trace=TraceConfig(experts="te"),
        )
