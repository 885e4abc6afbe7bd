"""What the ranks of a layout take of samples, hints and routing: together all, each once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from megatron_trace.hints import HintFiles, HintFilesWriter, HintKey, encode_hint
from megatron_trace.hints.store import HintStore
from megatron_trace.hints.types import QuantizerSettings, Site
from megatron_trace.testing.recorded_samples import random_samples
from megatron_trace.testing.rollouts import records_of
from megatron_trace.training.layout import RankLayout
from megatron_trace.training.micro_batch import make_micro_batch

LENGTHS = ((5, 3), (3, 0), (7, 6), (1, 10))
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 3), (4, 2)]


@pytest.fixture
def rolled(rollout):
    """Hints of all sites."""
    return rollout(LENGTHS, sites=("fc1", "fc2", "k", "v"))


@pytest.fixture
def sites(build, rolled):
    """TraceSites that guide all sites."""
    _, sites = build("trace", settings=rolled.settings, hint_sites=("fc1", "fc2", "k", "v"))
    return sites


def on_ranks(sites, samples, store, tp_size, cp_size, num_positions):
    """Gives the micro-batch of every rank, as its model would make it."""
    whole = sites.shape
    for cp_rank, tp_rank in itertools.product(range(cp_size), range(tp_size)):
        sites.shape = replace(whole, layout=RankLayout(tp_size, tp_rank, cp_size, cp_rank))
        try:
            yield sites.shape, make_micro_batch(samples, store, sites, num_positions=num_positions)
        finally:
            sites.shape = whole


@pytest.mark.parametrize(("tp_size", "cp_size"), LAYOUTS)
def test_hints_of_all_ranks_are_those_of_one_rank(sites, rolled, tp_size, cp_size):
    length = RankLayout(tp_size=tp_size, cp_size=cp_size).padded_length(12)
    whole = make_micro_batch(rolled.samples, rolled.store, sites, num_positions=length)
    parts = list(on_ranks(sites, rolled.samples, rolled.store, tp_size, cp_size, length))
    for place, expected in whole.hints.items():
        for name, per_value in (("payload", expected.num_bits / 8), ("scale_bytes", 1 / 16)):
            known = getattr(expected, name).unflatten(0, (length, -1))
            found = torch.full_like(known, 255)
            for shape, micro_batch in parts:
                positions = micro_batch.rows_at(place[1]).positions
                width = shape.row_width(place[1])
                columns = shape.columns(place[1]) or range(width)
                cut = slice(int(columns.start * per_value), int(columns.stop * per_value))
                rows = getattr(micro_batch.hints[place], name)
                found[positions, :, cut] = rows.unflatten(0, (len(positions), -1))
            assert torch.equal(found, known), (place, name)
        presence = torch.zeros(length, len(LENGTHS), dtype=torch.bool, device=sites.device)
        for _, micro_batch in parts:
            positions = micro_batch.rows_at(place[1]).positions
            rows = micro_batch.hints[place].has_hint
            presence[positions] = rows.unflatten(0, (len(positions), -1))
        assert torch.equal(presence.flatten(), expected.has_hint), place


@pytest.mark.parametrize(("tp_size", "cp_size"), LAYOUTS)
def test_routing_and_padding_of_all_ranks_are_those_of_one_rank(sites, rolled, tp_size, cp_size):
    length = RankLayout(tp_size=tp_size, cp_size=cp_size).padded_length(12)
    whole = make_micro_batch(rolled.samples, rolled.store, sites, num_positions=length)
    known = whole.routing.unflatten(1, (length, -1))
    found = torch.full_like(known, -1)
    for _, micro_batch in on_ranks(sites, rolled.samples, rolled.store, tp_size, cp_size, length):
        positions = micro_batch.token_rows.positions
        found[:, positions] = micro_batch.routing.unflatten(1, (len(positions), -1))
        assert torch.equal(micro_batch.token_rows.real, whole.valid[positions].flatten())
        assert torch.equal(micro_batch.tokens, whole.tokens)
        inputs = whole.tokens[:, micro_batch.attention_rows.positions]
        assert torch.equal(micro_batch.inputs, inputs)
    assert torch.equal(found, known)


@pytest.mark.parametrize(("tp_size", "cp_size"), LAYOUTS)
def test_a_rank_reads_no_byte_that_it_does_not_use(tmp_path, sites, rolled, tp_size, cp_size):
    with HintFilesWriter(tmp_path) as writer:
        for sample in rolled.samples:
            for (kind, _, _), hint in records_of(rolled.store, sample).items():
                writer.put(hint, kind)
            writer.commit([sample])
    files, before, read = HintFiles(tmp_path), 0, 0
    length = RankLayout(tp_size=tp_size, cp_size=cp_size).padded_length(12)
    for _, micro_batch in on_ranks(sites, rolled.samples, files, tp_size, cp_size, length):
        used = sum(
            int(rows.has_hint.sum()) * (rows.payload.shape[1] + rows.scale_bytes.shape[1])
            for rows in micro_batch.hints.values()
        )
        assert files.bytes_read.tensor_bytes - before == used
        before, read = files.bytes_read.tensor_bytes, read + used
    # A head of which the model has fewer than there are ranks is read by several.
    times = {site: 1 if site in (Site.FC1, Site.FC2) else max(1, tp_size // 2) for site in Site}
    stored = sum(
        times[hint.key.site] * hint.num_bytes
        for sample in rolled.samples
        for hint in records_of(rolled.store, sample).values()
    )
    assert read == stored


def test_an_error_names_the_position_in_the_sample_not_on_the_rank(sites, rolled):
    *_, (_, last) = on_ranks(sites, rolled.samples, rolled.store, 2, 2, 16)
    assert last.token_rows.positions.tolist() == [8, 9, 10, 11]
    assert last.row_name(Site.FC1, 4 * 2 + 3) == "sample sample-3, padding 10"
    assert last.row_name(Site.K, 4 * 1 + 2) == "sample sample-2, token 5"


@pytest.mark.parametrize("wanted", [10, 14])
def test_a_length_that_the_ranks_cannot_split_is_refused(sites, rolled, wanted):
    sites.shape = replace(sites.shape, layout=RankLayout(tp_size=2, cp_size=2))
    with pytest.raises(
        ValueError, match=f"num_positions={wanted} does not hold .* 16 is the least"
    ):
        make_micro_batch(rolled.samples, rolled.store, sites, num_positions=wanted)


def test_a_record_with_other_columns_than_the_model_is_refused_before_it_is_cut(build):
    _, sites = build("trace", hint_sites=("k",))
    sites.settings = QuantizerSettings(dict.fromkeys(sites.shape.places, 2.0**-9))
    (sample,) = random_samples(
        [(3, 2)], sites.shape, vocab_size=16, settings_digest=sites.settings.digest()
    )
    _, wide = build("trace", hint_sites=("k",), config={"num_query_groups": 4})
    wide.settings = sites.settings
    store = HintStore()
    for layer in (0, 1):
        codes = torch.zeros(4, wide.shape.row_width(Site.K), dtype=torch.uint8)
        key = HintKey(sample.sample_id, layer, Site.K, 0, sample.settings_digest)
        scales = torch.ones(4, codes.shape[1] // 16, dtype=torch.uint8)
        store.put(encode_hint(key, codes, scales, 2.0**-9, 1))
    sites.shape = replace(sites.shape, layout=RankLayout(tp_size=2))
    with pytest.raises(ValueError, match="values of a row 128, expected 64"):
        make_micro_batch([sample], store, sites)
