"""RlRun: the parts of one RL run, put together and started."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer import TransformerConfig

from megatron_trace.config import TraceConfig
from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.store import HintStore
from megatron_trace.hints.types import QuantizerSettings
from megatron_trace.models.expert_names import local_name
from megatron_trace.rl.health import parse_alarms, require_measurable
from megatron_trace.rl.objectives.settings import LossSettings, loss_settings
from megatron_trace.rl.optimizer import OptimizerSettings, build_optimizer
from megatron_trace.rl.rewards import AnswerFormat
from megatron_trace.rl.task import ReasoningGymTask, Task
from megatron_trace.rl.tasks import TaskItem, encode_prompts
from megatron_trace.rl.tokenizer import Tokenizer
from megatron_trace.rl_config import HealthConfig, LossConfig
from megatron_trace.rollout.decode_graphs import require_static_experts
from megatron_trace.rollout.engine import RolloutEngine
from megatron_trace.rollout.sampling import SamplingSettings
from megatron_trace.rollout.weights import holds_bits, plain_digest
from megatron_trace.training.hint_reader import HintReader, HintReaderChoice, wants_process
from megatron_trace.training.model import TrainerAttention, build_trainer_model
from megatron_trace.training.sites import TraceSites
from megatron_trace.training.te_choice import without_recipe
from megatron_trace.training.weights import expert_weight_digest

TRAINER_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class RunSettings:
    """Everything that decides the numbers of a run, except its weights, model and tasks.

    Attributes:
        trace: Method and hints.
        loss: Objective, corrections, bound of staleness.
        health: Alarms, and steps with NaN or Inf that are survived.
        optimizer: Optimizer.
        trainer_dtype: dtype of the trainer; the rollout computes in BF16.
        trainer_attention: Attention arithmetic of the trainer, see `build_trainer_model`. The
            engine reads its paged cache through torch's attention.
        pack_samples: Whether the samples of a micro-batch stand one after another in one sequence,
            instead of side by side padded to the longest; needs `trainer_attention=sdpa`.
        prompts_per_step: Prompt groups of a step.
        samples_per_prompt: Samples of a group.
        updates_per_rollout: Optimizer steps on the samples of one rollout, each on its own share
            of the prompt groups.
        micro_batch_samples: Samples that are forwarded together.
        max_response_tokens: Tokens of a response, its end token included.
        context: Tokens that the model can hold.
        max_requests: Samples that the engine generates at a time.
        cuda_graphs: Whether its decode steps are captured in CUDA graphs, which takes a GPU.
        temperature: Temperature of the sampling.
        answer_format: How the answer is extracted from a response.
        seed: Decides the order of prompts and every sampling seed.
    """

    trace: TraceConfig
    loss: LossConfig = field(default_factory=LossConfig)
    health: HealthConfig = field(default_factory=HealthConfig)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    trainer_dtype: Literal["bf16", "fp32"] = "bf16"
    trainer_attention: TrainerAttention = "megatron"
    pack_samples: bool = False
    prompts_per_step: int = 16
    samples_per_prompt: int = 8
    updates_per_rollout: int = 1
    micro_batch_samples: int = 64
    max_response_tokens: int = 8
    context: int = 64
    max_requests: int = 64
    cuda_graphs: bool = False
    temperature: float = 1.0
    answer_format: AnswerFormat = "whole"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError on a value out of range or on contradictory settings."""
        for name in (
            "prompts_per_step",
            "updates_per_rollout",
            "micro_batch_samples",
            "context",
            "max_requests",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1; got {getattr(self, name)}")
        if self.samples_per_prompt < 2:
            raise ValueError(
                "samples_per_prompt must be >= 2, as an advantage is relative to the other "
                f"samples; got {self.samples_per_prompt}"
            )
        if self.prompts_per_step % self.updates_per_rollout:
            raise ValueError(
                f"prompts_per_step={self.prompts_per_step} must be a multiple of "
                f"updates_per_rollout={self.updates_per_rollout}, so that updates are alike"
            )
        for name, known in (
            ("trainer_dtype", TRAINER_DTYPES),
            ("trainer_attention", get_args(TrainerAttention)),
            ("answer_format", get_args(AnswerFormat)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be {' or '.join(known)}; got {getattr(self, name)!r}"
                )
        if self.pack_samples and self.trainer_attention == "megatron":
            raise ValueError(
                "pack_samples contradicts trainer_attention=megatron: Megatron's "
                "DotProductAttention refuses packed sequences; choose sdpa"
            )
        if self.cuda_graphs:
            require_static_experts(self.trace)
        loss_settings(self.trace.method, self.loss)
        parse_alarms(self.health)
        self.sampling()

    @property
    def objective(self) -> LossSettings:
        """What `loss` means for the method."""
        return loss_settings(self.trace.method, self.loss)

    def sampling(self, *, greedy: bool = False) -> SamplingSettings:
        """Gives how the engine samples, of a vocabulary that is large enough."""
        if greedy:
            return SamplingSettings(max_new_tokens=self.max_response_tokens, greedy=True)
        return SamplingSettings(
            max_new_tokens=self.max_response_tokens,
            temperature=self.temperature,
            top_logprobs=self.objective.center_top_k,
        )


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: Steps done; the next step has this number.
        policy_version: Version of the weights that the engine holds.
        prompt_cursor: Prompts taken from the training items.
        num_updates: Optimizer steps that were done.
        skipped_updates: Optimizer steps that were skipped for NaN or Inf.
        in_bf16: Whether an alarm made the run go on in BF16.
        first_nearest_mismatch: Largest mismatch to nearest of all sites in the first step that had
            diagnostics; None before it.
    """

    step: int = 0
    policy_version: int = 0
    prompt_cursor: int = 0
    num_updates: int = 0
    skipped_updates: int = 0
    in_bf16: bool = False
    first_nearest_mismatch: float | None = None


@dataclass(frozen=True)
class RunParts:
    """What of a run depends on its method.

    Attributes:
        model: Trainer model.
        ddp: Its DDP wrapper.
        optimizer: Megatron's optimizer.
        sites: Quantisers and micro-batch in force of the trainer model.
        engine: Rollout engine.
    """

    model: HybridModel
    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    sites: TraceSites
    engine: RolloutEngine


@dataclass
class RlRun:
    """One RL run: trainer, rollout engine, the hints between them, and how far it is.

    Call `close` at its end, however it ends: `contextlib.closing`.

    Attributes:
        settings: Settings of the run.
        task: Scores the samples, and answers their turns.
        items: Training items.
        prompts: Tokens of the prompt of each training item.
        model: Trainer model.
        ddp: Its DDP wrapper.
        optimizer: Megatron's optimizer.
        sites: Quantisers and micro-batch in force of the trainer model.
        engine: Rollout engine.
        build_parts: Builds all of these five anew under other settings.
        store: Hints of the samples that are not trained on yet.
        progress: How far the run is.
        reader: Reads the files of `store` in the thread that reads ahead; None without files.
        process: Process that reads them instead; None lets the thread do it.
        max_hint_bytes: Most bytes of hints that it may hold; None for one micro-batch ahead.
    """

    settings: RunSettings
    task: Task
    items: Sequence[TaskItem]
    prompts: Sequence[list[int]]
    model: HybridModel
    ddp: DistributedDataParallel
    optimizer: MegatronOptimizer
    sites: TraceSites
    engine: RolloutEngine
    build_parts: Callable[[RunSettings], RunParts]
    store: HintStore | HintFilesWriter = field(default_factory=HintStore)
    progress: Progress = field(default_factory=Progress)
    reader: HintFiles | None = None
    process: HintReader | None = None
    max_hint_bytes: int | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of task and model."""
        return self.task.tokenizer

    def close(self) -> None:
        """Ends the process that reads hints, and gives up the folder they are written to."""
        if self.process is not None:
            self.process.close()
        if isinstance(self.store, HintFilesWriter):
            self.store.close()

    def drop_hints(self) -> None:
        """Removes the hints of all samples, also those that a process left in files."""
        for sample_id in self.store.sample_ids():
            self.store.drop_sample(sample_id)

    def sampling(self) -> SamplingSettings:
        """Gives how the engine samples for training: no more most likely tokens than there are."""
        sampling = self.settings.sampling()
        top_logprobs = min(sampling.top_logprobs, self.tokenizer.vocab_size)
        return dataclasses.replace(sampling, top_logprobs=top_logprobs)

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Gives the trainer's parameters by the names that the engine has for them."""
        return {local_name(name): value.detach() for name, value in self.model.named_parameters()}

    def push_weights(self, policy_version: int) -> None:
        """Gives the engine the trainer's weights and checks that both hold the same.

        Raises:
            RuntimeError: The digests of the weights differ.
        """
        weights = self.named_weights()
        digest = self.engine.push_weights(weights, policy_version)
        if self.sites.quantises_experts:
            own = expert_weight_digest(self.model, self.sites)
        else:  # Hashed for the message only: that takes longer than to compare them.
            own = digest if holds_bits(self.engine.model, weights) else plain_digest(weights)
        if digest != own:
            raise RuntimeError(
                f"after the push of policy version {policy_version} the engine's weights have "
                f"digest {digest}, the trainer's {own}; the two sides must quantise alike"
            )
        self.progress = dataclasses.replace(self.progress, policy_version=policy_version)


def build_run(
    settings: RunSettings,
    model_config: TransformerConfig,
    *,
    pattern: str,
    items: Sequence[TaskItem],
    tokenizer: Tokenizer,
    task: Task | None = None,
    model_id: str = "",
    hint_folder: str | Path | None = None,
    max_hint_bytes: int | None = None,
    hint_reader: HintReaderChoice = "auto",
    rotary_percent: float = 1.0,
    rotary_base: int = 10_000,
) -> RlRun:
    """Builds trainer and engine; `start` or `checkpoint.resume` gives them their weights.

    The run is to be closed at its end.

    Args:
        settings: Settings of the run.
        model_config: Model configuration.
        pattern: Hybrid layer pattern, such as `*E*E`.
        items: Training items.
        tokenizer: Tokenizer of tasks and model.
        task: Scores the samples, and answers their turns, with the same tokenizer; None takes
            reasoning-gym's scorers.
        model_id: Name of the model in the quantiser settings.
        hint_folder: Folder that hints are written to and read from, of this run alone: resuming
            removes what is in it; a run that starts with what an earlier one left there drops it
            first (`RlRun.drop_hints`), or fails at the first sample that has a hint already. None
            keeps them in memory.
        max_hint_bytes: Most bytes of hints that are read ahead from it, the micro-batch in use
            included; None reads one micro-batch ahead.
        hint_reader: What reads ahead: `process`, `thread`, or `auto`: a process on a GPU.
        rotary_percent: Share of the head dim that RoPE rotates.
        rotary_base: Base period of RoPE.

    Raises:
        ValueError: A prompt does not fit the context, or sides, model and settings contradict each
            other; or a setting has no effect.
    """
    if max_hint_bytes is not None and (hint_folder is None or settings.updates_per_rollout > 1):
        raise ValueError(
            f"max_hint_bytes={max_hint_bytes} has no effect without hint_folder, or with "
            f"updates_per_rollout={settings.updates_per_rollout} (must be 1): all hints of a step "
            "are in memory then; leave it out"
        )
    if hint_reader != "auto" and (hint_folder is None or settings.updates_per_rollout > 1):
        raise ValueError(
            f"hint_reader={hint_reader} has no effect without hint_folder, or with "
            f"updates_per_rollout={settings.updates_per_rollout} (must be 1): nothing is read "
            "ahead then; leave it out"
        )
    require_measurable(settings.health, settings.trace)
    prompts = encode_prompts(
        items,
        tokenizer,
        context=settings.context,
        max_response_tokens=settings.max_response_tokens,
    )
    size: dict[str, Any] = {
        "pattern": pattern,
        "vocab_size": tokenizer.vocab_size,
        "max_sequence_length": settings.context,
        "rotary_percent": rotary_percent,
        "rotary_base": rotary_base,
    }

    def build_parts(settings: RunSettings) -> RunParts:
        model, sites = build_trainer_model(
            model_config,
            **size,
            trace=settings.trace,
            dtype=TRAINER_DTYPES[settings.trainer_dtype],
            attention=settings.trainer_attention,
        )
        sites.diagnostics = settings.trace.diagnostic_share > 0
        sites.compares_replayed_routing = True
        engine = RolloutEngine(
            without_recipe(model_config),
            **size,
            trace=settings.trace,
            eod_token=tokenizer.end_token,
            max_requests=settings.max_requests,
            cuda_graphs=settings.cuda_graphs,
            model_id=model_id,
        )
        return RunParts(model, *build_optimizer(model, settings.optimizer), sites, engine)

    parts = build_parts(settings)
    store = HintStore() if hint_folder is None else HintFilesWriter(hint_folder)
    if task is None:
        task = ReasoningGymTask(tokenizer, settings.answer_format)
    run = RlRun(settings, task, items, prompts, **vars(parts), build_parts=build_parts, store=store)
    if hint_folder is not None:
        run.reader, run.max_hint_bytes = HintFiles(hint_folder), max_hint_bytes
        if wants_process(hint_reader, run.sites.device, run.reader):
            run.process = HintReader(run.sites.device)
            try:
                run.process.start()  # Ready by the first step.
            except BaseException:
                run.close()
                raise
    return run


def start(
    run: RlRun, weights: Mapping[str, torch.Tensor], calibration: Iterable[torch.Tensor]
) -> None:
    """Gives both sides the same weights, calibrates the engine's scales, and pushes version 0.

    Args:
        run: A run that was just built.
        weights: FP32 or BF16 parameters by name.
        calibration: Batches of tokens, int64 [B, S] each; not read by method bf16.

    Raises:
        ValueError: A parameter is missing, unknown or of another shape.
    """
    # The engine knows which names and shapes are right, and copies nothing before it has checked.
    run.engine.load_weights(weights)
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            parameter.copy_(weights[local_name(name)])
    run.optimizer.reload_model_params()
    if run.sites.quantises:
        run.engine.calibrate(calibration)
        use_settings_of_engine(run)
    run.push_weights(policy_version=0)


def use_settings_of_engine(run: RlRun) -> QuantizerSettings:
    """Tells the trainer's quantisers the engine's scales."""
    settings = run.engine.settings
    assert settings is not None, "a quantising engine is calibrated before it is used"
    run.sites.settings = settings
    return settings


def calibration_batches(
    items: Sequence[TaskItem], tokenizer: Tokenizer, *, num_samples: int
) -> list[torch.Tensor]:
    """Gives the first items, prompt with answer, in batches of one length each (no padding).

    Returns:
        int64 [B, S] each.
    """
    by_length: dict[int, list[list[int]]] = {}
    for item in items[:num_samples]:
        tokens = tokenizer.encode(item.prompt + (item.answer or ""))
        by_length.setdefault(len(tokens), []).append(tokens)
    return [torch.tensor(rows) for _, rows in sorted(by_length.items())]


def evaluate(run: RlRun, items: Sequence[TaskItem]) -> float:
    """Gives the share of items that the engine answers right (reward 1 or more), greedily.

    Args:
        run: A started run; nothing of it changes.
        items: Held-out items.

    Raises:
        ValueError: There are no items, so that no share exists.
    """
    right = solved(run, items)
    return sum(right) / len(right)


def solved(run: RlRun, items: Sequence[TaskItem]) -> list[bool]:
    """Gives which items the engine answers right, greedily; arguments and errors as `evaluate`."""
    if not items:
        raise ValueError("an evaluation needs at least one held-out item; got none")
    prompts = encode_prompts(
        items,
        run.tokenizer,
        context=run.settings.context,
        max_response_tokens=run.settings.max_response_tokens,
    )
    names = [f"held-out-{row}" for row in range(len(items))]
    run.task.begin(dict(zip(names, items, strict=True)))
    samples = run.engine.generate(
        prompts,
        names,
        store=None,
        sampling=run.settings.sampling(greedy=True),
        seed=0,
        next_turn=run.task.next_turn,
    )
    rewards = run.task.scores(samples, items).rewards
    return [reward >= 1.0 for reward in rewards]
