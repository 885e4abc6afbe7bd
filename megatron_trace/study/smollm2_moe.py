"""SmolLM2-135M with its last layers up-cycled to a MoE and fine-tuned until the experts differ.

The layers before them stay the pretrained dense ones, so what goes into them is computed once, and
only the last layers are trained, as a pipeline stage of their own: their experts and routers; their
attention and norms stay as they were pretrained, too.

Legend: N rows, S positions, H hidden size.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_model import HybridModel
from tqdm import tqdm

from megatron_trace.study import smollm2
from megatron_trace.study.experts_differ import experts_differ
from megatron_trace.study.gguf_llama import byte_level_tokenizer, hybrid_weights, read_gguf
from megatron_trace.study.model import StudyModel, plain_logits
from megatron_trace.study.upcycling import (
    Upcycling,
    build_part,
    moe_config,
    upcycle,
    weights_of_part,
    with_part,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True)
class FineTuning:
    """Settings of the fine-tuning.

    Attributes:
        num_rows: Rows to train on.
        num_held_out: Rows to evaluate on, of other texts.
        row_tokens: Tokens of a row, S + 1.
        sum_share: Share of the rows that are solved sums; the others are texts.
        other_tokens: Tokens that occur in no row and compete in the loss all the same, chosen at
            random. Without them, fine-tuning makes all other tokens likelier; all 49,152 would make
            a step take twice as long.
        steps: Optimizer steps.
        batch_rows: Rows of a step.
        learning_rate: Peak learning rate; decreased linearly to zero.
        warmup_steps: Steps of linear increase.
        chunk_steps: Steps between two saved states.
        seed: Seed of rows and order.
    """

    num_rows: int = 96
    num_held_out: int = 8
    row_tokens: int = 129
    sum_share: float = 0.25
    other_tokens: int = 8192
    steps: int = 160
    batch_rows: int = 2
    learning_rate: float = 3e-4
    warmup_steps: int = 10
    chunk_steps: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError when the learning rate would never be at its peak."""
        if not 0 < self.warmup_steps < self.steps:
            raise ValueError(
                f"warmup_steps must be from 1 to below steps={self.steps}; got {self.warmup_steps}"
            )


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows with what the layers before the up-cycled ones make of them.

    Attributes:
        hidden: FP32 [S, N, H], input of the up-cycled layers.
        targets: int64 [N, S], next tokens, numbered within `vocab`.
        vocab: int64, the tokens that losses are over: those of the rows, and some others.
    """

    hidden: torch.Tensor
    targets: torch.Tensor
    vocab: torch.Tensor

    def at(self, rows: torch.Tensor | slice) -> Rows:
        """Gives some of the rows."""
        return replace(self, hidden=self.hidden[:, rows], targets=self.targets[rows])


def load(
    work: Path, *, upcycling: Upcycling | None = None, settings: FineTuning | None = None
) -> StudyModel:
    """Gives the fine-tuned model; trains it first, or further, if `work` does not hold it yet.

    Args:
        work: Folder for hidden states, the state of the training, and the result.
        upcycling: How the last layers become a MoE.
        settings: Settings of the fine-tuning.
    """
    upcycling = upcycling or Upcycling(num_layers=4, num_groups=4, granularity=2)
    settings = settings or FineTuning()
    folder = work / "smollm2_moe"
    llama = read_gguf(smollm2.gguf_path())
    tokenizer = byte_level_tokenizer(llama.metadata)
    weights = hybrid_weights(llama.tensors, llama.shape)
    dense = smollm2.dense_config(llama.shape)
    kept_layers = llama.shape.num_layers - upcycling.num_layers
    result = folder / "experts.pt"
    wanted = json.loads(json.dumps([asdict(upcycling), asdict(settings)]))
    if not result.exists():
        rows = training_rows(tokenizer, settings)
        part, facts = trained_part(
            weights,
            dense,
            kept_layers,
            rows,
            upcycling,
            settings,
            folder,
            llama.shape.rotary_base,
        )
        _save(result, {"settings": wanted, "part": part, "facts": facts})
    saved = torch.load(result, map_location="cpu")
    if saved["settings"] != wanted:
        raise ValueError(
            f"{result} was made with {saved['settings']}, but {wanted} is asked for; give another "
            "work folder"
        )
    all_weights = with_part(weights, saved["part"], first_position=2 * kept_layers)
    facts = smollm2.facts_of(llama, all_weights) | saved["facts"]
    facts |= {"upcycling": asdict(upcycling), "fine_tuning": asdict(settings)}
    return StudyModel(
        name="smollm2_moe",
        config=moe_config(dense, upcycling),
        pattern="*-" * kept_layers + "*E" * upcycling.num_layers,
        vocab_size=llama.shape.vocab_size,
        context=smollm2.CONTEXT,
        weights=all_weights,
        prompts=smollm2.mixed_prompts(tokenizer, smollm2.NUM_PROMPTS),
        calibration=smollm2.calibration_tokens(tokenizer),
        eod_token=smollm2.line_end(tokenizer),
        rotary_base=llama.shape.rotary_base,
        facts=facts,
    )


def training_rows(tokenizer: Tokenizer, settings: FineTuning) -> torch.Tensor:
    """Gives rows of texts that no prompt begins with, and of solved sums; the held-out rows last.

    Returns:
        int64 [num_rows + num_held_out, S + 1].
    """
    order = random.Random(settings.seed)
    texts = [row for text in smollm2.training_texts(tokenizer) for row in _cut(text, settings)]
    total = settings.num_rows + settings.num_held_out
    rows: list[list[int]] = []
    for number in range(total):
        if number % round(1 / settings.sum_share) == 0:
            sums = [(order.randint(1, 9), order.randint(1, 9)) for _ in range(settings.row_tokens)]
            line = "".join(f"{a}+{b}={a + b}\n" for a, b in sums)
            rows.append(tokenizer.encode(line).ids[: settings.row_tokens])
        else:
            rows.append(texts.pop(order.randrange(len(texts))))
    return torch.tensor(rows)


def _cut(text: list[int], settings: FineTuning) -> list[list[int]]:
    length = settings.row_tokens
    return [text[start : start + length] for start in range(0, len(text) - length + 1, length)]


def trained_part(
    weights: Mapping[str, torch.Tensor],
    config: Any,
    kept_layers: int,
    tokens: torch.Tensor,
    upcycling: Upcycling,
    settings: FineTuning,
    folder: Path,
    rotary_base: int,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Gives the up-cycled layers after fine-tuning, by names of their own, and facts about them.

    Args:
        weights: Parameters of the dense model.
        config: Its configuration.
        kept_layers: Decoder layers before the up-cycled ones.
        tokens: int64 [N, S + 1], rows to train on and then those to evaluate on.
        upcycling: How the last layers become a MoE.
        settings: Settings of the fine-tuning.
        folder: Gets hidden states and the state of the training.
        rotary_base: Base period of RoPE.
    """
    sizes = {"max_sequence_length": smollm2.CONTEXT, "rotary_base": rotary_base}
    rows = _rows(weights, config, kept_layers, tokens, sizes, folder, settings)
    train, held_out = rows.at(slice(settings.num_rows)), rows.at(slice(settings.num_rows, None))
    build = partial(build_part, **sizes, vocab_size=len(rows.vocab), first=False, last=True)
    dense = build(config, pattern="*-" * upcycling.num_layers)
    inner = dict(weights)
    inner["output_layer.weight"] = weights["output_layer.weight"][rows.vocab]
    _copy(dense, weights_of_part(inner, dense, first_position=2 * kept_layers))
    losses = {"dense": evaluate(dense, held_out)}
    pattern = "*E" * upcycling.num_layers
    moe = build(moe_config(config, upcycling), pattern=pattern)
    for megatron_scale in (False, True):
        upcycle(dense, moe, replace(upcycling, megatron_scale=megatron_scale))
        name = "upcycled, Megatron's scale" if megatron_scale else "upcycled, fc2 scaled"
        losses[name] = evaluate(moe, held_out)
    upcycle(dense, moe, upcycling)
    found = {"experts_at_init": _experts(moe, held_out, kept_layers)}
    steps = fine_tune(moe, train, settings, folder / "state.pt")
    losses["fine-tuned"] = evaluate(moe, held_out)
    found["experts"] = _experts(moe, held_out, kept_layers)
    part = {
        name: value.detach().cpu()
        for name, value in moe.named_parameters()
        if name.startswith("decoder.layers.")
    }
    facts = {
        "held_out_loss": losses,
        "loss_over_tokens": len(rows.vocab),
        "first_training_loss": sum(steps[:10]) / len(steps[:10]),
        "last_training_loss": sum(steps[-20:]) / len(steps[-20:]),
        **found,
    }
    return part, facts


def _rows(
    weights: Mapping[str, torch.Tensor],
    config: Any,
    kept_layers: int,
    tokens: torch.Tensor,
    sizes: Mapping[str, int],
    folder: Path,
    settings: FineTuning,
) -> Rows:
    """Computes the hidden states that the up-cycled layers get, or reads them."""
    present, numbered = tokens.unique(return_inverse=True)
    absent = torch.ones(len(weights["output_layer.weight"]), dtype=torch.bool)
    absent[present] = False
    others = absent.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(settings.seed)
    chosen = torch.randperm(len(others), generator=generator)[: settings.other_tokens]
    vocab = torch.cat([present, others[chosen]])
    path = folder / "hidden.pt"
    if not path.exists():
        trunk = build_part(
            config,
            pattern="*-" * kept_layers,
            vocab_size=len(weights["embedding.word_embeddings.weight"]),
            first=True,
            last=False,
            max_sequence_length=sizes["max_sequence_length"],
            rotary_base=sizes["rotary_base"],
        )
        _copy(trunk, weights_of_part(weights, trunk, first_position=0))
        with torch.no_grad():
            batches = tqdm(tokens[:, :-1].split(8), desc="hidden states", disable=None)
            hidden = [plain_logits(trunk, batch).cpu() for batch in batches]
        _save(path, torch.cat(hidden, dim=1))
    hidden = torch.load(path, map_location="cpu")
    if hidden.shape[:2] != (tokens.shape[1] - 1, tokens.shape[0]):
        raise ValueError(
            f"{path} holds hidden states of {tuple(hidden.shape[:2])} [S, N], but "
            f"{(tokens.shape[1] - 1, tokens.shape[0])} are needed; give another work folder"
        )
    return Rows(hidden, numbered[:, 1:], vocab)


def fine_tune(model: HybridModel, rows: Rows, settings: FineTuning, saved: Path) -> list[float]:
    """Trains experts and routers of a part in place; gives the loss of every step.

    Args:
        model: The last layers.
        rows: Rows to train on.
        settings: See `FineTuning`.
        saved: File that gets the state after every chunk, and is continued from.
    """
    trained: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name or ".router." in name)
        trained += [parameter] if parameter.requires_grad else []
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    if saved.exists():
        state = torch.load(saved, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses = state["losses"]
    model.train()
    for step in tqdm(range(len(losses), settings.steps), desc="fine-tuning", disable=None):
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        chosen = torch.randperm(settings.num_rows, generator=generator)[: settings.batch_rows]
        rise = (step + 1) / settings.warmup_steps
        fall = (settings.steps - step) / (settings.steps - settings.warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, rise, fall)
        loss = _loss(model, rows.at(chosen))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % settings.chunk_steps == 0 or len(losses) == settings.steps:
            _save(
                saved,
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "losses": losses,
                },
            )
    model.zero_grad(set_to_none=True)
    return losses


@torch.no_grad()
def evaluate(model: HybridModel, rows: Rows) -> float:
    """Gives the mean negative log-probability of the next tokens, in nats."""
    model.eval()
    return _loss(model, rows).item()


def _loss(model: HybridModel, rows: Rows) -> torch.Tensor:
    device = next(model.parameters()).device
    model.set_input_tensor(rows.hidden.to(device))  # pyright: ignore[reportArgumentType]
    logits = plain_logits(model, torch.zeros_like(rows.targets))
    return F.cross_entropy(logits.float().flatten(0, 1), rows.targets.flatten().to(device))


def _experts(model: HybridModel, rows: Rows, kept_layers: int) -> dict[int, Any]:
    model.set_input_tensor(rows.hidden.to(next(model.parameters()).device))  # pyright: ignore[reportArgumentType]
    found = experts_differ(model, [torch.zeros_like(rows.targets)])
    return {kept_layers + layer: asdict(experts) for layer, experts in found.items()}


def _copy(model: HybridModel, weights: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def _save(path: Path, value: Any) -> None:
    """Writes a file so that an interruption leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(value, unfinished)
    os.replace(unfinished, path)
