"""The table of cells."""

from __future__ import annotations

import pytest

from megatron_trace.study.cells import ALL_SITES, ENGINES, all_cells, cells_for, kept_layers


def test_every_cell_names_an_engine_that_fits_its_method():
    for cell in all_cells():
        assert ENGINES[cell.engine].quantised or cell.method == "bf16", cell.name


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (("latter", 1.0), tuple(range(8))),
        (("latter", 0.5), (4, 5, 6, 7)),
        (("first", 0.25), (0, 1)),
        (("latter", 0.125), (7,)),
        (("latter", 0.01), (7,)),
    ],
)
def test_a_share_of_the_layers_is_taken_from_its_end(layers, expected):
    assert kept_layers(layers, 8) == expected


def test_a_model_without_experts_has_cells_of_k_and_v_only():
    cells = cells_for(("k", "v"), short=False)
    assert cells
    for cell in cells:
        assert set(cell.sites) <= {"k", "v"}
        assert cell.method != "w4a16"
        assert cell.replay_routing
    guided = [cell.sites for cell in cells if cell.question == "sites" and cell.dtype == "bf16"]
    assert sorted(guided) == [("k",), ("k", "v"), ("v",)]


def test_a_short_study_asks_less():
    every, short = (cells_for(ALL_SITES, short=short) for short in (False, True))
    assert {cell.name for cell in short} < {cell.name for cell in every}
    assert not any(cell.gradient or cell.lag for cell in short)
