"""The loss on recorded rollouts: which tokens it takes, its parts by rank; what a run is told."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest
import torch

from megatron_trace.config import RecordedConfig, TraceConfig
from megatron_trace.hints import HintFilesWriter, Site
from megatron_trace.rl import recorded
from megatron_trace.rl.recorded import RecordedTraining
from megatron_trace.rl.rollout_folder import Reward, commit_rollouts
from megatron_trace.rl_config import LossConfig
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import VOCAB_SIZE, recorded_rollout, tiny_trainer
from megatron_trace.training.batch_content import RankRows
from megatron_trace.training.micro_batch import make_micro_batch

# (prompt, response) tokens; one response is empty.
LENGTHS = ((5, 3), (3, 0), (7, 4), (2, 6))
DEVICE = torch.cuda.current_device()
ADVANTAGES = torch.tensor([0.5, 2.0, -1.0, 0.25], device=DEVICE)
CAPPED = LossConfig(importance_cap=1.5)


@pytest.fixture(scope="module")
def rolled():
    with single_process(seed=0):
        yield recorded_rollout(LENGTHS)


@pytest.fixture
def folder(rolled, tmp_path):
    """A folder of the samples in a group, of which one more in another group is not complete."""
    with HintFilesWriter(tmp_path) as files:
        rolled.put_records(files)
        lone = dataclasses.replace(rolled.samples[0], sample_id="lone")
        rewards = [Reward(s.sample_id, "g", 4, float(n)) for n, s in enumerate(rolled.samples)]
        commit_rollouts(
            files, [*rolled.samples, lone], [*rewards, Reward("lone", "h", 2, 0.0)], rolled.settings
        )
    return tmp_path


@pytest.fixture
def training(folder):
    return RecordedTraining(
        TraceConfig(hint_layers="all"), RecordedConfig(hint_dir=str(folder)), CAPPED
    )


@pytest.fixture
def micro_batch(rolled):
    _, sites = tiny_trainer(settings=rolled.settings)
    return make_micro_batch(rolled.samples, rolled.store, sites)


def reference(rolled, logits):
    """Gives loss and report of logits [B, S, V], token by token."""
    loss, gap, weights, num_tokens = 0.0, 0.0, 0.0, 0
    for row, sample in enumerate(rolled.samples):
        for n, token in enumerate(sample.response_tokens):
            position = len(sample.prompt_tokens) - 1 + n
            own = float(logits[row, position].log_softmax(-1)[token])
            rollout = float(sample.logprobs[n])
            weight = min(torch.tensor(own - rollout).exp().item(), 1.5)
            loss -= weight * float(ADVANTAGES[row])
            gap, weights, num_tokens = gap + abs(own - rollout), weights + weight, num_tokens + 1
    return loss, gap, weights, num_tokens


def test_the_loss_sums_over_response_tokens_and_only_these(rolled, training, micro_batch):
    generator = torch.Generator().manual_seed(1)
    shape = (*micro_batch.targets.shape, VOCAB_SIZE)
    logits = torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()
    expected_loss, gap, weights, num_tokens = reference(rolled, logits.detach())
    loss, counted, report = training.loss(micro_batch, ADVANTAGES, logits)
    assert (int(counted), counted.dtype) == (num_tokens, torch.int32) == (13, torch.int32)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    told = {name: values.tolist() for name, values in report.items()}
    assert told["policy loss"] == pytest.approx([expected_loss, 13], rel=1e-5)
    assert told["log-prob gap"] == pytest.approx([gap, 13], rel=1e-5)
    assert told["importance weight"] == pytest.approx([weights, 13], rel=1e-5)
    loss.backward()
    assert logits.grad is not None
    reached = logits.grad.abs().sum(-1) > 0
    assert torch.equal(reached, micro_batch.loss_mask)


def test_logits_are_divided_by_the_rollouts_temperature(rolled, folder, micro_batch):
    warm = RecordedConfig(hint_dir=str(folder), temperature=2.0)
    training = RecordedTraining(TraceConfig(hint_layers="all"), warm, CAPPED)
    shape = (*micro_batch.targets.shape, VOCAB_SIZE)
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    loss, *_ = training.loss(micro_batch, ADVANTAGES, logits)
    assert loss.item() == pytest.approx(reference(rolled, logits / 2)[0], rel=1e-5)


def test_an_objective_over_sequences_divides_by_their_number(folder, micro_batch):
    """Three of the four samples have a response; with old = theta each has gain A."""
    config = LossConfig(objective="gspo", correction="none")
    training = RecordedTraining(TraceConfig(), RecordedConfig(hint_dir=str(folder)), config)
    logits = torch.randn(*micro_batch.targets.shape, VOCAB_SIZE, device=DEVICE)
    loss, number, report = training.loss(micro_batch, ADVANTAGES, logits)
    assert int(number) == 3
    assert loss.item() == pytest.approx(-(0.5 - 1.0 + 0.25), abs=1e-5)
    assert report["policy loss"].tolist() == pytest.approx([0.25, 3], abs=1e-5)
    assert report["entropy"][1] == 13


def test_score_centering_reads_the_samples_likely_tokens(rolled, folder):
    """Of all tokens of the vocabulary, so that a constant advantage has no gradient on average."""
    _, sites = tiny_trainer(settings=rolled.settings)
    everything = torch.arange(VOCAB_SIZE, dtype=torch.int32)
    samples = [
        dataclasses.replace(
            sample,
            top_tokens=everything.expand(len(sample.response_tokens), -1),
            top_logprobs=torch.full(
                (len(sample.response_tokens), VOCAB_SIZE), -math.log(VOCAB_SIZE)
            ),
        )
        for sample in rolled.samples
    ]
    config = LossConfig(objective="score_centering")
    training = RecordedTraining(TraceConfig(), RecordedConfig(hint_dir=str(folder)), config)
    micro_batch = make_micro_batch(samples, rolled.store, sites)
    logits = torch.randn(*micro_batch.targets.shape, VOCAB_SIZE, device=DEVICE).requires_grad_()
    training.loss(micro_batch, ADVANTAGES, logits)[0].backward()
    assert logits.grad is not None
    # d/dlogit_v: -A (w [v = y] - c_v + rest); c_v = min(p_v, 2 q_v) - p_v, as nothing is left over.
    row, position = 0, LENGTHS[0][0] - 1
    p, q = logits[row, position].softmax(-1).detach(), 1 / VOCAB_SIZE
    token = samples[row].response_tokens[0]
    rollout = float(samples[row].logprobs[0].exp())
    score = -(p.clamp(max=2 * q) - p)
    score[token] += min(float(p[token]) / rollout, 2.0)
    expected = -ADVANTAGES[row] * (score - score.sum() * p)
    torch.testing.assert_close(logits.grad[row, position], expected, atol=1e-5, rtol=1e-4)
    without = make_micro_batch(rolled.samples, rolled.store, sites)
    with pytest.raises(ValueError, match="has no top_tokens; roll out with"):
        training.loss(without, ADVANTAGES, logits)


def test_a_method_that_is_not_the_rollouts_is_refused(folder):
    with pytest.raises(ValueError, match=r"--trace-method bf16 contradicts .* are quantised"):
        RecordedTraining(TraceConfig(method="bf16"), RecordedConfig(hint_dir=str(folder)))


def test_the_losses_of_context_parallel_parts_add_up(training, micro_batch, monkeypatch):
    """Each rank has the log-probs of whole samples, and counts its own positions."""
    monkeypatch.setattr(recorded, "logprobs_of_logits", lambda given, *_, **__: given)
    generator = torch.Generator().manual_seed(2)
    logprobs = -torch.rand(micro_batch.loss_mask.shape, generator=generator).to(DEVICE)
    whole, num_tokens, report = training.loss(micro_batch, ADVANTAGES, logprobs)
    positions = torch.arange(micro_batch.num_positions, device=DEVICE)
    parts = []
    for own in (positions % 4 < 1, positions % 4 >= 1):
        rows = RankRows(positions[own], micro_batch.valid[own].flatten())
        part = dataclasses.replace(micro_batch, attention_rows=rows)
        parts.append(training.loss(part, ADVANTAGES, logprobs))
    assert sum(int(part[1]) for part in parts) == int(num_tokens)
    assert sum(part[0].item() for part in parts) == pytest.approx(whole.item(), rel=1e-5)
    for name, values in report.items():
        total = parts[0][2][name] + parts[1][2][name]
        assert total.tolist() == pytest.approx(values.tolist(), rel=1e-5), name


def test_a_micro_batch_without_response_has_a_loss_of_zero(rolled, training):
    _, sites = tiny_trainer(settings=rolled.settings)
    micro_batch = make_micro_batch(rolled.samples[1:2], rolled.store, sites)
    logits = torch.randn(*micro_batch.targets.shape, VOCAB_SIZE, device=DEVICE).requires_grad_()
    loss, num_tokens, report = training.loss(micro_batch, ADVANTAGES[1:2], logits)
    loss.backward()
    assert (loss.item(), int(num_tokens)) == (0.0, 0)
    assert logits.grad is not None
    assert not logits.grad.any()
    assert all(values.tolist() == [0.0, 0.0] for values in report.values())


def test_repeated_samples_and_those_left_out_are_told(training, caplog):
    with caplog.at_level(logging.WARNING):
        training.datasets((4, 0, 0))
        assert [record.message.split(": ")[1] for record in caplog.records] == [
            "1 samples are left out, as they or others of their group have no reward"
        ]
        caplog.clear()
        train, *_ = training.datasets((10, 0, 0))
    assert "has 4 samples, and 10 are taken: each up to 3 times" in caplog.text
    assert [train[n]["sample"] for n in range(10)] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_a_run_evaluates_on_the_other_folder_or_is_refused(folder, training):
    with pytest.raises(ValueError, match="--eval-iters needs --trace-valid-hint-dir"):
        training.datasets((4, 2, 0))
    both = RecordedConfig(hint_dir=str(folder), valid_hint_dir=str(folder))
    train, valid, test = RecordedTraining(TraceConfig(), both).datasets((4, 2, 0))
    assert train[3] == {"part": 0, "sample": 3}
    assert valid is not None
    assert (len(valid), valid[1], test) == (2, {"part": 1, "sample": 1}, None)


def test_a_run_ends_with_how_its_rows_were_rounded(rolled, training):
    model, sites = tiny_trainer(settings=rolled.settings)
    object.__setattr__(model, "trace_sites", sites)
    indices = {"part": torch.zeros(2, dtype=torch.int64), "sample": torch.tensor([0, 2])}
    expected = {}
    for _ in range(2):
        training.forward_step(iter([indices]), model)
        for site, counts in sites.report().sites.items():
            told = expected.setdefault(site, [0, 0])
            told[0] += counts.rejected
            told[1] += counts.not_recorded
        training.assert_ran()
    lines = training.summary().splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["fc1", "fc2", "k", "v"]
    assert expected[Site.FC2][1] > 0
    assert lines.pop(1) == "  fc2: all rounded to nearest, no hints"
    del expected[Site.FC2]
    for line, (rejected, plain) in zip(lines, expected.values(), strict=True):
        assert line.endswith(f"; {rejected} rejected, 0 missing, 0 rerouted, {plain} not_recorded")
