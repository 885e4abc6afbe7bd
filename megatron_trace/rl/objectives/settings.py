"""What a LossConfig means for a method: every value decided, contradictions refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_trace.config import Method
from megatron_trace.rl_config import LossConfig

# Objectives that a method is published with; the others are free, grpo by default.
OBJECTIVE_OF_METHOD: dict[Method, str] = {"qarl": "tbpo", "score_centering": "score_centering"}
SEQUENCE_OBJECTIVES = ("gspo", "tbpo")
_CLIP_OF_TOKENS = (0.2, 0.28)
_CLIP_OF_SEQUENCES = (3e-4, 4e-4)
# Corrections that an objective takes, the default one first; all where it is not named.
CORRECTIONS = {"tbpo": ("none",), "score_centering": ("tis", "none")}
_ALL_CORRECTIONS = ("tis", "icepop", "mis_token", "mis_sequence", "none")
_CAP = {"tis": 5.0, "icepop": 5.0, "mis_token": 2.0, "mis_sequence": 2.0}
# Of objectives with a cap of their own.
_OWN_CAP = {"tbpo": 2.0, "score_centering": 2.0}
_FLOOR = 0.5
_CENTER_TOP_K = 128


@dataclass(frozen=True)
class LossSettings:
    """The objective of a run; see `LossConfig` for the meaning of the fields.

    Attributes:
        objective: Not `auto`.
        correction: Not `auto`.
        clip_low: Of the ratio theta / old.
        clip_high: Of the ratio theta / old.
        importance_cap: Largest weight old / rollout.
        importance_floor: Smallest ratio that icepop keeps.
        center_top_k: Tokens that score_centering reads; 0 for the other objectives.
    """

    objective: str = "grpo"
    correction: str = "tis"
    clip_low: float = _CLIP_OF_TOKENS[0]
    clip_high: float = _CLIP_OF_TOKENS[1]
    importance_cap: float = _CAP["tis"]
    importance_floor: float = _FLOOR
    center_top_k: int = 0

    @property
    def unit(self) -> Literal["tokens", "sequences"]:
        """What the loss is a mean over: response tokens, or samples with a response."""
        return "sequences" if self.objective in SEQUENCE_OBJECTIVES else "tokens"


def loss_settings(method: Method, config: LossConfig) -> LossSettings:
    """Gives the objective that a configuration asks for under a method.

    Raises:
        ValueError: Method and settings contradict each other, or a setting has no effect.
    """
    published = OBJECTIVE_OF_METHOD.get(method)
    objective = config.objective if config.objective != "auto" else published or "grpo"
    if published is not None and objective != published:
        raise ValueError(
            f"method={method} contradicts objective={objective}: the method is plain FP4 training "
            f"(qat) with the objective {published}; leave the objective out, or choose method=qat"
        )
    accepted = CORRECTIONS.get(objective, _ALL_CORRECTIONS)
    correction = config.correction if config.correction != "auto" else accepted[0]
    if correction not in accepted:
        raise ValueError(
            f"correction={correction} contradicts objective={objective}, which weighs the "
            "rollout's probabilities itself: they would count twice; set correction="
            f"{' or '.join(accepted)}"
        )
    _require_effect(objective, correction, config)
    low, high = _CLIP_OF_SEQUENCES if objective in SEQUENCE_OBJECTIVES else _CLIP_OF_TOKENS
    cap = _OWN_CAP.get(objective, _CAP.get(correction, 1.0))
    top_k = _CENTER_TOP_K if config.center_top_k is None else config.center_top_k
    return LossSettings(
        objective=objective,
        correction=correction,
        clip_low=low if config.clip_low is None else config.clip_low,
        clip_high=high if config.clip_high is None else config.clip_high,
        importance_cap=cap if config.importance_cap is None else config.importance_cap,
        importance_floor=_FLOOR if config.importance_floor is None else config.importance_floor,
        center_top_k=top_k if objective == "score_centering" else 0,
    )


def _require_effect(objective: str, correction: str, config: LossConfig) -> None:
    without_effect = {
        "clip_low": objective == "score_centering",
        "clip_high": objective == "score_centering",
        "importance_cap": correction == "none" and objective != "tbpo",
        "importance_floor": correction != "icepop",
        "center_top_k": objective != "score_centering",
    }
    for name, ignored in without_effect.items():
        if ignored and getattr(config, name) is not None:
            raise ValueError(
                f"{name}={getattr(config, name)} has no effect with objective={objective} and "
                f"correction={correction}; leave it out"
            )
