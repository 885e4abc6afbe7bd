"""The 100M MoE's chains, experts and training, in miniature."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_trace.config import TraceConfig
from megatron_trace.hints import HintStore
from megatron_trace.metrics import logprob_gap
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rl.tasks import END_TOKEN, CharTokenizer, TaskItem, save_tasks
from megatron_trace.rollout import RolloutEngine, SamplingSettings
from megatron_trace.study import chain_training, moe_100m
from megatron_trace.study.chain_training import Phase, Recipe
from megatron_trace.study.chains import Chains
from megatron_trace.study.grouped_experts import GroupedExperts
from megatron_trace.study.solving import solved
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import build_trainer_model, token_logprobs

ITEMS = [
    *(TaskItem(f"{a}+{b}=", str(a + b), "sum", {}) for a in range(12) for b in range(12)),
    *(TaskItem(f"{a}*{b}:", str(a * b), "product", {}) for a in range(9) for b in range(9)),
]
TOKENIZER = CharTokenizer.of_tasks(ITEMS)
MINIATURE = Recipe(
    name="miniature",
    phases=(
        Phase(steps=4, num_rows=4, row_tokens=48, rows_at_once=2),
        Phase(steps=2, num_rows=2, row_tokens=96, rows_at_once=2),
    ),
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_experts=4,
    top_k=2,
    expert_size=32,
    head_dim=32,
    num_kv_heads=1,
    warmup_steps=2,
    save_every=2,
    prompt_tokens=(8, 24, 64),
)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl.gz"
    save_tasks(path, ITEMS)
    return path


@pytest.fixture(scope="module")
def trained(tasks, tmp_path_factory):
    return moe_100m.load(tmp_path_factory.mktemp("work"), tasks=tasks, recipe=MINIATURE)


def test_rows_are_whole_problems_whose_answers_are_marked():
    chains = Chains(ITEMS, TOKENIZER, torch.device("cpu"))
    rows = chains.draw(20, 50, seed=3)
    known = {item.prompt + (item.answer or ""): item for item in ITEMS}
    seen = set()
    for tokens, mask, problem, task in zip(
        rows.tokens, rows.answer_mask, rows.problem, rows.task, strict=True
    ):
        used = int((tokens == END_TOKEN).nonzero()[-1]) + 1
        assert not tokens[used:].any(), "only padding follows the last whole problem"
        assert len(tokens) - used < chains.longest
        start = 0
        for end in ((tokens == END_TOKEN).nonzero()[:, 0] + 1).tolist():
            item = known[TOKENIZER.decode(tokens[start : end - 1].tolist())]
            answer = len(item.answer or "") + 1
            assert not mask[max(start - 1, 0) : end - answer - 1].any()
            assert mask[end - answer - 1 : end - 1].all()
            (number,) = problem[start:end].unique().tolist()
            assert chains.tasks[int(task[number])] == item.task
            seen.add(item.task)
            start = end
    assert seen == {"sum", "product"}


def test_a_seed_names_its_rows():
    chains = Chains(ITEMS, TOKENIZER, torch.device("cpu"))
    first, again, other = (chains.draw(4, 50, seed=seed).tokens for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_grouped_experts_are_sequential_ones():
    """Output and gradients in BF16; measured 0 on a CPU: the same products."""
    models = []
    for experts in (HybridModules().experts, GroupedExperts):
        torch.manual_seed(0)
        models.append(
            build_hybrid_model(
                tiny_moe_config("*E*E", bf16=True, params_dtype=torch.bfloat16),
                pattern="*E*E",
                vocab_size=16,
                max_sequence_length=32,
                modules=HybridModules(experts=experts),
            )
        )
    tokens = torch.arange(24, device=torch.cuda.current_device()).view(3, 8) % 16
    outputs = [model(tokens, tokens, None) for model in models]
    torch.testing.assert_close(*outputs, atol=1e-2, rtol=0)
    for output in outputs:
        output.float().square().mean().backward()
    expected = dict(models[0].named_parameters())
    for name, parameter in models[1].named_parameters():
        grad = expected[name].grad
        if grad is None:  # An expert without tokens; here its gradient is zero instead.
            assert parameter.grad is None or not parameter.grad.any(), name
            continue
        torch.testing.assert_close(parameter.grad, grad, atol=1e-3, rtol=2e-2)


def test_the_learning_rate_rises_and_falls_to_a_tenth():
    recipe = moe_100m.RECIPE
    rates = [recipe.rate_of(step) for step in range(recipe.steps)]
    peak = rates.index(max(rates))
    assert rates[peak] == pytest.approx(recipe.learning_rate)
    assert abs(peak - recipe.warmup_steps) <= 1
    assert rates[-1] == pytest.approx(recipe.learning_rate / 10, rel=1e-3)
    assert [recipe.phase_of(step).row_tokens for step in (0, recipe.steps - 1)] == [512, 8192]


def test_a_training_that_was_stopped_ends_with_the_same_bits(trained, tasks, tmp_path, monkeypatch):
    step = chain_training._step

    def stopped(ddp, optimizer, chains, recipe, number):
        if number == 3:
            raise KeyboardInterrupt
        return step(ddp, optimizer, chains, recipe, number)

    with monkeypatch.context() as patch:
        patch.setattr(chain_training, "_step", stopped)
        with pytest.raises(KeyboardInterrupt):
            moe_100m.load(tmp_path, tasks=tasks, recipe=MINIATURE)
    assert (tmp_path / "miniature-training.pt").exists()
    resumed = moe_100m.load(tmp_path, tasks=tasks, recipe=MINIATURE)
    for name, weight in trained.weights.items():
        assert_same_bytes(resumed.weights[name], weight, name)
    assert resumed.facts["last_loss"] == trained.facts["last_loss"]
    assert resumed.facts["held_out_accuracy_96"] == trained.facts["held_out_accuracy_96"]


def test_a_trained_model_is_read_and_another_recipes_is_refused(trained, tasks, tmp_path):
    first = moe_100m.load(tmp_path, tasks=tasks, recipe=MINIATURE)
    (tmp_path / "miniature-training.pt").unlink()
    again = moe_100m.load(tmp_path, tasks=tasks, recipe=MINIATURE)
    assert again.facts == first.facts
    with pytest.raises(ValueError, match="was trained by the recipe"):
        moe_100m.load(tmp_path, tasks=tasks, recipe=dataclasses.replace(MINIATURE, seed=1))


def test_what_is_solved_is_counted_by_problem():
    """A model that answers every token with 'the next one' solves exactly what it copies."""
    chains = Chains(ITEMS, TOKENIZER, torch.device("cpu"))
    rows = chains.draw(6, 50, seed=0)
    wrong_row = 2

    class Copying(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.on_a_device = torch.nn.Parameter(torch.zeros(1))

        def forward(self, tokens, positions, mask):
            answer = rows.tokens[:, 1:].clone()
            answer[wrong_row] = 0
            return torch.nn.functional.one_hot(answer, TOKENIZER.vocab_size).float()

    right, task, start = solved(Copying(), rows)
    num_solved = int((rows.tokens == END_TOKEN).sum())
    in_wrong_row = int((rows.tokens[wrong_row] == END_TOKEN).sum())
    assert len(right) == len(task) == len(start) == num_solved
    assert int((~right).sum()) == in_wrong_row
    assert int(start.min()) >= 3, "an answer begins after its prompt"


def test_engine_and_trainer_take_the_model(trained):
    size = {
        "pattern": trained.pattern,
        "vocab_size": trained.vocab_size,
        "max_sequence_length": trained.context,
    }
    trace = TraceConfig(hint_layers="all", diagnostic_share=1.0)
    engine = RolloutEngine(trained.config, trace=trace, eod_token=trained.eod_token, **size)
    engine.load_weights(trained.weights)
    engine.calibrate(trained.calibration)
    engine.push_weights(trained.weights, policy_version=0)
    store = HintStore()
    prompts = trained.prompts[:6]
    assert max(map(len, prompts)) > 40
    samples = engine.generate(
        prompts,
        [f"sample-{index}" for index in range(len(prompts))],
        store=store,
        sampling=SamplingSettings(max_new_tokens=8),
        seed=0,
    )
    model, sites = build_trainer_model(trained.config, trace=trace, dtype=torch.bfloat16, **size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(trained.weights[name])
    assert engine.settings is not None
    sites.settings = engine.settings
    micro_batch = make_micro_batch(samples, store, sites)
    with torch.no_grad(), sites.micro_batch(micro_batch):
        logprobs = token_logprobs(model, sites, micro_batch)
    sites.assert_ran()
    gap = logprob_gap(micro_batch.rollout_logprobs, logprobs, micro_batch.loss_mask)
    assert gap.mean < 2e-2
