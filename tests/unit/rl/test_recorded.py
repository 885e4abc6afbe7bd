"""Training on recorded rollouts: what Megatron's loop calls, with and without reading ahead."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron_trace.config import RecordedConfig, TraceConfig
from megatron_trace.hints import HintFilesWriter
from megatron_trace.rl.recorded import RecordedTraining
from megatron_trace.rl.rollout_folder import Reward, commit_rollouts
from megatron_trace.testing.single_process import single_process
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer

LENGTHS = ((5, 3), (3, 2), (7, 4), (2, 6))
TRACE = TraceConfig(hint_layers="all")


@pytest.fixture(scope="module")
def rolled():
    with single_process(seed=0):
        yield recorded_rollout(LENGTHS)


@pytest.fixture
def folder(rolled, tmp_path):
    """A folder of four rewarded samples."""
    with HintFilesWriter(tmp_path) as files:
        rolled.put_records(files)
        rewards = [
            Reward(sample.sample_id, "g", len(LENGTHS), float(n % 2))
            for n, sample in enumerate(rolled.samples)
        ]
        commit_rollouts(files, rolled.samples, rewards, rolled.settings)
    return tmp_path


@pytest.fixture
def model(rolled):
    model, sites = tiny_trainer(settings=rolled.settings)
    object.__setattr__(model, "trace_sites", sites)
    return model


@pytest.fixture
def training(folder):
    """Makes `RecordedTraining` with three micro-batches a pass, closed at the end."""
    made, before = [], _reading_threads()

    def make(**recorded):
        made.append(
            RecordedTraining(
                TRACE,
                RecordedConfig(hint_dir=str(folder), **recorded),
                num_micro_batches=lambda trains: 3 if trains else 1,
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert _reading_threads() <= before


def _reading_threads():
    return {thread for thread in threading.enumerate() if thread.name == "trace-prefetch"}


class Batches:
    """Micro-batches of two samples, without end; counts what was taken."""

    def __init__(self):
        self.num_taken = 0

    def __next__(self):
        first = 2 * self.num_taken % 4
        self.num_taken += 1
        return {"part": torch.tensor([0, 0]), "sample": torch.tensor([first, first + 1])}


def losses(training, model, passes=2):
    """Gives losses and gradients of all micro-batches, and what was taken after each pass."""
    batches, found, taken = Batches(), [], []
    for _ in range(passes):
        for _ in range(3):
            logits, loss = training.forward_step(batches, model)
            found.append(loss(logits)[0])
        taken.append(batches.num_taken)
    model.zero_grad()
    torch.stack(found).sum().backward()
    return torch.stack(found), [p.grad for p in model.parameters()], taken


@pytest.mark.parametrize("bound", [{}, {"hint_memory_mb": 1}, {"hint_reader": "process"}])
def test_reading_ahead_changes_no_bit(training, model, bound):
    plain, plain_grads, plain_taken = losses(training(), model)
    ahead, ahead_grads, ahead_taken = losses(training(prefetch=True, **bound), model)
    assert torch.equal(plain, ahead)
    assert plain.abs().sum() > 0
    for a, b in zip(plain_grads, ahead_grads, strict=True):
        assert torch.equal(a, b)
    assert plain_taken == ahead_taken == [3, 6]


@pytest.mark.parametrize("prefetch", [False, True])
def test_packed_samples_give_the_losses_and_gradients_of_samples_side_by_side(
    training, model, prefetch
):
    plain, plain_grads, _ = losses(training(attention="sdpa"), model)
    packed, packed_grads, _ = losses(
        training(attention="sdpa", pack_samples=True, prefetch=prefetch), model
    )
    assert torch.allclose(packed, plain, rtol=1e-6)
    for a, b in zip(packed_grads, plain_grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6 * float(b.abs().max()))


def test_a_pass_takes_its_own_micro_batches_from_the_iterator_and_no_more(training, model):
    ahead, batches = training(prefetch=True), Batches()
    ahead.forward_step(batches, model)
    assert batches.num_taken == 3
    for _ in range(2):
        ahead.forward_step(batches, model)
    assert batches.num_taken == 3
    model.eval()
    ahead.forward_step(evaluation := Batches(), model)
    assert (batches.num_taken, evaluation.num_taken) == (3, 1)


def test_a_pass_that_ends_early_is_noticed_at_the_next_one(training, model):
    ahead = training(prefetch=True)
    ahead.forward_step(Batches(), model)
    with pytest.raises(RuntimeError, match="2 micro-batches of the last one were not forwarded"):
        ahead.forward_step(Batches(), model)


@pytest.mark.parametrize("prefetch", [False, True])
def test_hints_beyond_the_bound_are_refused(training, model, prefetch, monkeypatch):
    small = training(prefetch=prefetch, hint_memory_mb=1)
    monkeypatch.setattr(small._micro_batches, "max_host_bytes", 100)
    with pytest.raises(ValueError, match="but at most 100 may be held"):
        small.forward_step(Batches(), model)


@pytest.mark.parametrize(
    ("recorded", "flag"),
    [({"prefetch": True}, "--trace-prefetch"), ({"hint_memory_mb": 8}, "--trace-hint-memory-mb")],
)
def test_settings_of_hints_are_refused_where_none_are_read(folder, recorded, flag):
    with pytest.raises(ValueError, match=f"{flag} has no effect with --trace-method qat"):
        RecordedTraining(
            TraceConfig(method="qat"), RecordedConfig(hint_dir=str(folder), **recorded)
        )


def test_a_reader_without_reading_ahead_is_refused():
    with pytest.raises(ValueError, match="hint_reader=process has no effect without prefetch"):
        RecordedConfig(hint_reader="process")


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(ValueError, match="hint_memory_mb must be > 0; got 0"):
        RecordedConfig(hint_memory_mb=0)


@pytest.fixture
def other_model(rolled):
    """A model of the same shape that rolled nothing out."""
    model, sites = tiny_trainer(settings=rolled.settings, seed=1)
    object.__setattr__(model, "trace_sites", sites)
    return model


def test_another_model_than_the_rollouts_stops_after_the_first_step(training, other_model):
    run = training()
    logits, _ = run.forward_step(Batches(), other_model)
    assert logits.isfinite().all()
    unguided = r"guided 0 of .* rows .*--trace-guard-max-rejected-rows"
    with pytest.raises(RuntimeError, match=unguided):
        run.assert_ran()


def test_the_rollouts_own_model_goes_on(training, model):
    run = training()
    run.forward_step(Batches(), model)
    run.assert_ran()
    assert "100.0% of the rows guided" in run.summary()
