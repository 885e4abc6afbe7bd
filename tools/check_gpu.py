"""Shows on this machine's GPU that engine, trainer and hints work together, and how far apart.

A tiny MoE learns sums for a moment, the engine rolls it out in BF16 and in FP4 with hints, and
trainers of each method score the same tokens, with torch's attention and with Megatron's. Then one
optimizer step and a push, whose digests must agree. Ends with an error if something is off.

Examples:
    python tools/check_gpu.py                    on a GPU, about half a minute
    python tools/check_gpu.py --cpu --prompts 8 --warm-start-steps 20
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import itertools
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from megatron_trace.config import HINT_SITES, Method, TraceConfig
from megatron_trace.hints import HintStore, RolloutSample
from megatron_trace.metrics import logprob_gap
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rl.optimizer import OptimizerSettings, build_optimizer
from megatron_trace.rl.tasks import END_TOKEN, CharTokenizer, TaskItem
from megatron_trace.rl.warm_start import WarmStartSettings, warm_start
from megatron_trace.rollout import RolloutEngine, SamplingSettings
from megatron_trace.testing.single_process import single_process, tiny_moe_config
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import (
    TrainerAttention,
    build_trainer_model,
    token_logprobs,
)
from megatron_trace.training.weights import expert_weight_digest

PATTERN = "*E*E*E*E"
SIZE: dict[str, Any] = {"pattern": PATTERN, "max_sequence_length": 64}
ATTENTIONS: tuple[TrainerAttention, ...] = ("sdpa", "megatron")
METHODS: tuple[Method, ...] = ("bf16", "qat", "trace")
MAX_NEW_TOKENS = 12


def sums(count: int) -> list[TaskItem]:
    """Gives sums of four numbers of up to two digits."""
    order = random.Random(0)
    items = []
    for _ in range(count):
        numbers = [order.randrange(100) for _ in range(4)]
        items.append(TaskItem("+".join(map(str, numbers)) + "=", str(sum(numbers)), "sums", {}))
    return items


class Check:
    """The parts of the check, each timed.

    Attributes:
        rows: Rows of the table.
        seconds: Seconds of each part.
        problems: What is not as it must be.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.items = sums(4_000)
        self.tokenizer = CharTokenizer.of_tasks(self.items)
        self.rows: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}
        self.problems: list[str] = []

    def run(self) -> None:
        """Does everything."""
        with self.timed("warm start"):
            weights = self.weights()
        for method in ("bf16", "trace"):
            engine = self.engine(method, weights)
            store = HintStore()
            with self.timed(f"rollout {method}, first"):
                self.roll_out(engine, None, seed=1)
            with self.timed(f"rollout {method}"):
                samples = self.roll_out(engine, store, seed=0)
            tokens = sum(len(sample.response_tokens) for sample in samples)
            print(f"rollout {method}: {len(samples)} samples, {tokens} tokens sampled", flush=True)
            methods = METHODS[:1] if method == "bf16" else METHODS
            for scored, attention in itertools.product(methods, ATTENTIONS):
                self.score(scored, attention, engine, samples, store, weights)
        self.train(engine, samples, store, weights)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Times a part, its work on the device included."""
        started = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.seconds[name] = time.perf_counter() - started

    def weights(self) -> dict[str, torch.Tensor]:
        """Gives weights that know a little about sums."""
        torch.manual_seed(0)
        model = build_hybrid_model(
            tiny_moe_config(PATTERN),
            vocab_size=self.tokenizer.vocab_size,
            modules=HybridModules(),
            **SIZE,
        )
        settings = WarmStartSettings(
            steps=self.options.warm_start_steps, batch_size=128, learning_rate=4e-3
        )
        losses = warm_start(model, self.items, self.tokenizer, settings)
        print(f"warm start: loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
        # As a BF16 trainer holds them: every trainer below starts from the engine's bits.
        return {name: value.detach().bfloat16() for name, value in model.named_parameters()}

    def trace(self, method: Method) -> TraceConfig:
        """Gives the settings of a method: hints of every site and layer, codes of every sample."""
        quantises = method != "bf16"
        return TraceConfig(
            method=method,
            hint_layers="all",
            hint_sites=HINT_SITES,
            diagnostic_share=1.0 if quantises else 0.0,
        )

    def engine(self, method: Method, weights: dict[str, torch.Tensor]) -> RolloutEngine:
        """Gives an engine that holds the weights as policy version 0."""
        engine = RolloutEngine(
            tiny_moe_config(PATTERN),
            vocab_size=self.tokenizer.vocab_size,
            trace=self.trace(method),
            eod_token=END_TOKEN,
            max_requests=256,
            **SIZE,
        )
        if method != "bf16":
            engine.load_weights(weights)
            by_length: dict[int, list[list[int]]] = {}
            for item in self.items[:256]:
                tokens = self.tokenizer.encode(item.prompt + (item.answer or ""))
                by_length.setdefault(len(tokens), []).append(tokens)
            engine.calibrate([torch.tensor(rows) for rows in by_length.values()])
        engine.push_weights(weights, policy_version=0)
        return engine

    def roll_out(
        self, engine: RolloutEngine, store: HintStore | None, *, seed: int
    ) -> list[RolloutSample]:
        """Gives samples of the first problems, eight of each."""
        prompts = [
            self.tokenizer.encode(item.prompt)
            for item in self.items[: self.options.prompts]
            for _ in range(8)
        ]
        return engine.generate(
            prompts,
            [f"sample-{index}" for index in range(len(prompts))],
            store=store,
            sampling=SamplingSettings(max_new_tokens=MAX_NEW_TOKENS),
            seed=seed,
        )

    def score(
        self,
        method: Method,
        attention: TrainerAttention,
        engine: RolloutEngine,
        samples: Sequence[RolloutSample],
        store: HintStore,
        weights: dict[str, torch.Tensor],
    ) -> None:
        """Adds a row: how far a trainer's log-probs are from the engine's."""
        model, sites = self.trainer(method, attention, engine, weights)
        sites.diagnostics = method != "bf16"
        micro_batch = make_micro_batch(samples, store, sites)
        for what in ("first", "again"):
            sites.reset_report()
            with self.timed(f"score {what}"), torch.no_grad(), sites.micro_batch(micro_batch):
                logprobs = token_logprobs(model, sites, micro_batch)
        sites.assert_ran()
        gap = logprob_gap(micro_batch.rollout_logprobs, logprobs, micro_batch.loss_mask)
        report = sites.report()
        row: dict[str, Any] = {
            "rollout": "fp4" if engine.quantised else "bf16",
            "trainer": method,
            "attention": attention,
            "mean": gap.mean,
            "p99": gap.p99,
            "max": gap.max,
            "kl": gap.kl,
            "seconds": self.seconds.pop("score again"),
        }
        del self.seconds["score first"]
        for site, counts in report.code_mismatch.items():
            guided = counts.guided_values > 0
            row[f"{site}"] = counts.guided_share if guided else counts.rtn_share
            if counts.unexplained:
                self.problems.append(
                    f"{method}, {attention}: {counts.unexplained} codes at {site} "
                    "differ from the rollout's without an explanation"
                )
        if method == "trace":
            for site, coverage in report.sites.items():
                if coverage.coverage < 0.999:
                    self.problems.append(f"{site}: hint coverage {coverage.coverage}")
        self.rows.append(row)

    def trainer(
        self,
        method: Method,
        attention: TrainerAttention,
        engine: RolloutEngine,
        weights: dict[str, torch.Tensor],
    ) -> Any:
        """Gives a BF16 trainer with the weights, and its sites."""
        model, sites = build_trainer_model(
            tiny_moe_config(PATTERN),
            vocab_size=self.tokenizer.vocab_size,
            trace=self.trace(method),
            dtype=torch.bfloat16,
            attention=attention,
            **SIZE,
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        if sites.quantises:
            assert engine.settings is not None, "a quantising engine was calibrated"
            sites.settings = engine.settings
        return model, sites

    def train(
        self,
        engine: RolloutEngine,
        samples: Sequence[RolloutSample],
        store: HintStore,
        weights: dict[str, torch.Tensor],
    ) -> None:
        """Does optimizer steps of method trace and pushes; digests must agree."""
        model, sites = self.trainer("trace", "megatron", engine, weights)
        ddp, optimizer = build_optimizer(model, OptimizerSettings(learning_rate=1e-4))
        micro_batch = make_micro_batch(samples, store, sites)
        for what in ("first step", "second step"):
            with self.timed(f"train, {what}"):
                ddp.zero_grad_buffer()
                optimizer.zero_grad()
                with sites.micro_batch(micro_batch):
                    logprobs = token_logprobs(ddp, sites, micro_batch)
                    (-logprobs[micro_batch.loss_mask].mean()).backward()
                finalize_model_grads([ddp])
                result: Any = optimizer.step()
            succeeded, grad_norm, _ = result
            if not succeeded or not 0 < grad_norm < float("inf"):
                self.problems.append(f"{what}: gradient norm {grad_norm}")
        named = {name: value.detach() for name, value in model.named_parameters()}
        with self.timed("push"):
            pushed = engine.push_weights(named, policy_version=1)
        if expert_weight_digest(model, sites) != pushed:
            self.problems.append("after a push the digests of the quantised weights differ")

    def judge(self) -> None:
        """Notes what is wrong with the gaps."""
        mean = {(r["rollout"], r["trainer"], r["attention"]): r["mean"] for r in self.rows}
        for attention in ATTENTIONS:
            qat, trace = (mean["fp4", method, attention] for method in ("qat", "trace"))
            # On a CPU both may be 0, where engine and trainer have the same attention.
            if trace > 0.5 * qat:
                self.problems.append(
                    f"{attention}: the gap with hints is {trace:.2e}, without {qat:.2e}"
                )


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Gives the rows as text."""
    names = ["rollout", "trainer", "attention", "mean", "p99", "max", "kl"]
    names += ["fc1", "fc2", "k", "v", "seconds"]
    lines = [" ".join(f"{name:>9}" for name in names)]
    for row in rows:
        cells = [row.get(name, "-") for name in names]
        texts = [f"{cell:9.2e}" if isinstance(cell, float) else f"{cell:>9}" for cell in cells]
        lines.append(" ".join(texts))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Checks, prints and ends with status 1 if something is off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="check a machine without a GPU")
    parser.add_argument("--prompts", type=int, default=128, help="problems (default 128)")
    parser.add_argument("--warm-start-steps", type=int, default=200, help="default 200")
    parser.add_argument("--json", type=Path, help="file that gets the numbers")
    options = parser.parse_args(arguments)
    if not options.cpu and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --cpu checks the stand-in instead")
    with single_process(seed=0):
        check = Check(options)
        check.run()
    check.judge()
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; |log-prob gap| in nats,")
    print("share of codes that differ from the rollout's at fc1, fc2, k and v, as trained")
    print(table(check.rows))
    print("\n".join(f"{name}: {seconds:.2f} s" for name, seconds in check.seconds.items()))
    if options.json:
        numbers = {"rows": check.rows, "seconds": check.seconds, "problems": check.problems}
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    if check.problems:
        raise SystemExit("not as it must be:\n  " + "\n  ".join(check.problems))
    print("all as it must be")


if __name__ == "__main__":
    main()
