"""Trains a MoE in BF16 on chains of solved problems, by a recipe, resumable at its saved states.

Weights are BF16 with FP32 masters in Megatron's optimizer. A training that was stopped goes on from
its last saved state with the rows it would have seen.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping
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
from megatron_trace.study.chains import Chains
from megatron_trace.study.grouped_experts import GroupedExperts
from megatron_trace.study.solving import answer_loss

_logger = logging.getLogger(__name__)

# Rows of a training step are named by its number, held-out rows by numbers far from these.
HELD_OUT_SEED = 10_000_000


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
        tasks: Tasks of the mix that it is trained on; none is all of them.
        seed: Seed of weights and rows.
    """

    name: str
    phases: tuple[Phase, ...]
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
    tasks: tuple[str, ...] = ()
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


@dataclass
class TrainingLog:
    """What a training says of itself.

    Attributes:
        losses: Loss of every step, nats per answer token.
        seconds: Wall-clock seconds of all steps.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def model_config(recipe: Recipe) -> TransformerConfig:
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


def train(
    chains: Chains, recipe: Recipe, saved: Path, *, vocab_size: int
) -> tuple[HybridModel, TrainingLog]:
    """Gives the trained model; continues what `saved` holds, and writes it every some steps.

    Args:
        chains: What it is trained on.
        recipe: How.
        saved: File of the state.
        vocab_size: Rows of the embedding.

    Raises:
        ValueError: `saved` is of another recipe.
        RuntimeError: A gradient is not finite.
    """
    torch.manual_seed(recipe.seed)
    model = build_hybrid_model(
        model_config(recipe),
        pattern=recipe.pattern,
        vocab_size=vocab_size,
        max_sequence_length=recipe.context,
        modules=HybridModules(experts=GroupedExperts),
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
            write_state(saved, state)
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


def _resume(
    saved: Path, model: HybridModel, optimizer: MegatronOptimizer, recipe: Recipe
) -> TrainingLog:
    state = read_state(saved, recipe)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state["weights"][name])
    optimizer.load_state_dict(state["optimizer"])
    return TrainingLog(**state["log"])


def read_state(path: Path, recipe: Recipe) -> dict[str, Any]:
    """Reads what `write_state` wrote.

    Raises:
        ValueError: It is of another recipe.
    """
    state = torch.load(path, map_location="cpu")
    # As JSON: tuples come back as lists.
    found, own = json.dumps(state["recipe"]), json.dumps(asdict(recipe))
    if found != own:
        raise ValueError(
            f"{path} was trained by the recipe {found}, not {own}; remove it or give another work "
            "folder"
        )
    return state


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a state, `recipe` among it, under a temporary name and renames it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    torch.save(dict(state), temporary)
    os.replace(temporary, path)
