"""A MoE of 106M parameters, trained in minutes on one H200 on chains of reasoning-gym problems.

    python tools/moe_100m.py tasks out/moe_100m.jsonl.gz    (needs reasoning-gym)
    python tools/moe_100m.py train out/moe_100m.jsonl.gz --work out/moe_100m --log out/log.json

Most steps see rows of 512 tokens, the last ones rows of 8192, so that positions up to 8K are known
to the model. Weights are BF16 with FP32 masters in Megatron's optimizer. A training that was
stopped goes on from its last saved state with the rows it would have seen.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig

from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.models.local_config import local_moe_config
from megatron_trace.rl.optimizer import OptimizerSettings, build_optimizer
from megatron_trace.rl.tasks import (
    END_TOKEN,
    CharTokenizer,
    TaskItem,
    load_tasks,
    save_tasks,
    split_tasks,
)
from megatron_trace.study.chains import Chains
from megatron_trace.study.experts_differ import experts_differ
from megatron_trace.study.locks import locked
from megatron_trace.study.model import StudyModel
from megatron_trace.study.solving import accuracy, answer_loss
from megatron_trace.study.split_experts import SplitExperts
from megatron_trace.study.task_mix import TaskOfMix, items_of_mix

_logger = logging.getLogger(__name__)

NUM_HELD_OUT = 6_000
# Rows of a training step are named by its number, held-out rows by numbers far from these.
HELD_OUT_SEED = 10_000_000


ITEMS_PER_TASK = 30_000
MIX = (
    TaskOfMix(
        "chain_sum",
        "{metadata[expression]}=",
        {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
    ),
    TaskOfMix(
        "basic_arithmetic",
        "{metadata[expression]}==",
        {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1},
    ),
    TaskOfMix("products", "{metadata[expression]}=", {"min_digits": 1, "max_digits": 2}),
    TaskOfMix(
        "gcd",
        "{metadata[numbers][0]}&{metadata[numbers][1]}=",
        {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 200},
    ),
    TaskOfMix(
        "lcm",
        "{metadata[numbers][0]}|{metadata[numbers][1]}=",
        {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 60},
    ),
    TaskOfMix(
        "fraction_simplification",
        "{metadata[numerator]}/{metadata[denominator]}~",
        {"min_value": 1, "max_value": 99, "min_factor": 2, "max_factor": 12, "styles": ["plain"]},
    ),
    TaskOfMix(
        "base_conversion",
        "{metadata[source_repr]};{metadata[source_base]}:{metadata[target_base]}=",
        {"min_base": 2, "max_base": 16, "min_value": 0, "max_value": 500},
    ),
    TaskOfMix("count_bits", "{metadata[binary]}#", {"min_n": 1, "max_n": 65_535}),
    TaskOfMix("spell_backward", "{metadata[word]}<", {"min_word_len": 3, "max_word_len": 10}),
    TaskOfMix(
        "caesar_cipher",
        "{metadata[rotation]}:{metadata[cipher_text]}>",
        {"min_words": 1, "max_words": 5, "min_rotation": 1, "max_rotation": 25},
    ),
    TaskOfMix(
        "letter_counting",
        "{metadata[target_letter]}@{metadata[span]}=",
        {"min_words": 1, "max_words": 4},
    ),
)


@dataclass(frozen=True)
class Phase:
    """Steps on rows of one length.

    Attributes:
        steps: Optimizer steps.
        num_rows: Rows of a step.
        row_tokens: Tokens of a row.
        rows_at_once: Rows of a forward pass; gradients are summed over the passes of a step.
    """

    steps: int
    num_rows: int
    row_tokens: int
    rows_at_once: int


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, beside the problems.

    Attributes:
        name: Name of the model.
        phases: What is trained on, one after another.
        hidden_size: Hidden size.
        num_layers: Decoder layers, each attention and MoE.
        num_heads: Query heads.
        num_experts: Routed experts of a layer.
        top_k: Experts of a token.
        expert_size: Hidden size of an expert.
        head_dim: Head dim.
        num_kv_heads: Key/value heads.
        learning_rate: Peak learning rate; after the warm-up a cosine to a tenth of it.
        warmup_steps: Steps of linear increase.
        weight_decay: AdamW's weight decay.
        save_every: Steps between two saved states.
        prompt_tokens: Lengths of the study's prompts in tokens, about.
        seed: Seed of weights and rows.
    """

    name: str = "moe_100m"
    phases: tuple[Phase, ...] = (
        Phase(steps=624, num_rows=96, row_tokens=512, rows_at_once=96),
        Phase(steps=123, num_rows=8, row_tokens=8192, rows_at_once=8),
    )
    hidden_size: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_experts: int = 16
    top_k: int = 4
    expert_size: int = 512
    head_dim: int = 64
    num_kv_heads: int = 2
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    weight_decay: float = 0.01
    save_every: int = 500
    prompt_tokens: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8000)
    seed: int = 0

    @property
    def steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    @property
    def context(self) -> int:
        """Tokens of the longest row."""
        return max(phase.row_tokens for phase in self.phases)

    @property
    def pattern(self) -> str:
        """Hybrid layer pattern."""
        return "*E" * self.num_layers

    def phase_of(self, step: int) -> Phase:
        """Gives the phase that a step belongs to."""
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        raise ValueError(f"a recipe of {self.steps} steps has no step {self.steps + step}")

    def rate_of(self, step: int) -> float:
        """Gives the learning rate of a step."""
        rising = (step + 1) / max(self.warmup_steps, 1)
        done = max(step - self.warmup_steps, 0) / max(self.steps - self.warmup_steps, 1)
        falling = 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))
        return self.learning_rate * min(rising, falling)


RECIPE = Recipe()
# As wide, but of two layers and hardly trained: it tries the whole study in a minute.
REHEARSAL = Recipe(
    name="moe_100m_rehearsal",
    phases=(
        Phase(steps=2, num_rows=4, row_tokens=256, rows_at_once=4),
        Phase(steps=1, num_rows=1, row_tokens=1024, rows_at_once=1),
    ),
    num_layers=2,
    warmup_steps=1,
    prompt_tokens=(16, 64, 700),
)


@dataclass
class TrainingLog:
    """What a training says of itself.

    Attributes:
        losses: Loss of every step, nats per answer token.
        seconds: Wall-clock seconds of all steps.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def model_config(recipe: Recipe = RECIPE) -> TransformerConfig:
    """Gives the model's configuration, in BF16."""
    return local_moe_config(
        num_layers=2 * recipe.num_layers,
        hidden_size=recipe.hidden_size,
        num_attention_heads=recipe.num_heads,
        num_query_groups=recipe.num_kv_heads,
        kv_channels=recipe.head_dim,
        ffn_hidden_size=recipe.expert_size,
        num_moe_experts=recipe.num_experts,
        moe_router_topk=recipe.top_k,
        moe_ffn_hidden_size=recipe.expert_size,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
    )


def make_tasks(*, items_per_task: int = ITEMS_PER_TASK, seed: int = 0) -> list[TaskItem]:
    """Gives the problems of the mix, made by reasoning-gym, in the order of the tasks."""
    mix = [dataclasses.replace(part, size=items_per_task) for part in MIX]
    return items_of_mix(mix, seed=seed, drop_characters=" []'\",")


def load(
    work: Path,
    *,
    tasks: Path | None = None,
    recipe: Recipe = RECIPE,
    experts: type[SplitExperts] = SplitExperts,
) -> StudyModel:
    """Gives the trained model; trains it first, or further, if `work` does not hold it yet.

    Of several processes the first trains, and the others wait for it.

    Args:
        work: Folder for the state of the training.
        tasks: JSONL file of the problems, made by `tools/moe_100m.py tasks`; None makes it here,
            which needs reasoning-gym.
        recipe: How it is trained.
        experts: Routed experts while it is trained.

    Raises:
        ValueError: `work` holds the state of another recipe.
    """
    finished = work / f"{recipe.name}.pt"
    with locked(work / f"{recipe.name}.lock"):
        if not finished.exists():
            _write(finished, _trained(work, tasks or _own_tasks(work), recipe, experts))
    state = _read(finished, recipe)
    return StudyModel(
        name=recipe.name,
        config=model_config(recipe),
        pattern=recipe.pattern,
        vocab_size=state["vocab_size"],
        context=recipe.context,
        weights=state["weights"],
        prompts=state["prompts"],
        calibration=state["calibration"],
        eod_token=END_TOKEN,
        facts=state["facts"],
    )


def _trained(
    work: Path, tasks: Path, recipe: Recipe, experts: type[SplitExperts]
) -> dict[str, Any]:
    """Trains, and gives all that a study needs, so that it does not read the problems again."""
    items = load_tasks(tasks)
    tokenizer = CharTokenizer.of_tasks(items)
    train_items, held_out = split_tasks(
        items, num_held_out=min(NUM_HELD_OUT, len(items) // 10), seed=0
    )
    device = torch.cuda.current_device()
    chains = Chains(train_items, tokenizer, device)
    saved = work / f"{recipe.name}-training.pt"
    model, log = train(chains, tokenizer, recipe, saved, experts)
    return {
        "recipe": asdict(recipe),
        "weights": {name: value.detach().cpu() for name, value in model.named_parameters()},
        "vocab_size": tokenizer.vocab_size,
        "prompts": _prompts(train_items, held_out, tokenizer, recipe),
        "calibration": _calibration(chains, recipe),
        "facts": _facts(model, Chains(held_out, tokenizer, device), recipe, log),
    }


def _own_tasks(work: Path) -> Path:
    path = work / "tasks.jsonl.gz"
    if not path.exists():
        save_tasks(path, make_tasks())
    return path


def train(
    chains: Chains,
    tokenizer: CharTokenizer,
    recipe: Recipe,
    saved: Path,
    experts: type[SplitExperts] = SplitExperts,
) -> tuple[HybridModel, TrainingLog]:
    """Gives the trained model; continues what `saved` holds, and writes it every some steps."""
    torch.manual_seed(recipe.seed)
    model = build_hybrid_model(
        model_config(recipe),
        pattern=recipe.pattern,
        vocab_size=tokenizer.vocab_size,
        max_sequence_length=recipe.context,
        modules=HybridModules(experts=experts),
    )
    settings = OptimizerSettings(
        learning_rate=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    ddp, optimizer = build_optimizer(model, settings)
    log = TrainingLog()
    if saved.exists():
        log = _resume(saved, model, optimizer, recipe)
        _logger.warning("%s: continues at step %d of %d", saved, len(log.losses), recipe.steps)
    started = time.perf_counter() - log.seconds
    pending: list[torch.Tensor] = []
    for step in range(len(log.losses), recipe.steps):
        pending.append(_step(ddp, optimizer, chains, recipe, step))
        done = step + 1
        saves = done % recipe.save_every == 0 or done == recipe.steps
        if saves or done % 100 == 0:
            log.losses += torch.stack(pending).tolist()
            pending = []
            log.seconds = time.perf_counter() - started
            _logger.warning(
                "step %d of %d: loss %.4f, %.1f s",
                done,
                recipe.steps,
                sum(log.losses[-50:]) / len(log.losses[-50:]),
                log.seconds,
            )
        if saves:
            state = {
                "recipe": asdict(recipe),
                "weights": {name: value.detach() for name, value in model.named_parameters()},
                "optimizer": optimizer.state_dict(),
                "log": asdict(log),
            }
            _write(saved, state)
    return model, log


def _step(
    ddp: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    chains: Chains,
    recipe: Recipe,
    step: int,
) -> torch.Tensor:
    """Does one optimizer step and gives its loss, on the device."""
    phase = recipe.phase_of(step)
    rows = chains.draw(phase.num_rows, phase.row_tokens, seed=recipe.seed * HELD_OUT_SEED + step)
    for group in optimizer.param_groups:
        group["lr"] = recipe.rate_of(step)
    ddp.train()
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    num_answer_tokens = rows.answer_mask.sum()
    loss = torch.zeros((), device=rows.tokens.device)
    for first in range(0, phase.num_rows, phase.rows_at_once):
        part = slice(first, first + phase.rows_at_once)
        negative = answer_loss(ddp, rows.tokens[part], rows.answer_mask[part]) / num_answer_tokens
        negative.backward()
        loss += negative.detach()
    finalize_model_grads([ddp])
    result: Any = optimizer.step()
    succeeded, grad_norm, _ = result
    if not succeeded or not math.isfinite(grad_norm):
        raise RuntimeError(
            f"step {step}: the gradients must be finite; got norm {grad_norm}; lower the recipe's "
            "learning rate"
        )
    return loss


def _facts(model: HybridModel, unseen: Chains, recipe: Recipe, log: TrainingLog) -> dict[str, Any]:
    """Gives what the report prints of a trained model."""
    model.eval()
    shortest, longest = recipe.phases[0], recipe.phases[-1]
    parts = [
        (shortest.num_rows, shortest.row_tokens, shortest.rows_at_once),
        (longest.num_rows * 2, longest.row_tokens, longest.rows_at_once),
    ]
    facts: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "recipe": asdict(recipe),
        "steps": len(log.losses),
        "training_s": round(log.seconds, 1),
        "last_loss": sum(log.losses[-50:]) / len(log.losses[-50:]),
    }
    for number, (num_rows, row_tokens, at_once) in enumerate(parts):
        rows = unseen.draw(num_rows, row_tokens, seed=HELD_OUT_SEED - 1 - number)
        facts[f"held_out_accuracy_{row_tokens}"] = accuracy(model, rows, unseen.tasks, at_once)
    loss, count = 0.0, 0
    rows = unseen.draw(shortest.num_rows, shortest.row_tokens, seed=HELD_OUT_SEED - 3)
    with torch.no_grad():
        for first in range(0, shortest.num_rows, shortest.rows_at_once):
            part = slice(first, first + shortest.rows_at_once)
            loss += answer_loss(model, rows.tokens[part], rows.answer_mask[part]).item()
            count += int(rows.answer_mask[part].sum())
    facts["held_out_loss"] = loss / count
    facts["experts"] = {
        layer: asdict(found)
        for layer, found in experts_differ(
            model, [rows.tokens[:4, : min(512, shortest.row_tokens)]]
        ).items()
    }
    return facts


def _prompts(
    solved_items: Sequence[TaskItem],
    open_items: Sequence[TaskItem],
    tokenizer: CharTokenizer,
    recipe: Recipe,
) -> list[list[int]]:
    """Gives prompts of solved problems and an open one, each length of the recipe in turn."""
    order = random.Random(3)
    prompts = []
    for number, item in enumerate(open_items[:256]):
        prompt = tokenizer.encode(item.prompt)
        room = recipe.prompt_tokens[number % len(recipe.prompt_tokens)] - len(prompt)
        shots: list[int] = []
        while True:
            shot = order.choice(solved_items)
            tokens = [*tokenizer.encode(shot.prompt + (shot.answer or "")), END_TOKEN]
            if len(shots) + len(tokens) > room:
                break
            shots += tokens
        prompts.append(shots + prompt)
    return prompts


def _calibration(chains: Chains, recipe: Recipe) -> list[torch.Tensor]:
    """Gives chains of the shortest and the longest rows, cut so that none is padded."""
    shortest, longest = recipe.phases[0], recipe.phases[-1]
    parts = [(min(32, shortest.num_rows), shortest.row_tokens), (2, longest.row_tokens)]
    return [
        chains.draw(num_rows, row_tokens, seed=HELD_OUT_SEED - 4 - number)
        .tokens[:, : row_tokens - chains.longest]
        .cpu()
        for number, (num_rows, row_tokens) in enumerate(parts)
    ]


def _resume(
    saved: Path, model: HybridModel, optimizer: MegatronOptimizer, recipe: Recipe
) -> TrainingLog:
    state = _read(saved, recipe)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state["weights"][name])
    optimizer.load_state_dict(state["optimizer"])
    return TrainingLog(**state["log"])


def _read(path: Path, recipe: Recipe) -> dict[str, Any]:
    state = torch.load(path, map_location="cpu")
    # As JSON: tuples come back as lists.
    found, own = json.dumps(state["recipe"]), json.dumps(asdict(recipe))
    if found != own:
        raise ValueError(
            f"{path} was trained by the recipe {found}, not {own}; remove it or give another work "
            "folder"
        )
    return state


def _write(path: Path, state: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    torch.save(dict(state), temporary)
    os.replace(temporary, path)
