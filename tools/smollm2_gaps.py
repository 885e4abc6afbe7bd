"""Rolls SmolLM2 out in FP4 and in BF16 and prints how far trainers score the samples otherwise.

    python tools/smollm2_gaps.py dense --work out/study
    python tools/smollm2_gaps.py moe --work out/study
    python tools/smollm2_gaps.py moe --chain-sums 400

Trainers of FP32 and BF16 start from the engine's BF16 weights and have Megatron's attention. It
takes minutes on two cores; `tools/study.py` asks many more questions. Needs the packages of
`study/smollm2.py`.
"""

# ruff: noqa: E402  The stand-in for the CUDA runtime must be installed before Megatron is imported.
from __future__ import annotations

from megatron_trace.testing import cpu_runtime

cpu_runtime.install()

import argparse
import dataclasses
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_trace.config import Method, TraceConfig
from megatron_trace.hints import HintStore, QuantizerSettings, RolloutSample
from megatron_trace.metrics import LogprobGap, logprob_gap
from megatron_trace.models.hybrid import causal_mask
from megatron_trace.rollout import SamplingSettings
from megatron_trace.study import smollm2, smollm2_moe
from megatron_trace.study.few_shot import few_shot, solved
from megatron_trace.study.gguf_llama import byte_level_tokenizer, read_gguf
from megatron_trace.study.model import StudyModel
from megatron_trace.study.rollouts import engine_of
from megatron_trace.study.task_mix import CHAIN_SUMS, items_of_mix
from megatron_trace.testing.single_process import single_process
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import build_trainer_model, token_logprobs
from megatron_trace.training.report import TraceReport

STARTED_S = time.perf_counter()
# By model: beginnings of texts and their tokens, sums, and the longest response.
SIZES = {"dense": (8, 48, 6, 40), "moe": (6, 40, 6, 32)}
MODULES = {"dense": smollm2, "moe": smollm2_moe}
MICRO_BATCH = 4
# A model that solves less has nothing to be reinforced, and one that solves more little to learn.
REINFORCED = (0.05, 0.9)


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
    """Samples of one engine.

    Attributes:
        samples: The samples.
        store: Their hints.
        settings: Settings of the quantisers; None for BF16.
    """

    samples: Sequence[RolloutSample]
    store: HintStore
    settings: QuantizerSettings | None


def prompts_of(model: StudyModel, kind: str) -> list[Sequence[int]]:
    """Gives the prompts: texts, for the dense model one of 192 tokens, and sums."""
    num_texts, text_tokens, num_sums, _ = SIZES[kind]
    texts = model.prompts[2::3]
    sums = [prompt for number, prompt in enumerate(model.prompts) if number % 3 < 2]
    longer = [texts[2]] if kind == "dense" else []
    return [*(text[:text_tokens] for text in texts[:num_texts]), *longer, *sums[:num_sums]]


def roll_out(model: StudyModel, kind: str, method: Method, hint_sites: tuple[str, ...]) -> Rollout:
    """Generates the samples, with hints of all layers and full codes unless the method is bf16."""
    recorded: dict[str, Any] = {"hint_layers": "all", "hint_sites": hint_sites}
    share = 0.0 if method == "bf16" else 1.0
    trace = TraceConfig(method=method, diagnostic_share=share, **recorded)
    engine = engine_of(model, trace, max_requests=16)
    if method != "bf16":
        engine.load_weights(model.weights)
        texts, sums = model.calibration[0][:3, :96], model.calibration[1][-1:, :96]
        engine.calibrate([torch.cat([texts, sums])])
    engine.push_weights(model.weights, policy_version=0)
    prompts, store = prompts_of(model, kind), HintStore()
    samples = engine.generate(
        prompts,
        [f"sample-{number}" for number in range(len(prompts))],
        store=None if method == "bf16" else store,
        sampling=SamplingSettings(max_new_tokens=SIZES[kind][3]),
        seed=0,
    )
    responses = sum(len(sample.response_tokens) for sample in samples)
    rows = sum(sample.num_rows for sample in samples)
    say(f"{method} rollout: {rows} forwarded tokens, {responses} sampled, {len(samples)} samples")
    return Rollout(samples, store, engine.settings)


def score(
    model: StudyModel, rollout: Rollout, dtype: torch.dtype, trace: TraceConfig
) -> tuple[LogprobGap, TraceReport]:
    """Lets a trainer score the samples."""
    trainer, sites = build_trainer_model(
        model.config,
        pattern=model.pattern,
        vocab_size=model.vocab_size,
        max_sequence_length=model.context,
        trace=trace,
        dtype=dtype,
        attention="megatron",
        rotary_base=model.rotary_base,
    )
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            parameter.copy_(model.weights[name].bfloat16())
    if sites.quantises:
        assert rollout.settings is not None, "a trainer that quantises scores an FP4 rollout"
        sites.settings = rollout.settings
        sites.diagnostics = True
    scored: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, len(rollout.samples), MICRO_BATCH):
        chunk = rollout.samples[start : start + MICRO_BATCH]
        micro_batch = make_micro_batch(chunk, rollout.store, sites)
        with torch.no_grad(), sites.micro_batch(micro_batch):
            logprobs = token_logprobs(trainer, sites, micro_batch)
        mask = micro_batch.loss_mask
        scored.append((micro_batch.rollout_logprobs[mask], logprobs[mask]))
    sites.assert_ran()
    theirs, ours = (torch.cat(parts) for parts in zip(*scored, strict=True))
    return logprob_gap(theirs, ours, torch.ones_like(ours, dtype=torch.bool)), sites.report()


@torch.no_grad()
def answer_sums(model: StudyModel) -> None:
    """Prints how often the unquantised FP32 model answers few-shot sums, greedily and sampled."""
    hybrid = model.unquantised(torch.float32)
    tokenizer = byte_level_tokenizer(read_gguf(smollm2.gguf_path()).metadata)
    greedy, sampled = [], []
    for total in range(2, 19):
        prompts = [smollm2.sum_prompt(a, total - a) for a in range(1, 10) if 1 <= total - a <= 9]
        rows = [tokenizer.encode(f"{prompt}{total}\n").ids for prompt in prompts]
        tokens = torch.tensor(rows, device=next(hybrid.parameters()).device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        logits = hybrid(tokens, positions, causal_mask(tokens.shape[1]).to(tokens.device))
        answer = slice(tokens.shape[1] - len(str(total)) - 1, None)
        wanted = tokens[:, answer]
        logprobs = logits[:, :-1].float().log_softmax(-1)[:, -wanted.shape[1] :]
        greedy += (logprobs.argmax(-1) == wanted).all(-1).tolist()
        sampled += logprobs.gather(-1, wanted[..., None]).sum((1, 2)).exp().tolist()
    say(f"{len(greedy)} sums: {sum(greedy)} right greedily, {sum(sampled):.1f} expected at T=1")


def solve_chain_sums(model: StudyModel, count: int) -> None:
    """Prints how many chain sums the BF16 engine solves greedily after four solved ones."""
    engine = engine_of(model, TraceConfig(method="bf16"), max_requests=16)
    engine.push_weights(model.weights, policy_version=0)
    tokenizer = byte_level_tokenizer(read_gguf(smollm2.gguf_path()).metadata)
    problems = few_shot(items_of_mix([CHAIN_SUMS]), count)
    say(f"examples: {' '.join(problems.examples.split())}")
    right = solved(engine, tokenizer, problems)
    share, (low, high) = sum(right) / count, REINFORCED
    fits = "can" if low <= share <= high else "cannot"
    say(
        f"{model.name}, BF16, greedy: {sum(right)} of {count} chain sums right ({share:.1%}); with "
        f"{low:.0%} to {high:.0%} it would be reinforced: it {fits}"
    )


def say(line: str) -> None:
    """Prints a line with the seconds so far."""
    print(f"{time.perf_counter() - STARTED_S:6.0f} s  {line}", flush=True)


def main() -> None:
    """Runs both rollouts and all trainers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=sorted(SIZES))
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--sums", action="store_true", help="only answer few-shot sums, in FP32")
    only.add_argument(
        "--chain-sums", type=int, metavar="COUNT", help="only solve few-shot chain sums, in BF16"
    )
    parser.add_argument("--work", type=Path, default=Path("out/study"), help="kept between starts")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")  # Megatron and torch announce deprecations of their parts.
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    sites = ("k", "v") if options.kind == "dense" else ("fc1", "fc2", "k", "v")
    with single_process(seed=0):
        model = MODULES[options.kind].load(options.work)
        if options.sums:
            answer_sums(model)
            return
        if options.chain_sums:
            solve_chain_sums(model, options.chain_sums)
            return
        rollout = roll_out(model, options.kind, "trace", sites)
        cells: list[tuple[Method, str]] = [
            ("bf16", "all"),
            ("qat", "all"),
            ("trace", "latter_half"),
            ("trace", "all"),
        ]
        for dtype in (torch.float32, torch.bfloat16):
            for method, layers in cells:
                trace = TraceConfig(method=method, hint_layers=layers, hint_sites=sites)
                report_of(f"FP4 rollout, {method} ({layers})", model, rollout, dtype, trace)
        rollout = roll_out(model, options.kind, "bf16", sites)
        for dtype in (torch.float32, torch.bfloat16):
            trace = TraceConfig(method="bf16", hint_sites=sites)
            report_of("BF16 rollout, bf16 (floor)", model, rollout, dtype, trace)


def report_of(
    label: str, model: StudyModel, rollout: Rollout, dtype: torch.dtype, trace: TraceConfig
) -> None:
    """Scores and prints the gap, and the codes by site."""
    gap, report = score(model, rollout, dtype, trace)
    say(
        f"{label}, {str(dtype).removeprefix('torch.')} trainer: mean {gap.mean:.5f} p99 "
        f"{gap.p99:.4f} max {gap.max:.4f} KL {gap.kl:.2e} over {gap.num_tokens} tokens"
    )
    for site, counts in report.code_mismatch.items():
        if counts.values:
            say(
                f"    {site}: to nearest {counts.rtn_share:.3%} of {counts.values} differ, one "
                f"step {counts.one_step_share:.2%}, scale bytes {counts.scale_byte_share:.2%}; "
                f"guided {counts.guided_different} of {counts.guided_values} (out of the bracket "
                f"{counts.out_of_bracket}, sign {counts.sign_flip}, unexplained "
                f"{counts.unexplained}), coverage {report.sites[site].coverage:.2f}"
            )


if __name__ == "__main__":
    main()
