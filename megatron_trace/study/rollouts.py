"""Rollout sets: generated once with full codes at all places, kept in a file, and made into hints.

Legend: R rows of a sample, K values of a row, B blocks of a row.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_trace.config import TraceConfig
from megatron_trace.hints.codec import decode_codes, encode_packed_hint
from megatron_trace.hints.store import HintStore, RecordKind
from megatron_trace.hints.types import (
    HintKey,
    QuantizerSettings,
    RolloutSample,
    Site,
    SiteHint,
    stored_bits,
)
from megatron_trace.models.hybrid import pattern_sites
from megatron_trace.rollout.engine import RolloutEngine
from megatron_trace.rollout.sampling import SamplingSettings
from megatron_trace.study.cells import LONG_PROMPT_TOKENS, Cell, EngineSetting
from megatron_trace.study.model import StudyModel

Place = tuple[int, Site]
# Fields of a record of full codes that a file keeps; the key follows from the sample.
RECORD_FIELDS = ("num_bits", "payload", "scale_bytes", "global_scale", "number_format")


@dataclass(frozen=True, eq=False)
class RolloutSet:
    """Samples of one engine setting with what its quantisers did.

    Attributes:
        samples: The samples, in the order of the prompts.
        codes: Full codes with raw block scales by sample and place; empty for a BF16 engine.
        settings: Settings of the quantisers; None for a BF16 engine.
    """

    samples: Sequence[RolloutSample]
    codes: Mapping[str, Mapping[Place, SiteHint]]
    settings: QuantizerSettings | None

    def to(self, device: torch.device) -> RolloutSet:
        """Gives the set with its codes on a device."""
        codes = {
            sample_id: {
                place: dataclasses.replace(
                    hint,
                    payload=hint.payload.to(device),
                    scale_bytes=hint.scale_bytes.to(device),
                )
                for place, hint in places.items()
            }
            for sample_id, places in self.codes.items()
        }
        return RolloutSet(self.samples, codes, self.settings)


def engine_of(model: StudyModel, trace: TraceConfig, *, max_requests: int) -> RolloutEngine:
    """Builds an engine of a model that has no weights yet."""
    return RolloutEngine(
        model.config,
        pattern=model.pattern,
        vocab_size=model.vocab_size,
        max_sequence_length=model.context,
        trace=trace,
        eod_token=model.eod_token,
        max_requests=max_requests,
        rotary_base=model.rotary_base,
        model_id=model.name,
    )


def build_engine(model: StudyModel, setting: EngineSetting) -> RolloutEngine:
    """Builds an engine that records full codes everywhere and no hints."""
    trace = TraceConfig(
        method="qat" if setting.quantised else "bf16",
        hint_layers="all",
        hint_sites=pattern_sites(model.pattern),
        diagnostic_share=1.0 if setting.quantised else 0.0,
        power_of_two_scales=setting.power_of_two_scales,
        number_format=setting.number_format,
    )
    engine = engine_of(model, trace, max_requests=setting.max_requests)
    if setting.quantised:
        engine.load_weights(model.weights)
        engine.calibrate(model.calibration)
    engine.push_weights(model.weights, policy_version=0)
    return engine


def roll_out(
    model: StudyModel, setting: EngineSetting, *, num_samples: int, max_new_tokens: int
) -> RolloutSet:
    """Generates the samples of an engine setting.

    Args:
        model: The model.
        setting: The engine setting.
        num_samples: Samples; prompts are taken in order, and again from the first.
        max_new_tokens: Longest response.

    Raises:
        ValueError: The model has no prompt of this length.
    """
    fitting = [
        row
        for row, prompt in enumerate(model.prompts)
        if (len(prompt) > LONG_PROMPT_TOKENS) == setting.long_prompts
    ]
    if not fitting:
        raise ValueError(
            f"{model.name} has no prompt for {setting.name}: their lengths are "
            f"{min(map(len, model.prompts))} to {max(map(len, model.prompts))} tokens, and long is "
            f"above {LONG_PROMPT_TOKENS}"
        )
    engine = build_engine(model, setting)
    store = HintStore()
    rows = [fitting[number % len(fitting)] for number in range(num_samples)]
    samples = engine.generate(
        [model.prompts[row] for row in rows],
        [f"prompt-{row}/sample-{number}" for number, row in enumerate(rows)],
        store=store if setting.quantised else None,
        sampling=SamplingSettings(max_new_tokens=max_new_tokens),
        seed=0,
    )
    return RolloutSet(samples, _codes_of(store, samples), engine.settings)


def rescored(
    engine: RolloutEngine, samples: Sequence[RolloutSample], *, policy_version: int
) -> tuple[list[RolloutSample], dict[str, dict[Place, SiteHint]]]:
    """Lets an engine read finished samples as prompts, and gives what its quantisers did.

    Args:
        engine: A quantising engine that holds the weights of `policy_version`.
        samples: Samples of any engine of this model.
        policy_version: Version of the engine's weights.

    Returns:
        The samples with the routing of this engine (tokens and log-probs stay), and its codes.
    """
    store = HintStore()
    read = engine.generate(
        [sample.tokens[:-1] for sample in samples],
        [sample.sample_id for sample in samples],
        store=store,
        sampling=SamplingSettings(max_new_tokens=1, greedy=True),
        seed=0,
    )
    again = [
        dataclasses.replace(
            sample,
            routing=other.routing,
            policy_version=policy_version,
            settings_digest=other.settings_digest,
        )
        for sample, other in zip(samples, read, strict=True)
    ]
    return again, _codes_of(store, again)


def _codes_of(
    store: HintStore, samples: Sequence[RolloutSample]
) -> dict[str, dict[Place, SiteHint]]:
    kind = RecordKind.CODES
    return {
        sample.sample_id: {
            place: store.get(_key(sample, place), num_rows=sample.num_rows, kind=kind)
            for place in store.places(sample.sample_id, kind)
        }
        for sample in samples
    }


def _key(sample: RolloutSample, place: Place) -> HintKey:
    return HintKey(sample.sample_id, *place, sample.policy_version, sample.settings_digest)


# From codes to the hints of a cell.


def derived_store(rollouts: RolloutSet, cell: Cell) -> HintStore:
    """Gives a store with the hints that the engine would have kept, and its full codes.

    Args:
        rollouts: The samples and their codes.
        cell: Bits, form of block scales, and damage. Places are not chosen here: a trainer reads
            those of its configuration only.
    """
    store = HintStore()
    samples = rollouts.samples
    rows = [sample.num_rows for sample in samples]
    for place in rollouts.codes[samples[0].sample_id]:
        codes = [rollouts.codes[sample.sample_id][place] for sample in samples]
        # All samples at once: on a GPU, thousands of small calls would take most of the time.
        payload_rows, scale_rows = _source_rows(rows, cell.damage, codes[0].payload.device)
        whole = encode_packed_hint(
            codes[0].key,
            torch.cat([hint.payload for hint in codes])[payload_rows],
            torch.cat([hint.scale_bytes for hint in codes])[scale_rows],
            codes[0].global_scale,
            stored_bits(codes[0].format, cell.bits),
            cell.scale_form,
            codes[0].format,
        )
        parts = zip(codes, whole.payload.split(rows), whole.scale_bytes.split(rows), strict=True)
        for hint, payload, scale_bytes in parts:
            own = dataclasses.replace(whole, key=hint.key, payload=payload, scale_bytes=scale_bytes)
            store.put(own)
            store.put(hint, RecordKind.CODES)
    return store


def _source_rows(
    num_rows: Sequence[int], damage: str, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives from which row of all samples each row takes its bits, and its block scales.

    Args:
        num_rows: R of each sample.
        damage: What is done to the hints.
        device: Where the rows are.

    Returns:
        int64 [sum of R] each.
    """
    same = torch.arange(sum(num_rows), device=device)
    if damage == "none":
        return same, same
    starts = [sum(num_rows[:number]) for number in range(len(num_rows))]
    parts = []
    for number, count in enumerate(num_rows):
        rows = torch.arange(count)
        # Another token's row, unless there is one only: prompts of two samples may begin alike.
        source = (number + 1) % len(num_rows) if damage == "other_sample" else number
        shifted = (rows + num_rows[source] // 2) % num_rows[source]
        parts.append(starts[source] + shifted)
    moved = torch.cat(parts).to(device)
    if damage == "wrong_scales":
        return same, moved
    assert damage in ("shuffled", "other_sample"), "the kinds of Cell.damage"
    return moved, moved


def code_differences(
    codes: Mapping[Place, SiteHint], others: Mapping[Place, SiteHint]
) -> dict[str, dict[str, int]]:
    """Gives how often two records of a sample have other codes and block scales, by site.

    The counts have the names of `CodeMismatch`.
    """
    found: dict[str, dict[str, int]] = {}
    for (layer, site), hint in codes.items():
        mine, theirs = (decode_codes(part) for part in (hint, others[layer, site]))
        sign = hint.format.element.sign_code
        nonzero = ((mine | theirs) & (sign - 1)) != 0
        counts = {
            "values": mine.numel(),
            "rtn_different": int(((mine != theirs) & nonzero).sum()),
            "blocks": hint.scale_bytes.numel(),
            "scale_bytes_different": int(
                (hint.scale_bytes != others[layer, site].scale_bytes).sum()
            ),
        }
        known = found.setdefault(str(site), dict.fromkeys(counts, 0))
        for name, count in counts.items():
            known[name] += count
    return found


# Files.


def save(rollouts: RolloutSet, path: Path, identity: Mapping[str, Any]) -> None:
    """Writes a rollout set under a temporary name and renames it.

    Args:
        rollouts: The rollout set.
        path: The file.
        identity: What decided it; `load` compares it.
    """
    fields = [vars(sample) for sample in rollouts.samples]
    codes = {
        sample_id: {
            (layer, str(site)): {name: getattr(hint, name) for name in RECORD_FIELDS}
            for (layer, site), hint in places.items()
        }
        for sample_id, places in rollouts.codes.items()
    }
    settings = rollouts.settings
    plain = None
    if settings is not None:
        plain = {
            field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)
        }
        plain["global_scales"] = {
            (layer, str(site)): scale for (layer, site), scale in settings.global_scales.items()
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    torch.save(
        {"identity": dict(identity), "samples": fields, "codes": codes, "settings": plain},
        temporary,
    )
    os.replace(temporary, path)


def load(path: Path, identity: Mapping[str, Any]) -> RolloutSet:
    """Reads a rollout set.

    Raises:
        ValueError: The file is of another model or another engine setting.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["identity"] != dict(identity):
        raise ValueError(
            f"{path} holds rollouts of {state['identity']}, not of {dict(identity)}; remove it or "
            "give another work folder"
        )
    samples = [RolloutSample(**fields) for fields in state["samples"]]
    codes: dict[str, dict[Place, SiteHint]] = {}
    for sample in samples:
        codes[sample.sample_id] = {
            (layer, Site(site)): SiteHint(key=_key(sample, (layer, Site(site))), **fields)
            for (layer, site), fields in state["codes"].get(sample.sample_id, {}).items()
        }
    settings = None
    if state["settings"] is not None:
        plain = dict(state["settings"])
        plain["global_scales"] = {
            (layer, Site(site)): scale for (layer, site), scale in plain["global_scales"].items()
        }
        settings = QuantizerSettings(**plain)
    return RolloutSet(samples, codes, settings)
