"""Checks guided rounding inside Transformer Engine's grouped experts against a torch reference.

    python tools/check_te_guided.py --out te_guided.json

A Megatron MoELayer with `TraceTEGroupedMLP`, quantised through the `CustomRecipe` factory, runs
forward and backward on a GPU with true hints (a noisy copy's). Every case is compared twice:

* `same`: against the reference on TE's BF16 grouped product of the operands quantised beforehand
  by the torch specification, padded alike. Equal bits are required.
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
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformer_engine.pytorch.quantization import QuantizerRole
from transformer_engine.pytorch.tensor import IdentityQuantizer

from megatron_trace.formats import decode, pack_bits, reference, unpack_codes
from megatron_trace.hints.types import Site
from megatron_trace.models.hybrid import build_hybrid_model, causal_mask, decoder_layers
from megatron_trace.testing.moe_reference import (
    TorchProduct,
    quantised,
    quantised_weight,
    routed_experts,
)
from megatron_trace.testing.roundings import RecordedRoundings, recorded_rounding
from megatron_trace.testing.te_layer import (
    F_EXPERT,
    FC2_SCALE,
    LAYER,
    Case,
    H,
    Outcome,
    SameProduct,
    build_layer,
    case_roundings,
    expert_weights,
    moe_config,
    noisy,
    run_layer,
    run_reference,
    static_scale,
)
from megatron_trace.training import te_recipe
from megatron_trace.training.rounding import Rounding
from megatron_trace.training.te_rows import LinearCall, linear_call, moved, pad_rows
from megatron_trace.training.te_specs import (
    TE_HYBRID_MODULES,
    TraceTEMoELayer,
    attach_rounding_source,
)

TORCH_TOLERANCE = 1e-2

CASES = (
    Case("top-2 of 8"),
    Case("uneven splits", splits=(40, 0, 17, 71)),
    Case("one busy expert", splits=(0, 0, 200, 0)),
    Case("no padding needed", splits=(128, 0, 128, 256)),
    Case("full codes", num_bits=4),
    Case("some rows without hint", hint_share=0.7),
    Case("no hints (qat)", num_bits=0),
    Case("fused wgrad", fused_wgrad=True),
    Case("fused wgrad, uneven splits", splits=(40, 0, 17, 71), fused_wgrad=True),
    Case("recomputed", recompute=True),
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
    """Compares one case with both references."""
    torch.manual_seed(len(case.name))
    layer = build_layer(case, device)
    tokens = torch.randn(case.num_tokens, H, device=device).bfloat16()
    output_gradient = torch.randn(case.num_tokens, H, device=device).bfloat16()
    roundings = case_roundings(case, tokens)
    layer.attach(roundings, LAYER)
    ours = run_layer(layer, tokens, output_gradient)
    calls = 2 if case.recompute else 1
    ours_only = case.native or has_our_quantisers(layer)
    report.add(
        case.name,
        "guided quantiser was called",
        roundings.calls == {(LAYER, Site.FC1): calls, (LAYER, Site.FC2): calls} and ours_only,
        calls={str(site): count for (_, site), count in roundings.calls.items()},
    )
    references = {
        "same": partial(SameProduct, fused_wgrad=case.fused_wgrad),
        "torch": TorchProduct,
    }
    for name, product in references.items():
        theirs = run_reference(layer, tokens, output_gradient, roundings, product)
        exact = name == "same" and not case.native
        report.compare(f"{case.name} / {name}", ours, theirs, exact=exact)


def has_our_quantisers(layer: TraceTEMoELayer) -> bool:
    """Tells whether TE holds our quantisers for inputs and weights, and none for gradients."""
    return all(
        isinstance(slots[0], te_recipe.GuidedFakeQuantizer)
        and isinstance(slots[1], te_recipe.WeightFakeQuantizer)
        and type(gradients[0]) is IdentityQuantizer
        for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2)
        for slots in [linear.quantizers["scaling_fwd"]]
        for gradients in [linear.quantizers["scaling_bwd"]]
    )


def check_cached_weights(report: Report, device: torch.device) -> None:
    """Two micro-batches of one step share quantised weights; the next step has new ones."""
    case = Case("cached weights", fused_wgrad=True)
    torch.manual_seed(5)
    layer = build_layer(case, device)
    tokens = torch.randn(case.num_tokens, H, device=device).bfloat16()
    gradient = torch.randn(case.num_tokens, H, device=device).bfloat16()
    roundings = case_roundings(case, tokens)
    layer.attach(roundings, LAYER, cache_weights=True)
    product = partial(SameProduct, fused_wgrad=True)
    for step in range(2):
        with torch.no_grad():
            for weight in expert_weights(layer):
                weight.mul_(1.0 + 0.1 * step)
                weight.main_grad.zero_()
        layer.set_is_first_microbatch()
        first = run_layer(layer, tokens, gradient)
        report.compare(
            f"cached weights, step {step}",
            first,
            run_reference(layer, tokens, gradient, roundings, product),
            exact=True,
        )
        second = run_layer(layer, tokens, gradient)
        once, twice = (o.tensors()["wgrad fc1"] for o in (first, second))
        relative = float((twice - 2 * once).norm() / (2 * once).norm())
        report.add(
            f"cached weights, step {step}",
            "second micro-batch adds the same gradient",
            relative <= 1e-6 and torch.equal(first.output, second.output),
            relative=relative,
            tolerance=1e-6,
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
    with linear_call(LinearCall("fc1", values, on_device)):
        fake = [te_recipe.GuidedFakeQuantizer()(part).dequantize() for part in parts]
        native = [te_recipe.GuidedNVFP4Quantizer()(part) for part in parts]
        held = te_recipe.WeightFakeQuantizer()(weight.to(device)).dequantize()
        native_weight = te_recipe.WeightNVFP4Quantizer()(weight.to(device))
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
    layer.attach(RecordedRoundings(), LAYER)
    report.add(
        "refusals",
        "missing hint",
        **raises(LookupError, lambda: run_layer(layer, tokens, gradient)),
    )
    layer.attach(case_roundings(case, tokens), LAYER)
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
    layer.attach(case_roundings(case, tokens), LAYER)
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


class NoisyRoundings(RecordedRoundings):
    """Records a place's hints from a noisy copy of the values it is first asked about."""

    def rounding(self, layer: int, site: Site, values: torch.Tensor | None) -> Rounding:
        """Gives the rounding recorded at the first question."""
        if (layer, site) not in self.roundings:
            if values is None:
                rounding = Rounding(FC2_SCALE)
            else:
                rounding = recorded_rounding(noisy(values), static_scale(values), num_bits=1)
            self.roundings[layer, site] = rounding
        return super().rounding(layer, site, values)


def check_model(report: Report, device: torch.device) -> None:
    """A HybridModel with the TE experts in our spec, forward and backward, hints on."""
    num_layers, vocab_size, length, batch = 2, 512, 96, 2
    torch.manual_seed(17)
    config = moe_config(
        num_layers=2 * num_layers,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
    )
    model = build_hybrid_model(
        config,
        pattern="*E" * num_layers,
        vocab_size=vocab_size,
        max_sequence_length=length,
        modules=TE_HYBRID_MODULES,
    ).to(device)
    model.train()
    roundings = NoisyRoundings()
    attach_rounding_source(model, roundings)
    moes = [layer.moe for layer in decoder_layers(model)]
    seen: dict[Any, tuple] = {}
    for module in [*moes, *(moe.router for moe in moes)]:
        module.register_forward_hook(lambda m, i, o: seen.__setitem__(m, (i, o)), always_call=True)
    tokens = torch.randint(0, vocab_size, (batch, length), device=device)
    positions = torch.arange(length, device=device).expand(batch, -1)
    logits = model(tokens, positions, causal_mask(length).to(device))
    logits.float().square().mean().backward()

    expected = {(i, site): 1 for i in range(num_layers) for site in (Site.FC1, Site.FC2)}
    gradients = [weight.grad for moe in moes for weight in expert_weights(moe)]
    report.add(
        "HybridModel *E*E",
        "every place was guided once, gradients are finite",
        roundings.calls == expected
        and all(has_our_quantisers(moe) for moe in moes)
        and all(grad is not None and bool(torch.isfinite(grad).all()) for grad in gradients)
        and bool(torch.isfinite(logits).all()),
        calls=sum(roundings.calls.values()),
        logits=list(logits.shape),
    )
    for index, moe in enumerate(moes):
        (probs, chosen), output = seen[moe.router][1], seen[moe][1][0]
        weights = [quantised_weight(weight) for weight in expert_weights(moe)]
        half = len(weights) // 2
        with torch.no_grad():
            wanted = routed_experts(
                seen[moe][0][0].reshape(-1, H),
                probs,
                chosen,
                tuple(SameProduct(part, False) for part in (weights[:half], weights[half:])),
                tuple(roundings.rounding(index, site, None) for site in (Site.FC1, Site.FC2)),
            )
        report.add(
            "HybridModel *E*E",
            f"output of layer {index} equals the reference",
            torch.equal(output.reshape(-1, H), wanted),
            largest=float((output.reshape(-1, H) - wanted).abs().max()),
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
        check_model,
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
