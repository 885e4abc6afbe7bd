"""The types that rollout and training exchange refuse what contradicts itself."""

import dataclasses

import pytest
import torch

from megatron_trace.hints import (
    HintKey,
    QuantizerSettings,
    RolloutSample,
    Site,
    SiteHint,
    VersionSpan,
    version_spans,
)

SETTINGS = QuantizerSettings({(0, Site.FC1): 0.5, (1, Site.K): 0.25})
KEY = HintKey("s0", layer=3, site=Site.FC1, policy_version=7, settings_digest="abc")
HINT = SiteHint(
    key=KEY,
    num_bits=1,
    payload=torch.zeros(5, 4, dtype=torch.uint8),
    scale_bytes=torch.zeros(5, 2, dtype=torch.uint8),
    global_scale=1.0,
)
SAMPLE = RolloutSample(
    sample_id="s0",
    prompt_tokens=(1, 2, 3),
    response_tokens=(4, 5),
    logprobs=torch.zeros(2),
    routing=torch.zeros(4, 2, 4, dtype=torch.int16),
    policy_version=7,
    settings_digest="abc",
    finish_reason="stop",
)


@pytest.mark.parametrize(
    "change",
    [
        {"global_scales": {(0, Site.FC1): 0.5}},
        {"global_scales": {(0, Site.FC1): 0.5, (1, Site.V): 0.25}},
        {"global_scales": {(0, Site.FC1): 0.5, (2, Site.K): 0.25}},
        {"global_scales": {(0, Site.FC1): 0.5, (1, Site.K): 0.25 + 2**-50}},
        {"number_format": "nvfp4_4over6"},
        {"quantised_parts": "kv"},
        {"prefill_attends_to": "fresh"},
        {"operand_dtype": "float32"},
        {"power_of_two_scales": True},
        {"model_id": "other"},
        {"residual_share": 0.5},
    ],
    ids=lambda change: str(change),
)
def test_any_other_setting_gives_another_digest(change: dict) -> None:
    assert dataclasses.replace(SETTINGS, **change).digest() != SETTINGS.digest()


def test_every_setting_is_part_of_the_digest_test() -> None:
    assert {field.name for field in dataclasses.fields(QuantizerSettings)} == {
        "global_scales",
        "number_format",
        "quantised_parts",
        "prefill_attends_to",
        "operand_dtype",
        "power_of_two_scales",
        "model_id",
        "residual_share",
    }, "add the new setting to the changes of the test above"


def test_digest_does_not_depend_on_the_order_of_calibration() -> None:
    reordered = QuantizerSettings(dict(reversed(SETTINGS.global_scales.items())))
    assert reordered.digest() == SETTINGS.digest()


def test_place_that_was_not_calibrated_is_named() -> None:
    with pytest.raises(LookupError, match="no global scale for layer 1, site v"):
        SETTINGS.global_scale(1, Site.V)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_global_scale_must_be_finite_and_positive(scale: float) -> None:
    with pytest.raises(ValueError, match="layer 2, site v must be finite and > 0"):
        QuantizerSettings({(2, Site.V): scale})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"payload": HINT.payload[:4]}, r"payload must be \(5, 4\)"),
        ({"payload": HINT.payload[:, :3]}, r"payload must be \(5, 4\)"),
        ({"payload": HINT.payload.int()}, "payload must be uint8"),
        ({"scale_bytes": HINT.scale_bytes[0]}, "scale_bytes must be uint8"),
        ({"num_bits": 4}, r"payload must be \(5, 16\)"),
        ({"num_bits": 2}, r"payload must be \(5, 8\)"),
        ({"scale_form": "residue"}, r"residues must be \(5, 1\) for 5 rows .* got \(5, 2\)"),
        ({"scale_form": "delta"}, "scale_form must be raw or residue; got 'delta'"),
        ({"num_bits": 3}, "num_bits must be 1, 2 or 4; got 3"),
    ],
)
def test_hint_whose_parts_disagree_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message + r".*sample s0, layer 3, site fc1"):
        dataclasses.replace(HINT, **change)


def test_sizes_of_a_hint() -> None:
    assert (HINT.num_rows, HINT.num_values, HINT.num_bytes) == (5, 32, 30)


def test_last_token_of_a_sample_has_no_row() -> None:
    assert SAMPLE.tokens == (1, 2, 3, 4, 5)
    assert SAMPLE.num_rows == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": torch.zeros(3)}, "2 response tokens, but log-probs of shape"),
        ({"routing": SAMPLE.routing[:3]}, r"routing must be \[4, layers, top-k\]"),
        ({"routing": SAMPLE.routing[:, 0]}, r"routing must be \[4, layers, top-k\]"),
        ({"top_logprobs": torch.zeros(2, 3)}, "top_tokens and top_logprobs must have one shape"),
        ({"top_logprobs": torch.zeros(3, 3)}, r"top_logprobs must be torch.float32 \[2, K\]"),
        ({"top_tokens": torch.zeros(2, 3)}, r"top_tokens must be torch.int32 \[2, K\]"),
    ],
)
def test_sample_whose_lengths_disagree_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match="sample s0: " + message):
        dataclasses.replace(SAMPLE, **change)


def test_spans_begin_where_the_version_changes() -> None:
    spans = version_spans(torch.tensor([3, 3, 5, 5, 4]), {3: "a", 4: "b", 5: "c"})
    assert spans == (VersionSpan(0, 3, "a"), VersionSpan(2, 5, "c"), VersionSpan(4, 4, "b"))


@pytest.mark.parametrize(
    ("tokens", "rows", "message"),
    [
        ([(0, 7)], None, "must be given together"),
        ([(1, 7)], [(0, 7)], r"version_spans must begin at 0 and rise below 2; got \[1\]"),
        ([(0, 7), (2, 8)], [(0, 7)], "version_spans must begin at 0 and rise below 2"),
        ([(0, 7)], [(0, 7), (3, 8), (3, 9)], "record_spans must begin at 0 and rise below 4"),
        ([(0, 7)], [(0, 6)], "policy_version must be the oldest of record_spans"),
    ],
)
def test_spans_that_contradict_the_sample_are_refused(tokens, rows, message) -> None:
    spans = [
        None if of is None else tuple(VersionSpan(*span, "") for span in of)
        for of in (tokens, rows)
    ]
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SAMPLE, version_spans=spans[0], record_spans=spans[1])
