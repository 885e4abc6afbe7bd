"""What a rollout reports about itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_trace.hints import RolloutSample
from megatron_trace.rollout.recorder import Place


@dataclass(frozen=True)
class RolloutReport:
    """Counts of one call of `RolloutEngine.generate`.

    Attributes:
        num_samples: Samples that were returned.
        num_aborted: Samples that were aborted; those that were kept are among `num_samples`.
        prompt_tokens: Tokens of the prompts of the samples returned.
        response_tokens: Tokens of their responses.
        finish_reasons: Samples by the reason they ended.
        degenerate: Samples by what is wrong with them (`loop`, `garbled`).
        prefix_tokens: Prompt tokens that the prefix cache had.
        restored_tokens: Tokens put back after an eviction, or for another turn.
        num_evictions: Requests that lost their pages for a while.
        saturated_values: By place with a static scale: values beyond the largest that it has.
        quantised_values: By place: all values that were quantised.
        settings_version: How often the engine's quantiser settings had been set.
        policy_version: Version of the weights.
    """

    num_samples: int = 0
    num_aborted: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    degenerate: Mapping[str, int] = field(default_factory=dict)
    prefix_tokens: int = 0
    restored_tokens: int = 0
    num_evictions: int = 0
    saturated_values: Mapping[Place, int] = field(default_factory=dict)
    quantised_values: Mapping[Place, int] = field(default_factory=dict)
    settings_version: int = 0
    policy_version: int = 0

    def saturation(self, place: Place) -> float:
        """Gives the share of a place's values beyond the largest that its static scale has."""
        return self.saturated_values.get(place, 0) / max(self.quantised_values.get(place, 0), 1)

    @property
    def largest_saturation(self) -> tuple[float, Place | None]:
        """The largest share of all places, and where it is; 0 and None without static scales."""
        shares = [(self.saturation(place), place) for place in sorted(self.saturated_values)]
        return max(shares, default=(0.0, None), key=lambda share: share[0])

    def as_dict(self) -> dict[str, Any]:
        """Gives the counts as plain values that JSON can hold; saturation as shares by place."""
        share, place = self.largest_saturation
        fields = {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in vars(self).items()
            if name not in ("saturated_values", "quantised_values")
        }
        return fields | {
            "saturation": {
                f"{layer}/{site}": self.saturation((layer, site))
                for layer, site in sorted(self.saturated_values)
            },
            "largest_saturation": share,
            "largest_saturation_at": None if place is None else f"{place[0]}/{place[1]}",
        }


def counts_of_samples(samples: Sequence[RolloutSample]) -> dict[str, Any]:
    """Gives the fields of a report that follow from the samples."""
    degenerate = Counter(sample.degeneration for sample in samples if sample.degeneration)
    return {
        "num_samples": len(samples),
        "prompt_tokens": sum(len(sample.prompt_tokens) for sample in samples),
        "response_tokens": sum(len(sample.response_tokens) for sample in samples),
        "finish_reasons": dict(Counter(sample.finish_reason for sample in samples)),
        "degenerate": dict(degenerate),
    }
