"""Checks trainers with Transformer Engine's experts against one with local experts, on a GPU.

    python tools/check_te_trainer.py --out te_trainer.json

* Full trainer `*E*E`, hints of every site, experts without tokens, micro-batches, two optimizer
  steps: log-probs, accumulated gradients, weight digests, counters. Products of another kernel sum
  in another order, and an activation that this moves over a rounding boundary moves by an FP4 step;
  so errors are relative to the whole tensor, and compared with a tolerance.
* Checkpoints of each kind, loaded into each other kind: equal bits.
* RL steps with the rollout engine beside the trainer: digests after each push, coverage, gap.
* Milliseconds of one MoE layer of the shape of a real model.
* With `--checks layouts`, on two GPUs: EP2, TP2, both, and TP2 with ETP2, each kind of experts
  beside local ones in the same layout.

Legend: T tokens, H hidden size.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from check_te_guided import Report, print_table, versions
from megatron.core import dist_checkpointing

from megatron_trace import compat
from megatron_trace.config import HINT_SITES, TraceConfig
from megatron_trace.hints.store import HintStore
from megatron_trace.models.expert_names import local_name
from megatron_trace.testing.recorded_samples import calibrate, random_samples, record
from megatron_trace.testing.single_process import single_process, tiny_moe_config
from megatron_trace.testing.te_layouts import LAYOUTS, outcomes_of_layouts
from megatron_trace.testing.te_trainer import (
    local_weights,
    relative_errors,
    train_steps,
    trainer_with,
)
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import build_trainer_model, token_logprobs
from megatron_trace.training.weights import expert_weight_digest

KINDS = ("te", "te_recipe")
FUSED = {"gradient_accumulation_fusion": True}
# Mean |difference| of a token's log-prob, and relative error of all gradients together.
LOGPROB_TOLERANCE = 2e-2
GRADIENT_TOLERANCE = 5e-2
# Of one layout with one kind of experts: the first compiles kernels and starts NCCL.
LAYOUT_TIMEOUT_S = 60.0
LAYOUTS_TIMEOUT_S = 300.0


def check_training(report: Report) -> None:
    """Two optimizer steps of each kind, beside those of local experts."""
    rollout = recorded_rollout(
        ((5, 3), (3, 0), (7, 4), (2, 6), (9, 9)), num_experts=5, sites=HINT_SITES
    )
    weights = local_weights(tiny_trainer(dtype=torch.bfloat16)[0])
    local = train_steps(*trainer_with("local", rollout, weights), rollout)
    for kind in KINDS:
        for config in ({}, FUSED):
            group = f"trainer *E*E, {kind}{', fused wgrad' if config else ''}"
            with report.check(group, "ran"):
                model, sites = trainer_with(kind, rollout, weights, config=config)
                ours = train_steps(model, sites, rollout)
                _compare_training(report, group, ours, local)


def _compare_training(report: Report, group: str, ours: Any, local: Any) -> None:
    report.add(group, "digest of the first weights", ours.digests[0] == local.digests[0])
    report.add(group, "weights change with each step", len(set(ours.digests)) == 3)
    half = len(ours.logprobs) // 2
    gaps = [
        (torch.cat(part) - torch.cat(expected)).abs()
        for part, expected in (
            (ours.logprobs[:half], local.logprobs[:half]),
            (ours.logprobs[half:], local.logprobs[half:]),
        )
    ]
    report.add(
        group,
        "log-probs of the first step",
        float(gaps[0].mean()) <= LOGPROB_TOLERANCE,
        mean=float(gaps[0].mean()),
        largest=float(gaps[0].max()),
        equal=float((gaps[0] == 0).float().mean()),
        second_step_mean=float(gaps[1].mean()),
    )
    errors = relative_errors(ours, local, step=0)
    whole = torch.cat([local.gradients[0][name].flatten() for name in errors])
    got = torch.cat([ours.gradients[0][name].flatten() for name in errors])
    relative = float((got - whole).norm() / whole.norm())
    report.add(
        group,
        "gradients of the first step",
        relative <= GRADIENT_TOLERANCE
        and all(
            bool(ours.gradients[0][name].any()) == bool(value.any())
            for name, value in local.gradients[0].items()
        ),
        relative=relative,
        worst_parameter=max(errors.values()),
        exact_parameters=sum(error == 0 for error in errors.values()),
        parameters=len(errors),
    )
    counts = ("guided", "rejected", "missing", "padding", "not_recorded", "blocks")
    mine, theirs = ours.reports[0], local.reports[0]
    report.add(
        group,
        "counters of the first step",
        mine.weight_uses == theirs.weight_uses
        and mine.weights_quantised == theirs.weights_quantised
        and all(
            abs(getattr(mine.sites[site], name) - getattr(wanted, name)) <= 2
            for site, wanted in theirs.sites.items()
            for name in counts
        ),
        coverage={str(site): counts.coverage for site, counts in mine.sites.items()},
    )


def check_checkpoints(report: Report) -> None:
    """Saves a model of each kind and loads it into every kind."""
    rollout = recorded_rollout(sites=HINT_SITES)
    weights = local_weights(tiny_trainer(dtype=torch.bfloat16)[0])
    zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
    kinds = ("local", *KINDS)
    for saved in kinds:
        with tempfile.TemporaryDirectory() as folder, report.check("checkpoints", saved):
            source, sites = trainer_with(saved, rollout, weights)
            train_steps(source, sites, rollout, num_steps=1)
            with compat.checkpoint_writes_in_process():
                dist_checkpointing.save(source.sharded_state_dict(), folder)
            expected = local_weights(source)
            for loaded in kinds:
                target, own = trainer_with(loaded, rollout, zeros)
                target.load_state_dict(dist_checkpointing.load(target.sharded_state_dict(), folder))
                got = local_weights(target)
                report.add(
                    "checkpoints",
                    f"{saved} into {loaded}",
                    all(torch.equal(got[name], value) for name, value in expected.items())
                    and expert_weight_digest(target, own) == expert_weight_digest(source, sites),
                )


def check_rl(report: Report) -> None:
    """RL steps with the engine: each push compares the digests of both sides."""
    # Only here: the other checks run without reasoning-gym.
    from megatron_trace.rl.optimizer import OptimizerSettings
    from megatron_trace.rl.run import RunSettings, build_run, calibration_batches, start
    from megatron_trace.rl.step import rl_step
    from megatron_trace.testing.sums import CONTEXT, ITEMS, TOKENIZER, warm_weights

    weights = warm_weights(tiny_moe_config("*E*E"), pattern="*E*E")
    for kind in ("local", *KINDS):
        with report.check("RL with the engine", kind):
            trace = TraceConfig(hint_layers="all", hint_sites=HINT_SITES, experts=kind)
            run = build_run(
                RunSettings(
                    trace=trace,
                    optimizer=OptimizerSettings(learning_rate=1e-3),
                    prompts_per_step=4,
                    samples_per_prompt=4,
                    micro_batch_samples=8,
                    max_response_tokens=3,
                    context=CONTEXT,
                    max_requests=16,
                ),
                tiny_moe_config("*E*E", **({} if kind == "local" else FUSED)),
                pattern="*E*E",
                items=ITEMS,
                tokenizer=TOKENIZER,
            )
            start(run, weights, calibration_batches(ITEMS, TOKENIZER, num_samples=10))
            steps = [rl_step(run) for _ in range(3)]
            coverage = {
                site: counts["coverage"] for site, counts in steps[0]["quantisers"]["sites"].items()
            }
            report.add(
                "RL with the engine",
                f"3 steps, {kind}",
                all(share > 0.9 for share in coverage.values())
                and all(step["grad_norm"] > 0 for step in steps[:1]),
                coverage=coverage,
                mean_abs_gap=[step["gap"]["mean"] for step in steps],
                grad_norm=[step["grad_norm"] for step in steps],
                reward=[step["reward"] for step in steps],
                train_s=[round(step["seconds"]["train"], 3) for step in steps],
            )


def check_layouts(report: Report) -> None:
    """One training step over two ranks, each with a GPU; a layout that hangs ends the check."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        runs = outcomes_of_layouts(
            Path(folder),
            timeout_s=LAYOUTS_TIMEOUT_S,
            step_timeout_s=LAYOUT_TIMEOUT_S,
            echo=partial(print, flush=True),
        )
    print(f"layouts: {time.perf_counter() - begun:.1f} s in all", flush=True)
    digests = {
        of_kind["local"][0].digests[0] for of_kind in runs.outcomes.values() if "local" in of_kind
    }
    for layout in LAYOUTS:
        of_kind = runs.outcomes.get(layout, {})
        for kind in KINDS:
            group = f"two GPUs, {layout}, {kind}"
            if kind not in of_kind:
                report.add(group, "finished", False)
                continue
            for rank, (ours, local) in enumerate(zip(of_kind[kind], of_kind["local"], strict=True)):
                names = [name for name, value in local.grads.items() if value.any()]
                got, expected = (
                    torch.cat([outcome.grads[name].float().flatten() for name in names])
                    for outcome in (ours, local)
                )
                relative = float((got - expected).norm() / expected.norm())
                loss = max(
                    abs(a - b) / abs(b) for a, b in zip(ours.loss, local.loss, strict=True) if b
                )
                report.add(
                    group,
                    f"rank {rank}",
                    relative <= GRADIENT_TOLERANCE
                    and loss <= LOGPROB_TOLERANCE
                    and {ours.digests[0]} == digests,
                    relative=relative,
                    loss_relative=loss,
                    guided={str(site): rows for site, rows in ours.guided.items()},
                    guided_locally={str(site): rows for site, rows in local.guided.items()},
                )
    if runs.failure is not None:
        raise RuntimeError(runs.failure)


def measure_layer(
    report: Report,
    *,
    hidden: int = 2048,
    num_experts: int = 64,
    num_tokens: int = 8192,
    length: int = 1024,
    repeats: int = 5,
) -> None:
    """Milliseconds of forward and backward of `*E` with experts of 768, top 8."""
    config = {
        "hidden_size": hidden,
        "num_attention_heads": 16,
        "kv_channels": 128,
        "moe_ffn_hidden_size": 768,
        "ffn_hidden_size": 768,
        "num_moe_experts": num_experts,
        "moe_router_topk": 8,
        "use_cpu_initialization": False,
    }
    size = {"pattern": "*E", "vocab_size": 256, "max_sequence_length": length + 1}
    trace = {"hint_layers": "all", "hint_sites": HINT_SITES}

    def build(**fields: Any) -> Any:
        overrides = config | (FUSED if fields.get("experts", "local") != "local" else {})
        torch.manual_seed(0)
        return build_trainer_model(
            tiny_moe_config("*E", **overrides),
            **size,
            trace=TraceConfig(**(trace | fields)),
            attention="sdpa",
        )

    model, sites = build(method="qat")
    weights = local_weights(model)
    samples = random_samples(
        [(length // 2, length // 2 + 1)] * (num_tokens // length), sites.shape, vocab_size=256
    )
    calibrate(model, sites, samples[:1])
    store = HintStore()
    places = list(sites.shape.places)
    samples = record(model, sites, samples, store, places=places)
    settings = sites.settings
    del model
    for method, kind in (
        ("bf16", "te"),
        ("qat", "local"),
        ("qat", "te"),
        ("trace", "local"),
        ("trace", "te"),
        ("trace", "te_recipe"),
    ):
        with report.check("time", f"{method}, {kind}"):
            model, sites = build(method=method, experts=kind)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[local_name(name)])
            if sites.quantises:
                sites.settings = settings
            for weight in model.parameters():
                made: Any = weight
                made.main_grad = torch.zeros_like(weight, dtype=torch.float32)
                made.grad_added_to_main_grad = False
            micro_batch = make_micro_batch(samples, store if sites.quantises else None, sites)
            times = []
            torch.cuda.reset_peak_memory_stats()
            for _ in range(repeats + 2):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                with sites.micro_batch(micro_batch):
                    token_logprobs(model, sites, micro_batch).sum().backward()
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begun) * 1e3)
            report.add(
                "time",
                f"{method}, {kind}",
                True,
                milliseconds=round(sorted(times[2:])[repeats // 2], 2),
                peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2),
            )
            del model, sites, micro_batch, parameter, weight, made
            # Layers and their places refer to one another.
            gc.collect()
            torch.cuda.empty_cache()


def main() -> int:
    """Runs the checks and gives the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    checks = {
        "training": check_training,
        "rl": check_rl,
        "checkpoints": check_checkpoints,
        "time": measure_layer,
        "layouts": check_layouts,
    }
    parser.add_argument(
        "--checks",
        nargs="+",
        choices=checks,
        default=["training", "rl", "checkpoints", "time"],
        help="what is checked; layouts need two GPUs",
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("check_te_trainer.py needs a CUDA device", file=sys.stderr)
        return 2
    found = versions()
    print(found)
    report = Report()
    with single_process(seed=0):
        for name in arguments.checks:
            with report.check(name, "ran"):
                checks[name](report)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"versions": found, "results": report.rows}, indent=1))
    print_table(report)
    failed = sum(not row["passed"] for row in report.rows)
    print(f"{len(report.rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
