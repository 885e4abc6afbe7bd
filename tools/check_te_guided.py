"""Checks guided rounding inside Transformer Engine's grouped experts against a torch reference.

    python tools/check_te_guided.py --out te_guided.json

A Megatron MoE layer with `TraceTEGroupedMLP` runs forward and backward on a GPU with true hints (a
noisy copy's) of fc1 and fc2, with experts=te and with experts=te_recipe. Each is compared twice:

* `same`: against the reference on TE's BF16 grouped product of the operands quantised beforehand
  by the torch specification, padded alike; equal bits are required
* `torch`: against the reference on one `torch` product per expert, without padding. The order of
  sums may differ, and where it moves an activation over a rounding boundary fc2's input differs by
  an FP4 step; so the relative error of the whole tensor must stay under TORCH_TOLERANCE.

Legend: T tokens, H hidden size, F expert hidden size, E experts, N dispatched rows.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformer_engine.pytorch.quantization import QuantizerRole
from transformer_engine.pytorch.tensor import IdentityQuantizer

from megatron_trace.formats import decode, pack_bits, reference, unpack_codes
from megatron_trace.hints.types import Site
from megatron_trace.testing.moe_reference import (
    TorchProduct,
    quantised,
    quantised_weight,
)
from megatron_trace.testing.roundings import RecordedRoundings, recorded_rounding
from megatron_trace.testing.te_layer import (
    F_EXPERT,
    LAYER,
    Case,
    H,
    Layer,
    Outcome,
    SameProduct,
    build_layer,
    case_roundings,
    expert_weights,
    noisy,
    run_layer,
    run_reference,
    static_scale,
)
from megatron_trace.training import te_recipe
from megatron_trace.training.experts import bind_experts
from megatron_trace.training.te_choice import ExpertsKind
from megatron_trace.training.te_rows import LinearCall, linear_call, moved, pad_rows
from megatron_trace.training.weights import quantise_weight

TORCH_TOLERANCE = 1e-2

KINDS: tuple[ExpertsKind, ...] = ("te", "te_recipe")
CASES = (
    Case("top-2 of 8"),
    Case("uneven splits", splits=(40, 0, 17, 71)),
    Case("splits 1, 0, 63, 64", splits=(1, 0, 63, 64)),
    Case("one busy expert", splits=(0, 0, 200, 0)),
    Case("no padding needed", splits=(128, 0, 128, 256)),
    Case("full codes", num_bits=4),
    Case("some rows without hint", hint_share=0.7),
    Case("no hints (qat)", num_bits=0),
    Case("fused wgrad", fused_wgrad=True),
    Case("fused wgrad, uneven splits", splits=(40, 0, 17, 71), fused_wgrad=True),
    Case("fused wgrad, splits 1, 0, 63, 64", splits=(1, 0, 63, 64), fused_wgrad=True),
    Case("recomputed", recompute=True),
    Case("activation recomputed", moe_act_recompute=True),
    Case("all-gather dispatcher", dispatcher="allgather"),
    Case("fused permutation", permute_fusion=True),
)
NATIVE_CASE = Case("native FP4", native=True)
NATIVE_CAPABILITY = (10, 0)


@dataclass
class Report:
    """Results of all checks, in order."""

    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, group: str, name: str, passed: bool, **measured: Any) -> None:
        """Notes one result and prints it."""
        self.rows.append({"group": group, "name": name, "passed": bool(passed), **measured})
        print("PASS" if passed else "FAIL", group, "|", name, "|", measured, flush=True)

    def compare(self, group: str, ours: Outcome, theirs: Outcome, *, exact: bool) -> None:
        """Notes the comparison of two outcomes, one row per kind of tensor."""
        expected = theirs.tensors()
        for name, tensor in ours.tensors().items():
            difference = tensor.double() - expected[name].double()
            relative = float(difference.norm() / expected[name].double().norm().clamp_min(1e-30))
            largest = float(difference.abs().max())
            finite = bool(torch.isfinite(tensor).all())
            allowed = 0.0 if exact else TORCH_TOLERANCE
            self.add(
                group,
                name,
                finite and relative <= allowed,
                relative=relative,
                largest=largest,
                tolerance=allowed,
            )

    @contextlib.contextmanager
    def check(self, group: str, name: str) -> Iterator[None]:
        """Notes an exception as a failure and goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(group, name, False, error=f"{type(error).__name__}: {str(error)[:400]}")
            if "CUDA error" in str(error):
                raise


def check_case(case: Case, report: Report, device: torch.device) -> None:
    """Compares one case with both references, and both kinds of experts with one another."""
    outcomes = {}
    for kind in ("te_recipe",) if case.native else KINDS:
        named = replace(case, name=f"{case.name}, {kind}", experts=kind)
        outcomes[kind] = check_kind(named, report, device)
    if not case.native:
        report.compare(f"{case.name} / te and te_recipe", *outcomes.values(), exact=False)


def check_kind(case: Case, report: Report, device: torch.device) -> Outcome:
    """Compares one case with both references."""
    torch.manual_seed(23)
    model_parallel_cuda_manual_seed(23, force_reset_rng=True)
    layer = build_layer(case, device)
    tokens = torch.randn(case.num_tokens, H, device=device).bfloat16()
    output_gradient = torch.randn(case.num_tokens, H, device=device).bfloat16()
    roundings = case_roundings(case, layer, tokens)
    bind_experts(layer, LAYER, cast("Any", roundings))
    ours = run_layer(layer, tokens, output_gradient)
    calls = 2 if case.recompute else 1
    report.add(
        case.name,
        "guided quantiser was called",
        roundings.calls == {(LAYER, Site.FC1): calls, (LAYER, Site.FC2): calls}
        and set(roundings.weight_uses.values()) == {calls}
        and roundings.weights_quantised == 2 * case.num_experts
        and (case.native or has_our_quantisers(layer, case.experts)),
        calls={str(site): count for (_, site), count in roundings.calls.items()},
    )
    padded = case.experts == "te_recipe"
    references = {
        "same": partial(SameProduct, fused_wgrad=case.fused_wgrad, padded=padded),
        "torch": TorchProduct,
    }
    for name, product in references.items():
        theirs = run_reference(layer, tokens, output_gradient, roundings, product)
        exact = name == "same" and not case.native
        report.compare(f"{case.name} / {name}", ours, theirs, exact=exact)
    return ours


def has_our_quantisers(layer: Layer, experts: ExpertsKind) -> bool:
    """Tells whether TE holds our quantisers where it should, and none for gradients."""
    of_input = te_recipe.GuidedFakeQuantizer if experts == "te_recipe" else IdentityQuantizer
    return all(
        type(slots[0]) is of_input
        and type(slots[1]) is te_recipe.WeightFakeQuantizer
        and type(gradients[0]) is IdentityQuantizer
        for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2)
        for slots in [linear.quantizers["scaling_fwd"]]
        for gradients in [linear.quantizers["scaling_bwd"]]
    )


def check_cached_weights(report: Report, device: torch.device) -> None:
    """Two micro-batches of one step share quantised weights; the next step has new ones."""
    for kind in KINDS:
        check_cached_weights_of(
            Case(f"cached weights, {kind}", kind, fused_wgrad=True), report, device
        )


def check_cached_weights_of(case: Case, report: Report, device: torch.device) -> None:
    """The same of one kind of experts."""
    torch.manual_seed(5)
    layer = build_layer(case, device)
    tokens = torch.randn(case.num_tokens, H, device=device).bfloat16()
    gradient = torch.randn(case.num_tokens, H, device=device).bfloat16()
    roundings = case_roundings(case, layer, tokens)
    bind_experts(layer, LAYER, cast("Any", roundings))
    product = partial(SameProduct, fused_wgrad=True, padded=case.experts == "te_recipe")
    for step in range(2):
        with torch.no_grad():
            for weight in expert_weights(layer):
                weight.mul_(1.0 + 0.1 * step)
                weight.main_grad.zero_()
        first = run_layer(layer, tokens, gradient)
        report.compare(
            f"{case.name}, step {step}",
            first,
            run_reference(layer, tokens, gradient, roundings, product),
            exact=True,
        )
        second = run_layer(layer, tokens, gradient)
        once, twice = (o.tensors()["wgrad fc1"] for o in (first, second))
        relative = float((twice - 2 * once).norm() / (2 * once).norm())
        report.add(
            f"{case.name}, step {step}",
            "second micro-batch adds the same gradient",
            relative <= 1e-6 and torch.equal(first.output, second.output),
            relative=relative,
            tolerance=1e-6,
        )
    report.add(
        case.name,
        "each weight was quantised once a step",
        roundings.weights_quantised == 2 * 2 * case.num_experts,
        uses=sum(roundings.weight_uses.values()),
    )


@dataclass
class Operands:
    """What our quantisers give for an input with uneven splits, and what they should give.

    Attributes:
        fake: BF16 [padded rows, H]; the fake quantiser's values.
        native: NVFP4 storages of each expert's rows.
        weight: BF16; the fake quantiser's weight.
        native_weight: The same weight as an NVFP4 tensor.
        expected: BF16 [padded rows, H]; values by the specification.
        expected_codes: uint8 [padded rows, H]; codes by the specification.
        expected_weight: BF16; by the specification.
        scale_bytes: uint8 [padded rows, H / 16].
        scale: Static decode-side scale.
    """

    fake: torch.Tensor
    native: list[Any]
    weight: torch.Tensor
    native_weight: Any
    expected: torch.Tensor
    expected_codes: torch.Tensor
    expected_weight: torch.Tensor
    scale_bytes: torch.Tensor
    scale: float


def make_operands(device: torch.device) -> Operands:
    """Quantises on the device by our quantisers, and on the CPU by the specification."""
    splits, padded_splits = (40, 0, 17, 71), (128, 0, 128, 128)
    torch.manual_seed(7)
    tokens = torch.randn(sum(splits), H).bfloat16()
    weight = torch.randn(2 * F_EXPERT, H).bfloat16()
    scale = static_scale(tokens)
    pad = partial(pad_rows, splits=splits, padded_splits=padded_splits)
    rounding = moved(
        recorded_rounding(noisy(tokens), scale, num_bits=1, implementation="torch"), pad
    )
    padded, hint = pad(tokens), rounding.hint
    assert hint is not None, "recorded_rounding makes hints"
    values = padded.to(device)
    on_device = replace(rounding, hint=hint.to(device), implementation="auto")
    parts = torch.split(values, padded_splits)
    on_gpu = weight.to(device)
    form = quantise_weight(on_gpu, RecordedRoundings.weight_rule)
    with linear_call(LinearCall("fc1", values, on_device, [(on_gpu, form)])):
        fake = [te_recipe.GuidedFakeQuantizer()(part).dequantize() for part in parts]
        native = [te_recipe.GuidedNVFP4Quantizer()(part) for part in parts]
        held = te_recipe.WeightFakeQuantizer()(on_gpu).dequantize()
        native_weight = te_recipe.WeightNVFP4Quantizer()(on_gpu)
    guided = reference.guided_codes(padded, hint.payload, hint.scale_bytes, scale, num_bits=1)
    return Operands(
        torch.cat(fake).cpu(),
        native,
        held.cpu(),
        native_weight,
        quantised(rounding, padded),
        guided.masked_fill(~hint.has_hint.unsqueeze(-1), 0),
        quantised_weight(weight),
        hint.scale_bytes,
        scale,
    )


def check_operands(report: Report, device: torch.device) -> None:
    """The quantisers' operands, bit by bit, against the specification on the CPU."""
    operands = make_operands(device)
    add = partial(report.add, "operands")
    add("activation bits", torch.equal(operands.fake, operands.expected))
    add("weight bits", torch.equal(operands.weight, operands.expected_weight))
    codes = torch.cat([unpack_codes(storage._rowwise_data) for storage in operands.native]).cpu()
    add("NVFP4 codes", torch.equal(codes, operands.expected_codes))

    tokens = torch.randn(512, H).bfloat16()
    scale = static_scale(tokens)
    rollout = noisy(tokens)
    (of_rollout, scale_bytes), (own, _) = (reference.encode(x, scale) for x in (rollout, tokens))
    bits = pack_bits(of_rollout)
    guided = reference.guided_codes(tokens, bits, scale_bytes, scale, num_bits=1)
    shares = {
        "nearest": float((own != of_rollout).float().mean()),
        "guided": float((guided != of_rollout).float().mean()),
    }
    add(
        "share of codes unlike the rollout's",
        shares["guided"] < 0.2 * shares["nearest"],
        **shares,
    )


def check_te_decodes(report: Report, device: torch.device) -> None:
    """Transformer Engine reads our NVFP4 tensors as the values that we mean."""
    operands = make_operands(device)
    decoded = torch.cat([part.dequantize(dtype=torch.float32) for part in operands.native]).cpu()
    ours = decode(operands.expected_codes, operands.scale_bytes, operands.scale)
    report.add(
        "TE decodes",
        "our NVFP4 activation",
        torch.allclose(decoded, ours, rtol=1e-6, atol=0),
        largest=float((decoded - ours).abs().max()),
    )
    decoded = operands.native_weight.dequantize(dtype=torch.float32).cpu()
    ours = operands.expected_weight.float()
    report.add(
        "TE decodes",
        "our NVFP4 weight",
        torch.allclose(decoded, ours, rtol=2**-8, atol=0),
        largest=float((decoded - ours).abs().max()),
    )


def check_native(report: Report, device: torch.device) -> None:
    """The native FP4 product of our codes, where the GPU has one."""
    with report.check(NATIVE_CASE.name, "ran"):
        check_case(NATIVE_CASE, report, device)


def check_refusals(report: Report, device: torch.device) -> None:
    """Missing hints and a missing FP4 context raise; other roles are not quantised."""
    case = Case("refusals")
    torch.manual_seed(11)
    layer = build_layer(case, device)
    tokens = torch.randn(case.num_tokens, H, device=device).bfloat16()
    gradient = torch.ones_like(tokens)

    def raises(kind: type[Exception], run: Callable[[], Any]) -> dict[str, Any]:
        try:
            run()
        except kind as error:
            return {"passed": True, "message": str(error)[:160]}
        return {"passed": False, "message": "nothing was raised"}

    report.add(
        "refusals",
        "layer without source",
        **raises(LookupError, lambda: run_layer(layer, tokens, gradient)),
    )
    bind_experts(layer, LAYER, cast("Any", RecordedRoundings()))
    report.add(
        "refusals",
        "missing hint",
        **raises(LookupError, lambda: run_layer(layer, tokens, gradient)),
    )
    bind_experts(layer, LAYER, cast("Any", case_roundings(case, layer, tokens)))
    report.add(
        "refusals",
        "no FP4 context",
        **raises(RuntimeError, lambda: layer(tokens.unsqueeze(1))),
    )
    report.add(
        "refusals",
        "quantiser outside of a call",
        **raises(LookupError, lambda: te_recipe.GuidedFakeQuantizer()(tokens)),
    )
    others = [
        QuantizerRole("linear", "input", "qkv"),
        QuantizerRole("linear", "weight", "qkv"),
        QuantizerRole("grouped_linear", "grad_output", "fc1"),
        None,
    ]
    factories = (te_recipe.guided_fake_quantizer_factory, te_recipe.guided_nvfp4_quantizer_factory)
    report.add(
        "refusals",
        "other roles stay BF16",
        all(type(make(role)) is IdentityQuantizer for make in factories for role in others),
    )


def check_checkpoint(report: Report, device: torch.device) -> None:
    """Saving a layer that has run needs no unpickling of the recipe."""
    case = Case("checkpoint")
    torch.manual_seed(13)
    layer = build_layer(case, device)
    tokens = torch.randn(case.num_tokens, H, device=device).bfloat16()
    bind_experts(layer, LAYER, cast("Any", case_roundings(case, layer, tokens)))
    before = run_layer(layer, tokens, torch.ones_like(tokens))
    with report.check("checkpoint", "save and load"):
        metadata = {
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)
        }
        sharded = layer.experts.sharded_state_dict("experts.", (), metadata)
        layer.load_state_dict(layer.state_dict())
        after = run_layer(layer, tokens, torch.ones_like(tokens))
        report.add(
            "checkpoint",
            "save and load",
            torch.equal(before.output, after.output),
            sharded_entries=len(sharded),
        )


def versions() -> dict[str, str]:
    """Gives what ran."""
    names = ("torch", "triton", "megatron-core", "transformer-engine", "nvidia-modelopt")
    found = {name: version(name) for name in names}
    return found | {
        "python": sys.version.split()[0],
        "cuda": str(torch.version.cuda),
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
    }


@contextlib.contextmanager
def one_rank(backend: str) -> Iterator[None]:
    """Initialises torch.distributed and Megatron for one process."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def run_checks(report: Report, device: torch.device) -> None:
    """Runs every check; one that raises counts as failed."""
    with report.check("operands", "ran"):
        check_operands(report, device)
    for case in CASES:
        with report.check(case.name, "ran"):
            check_case(case, report, device)
    others = (
        check_cached_weights,
        check_refusals,
        check_checkpoint,
        check_te_decodes,
    )
    for check in others:
        with report.check(check.__name__, "ran"):
            check(report, device)


def print_table(report: Report) -> None:
    """Prints one line per group: checks passed, and the largest relative error."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in report.rows:
        groups.setdefault(row["group"], []).append(row)
    print(f"\n{'group':44} {'passed':>8}  {'relative error':>14}")
    for group, rows in groups.items():
        passed = sum(row["passed"] for row in rows)
        errors = [row["relative"] for row in rows if "relative" in row]
        worst = f"{max(errors):.3g}" if errors else ""
        mark = "" if passed == len(rows) else "  FAIL"
        print(f"{group:44} {passed:>4}/{len(rows):<3}  {worst:>14}{mark}")


def main() -> int:
    """Runs the checks and gives the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument(
        "--attempt-native",
        action="store_true",
        help="try the native FP4 product also below compute capability 10, where TE refuses it",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("check_te_guided.py needs a CUDA device", file=sys.stderr)
        return 2
    found = versions()
    print(found)
    native = torch.cuda.get_device_capability() >= NATIVE_CAPABILITY
    report = Report()
    device = torch.device("cuda", torch.cuda.current_device())
    with one_rank("nccl"):
        run_checks(report, device)
        if native or arguments.attempt_native:
            check_native(report, device)
    results = {"versions": found, "native": native, "results": report.rows}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(results, indent=1))
    print_table(report)
    if not native:
        print("native FP4 product: NOT RUN, it needs compute capability 10")
    failed = sum(not row["passed"] for row in report.rows)
    print(f"{len(report.rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
