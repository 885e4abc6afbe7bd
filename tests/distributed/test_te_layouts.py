"""Over two ranks, Transformer Engine's experts give what local experts give in the same layout."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "transformer_engine.pytorch", reason="Transformer Engine is not installed", exc_type=ImportError
)

from megatron_trace.hints.types import Site
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.te_layouts import LAYOUTS, outcomes_of_layouts
from megatron_trace.testing.te_on_cpu import te_on_cpu

# Largest difference of a tensor relative to its largest value; measured 4.8e-7 at most.
ETP_TOLERANCE = 1e-5

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.parametrize("kind", ["te", "te_recipe"]),
    pytest.mark.parametrize("layout", list(LAYOUTS)),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    with single_process(seed=0), te_on_cpu():
        runs = outcomes_of_layouts(
            tmp_path_factory.mktemp("te"), timeout_s=1000, step_timeout_s=300
        )
    assert runs.failure is None, runs.failure
    return runs.outcomes


def _assert_same(got, expected, layout, name):
    """Checks bits; of split experts a tolerance, as their partial sums are added in BF16."""
    if layout != "TP2 ETP2":
        assert_same_bytes(got, expected, name)
        return
    error = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert expected.any() == got.any()
    assert not expected.any() or error <= ETP_TOLERANCE, f"{name}: relative error {error:.1e}"


def test_each_rank_has_loss_gradients_and_weights_of_local_experts(outcomes, layout, kind):
    for rank, (ours, local) in enumerate(
        zip(outcomes[layout][kind], outcomes[layout]["local"], strict=True)
    ):
        assert ours.loss == local.loss
        assert ours.grads.keys() == local.grads.keys()
        for name, expected in local.grads.items():
            _assert_same(ours.grads[name], expected, layout, f"rank {rank}, {name}")
        for name, expected in local.weights.items():
            _assert_same(ours.weights[name], expected, layout, f"rank {rank}, {name}")


def test_digests_do_not_depend_on_kind_or_layout(outcomes, layout, kind):
    first = outcomes["EP2"]["local"][0].digests[0]
    for ours, local in zip(outcomes[layout][kind], outcomes[layout]["local"], strict=True):
        assert ours.digests == local.digests
        assert ours.digests[0] == first
        assert ours.digests[1] != first


def test_rows_are_guided_on_the_ranks_where_local_experts_are(outcomes, layout, kind):
    for ours, local in zip(outcomes[layout][kind], outcomes[layout]["local"], strict=True):
        assert ours.guided == local.guided
        assert min(ours.guided[site] for site in Site) > 0
