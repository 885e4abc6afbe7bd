"""The in-memory store: what is put is found by its key, and by nothing else."""

import dataclasses

import pytest
import torch

from megatron_trace.hints import HintKey, HintStore, RecordKind, Site, SiteHint

KEY = HintKey("s0", layer=3, site=Site.FC1, policy_version=7, settings_digest="abc")


def hint_for(key: HintKey = KEY, *, rows: int = 5, num_bits: int = 1) -> SiteHint:
    return SiteHint(
        key=key,
        num_bits=num_bits,
        payload=torch.zeros(rows, 4 * num_bits, dtype=torch.uint8),
        scale_bytes=torch.zeros(rows, 2, dtype=torch.uint8),
        global_scale=1.0,
    )


def key_with(**changes: object) -> HintKey:
    return dataclasses.replace(KEY, **changes)


def stored(*hints: SiteHint) -> HintStore:
    store = HintStore()
    for hint in hints:
        store.put(hint)
    return store


def test_reading_twice_gives_the_same_record() -> None:
    hint = hint_for()
    store = stored(hint)
    assert store.get(KEY, num_rows=5) is hint
    assert store.get(KEY, num_rows=5) is hint


def test_places_of_a_sample_are_kept_apart() -> None:
    hints = [
        hint_for(key_with(layer=layer, site=site)) for layer in (2, 3) for site in (Site.K, Site.V)
    ]
    store = stored(*hints)
    for hint in hints:
        assert store.get(hint.key, num_rows=5) is hint


def test_unknown_sample_is_a_missing_hint() -> None:
    with pytest.raises(LookupError, match=r"nothing is stored for this sample, of 1 samples.*s9"):
        stored(hint_for()).get(key_with(sample_id="s9"), num_rows=5)


def test_unknown_place_names_what_the_sample_has() -> None:
    store = stored(hint_for(), hint_for(key_with(site=Site.V, layer=2)))
    with pytest.raises(LookupError, match=r"layer\.site 2\.v, 3\.fc1;.*sample s0, layer 1, site k"):
        store.get(key_with(layer=1, site=Site.K), num_rows=5)


@pytest.mark.parametrize(
    ("key", "num_rows", "message"),
    [
        (key_with(policy_version=8), 5, "policy version 7, but 8"),
        (key_with(settings_digest="def"), 5, "quantiser settings abc, but def"),
        (KEY, 6, "number of rows 5, but 6"),
        (KEY, 4, "number of rows 5, but 4"),
        (key_with(policy_version=8, layer=0), 5, "policy version 7, but 8"),
    ],
)
def test_record_of_another_rollout_is_refused(key: HintKey, num_rows: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"sample s0 have {message} was given"):
        stored(hint_for()).get(key, num_rows=num_rows)


def test_putting_twice_is_refused_and_keeps_the_first() -> None:
    first = hint_for()
    store = stored(first)
    with pytest.raises(ValueError, match="a hint record is stored already; drop the sample"):
        store.put(hint_for())
    assert store.get(KEY, num_rows=5) is first


@pytest.mark.parametrize(
    ("hint", "message"),
    [
        (hint_for(key_with(layer=2, policy_version=8)), "policy version 7, but 8"),
        (hint_for(key_with(layer=2, settings_digest="def")), "quantiser settings abc, but def"),
        (hint_for(key_with(layer=2), rows=4), "number of rows 5, but 4"),
    ],
    ids=["policy_version", "settings", "truncated"],
)
def test_records_of_one_sample_must_come_from_one_rollout(hint: SiteHint, message: str) -> None:
    store = stored(hint_for())
    with pytest.raises(ValueError, match=message):
        store.put(hint)
    assert store.places("s0") == ((3, Site.FC1),)


def test_full_codes_stand_beside_the_hint() -> None:
    hint, codes = hint_for(), hint_for(num_bits=4)
    store = stored(hint)
    store.put(codes, RecordKind.CODES)
    assert store.get(KEY, num_rows=5) is hint
    assert store.get(KEY, num_rows=5, kind=RecordKind.CODES) is codes
    assert len(store) == 2


def test_a_hint_is_never_given_for_missing_full_codes() -> None:
    with pytest.raises(LookupError, match=r"no codes record at this place.*\(none\)"):
        stored(hint_for(num_bits=4)).get(KEY, num_rows=5, kind=RecordKind.CODES)


def test_full_codes_of_one_bit_are_refused() -> None:
    store = HintStore()
    with pytest.raises(ValueError, match="full codes need 4 bits per value; got 1"):
        store.put(hint_for(), RecordKind.CODES)
    assert store.sample_ids() == ()


def test_full_codes_with_residues_are_refused() -> None:
    codes = dataclasses.replace(
        hint_for(num_bits=4), scale_form="residue", scale_bytes=torch.zeros(5, 1, dtype=torch.uint8)
    )
    with pytest.raises(ValueError, match="full codes need raw block scales; got residue"):
        HintStore().put(codes, RecordKind.CODES)


def test_bytes_and_length_count_both_kinds() -> None:
    store = stored(hint_for(), hint_for(key_with(site=Site.K)))
    store.put(hint_for(num_bits=4), RecordKind.CODES)
    assert len(store) == 3
    assert store.num_bytes == 2 * 5 * (4 + 2) + 5 * (16 + 2)


def test_dropping_a_sample_drops_its_records_only() -> None:
    store = stored(hint_for(), hint_for(key_with(site=Site.K)), hint_for(key_with(sample_id="s1")))
    assert store.drop_sample("s0") == 2
    assert store.drop_sample("s0") == 0
    assert store.sample_ids() == ("s1",)
    store.put(hint_for())


def test_expiry_drops_older_policy_versions_only() -> None:
    store = stored(
        *(
            hint_for(key_with(sample_id=f"s{version}", policy_version=version))
            for version in (5, 6, 7)
        )
    )
    assert store.expire(before=7) == ("s5", "s6")
    assert store.sample_ids() == ("s7",)
    assert store.expire(before=7) == ()


def test_coverage_counts_samples_by_place() -> None:
    store = stored(
        hint_for(),
        hint_for(key_with(site=Site.V)),
        hint_for(key_with(sample_id="s1", layer=1)),
        hint_for(key_with(sample_id="s1")),
    )
    assert list(store.coverage().items()) == [
        ((1, Site.FC1), 1),
        ((3, Site.FC1), 2),
        ((3, Site.V), 1),
    ]
    assert store.coverage(RecordKind.CODES) == {}
    assert store.places("s1") == ((1, Site.FC1), (3, Site.FC1))
    assert store.places("s9") == ()
