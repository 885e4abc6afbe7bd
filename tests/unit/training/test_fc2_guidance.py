"""fc2's input is rounded by the hint of its token and expert slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.formats import reference
from megatron_trace.hints.store import HintStore
from megatron_trace.hints.types import HintKey, Site
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.recorded_samples import seen_values, slots_side_by_side
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.rounding import Rounding

FC2 = (0, Site.FC2)
TOP_K, K = 4, 64
REAL_ROWS = 7 + 2 + 10 + 7
PADDING_ROWS = 4 * 10 - REAL_ROWS


@pytest.fixture
def rolled(rollout):
    return rollout(sites=HINT_SITES, codes=True)


def _ready(build, rolled, method="trace", **options):
    model, sites = build(method, **{"hint_sites": HINT_SITES, **options})
    sites.settings = rolled.settings
    return model, sites, make_micro_batch(rolled.samples, rolled.store, sites)


def _forward(model, sites, micro_batch):
    with torch.no_grad(), sites.micro_batch(micro_batch), seen_values(sites) as seen:
        logprobs = token_logprobs(model, sites, micro_batch)
    return logprobs, seen


def _slots(seen, micro_batch):
    """Gives what layer 0's fc2 quantisers got and gave, [N, k, K]."""
    values = (seen[FC2].inputs, seen[FC2].outputs)
    return [slots_side_by_side(v, micro_batch.routing[0]).unflatten(1, (TOP_K, K)) for v in values]


def _hint(rolled, sample, place=FC2):
    key = HintKey(sample.sample_id, *place, sample.policy_version, rolled.settings.digest())
    return rolled.store.get(key, num_rows=sample.num_rows)


def _store_with(rolled, hint):
    """Gives the rollout's hints, but one of them changed."""
    store = HintStore()
    for sample in rolled.samples:
        for place in rolled.store.places(sample.sample_id):
            own = _hint(rolled, sample, place)
            store.put(hint if own.key == hint.key else own)
    return store


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_bits", [1, 2, 4])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_every_slot_is_guided_by_its_own_hint(build, rollout, num_bits, packed, dispatcher):
    rolled = rollout(sites=HINT_SITES, num_bits=num_bits)
    model, sites, micro_batch = _ready(
        build,
        rolled,
        guard=False,
        hint_bits=num_bits,
        save_packed_activations=packed,
        config={"moe_token_dispatcher_type": dispatcher},
    )
    _, seen = _forward(model, sites, micro_batch)
    got, gave = _slots(seen, micro_batch)
    hint, scale = micro_batch.hints[FC2], rolled.settings.global_scale(*FC2)
    rows = got.flatten(1)
    guided = reference.guided(
        rows, hint.payload, hint.scale_bytes, scale, num_bits=num_bits, dtype=torch.bfloat16
    )
    nearest = reference.rtn(rows, scale, dtype=torch.bfloat16)
    real = micro_batch.valid.flatten().unsqueeze(-1)
    assert_same_bytes(gave.flatten(1), torch.where(real, guided, nearest), "fc2")
    assert not torch.equal(guided[real[:, 0]], nearest[real[:, 0]]), "hints should matter"


def test_slots_follow_the_routing_record_not_the_order_of_experts(rolled):
    ascending = [s.routing[:, 0].sort(-1).values.equal(s.routing[:, 0]) for s in rolled.samples]
    assert not any(ascending), "random routing should test the order"


def test_a_slot_is_judged_by_itself(build, rolled):
    """One slot of one token gets the hint of another: it alone is rounded to nearest."""
    good = _hint(rolled, rolled.samples[0])
    payload, slot, token = good.payload.clone(), 2, 3
    payload[token].view(TOP_K, -1)[slot] = ~payload[token].view(TOP_K, -1)[slot]
    store = _store_with(rolled, replace(good, payload=payload))
    model, sites, _ = _ready(build, rolled)
    micro_batch = make_micro_batch(rolled.samples, store, sites)
    _, seen = _forward(model, sites, micro_batch)
    counts = sites.report().sites[Site.FC2]
    assert (counts.rejected, counts.missing) == (1, 0)
    assert counts.guided == 2 * TOP_K * REAL_ROWS - 1
    got, gave = _slots(seen, micro_batch)
    row = token * len(rolled.samples)
    nearest = Rounding(rolled.settings.global_scale(*FC2)).quantised(got[row])
    assert_same_bytes(gave[row, slot], nearest[slot], "the refused slot")
    assert any(not torch.equal(gave[row, s], nearest[s]) for s in range(TOP_K) if s != slot)


def test_every_slot_is_counted_once(build, rolled):
    model, sites, micro_batch = _ready(build, rolled, hint_layers="1")
    with torch.no_grad(), sites.micro_batch(micro_batch):
        for _ in range(2):
            token_logprobs(model, sites, micro_batch)
    counts = sites.report().sites[Site.FC2]
    assert counts.calls == 2 * 2
    assert counts.guided + counts.rejected == TOP_K * REAL_ROWS
    assert (counts.padding, counts.missing) == (TOP_K * PADDING_ROWS, 0)
    # Layer 0: all slots, of padding too.
    assert counts.not_recorded == TOP_K * (REAL_ROWS + PADDING_ROWS)


def test_a_missing_hint_is_an_error(build, rollout):
    with pytest.raises(LookupError, match="layer 0, site fc2"):
        _ready(build, rollout())


def test_missing_hints_are_rounded_to_nearest_and_counted_if_that_is_asked_for(build, rollout):
    model, sites, micro_batch = _ready(build, rollout(), missing_hints="rtn")
    assert FC2 not in micro_batch.hints
    _, seen = _forward(model, sites, micro_batch)
    counts = sites.report().sites[Site.FC2]
    assert (counts.guided, counts.missing) == (0, 2 * TOP_K * REAL_ROWS)
    assert counts.padding == 2 * TOP_K * PADDING_ROWS
    got, gave = _slots(seen, micro_batch)
    nearest = reference.rtn(got, sites.settings.global_scale(*FC2), dtype=torch.bfloat16)
    assert_same_bytes(gave, nearest, "fc2")


def test_a_hint_of_another_width_is_refused(build, rolled):
    _, sites, _ = _ready(build, rolled)
    hint = _hint(rolled, rolled.samples[0])
    narrow = replace(
        hint, payload=hint.payload[:, : K // 8], scale_bytes=hint.scale_bytes[:, : K // 16]
    )
    store = _store_with(rolled, narrow)
    with pytest.raises(ValueError, match=r"values of a row 64, expected 256 .*layer 0, site fc2"):
        make_micro_batch(rolled.samples[:1], store, sites)


@pytest.mark.parametrize("built_for_replay", [True, False])
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_without_replay_rows_of_other_experts_are_rounded_to_nearest_and_counted(
    build, rolled, dispatcher, built_for_replay
):
    config = {
        "moe_token_dispatcher_type": dispatcher,
        "moe_enable_routing_replay": built_for_replay,
    }
    model, sites, micro_batch = _ready(build, rolled, guard=False, config=config)
    moes = [model.decoder.layers[i].mlp for i in (1, 3)]
    live = []
    for moe in moes:
        moe.router.register_forward_hook(lambda m, i, output: live.append(output[1]))
    with (
        torch.no_grad(),
        sites.micro_batch(micro_batch, replay_routing=False),
        seen_values(sites) as seen,
    ):
        token_logprobs(model, sites, micro_batch)
    recorded = [
        torch.zeros_like(used).scatter(1, r, True)
        for used, r in zip(live, micro_batch.routing, strict=True)
    ]
    real = micro_batch.valid.flatten().unsqueeze(-1)
    rerouted = sum(int((used & ~r & real).sum()) for used, r in zip(live, recorded, strict=True))
    counts = sites.report().sites[Site.FC2]
    assert counts.rerouted == rerouted > 0
    assert counts.guided == 2 * TOP_K * REAL_ROWS - rerouted > 0
    assert counts.padding == 2 * TOP_K * PADDING_ROWS
    assert (counts.missing, counts.rejected, counts.not_recorded) == (0, 0, 0)
    assert counts.coverage == counts.guided / (2 * TOP_K * REAL_ROWS)
    hint, scale = micro_batch.hints[FC2], rolled.settings.global_scale(*FC2)
    sizes = live[0].sum(0).tolist()
    parts = [torch.cat(of).split(sizes) for of in (seen[FC2].inputs, seen[FC2].outputs)]
    for expert, (got, gave) in enumerate(zip(*parts, strict=True)):
        tokens = live[0][:, expert].nonzero()[:, 0]
        assert len(got) == len(tokens)
        for row, token in enumerate(tokens.tolist()):
            slot = (micro_batch.routing[0, token] == expert).nonzero()[:, 0]
            expected = reference.rtn(got[row : row + 1], scale, dtype=torch.bfloat16)
            if len(slot) and real[token]:
                payload = hint.payload[token].view(TOP_K, -1)[slot]
                scales = hint.scale_bytes[token].view(TOP_K, -1)[slot]
                rule = {"num_bits": 1, "dtype": torch.bfloat16}
                expected = reference.guided(got[row : row + 1], payload, scales, scale, **rule)
            assert_same_bytes(gave[row : row + 1], expected, f"expert {expert}, token {token}")


@pytest.mark.parametrize("matrix", ["fc1", "fc2"])
def test_a_linear_called_without_its_layer_is_refused(build, rolled, matrix):
    model, sites, micro_batch = _ready(build, rolled)
    linear = getattr(model.decoder.layers[1].mlp.experts.local_experts[3], f"linear_{matrix}")
    with (
        sites.micro_batch(micro_batch),
        pytest.raises(LookupError, match=f"{matrix} of layer 0, expert 3 was called by itself"),
    ):
        linear(torch.zeros(2, 128 if matrix == "fc1" else K))


def test_diagnostics_compare_fc2_with_full_codes_and_explain_every_mismatch(build, rolled):
    for method in ("qat", "trace"):
        model, sites = build(method, hint_sites=HINT_SITES)
        sites.settings = rolled.settings
        sites.diagnostics = True
        _forward(model, sites, make_micro_batch(rolled.samples, rolled.store, sites))
        counts = sites.report().code_mismatch[Site.FC2]
        assert counts.values == 2 * REAL_ROWS * TOP_K * K
        assert counts.rtn_different > 0
        assert counts.guided_values == (counts.values if method == "trace" else 0)
        assert counts.unexplained == 0
        assert counts.guided_different <= 1e-3 * counts.values
