"""The folder through which workers and trainer of a run exchange samples and weights."""

import os
import re
import threading
from dataclasses import replace

import pytest

from megatron_trace.config import RecordedConfig, TraceConfig
from megatron_trace.hints.settings_file import load_settings
from megatron_trace.hints.types import QuantizerSettings
from megatron_trace.rl.exchange import Exchange, ExchangeSettings, PausedError
from megatron_trace.rl.exchange_folder import ExchangeFolder
from megatron_trace.rl.recorded import RecordedTraining
from megatron_trace.rl.rollout_folder import Reward
from megatron_trace.rl_config import LossConfig
from megatron_trace.testing.processes import came_true

SETTINGS = ExchangeSettings(steps=4, batches_per_step=2, prompts_per_batch=1, samples_per_prompt=2)


@pytest.fixture
def exchange(tmp_path):
    return Exchange.create(tmp_path / "run", SETTINGS)


def publish(exchange, version):
    (exchange.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(version))


def rewards(batch):
    return [Reward(f"batch-{batch}/{n}", f"batch-{batch}", 2, float(n)) for n in range(2)]


def complete(exchange, worker="w", digest=None):
    """Claims and commits everything that may be begun; gives the batches."""
    folder, done = exchange.worker_folder(worker), []
    while (claim := exchange.claim(worker)) is not None:
        assert exchange.commit(claim, folder, rewards(claim.batch), digest)
        done.append((claim.batch, claim.policy_version))
    return done


def test_nothing_is_begun_before_a_version_within_the_bound_is_published(exchange):
    assert complete(exchange) == [(0, 0), (1, 0)]
    publish(exchange, 1)
    assert complete(exchange) == [(2, 1), (3, 1)]
    publish(exchange, 3)  # What was never rolled out of steps that are done is not wanted any more.
    assert complete(exchange) == [(6, 3), (7, 3)]


def test_with_a_lag_workers_go_on_for_so_many_steps(tmp_path):
    ahead = Exchange.create(
        tmp_path, ExchangeSettings(steps=4, prompts_per_batch=1, samples_per_prompt=2, max_lag=2)
    )
    assert complete(ahead) == [(0, 0), (1, 0), (2, 0)]
    publish(ahead, 1)
    assert complete(ahead) == [(3, 1)]


def test_two_workers_get_different_batches(exchange):
    assert [exchange.claim(name).batch for name in ("a", "b")] == [0, 1]
    assert exchange.claim("c") is None
    assert exchange.claims() == {0: "a", 1: "b"}


def test_of_many_threads_that_ask_at_once_each_batch_goes_to_one(tmp_path):
    many = Exchange.create(
        tmp_path,
        ExchangeSettings(steps=1, batches_per_step=40, prompts_per_batch=1, samples_per_prompt=2),
    )
    got, start = [], threading.Barrier(4)

    def work(name):
        own = Exchange(tmp_path)
        start.wait()
        while (claim := own.claim(name)) is not None:
            got.append(claim.batch)
            own.commit(claim, own.folder / "rollouts", rewards(claim.batch))

    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(40))
    assert many.num_complete() == 40


def test_the_claim_of_a_silent_worker_is_taken_over(exchange):
    lost = exchange.claim("lost")
    exchange.claim("other")
    assert exchange.claim("third") is None
    os.utime(lost.path, (1, 1))
    assert exchange.claim("third").batch == lost.batch
    assert exchange.claims()[lost.batch] == "third"


def test_signs_of_life_keep_a_claim(tmp_path):
    """Of two exchanges of one folder one gives signs often, so that the other's lease is long."""
    settings = ExchangeSettings(steps=1, prompts_per_batch=1, samples_per_prompt=2, lease_s=0.2)
    often, patient = Exchange.create(tmp_path, settings), Exchange(tmp_path)
    patient.settings = replace(settings, lease_s=600.0)
    claim = often.claim("slow")
    with often.signs_of_life(claim):
        for _ in range(3):
            os.utime(claim.path, (1, 1))  # It was silent for long.
            came_true(lambda: claim.path.stat().st_mtime != 1, within_s=60)
            assert patient.claim("other") is None
    os.utime(claim.path, (1, 1))
    assert patient.claim("other").batch == claim.batch


def test_a_worker_that_begins_anew_gets_its_own_batch_back_at_once(exchange):
    first = exchange.claim("w")
    assert exchange.claim("w").batch == first.batch
    assert exchange.worker_folder("w") != exchange.worker_folder("w")


def test_only_versions_that_no_step_needs_are_removed_of_earlier_lives(exchange):
    first, other, current = map(exchange.worker_folder, ("w", "x", "w"))
    for folder in (first, other, current):
        for version in range(4):
            (folder / f"v{version:08d}").mkdir()
    publish(exchange, 2)
    claim = exchange.claim("w")
    assert exchange.oldest_needed_version(claim) == 2  # A lag of 0 is allowed.
    exchange.drop_earlier_lives("w", current, before=2)
    left = [sorted(int(p.name[1:]) for p in folder.iterdir()) for folder in (first, other, current)]
    assert left == [[2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]


def test_of_two_results_for_a_batch_the_first_counts(exchange):
    claim = exchange.claim("slow")
    os.utime(claim.path, (1, 1))
    other = exchange.claim("quick")
    folder = exchange.worker_folder("quick")
    assert exchange.commit(other, folder, rewards(0))
    assert not exchange.commit(claim, exchange.worker_folder("slow"), rewards(0))
    assert exchange.batch(0).folder == str(folder.relative_to(exchange.folder))


def test_a_paused_run_hands_nothing_out_and_nobody_waits(exchange):
    exchange.pause()
    with pytest.raises(PausedError, match="is paused"):
        exchange.claim("w")
    with pytest.raises(PausedError, match="before batch 0 was there"):
        exchange.wait_for_batch(0)
    exchange.unpause()
    assert exchange.claim("w").batch == 0


def test_settings_of_the_first_worker_count(exchange):
    scales = [QuantizerSettings(global_scales={}, model_id=name) for name in ("a", "b")]
    assert exchange.share_settings(scales[0])
    assert not exchange.share_settings(scales[1])
    assert load_settings(exchange.wait_for_settings()) == scales[0]


def test_other_settings_of_the_same_run_are_refused(exchange):
    with pytest.raises(ValueError, match=r"max_lag=0, but 2 is asked for"):
        Exchange.create(
            exchange.folder,
            ExchangeSettings(
                steps=4, batches_per_step=2, prompts_per_batch=1, samples_per_prompt=2, max_lag=2
            ),
        )


def test_a_bound_that_would_stop_the_run_is_refused():
    with pytest.raises(ValueError, match=r"max_lag=0 contradicts publish_every=2"):
        ExchangeSettings(steps=4, publish_every=2)


def test_a_damaged_batch_is_named(exchange):
    complete(exchange)
    path = exchange.folder / "batches" / "b00000001.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        exchange.batch(1)


def folder_of(exchange, **loss):
    return ExchangeFolder(exchange, LossConfig(**loss), quantised=False, drop_without_spread=False)


def test_the_trainer_refuses_samples_beyond_the_bound(exchange):
    complete(exchange)
    (exchange.folder / "batches" / "b00000001.json").rename(
        exchange.folder / "batches" / "b00000002.json"
    )
    with pytest.raises(RuntimeError, match=r"of policy version 0, but step 1 trains on 1 to 1"):
        folder_of(exchange).advantage(4)


def test_a_step_on_weights_that_its_workers_did_not_have_is_refused(exchange):
    complete(exchange, digest="aa")
    trace, recorded = TraceConfig(method="bf16"), RecordedConfig(hint_dir=str(exchange.folder))
    training = RecordedTraining(trace, recorded)
    assert training.require_weights(0, lambda: "aa") == "aa"
    with pytest.raises(RuntimeError, match=r"0 has digest bb in the trainer, but .* with aa"):
        training.require_weights(0, lambda: "bb")


def test_weights_of_an_earlier_version_are_not_compared(tmp_path):
    lags = Exchange.create(
        tmp_path, ExchangeSettings(steps=2, prompts_per_batch=1, samples_per_prompt=2, max_lag=1)
    )
    complete(lags, digest="aa")
    assert [folder_of(lags).weights_digests(version) for version in (0, 1)] == [{"aa"}, set()]


def test_advantages_are_relative_to_the_group(exchange):
    complete(exchange)
    samples = folder_of(exchange)
    assert len(samples) == 16
    assert samples.advantage(0) == -samples.advantage(1) < 0
    assert [samples.reward(index) for index in range(4)] == [0.0, 1.0, 0.0, 1.0]
    assert samples.has_spread(0)


def test_a_sample_lags_by_the_versions_that_its_step_is_ahead_of_its_own(tmp_path):
    settings = ExchangeSettings(steps=3, prompts_per_batch=1, samples_per_prompt=2, max_lag=1)
    ahead = Exchange.create(tmp_path, settings)
    complete(ahead)
    publish(ahead, 2)
    complete(ahead)
    assert [folder_of(ahead).lag(index) for index in range(6)] == [0, 0, 1, 1, 0, 0]


def test_flags_that_contradict_the_run_are_refused(exchange):
    fitting = {
        "global_batch_size": 4,
        "train_iters": 4,
        "save": str(exchange.checkpoints),
        "load": str(exchange.checkpoints),
        "save_interval": 1,
    }
    folder_of(exchange).require_fitting(**fitting)
    for name, wrong in (
        ("global_batch_size", 8),
        ("train_iters", 5),
        ("save", "elsewhere"),
        ("load", None),
        ("save_interval", 2),
    ):
        with pytest.raises(ValueError, match="--" + name.replace("_", "-")):
            folder_of(exchange).require_fitting(**fitting | {name: wrong})
    with pytest.raises(ValueError, match="contradicts max_lag=0"):
        folder_of(exchange, max_lag=3)
