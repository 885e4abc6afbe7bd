"""A task of one's own: rewards, turns and what goes wrong in them, up to the RL step."""

import math

import pytest
import torch

from megatron_trace.config import TraceConfig
from megatron_trace.hints.types import HintKey, RolloutSample, Site
from megatron_trace.models.hybrid import HybridModules, build_hybrid_model
from megatron_trace.rl.advantages import advantages_of_rewarded, group_advantages, has_spread
from megatron_trace.rl.hf_tokenizer import HfTokenizer
from megatron_trace.rl.own_task import OwnTask
from megatron_trace.rl.rollout_folder import Reward, rewarded_groups
from megatron_trace.rl.run import RunSettings, build_run, calibration_batches, start
from megatron_trace.rl.step import choose, rl_step, roll_out, scores_of
from megatron_trace.rl.task import open_task
from megatron_trace.rl.tasks import CharTokenizer, TaskItem
from megatron_trace.rl.warm_start import WarmStartSettings, warm_start
from megatron_trace.rl_config import TaskConfig
from megatron_trace.rollout.callbacks import Turn
from megatron_trace.testing.single_process import tiny_moe_config
from megatron_trace.testing.tiny_tokenizer import save_tiny_tokenizer
from megatron_trace.training.micro_batch import make_micro_batch

FUNCTIONS = """
import os

def echo(turns, record):
    raise ValueError(repr(turns))

def score(turns, record):
    answer = turns[-1]["content"]
    if answer.startswith("8"):
        raise ValueError("unlucky")
    if answer.startswith("6"):
        return None
    return float(turns[0]["content"] == record["answer"]) + 0.01 * len(answer)

def reply(turns, record):
    if record["prompt"] == "raise":
        raise ValueError("no tool")
    if record["prompt"] == "foreign":
        return "\u00e9"
    if len(turns) > 1:
        return None
    return "again " + record["again"]

def crash(turns, record):
    os._exit(7)
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture
def own_task(functions):
    tasks = []

    def own_task(reward="score", environment=None, **config):
        config = TaskConfig(
            reward=f"{functions}:{reward}",
            environment=environment and f"{functions}:{environment}",
            function_workers=1,
            function_timeout_s=300.0,
            **config,
        )
        tasks.append(OwnTask(config, CharTokenizer(" +123468=aegin")))
        return tasks[-1]

    yield own_task
    for task in tasks:
        task.close()


def item(prompt="1+1=", answer="2"):
    record = {"prompt": prompt, "answer": answer, "again": "1"}
    return TaskItem(prompt, answer, "own", record, f"item {prompt}")


def sample(task, turns, *, name="s", finished=True):
    """Gives a sample of turns of the model, with the answers between them."""
    end, tokens, given = task.tokenizer.end_token, [], []
    for row, text in enumerate(turns):
        part = task.tokenizer.encode(text)
        if row % 2 == 0 and (finished or row < len(turns) - 1):
            part.append(end)
        tokens += part
        given += [row % 2] * len(part)
    return RolloutSample(
        sample_id=name,
        prompt_tokens=(2,),
        response_tokens=tuple(tokens),
        logprobs=torch.zeros(len(tokens)),
        routing=torch.zeros(len(tokens), 1, 1, dtype=torch.int16),
        policy_version=0,
        settings_digest="",
        finish_reason="stop" if finished else "length",
        given=torch.tensor(given, dtype=torch.uint8) if any(given) else None,
    )


def test_failed_calls_are_left_out_or_scored_as_chosen(own_task, caplog):
    for failed_reward in (None, -1.0):
        task = own_task(failed_reward=failed_reward)
        samples = [sample(task, [text], name=text) for text in ("2", "8", "6", "3")]
        scores = task.scores(samples, [item()] * 4)
        expected = math.nan if failed_reward is None else failed_reward
        assert scores.rewards == pytest.approx([1.01, expected, expected, 0.01], nan_ok=True)
        assert scores.failures == {"raised": 1, "invalid": 1}
    assert (
        "failed on 2 of 4 samples, which are left out; first: sample 8 (item 1+1=)" in caplog.text
    )
    assert "unlucky" in caplog.text


def test_the_function_sees_the_turns_of_the_sample(own_task, caplog):
    task = own_task(reward="echo", environment="reply")
    whole = sample(task, ["2", "again 1", "4"], finished=False)
    first = Turn("s", (2, *whole.response_tokens[:2]), 1, 1)
    task.begin({"s": item()})
    assert task.next_turn(first) == task.tokenizer.encode("again 1")
    task.scores([whole], [item()])
    turns = [
        {"role": "assistant", "content": "2", "finished": True},
        {"role": "tool", "content": "again 1"},
        {"role": "assistant", "content": "4", "finished": False},
    ]
    assert repr(turns) in caplog.text


def test_an_answer_for_which_there_was_no_room_is_not_of_the_sample(own_task, caplog):
    task = own_task(reward="echo", environment="reply")
    whole = sample(task, ["2"])
    task.begin({"s": item()})
    assert task.next_turn(Turn("s", (2, *whole.response_tokens), 1, 1))
    task.scores([whole], [item()])
    assert repr([{"role": "assistant", "content": "2", "finished": True}]) in caplog.text


@pytest.mark.parametrize(
    ("environment", "prompt", "kind"),
    [
        ("reply", "raise", "raised"),
        ("reply", "foreign", "invalid"),
        ("crash", "1+1=", "crashed"),
    ],
)
def test_a_failed_environment_ends_its_sample_and_costs_its_reward(
    own_task, environment, prompt, kind
):
    task = own_task(environment=environment)
    one = sample(task, ["2"])
    task.begin({"s": item(prompt), "t": item()})
    assert task.next_turn(Turn("s", (2, *one.response_tokens), 1, 1)) is None
    scores = task.scores([one, sample(task, ["2"], name="t")], [item(prompt), item()])
    assert math.isnan(scores.rewards[0])
    assert scores.rewards[1] == pytest.approx(1.01)
    assert scores.failures == {kind: 1}


def test_advantages_among_the_rewarded_are_those_of_a_group_without_the_others():
    nan = math.nan
    rewards = torch.tensor([[1.0, nan, 0.0, 1.0], [nan, nan, nan, 1.0], [0.5, 0.5, nan, 0.5]])
    advantages = advantages_of_rewarded(rewards)
    expected = group_advantages(torch.tensor([[1.0, 0.0, 1.0]]))[0].tolist()
    assert advantages[0].tolist() == pytest.approx([expected[0], nan, *expected[1:]], nan_ok=True)
    assert advantages[1].isnan().all()
    assert advantages[2].tolist() == pytest.approx([0, 0, nan, 0], nan_ok=True)
    assert has_spread(rewards).tolist() == [True, False, False]
    assert not has_spread(torch.full((1, 2), nan))


@pytest.fixture(scope="module")
def own_run(one_rank, functions, tmp_path_factory):
    """A run on conversations with two turns, trained to answer with one digit and an end."""
    folder = tmp_path_factory.mktemp("prompts")
    lines = [
        f'{{"prompt": [{{"role": "user", "content": "{n}+{n}="}}], "answer": "{2 * n}",'
        f' "again": "{n}"}}\n'
        for n in range(5)
    ]
    (folder / "p.jsonl").write_text("".join(lines))
    config = TaskConfig(
        reward=f"{functions}:score",
        environment=f"{functions}:reply",
        tokenizer=str(save_tiny_tokenizer(folder / "tokenizer")),
        function_workers=2,
    )
    items, task = open_task(folder / "p.jsonl", config)
    settings = RunSettings(
        trace=TraceConfig(),
        prompts_per_step=4,
        samples_per_prompt=4,
        micro_batch_samples=16,
        max_response_tokens=6,
        context=64,
        max_requests=16,
    )
    run = build_run(
        settings,
        tiny_moe_config("*E*E"),
        pattern="*E*E",
        items=items,
        tokenizer=task.tokenizer,
        task=task,
    )
    torch.manual_seed(0)
    model = build_hybrid_model(
        tiny_moe_config("*E*E"),
        pattern="*E*E",
        vocab_size=task.tokenizer.vocab_size,
        max_sequence_length=64,
        modules=HybridModules(),
    )
    warm = WarmStartSettings(steps=20, batch_size=16, learning_rate=5e-3, warmup_steps=2)
    warm_start(model, items, task.tokenizer, warm, progress=False)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    start(run, weights, calibration_batches(items, task.tokenizer, num_samples=5))
    yield run
    task.close()


def test_given_tokens_have_hints_but_no_loss(own_run):
    samples, _ = roll_out(own_run)
    several = [one for one in samples if one.given is not None]
    assert several, "the warm start must have taught the end of a turn"
    assert isinstance(own_run.tokenizer, HfTokenizer)
    for one in several:
        response = torch.tensor(one.response_tokens)
        told = own_run.tokenizer.decode(response[one.given == 1].tolist())
        assert told.startswith("\n<|im_start|>tool\nagain ")
        assert told.endswith("<|im_end|>\n<|im_start|>assistant\n")
    batch = make_micro_batch(samples, own_run.store, own_run.sites)
    assert batch.loss_mask.sum() == sum(one.num_sampled for one in samples)
    for one in samples:
        for place in ((layer, site) for layer in (0, 1) for site in (Site.FC1, Site.K, Site.V)):
            key = HintKey(one.sample_id, *place, one.policy_version, one.settings_digest)
            assert own_run.store.get(key, num_rows=one.num_rows).num_rows == len(one.tokens) - 1
    own_run.store.expire(before=1)


def test_a_step_trains_on_the_rewarded_and_counts_the_others(own_run):
    samples, rows = roll_out(own_run)
    scores = scores_of(own_run, samples, rows)
    rewards = torch.tensor(scores.rewards).view(4, 4)
    chosen = choose(own_run, samples, rewards)
    num_failed = sum(scores.failures.values())
    assert 0 < num_failed < 16, "answers that begin with 8 raise, with 6 are no number"
    assert len(chosen.samples) == 16 - chosen.num_unrewarded
    assert chosen.num_unrewarded >= num_failed
    own_run.store.expire(before=1)
    metrics = rl_step(own_run)
    assert metrics["reward_failures"] == scores.failures
    assert metrics["reward_failed"] == num_failed / 16
    assert metrics["unrewarded_dropped"] == chosen.num_unrewarded
    assert metrics["reward"] == pytest.approx(rewards.nanmean().item())
    # Samples that are alike in reward have no advantage; which are drawn depends on the machine.
    unlike = [len(row[row.isfinite()].unique()) > 1 for row in rewards]
    assert (metrics["grad_norm"] > 0) == any(unlike)
    assert metrics["health"]["coverage"] == 1.0


def test_a_step_of_which_every_call_failed_stops_the_run(own_run, monkeypatch, functions):
    config = TaskConfig(reward=f"{functions}:crash", function_workers=2, failed_reward=0.0)
    broken = OwnTask(config, own_run.tokenizer)
    monkeypatch.setattr(own_run, "task", broken)
    with pytest.raises(RuntimeError, match=r"failed on all 16 samples .*crashed.*Correct the func"):
        rl_step(own_run)
    broken.close()


def test_a_folder_gets_groups_without_the_samples_that_have_no_reward(own_task):
    task, nan = own_task(), math.nan
    samples = [sample(task, ["2"], name=name) for name in "abcde"]
    kept, rewards = rewarded_groups(samples, list("xxxyy"), [1.0, nan, 0.0, nan, 1.0])
    assert [one.sample_id for one in kept] == ["a", "c"]
    assert rewards == [Reward("a", "x", 2, 1.0), Reward("c", "x", 2, 0.0)]
