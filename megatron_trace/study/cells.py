"""The cells of the study, as data: what each one varies against the default trainer.

A cell is one trainer setting that scores the samples of one engine setting. All cells of an engine
setting score the same samples, so that they can be compared pairwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_trace.config import NumberFormatName

CellMethod = Literal["bf16", "qat", "trace", "w4a16"]
ALL_SITES = ("fc1", "fc2", "k", "v")
DEFAULT_SITES = ("fc1", "k", "v")


@dataclass(frozen=True)
class EngineSetting:
    """How the samples of a rollout set were generated.

    Attributes:
        name: Name of the rollout set.
        quantised: Whether the engine quantises.
        number_format: Its number format.
        power_of_two_scales: Whether global scales are powers of two.
        max_requests: Samples that the engine generates at a time.
        long_prompts: Whether its prompts are those above `LONG_PROMPT_TOKENS` instead of the
            others. Then there are a quarter as many samples.
    """

    name: str
    quantised: bool = True
    number_format: NumberFormatName = "nvfp4"
    power_of_two_scales: bool = False
    max_requests: int = 64
    long_prompts: bool = False


LONG_PROMPT_TOKENS = 600
ENGINES = {
    setting.name: setting
    for setting in (
        EngineSetting("fp4"),
        EngineSetting("bf16", quantised=False),
        EngineSetting("fp4-batch-4", max_requests=4),
        EngineSetting("fp4-long", max_requests=16, long_prompts=True),
        EngineSetting("bf16-long", quantised=False, max_requests=16, long_prompts=True),
        EngineSetting("fp4-pow2", power_of_two_scales=True),
        EngineSetting("nvfp4_4over6", number_format="nvfp4_4over6"),
        EngineSetting("mxfp4", number_format="mxfp4"),
        EngineSetting("mxfp4_w4a8", number_format="mxfp4_w4a8"),
    )
}


@dataclass(frozen=True)
class StudySettings:
    """Size of a study.

    Attributes:
        name: `cpu` or `h200`.
        num_samples: Samples of every rollout set.
        max_new_tokens: Longest response.
        short: Whether only the questions of a slow model are asked.
    """

    name: str
    num_samples: int
    max_new_tokens: int
    short: bool = False


@dataclass(frozen=True)
class Cell:
    """One trainer setting.

    Attributes:
        name: Unique; `/` separates the question from what varies.
        engine: Name of the engine setting whose samples are scored.
        method: What the trainer quantises; `w4a16` quantises expert weights only.
        bits: Bits of a hint.
        sites: Guided sites.
        layers: Which share of the layers is guided, and from which end.
        scale_form: How a hint keeps block scales.
        scales: `rollout`; `own` uses the trainer's block scales with the rollout's bits; `nearest`
            uses the rollout's block scales without its bits; `accumulator` takes code * block scale
            as the experts' operands and applies global scales to the product, which the engine
            does not.
        guard: Whether implausible hints are rejected.
        dtype: dtype of the trainer.
        attention: Attention arithmetic of the trainer.
        replay_routing: Whether tokens go to the rollout's experts.
        micro_batch: Samples that are forwarded together.
        damage: What is done to the hints.
        noise: Relative noise on the output of every layer, or on every weight.
        lag: Optimizer steps between the rollout's weights and the trainer's.
        lag_rate: Learning rate of these steps.
        fresh: Whether the hints are of the trainer's weights in spite of the lag.
        codes: Whether codes are compared with the rollout's, by site or also by layer.
        gradient: Whether the policy gradient is compared instead of log-probs.
    """

    name: str
    engine: str = "fp4"
    method: CellMethod = "trace"
    bits: int = 1
    sites: tuple[str, ...] = ALL_SITES
    layers: tuple[Literal["first", "latter"], float] = ("latter", 1.0)
    scale_form: Literal["raw", "residue"] = "raw"
    scales: Literal["rollout", "own", "nearest", "accumulator"] = "rollout"
    guard: bool = True
    dtype: Literal["bf16", "fp32"] = "bf16"
    attention: Literal["megatron", "sdpa"] = "megatron"
    replay_routing: bool = True
    micro_batch: int = 64
    damage: Literal["none", "shuffled", "wrong_scales", "other_sample"] = "none"
    noise: tuple[Literal["activations", "weights"], float] = ("activations", 0.0)
    lag: int = 0
    lag_rate: float = 0.0
    fresh: bool = False
    codes: Literal["no", "site", "layer"] = "no"
    gradient: bool = False

    @property
    def question(self) -> str:
        """The part of the name before the first slash."""
        return self.name.partition("/")[0]


def kept_layers(layers: tuple[str, float], num_layers: int) -> tuple[int, ...]:
    """Gives the decoder layers of a share, at least one, such as the latter half.

    Args:
        layers: `first` or `latter`, and the share.
        num_layers: Decoder layers of the model.
    """
    end, share = layers
    count = max(1, round(num_layers * share))
    return tuple(range(count)) if end == "first" else tuple(range(num_layers - count, num_layers))


METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bf16", {"method": "bf16"}),
    ("w4a16", {"method": "w4a16"}),
    ("qat", {"method": "qat"}),
    ("trace", {"sites": DEFAULT_SITES}),
    ("trace-all-sites", {}),
    ("full-codes", {"bits": 4, "guard": False}),
)
DTYPES: tuple[Literal["bf16", "fp32"], ...] = ("bf16", "fp32")
NOISES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0)
# (learning rate, steps): a rate of RL, and one at which a policy ages fast.
LAGS = ((1e-5, 1), (1e-5, 2), (1e-5, 3), (3e-4, 1), (3e-4, 3), (3e-4, 10), (3e-4, 30))


def all_cells() -> list[Cell]:
    """Gives every cell, in the order in which they are computed."""
    cells = [
        *_methods(),
        *_positions(),
        *_sites(),
        *_layers(),
        *_bits(),
        *_scales(),
        *_formats(),
        *_guard(),
        *_arithmetic(),
        *_engine(),
        *_routing(),
        *_gradients(),
        *_damaged(),
        *_noises(),
        *_lags(),
    ]
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names), "the names of cells are unique"
    return cells


def cells_for(sites: Sequence[str], *, short: bool, long_prompts: bool = False) -> list[Cell]:
    """Gives the cells that make sense for a model.

    Args:
        sites: Sites that the model has; a cell without them is left out, and of two cells that
            then are the same the first is kept.
        short: Whether only the questions of a slow model are asked.
        long_prompts: Whether the model has long prompts too.
    """
    kept: dict[Cell, Cell] = {}
    for cell in all_cells():
        if short and not _is_short(cell):
            continue
        if ENGINES[cell.engine].long_prompts and not long_prompts:
            continue
        present = tuple(site for site in cell.sites if site in sites)
        needs_experts = cell.method == "w4a16" or not cell.replay_routing
        if not present or (needs_experts and "fc1" not in sites):
            continue
        cell = dataclasses.replace(cell, sites=present)
        kept.setdefault(dataclasses.replace(cell, name=cell.question), cell)
    return list(kept.values())


def _is_short(cell: Cell) -> bool:
    if cell.gradient or cell.lag or cell.engine.removesuffix("-long") not in ("fp4", "bf16"):
        return False
    if cell.question == "noise":
        return cell.noise[1] in (1e-2, 1e-1)
    return cell.dtype == "bf16" or cell.question == "method"


def _methods() -> Iterator[Cell]:
    for dtype in DTYPES:
        yield Cell(f"floor/{dtype}", engine="bf16", method="bf16", dtype=dtype)
        for name, fields in METHODS:
            codes = "layer" if name in ("qat", "trace-all-sites") else "site"
            if fields.get("method") in ("bf16", "w4a16"):
                codes = "no"
            yield Cell(f"method/{name}/{dtype}", dtype=dtype, codes=codes, **fields)


def _positions() -> Iterator[Cell]:
    yield Cell("position/floor", engine="bf16-long", method="bf16")
    for name, fields in METHODS:
        if name != "w4a16":
            yield Cell(f"position/{name}", engine="fp4-long", **fields)


def _sites() -> Iterator[Cell]:
    subsets = (
        ("fc1",),
        ("fc2",),
        ("k",),
        ("v",),
        ("k", "v"),
        ("fc1", "fc2"),
        ("fc1", "k", "v"),
        ALL_SITES,
    )
    for dtype in DTYPES:
        for sites in subsets:
            yield Cell(f"sites/{'+'.join(sites)}/{dtype}", sites=sites, dtype=dtype)


def _layers() -> Iterator[Cell]:
    for dtype in DTYPES:
        for end in ("latter", "first"):
            for share in (1.0, 0.5, 0.25, 0.125):
                yield Cell(
                    f"layers/{end}-{share:g}/{dtype}",
                    layers=(end, share),
                    dtype=dtype,
                    codes="site" if (end, share) == ("latter", 0.5) else "no",
                )


def _bits() -> Iterator[Cell]:
    for dtype in DTYPES:
        for bits in (1, 2, 4):
            yield Cell(f"bits/{bits}/{dtype}", bits=bits, dtype=dtype)


def _scales() -> Iterator[Cell]:
    for dtype in DTYPES:
        yield Cell(f"scales/rollout/{dtype}", dtype=dtype)
        yield Cell(f"scales/residue/{dtype}", scale_form="residue", dtype=dtype)
        yield Cell(f"scales/own/{dtype}", scales="own", guard=False, dtype=dtype)
        yield Cell(f"scales/no-bits/{dtype}", scales="nearest", guard=False, dtype=dtype)
        for method in ("qat", "trace"):
            yield Cell(f"scales/pow2-{method}/{dtype}", "fp4-pow2", method=method, dtype=dtype)
    # In FP32 an operand of code * block scale * global scale is as good as the product after it.
    for method in ("qat", "trace"):
        yield Cell(
            f"scales/accumulator-{method}/fp32", method=method, scales="accumulator", dtype="fp32"
        )


def _formats() -> Iterator[Cell]:
    for dtype in DTYPES:
        for engine in ("nvfp4_4over6", "mxfp4", "mxfp4_w4a8"):
            fields: dict[str, Any] = {"engine": engine, "dtype": dtype, "codes": "site"}
            name = f"format/{engine}-{dtype}"
            yield Cell(f"{name}/qat", method="qat", **fields)
            yield Cell(f"{name}/trace", **fields)
            yield Cell(f"{name}/full-codes", bits=4, guard=False, **fields)


def _guard() -> Iterator[Cell]:
    for dtype in DTYPES:
        yield Cell(f"guard/on/{dtype}", dtype=dtype)
        yield Cell(f"guard/off/{dtype}", guard=False, dtype=dtype)


def _arithmetic() -> Iterator[Cell]:
    for name, method in (("floor", "bf16"), ("qat", "qat"), ("trace", "trace")):
        engine = "bf16" if name == "floor" else "fp4"
        fields: dict[str, Any] = {"engine": engine, "method": method}
        yield Cell(f"arithmetic/sdpa/{name}", attention="sdpa", **fields)
        yield Cell(f"arithmetic/one-sample/{name}", micro_batch=1, **fields)
    for method in ("qat", "trace"):
        yield Cell(f"arithmetic/engine-batch-4/{method}", engine="fp4-batch-4", method=method)


def _engine() -> Iterator[Cell]:
    yield Cell("engine/prefill", bits=4, guard=False, fresh=True)


def _routing() -> Iterator[Cell]:
    for dtype in DTYPES:
        yield Cell(
            f"routing/floor/{dtype}", "bf16", method="bf16", dtype=dtype, replay_routing=False
        )
        for name, fields in METHODS[:4]:
            yield Cell(f"routing/{name}/{dtype}", dtype=dtype, replay_routing=False, **fields)


def _gradients() -> Iterator[Cell]:
    more: tuple[tuple[str, dict[str, Any]], ...] = (
        ("trace-2-bits", {"bits": 2, "guard": False}),
        ("trace-latter-half", {"layers": ("latter", 0.5)}),
    )
    for dtype in DTYPES:
        for name, fields in (*METHODS, *more):
            # In BF16 first: names without a dtype.
            suffix = "" if dtype == "bf16" else f"/{dtype}"
            yield Cell(f"gradient/{name}{suffix}", gradient=True, dtype=dtype, **fields)


def _damaged() -> Iterator[Cell]:
    for damage in ("shuffled", "wrong_scales", "other_sample"):
        yield Cell(f"control/{damage}/guard", damage=damage, codes="site")
        yield Cell(f"control/{damage}/no-guard", damage=damage, guard=False)


def _noises() -> Iterator[Cell]:
    for kind in ("activations", "weights"):
        for size in NOISES:
            noise = (kind, size)
            yield Cell(f"noise/{kind}-{size:g}/qat", method="qat", noise=noise)
            yield Cell(f"noise/{kind}-{size:g}/trace", noise=noise)
            yield Cell(f"noise/{kind}-{size:g}/full-codes", noise=noise, bits=4, guard=False)


def _lags() -> Iterator[Cell]:
    for rate, steps in LAGS:
        lag: dict[str, Any] = {"lag": steps, "lag_rate": rate}
        name = f"lag/{rate:g}x{steps}"
        yield Cell(f"{name}/bf16", method="bf16", **lag)
        yield Cell(f"{name}/qat", method="qat", **lag)
        yield Cell(f"{name}/fresh", fresh=True, **lag)
        yield Cell(f"{name}/stale", **lag)
        yield Cell(f"{name}/stale-no-guard", guard=False, **lag)
        yield Cell(f"{name}/stale-full-codes", bits=4, guard=False, **lag)
