"""TraceConfig: every knob of TRACE, its default, its unit and its check.

`arguments.py` turns the fields into `--trace-*` flags; nothing else knows argparse.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from megatron_trace.formats.number_format import FORMAT_SETS, FormatSet
from megatron_trace.hints.types import HINT_BITS, QuantisedParts

Method = Literal["bf16", "qat", "qarl", "quads", "score_centering", "trace"]
Experts = Literal["auto", "local", "te", "te_recipe"]
Implementation = Literal["auto", "torch", "triton"]
DeltaRule = Literal["auto", "torch", "fla"]
KVKernels = Literal["auto", "torch", "triton", "cuda"]
PackedExpertKernels = Literal["off", "auto", "torch", "cuda"]
HintScales = Literal["raw", "residue"]
NumberFormatName = Literal["nvfp4", "nvfp4_4over6", "mxfp4", "mxfp4_w4a8"]
SITES_OF_PARTS = {"experts": ("fc1", "fc2"), "kv": ("k", "v")}
HINT_SITES = (*SITES_OF_PARTS["experts"], *SITES_OF_PARTS["kv"])
DEFAULT_HINT_SITES = ("fc1", "k", "v")
_BOTH_PARTS: QuantisedParts = "experts_and_kv"
_OF_GUARD = (
    "guard_max_far_blocks",
    "guard_max_scale_steps",
    "guard_min_parity_agreement",
    "guard_max_rejected_rows",
)


@dataclass(frozen=True)
class TraceConfig:
    """Settings of one TRACE run.

    Attributes:
        method: `bf16` quantises nothing; `qat` fake-quantises rollout and training by rounding to
            nearest; `qarl` and `score_centering` are qat with an objective of their own; `quads`
            fake-quantises the expert weights only in training, and compensates the rollout's
            experts for what quantising their inputs took away; `trace` guides training's rounding
            by the rollout's hints.
        number_format: Formats of expert weights, their inputs and the KV cache: `nvfp4`;
            `nvfp4_4over6` (the better of two block scales); `mxfp4`; `mxfp4_w4a8` (MXFP4 with the
            experts' inputs in MXFP8).
        quantised_parts: What is quantised: `experts_and_kv`, `experts` (routed experts only) or
            `kv` (KV cache only).
        hint_bits: Bits per value of a hint: 1 (mantissa bit), 2 (magnitude index modulo 4) or
            4 (full code, which has 8 bits where values are in MXFP8).
        hint_scales: How a hint keeps block scales: `raw` (8 bits each), or `residue` (3 bits each,
            modulo 8 against the trainer's own, which tells the guard less).
        hint_layers: Checkpoint decoder layers whose hints are recorded: `all`, `latter_half` (the
            paper's choice; our study found it not nearly enough), or comma-separated indices such
            as `2,3`.
        hint_sites: Sites that are recorded and guided, of fc1, fc2, k, v. fc2 takes top-k times the
            expert's hidden size a token, and needs routing replay. The default leaves out what is
            not quantised, such as fc1 in a model without MoE layers; any other choice must exist.
        missing_hints: What a recorded place without its hint does: `error`, or `rtn` (rounding to
            nearest, counted and reported).
        guard: Whether implausible hint rows are rejected (rounded to nearest and counted).
        guard_max_far_blocks: Share of a row's blocks whose scale may lie more than
            `guard_max_scale_steps` from the trainer's own. Of this and the next two, the default is
            that of the number format (`hints/guard.py`).
        guard_max_scale_steps: Steps beyond which a block counts as far: those of E4M3, of which a
            factor of 2 has eight.
        guard_min_parity_agreement: Share of a row's mantissa bits that must agree with rounding
            to nearest under the rollout's scale.
        guard_max_rejected_rows: Share of a site's rows with hints that the guard may reject, on one
            rank, before training stops: in the first step of an RL run, whose later ones have
            alarms, and in every step of Megatron's loop. A model that is not the rollout's has
            nearly all rejected, its own nearly none. 1 trains on and counts them.
        diagnostic_share: Share of the samples that also carry full codes, for metrics only.
        check_finite: Whether NaN or Inf at a quantised site raises an error that names it.
        power_of_two_scales: Whether the global scales of activations and weights are rounded up to
            powers of two, with which code * block scale * global scale is exact in BF16.
        save_packed_activations: Whether training keeps the quantised inputs of the routed experts'
            linears for backward as codes and block scales, 4.5 bit a value; the gradients have the
            same bits either way.
        experts: The trainer's routed experts: `local` (Megatron's local linears), `te` (Transformer
            Engine's grouped linears), `te_recipe` (the same, rounding inside Transformer Engine by
            its custom recipe), or `auto`: `te_recipe` if Megatron's --fp4-quantizer-factory names
            one of ours, else `local`.
        implementation: Kernels of the number formats: `torch`, `triton`, or `auto` (Triton where
            the tensor is on a GPU).
        delta_rule: Kernels of Gated DeltaNet layers: `torch`, `fla` (flash-linear-attention's), or
            `auto` (fla on a GPU, torch on a CPU or with --deterministic-mode).
        kv_attention: Kernels with which the engine reads its packed KV cache: `torch`, `triton`,
            `cuda` (CUDA C++ for decode, Triton for prefill), or `auto` (the fastest that can run).
        packed_experts: What computes the engine's routed experts from packed NVFP4 codes: `torch`,
            `cuda` (CUDA C++, compute capability 9.0), `auto` (cuda where it can run, else `off`),
            or `off`: Megatron's experts on BF16 weights of the same values, which round differently
            unless power_of_two_scales is set.
    """

    method: Method = "trace"
    number_format: NumberFormatName = "nvfp4"
    quantised_parts: QuantisedParts = "experts_and_kv"
    hint_bits: int = 1
    hint_scales: HintScales = "raw"
    hint_layers: str = "all"
    hint_sites: tuple[str, ...] = field(default=DEFAULT_HINT_SITES)
    missing_hints: Literal["error", "rtn"] = "error"
    guard: bool = True
    guard_max_far_blocks: float | None = None
    guard_max_scale_steps: int | None = None
    guard_min_parity_agreement: float | None = None
    guard_max_rejected_rows: float = 0.5
    diagnostic_share: float = 0.0
    check_finite: bool = True
    power_of_two_scales: bool = False
    save_packed_activations: bool = False
    experts: Experts = "auto"
    implementation: Implementation = "auto"
    delta_rule: DeltaRule = "auto"
    kv_attention: KVKernels = "auto"
    packed_experts: PackedExpertKernels = "off"

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range or on contradictory settings."""
        for name, choices in (
            ("method", Method),
            ("number_format", NumberFormatName),
            ("quantised_parts", QuantisedParts),
        ):
            known, value = get_args(choices), getattr(self, name)
            _require(value in known, name, f"one of {', '.join(known)}", value)
        _require(self.hint_bits in HINT_BITS, "hint_bits", "1, 2 or 4", self.hint_bits)
        _require(
            self.hint_scales in ("raw", "residue"),
            "hint_scales",
            "raw or residue",
            self.hint_scales,
        )
        _require(
            bool(self.hint_sites)
            and set(self.hint_sites) <= set(HINT_SITES)
            and len(set(self.hint_sites)) == len(self.hint_sites),
            "hint_sites",
            f"distinct sites of {', '.join(HINT_SITES)}",
            self.hint_sites,
        )
        _require(
            self.missing_hints in ("error", "rtn"),
            "missing_hints",
            "error or rtn",
            self.missing_hints,
        )
        for name in (
            "guard_max_far_blocks",
            "guard_min_parity_agreement",
            "guard_max_rejected_rows",
            "diagnostic_share",
        ):
            value = getattr(self, name)
            _require(value is None or 0.0 <= value <= 1.0, name, "a share from 0 to 1", value)
        _require(
            self.guard_max_scale_steps is None or self.guard_max_scale_steps >= 0,
            "guard_max_scale_steps",
            ">= 0",
            self.guard_max_scale_steps,
        )
        _require(
            self.implementation in ("auto", "torch", "triton"),
            "implementation",
            "auto, torch or triton",
            self.implementation,
        )
        _require(
            self.experts in ("auto", "local", "te", "te_recipe"),
            "experts",
            "auto, local, te or te_recipe",
            self.experts,
        )
        for name, choices in (
            ("delta_rule", DeltaRule),
            ("kv_attention", KVKernels),
            ("packed_experts", PackedExpertKernels),
        ):
            known, value = get_args(choices), getattr(self, name)
            _require(value in known, name, f"one of {', '.join(known)}", value)
        if self.method == "bf16" and self.diagnostic_share > 0:
            raise ValueError(
                f"diagnostic_share={self.diagnostic_share} has no effect with method=bf16, which "
                "quantises nothing; set it to 0 or choose qat or trace"
            )
        if self.save_packed_activations and self.method == "bf16":
            raise ValueError(
                "save_packed_activations has no effect with method=bf16, which quantises nothing; "
                "switch it off or choose qat or trace"
            )
        if self.save_packed_activations and not self.check_finite:
            raise ValueError(
                "save_packed_activations contradicts check_finite=False: a NaN has no code, so it "
                "would vanish; switch one of them the other way"
            )
        for name in _OF_GUARD if not self.guard else ():
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect without guard; leave it out, or "
                    "leave the guard on"
                )
        if self.hint_layers not in ("latter_half", "all"):
            _parse_layers(self.hint_layers)
        self._require_fitting_format()
        if self.method == "quads":
            self._require_fitting_quads()

    def _require_fitting_format(self) -> None:
        """Raises ValueError where another setting contradicts number format or parts."""
        formats = self.formats
        if self.method == "bf16":
            for name, default in (("number_format", "nvfp4"), ("quantised_parts", _BOTH_PARTS)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect with method=bf16, which "
                        "quantises nothing; leave it out or choose qat or trace"
                    )
        if self.power_of_two_scales and not formats.weights.has_global_scale:
            raise ValueError(
                f"power_of_two_scales has no effect with number_format={self.number_format}, which "
                "has no global scales; switch it off"
            )
        if self.hint_scales == "residue" and not formats.kv_cache.has_residues:
            raise ValueError(
                f"hint_scales=residue contradicts number_format={self.number_format}, whose block "
                "scales no residue tells; set hint_scales=raw"
            )
        if self.save_packed_activations and not self.quantises_experts:
            raise ValueError(
                "save_packed_activations has no effect with quantised_parts=kv, which leaves the "
                "experts' inputs as they are; switch it off"
            )
        foreign = [site for site in self.hint_sites if site not in self.quantised_sites]
        if foreign and self.hint_sites != DEFAULT_HINT_SITES and self.method == "trace":
            raise ValueError(
                f"hint_sites names {', '.join(foreign)}, but quantised_parts="
                f"{self.quantised_parts} quantises {', '.join(self.quantised_sites)} only; leave "
                "out what is not quantised"
            )

    def _require_fitting_quads(self) -> None:
        """Raises ValueError where a setting has no effect on quads, or contradicts it."""
        reasons = {
            **dict.fromkeys(
                ("hint_bits", "hint_scales", "hint_layers", "hint_sites", "missing_hints"),
                "which reads no hints",
            ),
            "diagnostic_share": "whose trainer gives its activations no codes to compare",
            "save_packed_activations": "whose trainer keeps its experts' inputs in BF16",
        }
        for name, reason in reasons.items():
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if value != default:
                raise ValueError(
                    f"{name}={value} has no effect with method=quads, {reason}; leave it out"
                )
        if self.quantised_parts == "kv":
            raise ValueError(
                "quantised_parts=kv contradicts method=quads, which is about the experts; choose "
                "qat, or quantise them too"
            )
        if self.experts not in ("auto", "local"):
            raise ValueError(
                f"experts={self.experts} contradicts method=quads: Transformer Engine's experts "
                "round their inputs; use experts=local"
            )

    @property
    def formats(self) -> FormatSet:
        """Number formats of expert weights, their inputs and the KV cache."""
        return FORMAT_SETS[self.number_format]

    @property
    def residual_share(self) -> float:
        """Share of the experts' input channels whose residual the rollout quantises too (quads)."""
        return 0.5 if self.method == "quads" else 0.0

    @property
    def compensates_residual(self) -> bool:
        """Whether the rollout adds what quantising the experts' inputs took away."""
        return self.residual_share > 0

    @property
    def quantises_experts(self) -> bool:
        """Whether the weights of the routed experts are quantised, and in the rollout inputs."""
        return self.method != "bf16" and self.quantised_parts != "kv"

    @property
    def quantises_kv(self) -> bool:
        """Whether keys and values are quantised."""
        return self.method != "bf16" and self.quantised_parts != "experts"

    @property
    def quantised_sites(self) -> tuple[str, ...]:
        """Sites that the rollout quantises in a model that has all of them."""
        parts = {"experts": self.quantises_experts, "kv": self.quantises_kv}
        return tuple(site for part, on in parts.items() if on for site in SITES_OF_PARTS[part])

    @property
    def trained_sites(self) -> tuple[str, ...]:
        """Sites that training quantises: those of the rollout, and none under quads (W4A16)."""
        return () if self.method == "quads" else self.quantised_sites

    @property
    def trains_quantised_kv(self) -> bool:
        """Whether training quantises keys and values."""
        return self.quantises_kv and self.method != "quads"

    @property
    def recorded_bits(self) -> int:
        """Bits per value that the rollout records: a hint's, or 4 where full codes are wanted."""
        return 4 if self.diagnostic_share > 0 else self.hint_bits

    def recorded_layers(self, num_layers: int) -> tuple[int, ...]:
        """Gives the decoder layers whose hints are recorded, in ascending order.

        Args:
            num_layers: Decoder layers (attention + MoE pairs) of the checkpoint.

        Raises:
            ValueError: `hint_layers` names a layer that the model does not have.
        """
        if self.hint_layers == "all":
            return tuple(range(num_layers))
        if self.hint_layers == "latter_half":
            return tuple(range(num_layers // 2, num_layers))
        layers = _parse_layers(self.hint_layers)
        if layers[-1] >= num_layers:
            raise ValueError(
                f"hint_layers={self.hint_layers!r} names decoder layer {layers[-1]}, but the model "
                f"has {num_layers} (0 to {num_layers - 1})"
            )
        return layers

    def sites_in(self, available: Collection[str]) -> tuple[str, ...]:
        """Gives the sites whose hints are recorded in a model.

        Args:
            available: Sites that the model has, quantised or not.

        Raises:
            ValueError: `hint_sites` names a site that the model does not have, and is not the
                default.
        """
        missing = [site for site in self.hint_sites if site not in available]
        if missing and self.hint_sites != DEFAULT_HINT_SITES:
            raise ValueError(
                f"hint_sites={self.hint_sites} names {', '.join(missing)}, but the model has "
                f"{', '.join(available) or 'no quantised site'} only (fc1 and fc2 are sites of MoE "
                "layers); leave out what it does not have"
            )
        quantised = set(available) & set(self.quantised_sites)
        return tuple(site for site in self.hint_sites if site in quantised)


@dataclass(frozen=True)
class RecordedConfig:
    """Settings of training on recorded rollouts.

    Attributes:
        hint_dir: Folder of samples, hints and rewards to train on.
        valid_hint_dir: Folder to evaluate on; empty evaluates on nothing.
        attention: Core attention: `megatron` is Megatron's own, `sdpa` torch's, the engine's.
        replay_routing: Whether tokens go to the rollout's experts. If not, rows of fc2 whose expert
            the rollout did not take are rounded to nearest and counted.
        pack_samples: Whether the samples of a micro-batch stand one after another in one sequence,
            instead of side by side padded to the longest; needs `attention=sdpa`.
        temperature: Temperature of the rollout's sampling.
        prefetch: Whether the hints of a step's next micro-batches are read meanwhile.
        hint_reader: What reads them: `process` (one for each rank, which the training does not
            wait for), `thread` (of the training's own process), or `auto`: a process on a GPU, a
            thread on a CPU.
        hint_memory_mb: Most MiB of host memory for the hints of micro-batches that were read and
            not used yet, the one in use included, for each chunk of the model on a rank; prefetch
            needs room for two. A micro-batch whose hints alone take more is an error. Without it,
            prefetch reads one micro-batch ahead.
        metrics_dir: Folder that gets what every step measures (`metrics.jsonl`) and what the run is
            (`run.json`), for tools/report.py; empty writes none. A run that goes on from a
            checkpoint continues the file; the folder of another run is refused.
    """

    hint_dir: str = ""
    valid_hint_dir: str = ""
    attention: Literal["megatron", "sdpa"] = "megatron"
    replay_routing: bool = True
    pack_samples: bool = False
    temperature: float = 1.0
    prefetch: bool = False
    hint_reader: Literal["auto", "process", "thread"] = "auto"
    hint_memory_mb: int | None = None
    metrics_dir: str = ""

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range."""
        _require(
            self.attention in ("megatron", "sdpa"), "attention", "megatron or sdpa", self.attention
        )
        if self.pack_samples and self.attention == "megatron":
            raise ValueError(
                "pack_samples contradicts attention=megatron: Megatron's DotProductAttention "
                "refuses packed sequences; choose attention=sdpa"
            )
        _require(self.temperature > 0, "temperature", "> 0", self.temperature)
        readers = ("auto", "process", "thread")
        _require(self.hint_reader in readers, "hint_reader", " or ".join(readers), self.hint_reader)
        if self.hint_reader != "auto" and not self.prefetch:
            raise ValueError(
                f"hint_reader={self.hint_reader} has no effect without prefetch; set it, or leave "
                "hint_reader out"
            )
        bound = self.hint_memory_mb
        _require(bound is None or bound > 0, "hint_memory_mb", "> 0", bound)
        for name in ("hint_dir", "valid_hint_dir"):
            folder = getattr(self, name)
            if self.metrics_dir and folder and Path(folder).resolve() == self.metrics_path:
                raise ValueError(
                    f"metrics_dir={self.metrics_dir} is {name}, whose run.json would be another "
                    "file; give it a folder of its own, such as one within"
                )

    @property
    def metrics_path(self) -> Path:
        """Absolute path of `metrics_dir`."""
        return Path(self.metrics_dir).resolve()


def _parse_layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ValueError(
            f"hint_layers must be latter_half, all, or indices such as 2,3; got {text!r}"
        )
    layers = tuple(sorted({int(part) for part in parts}))
    if len(layers) != len(parts):
        raise ValueError(f"hint_layers names a layer twice: {text!r}")
    return layers


def _require(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise ValueError(f"{name} must be {expected}; got {got!r}")
