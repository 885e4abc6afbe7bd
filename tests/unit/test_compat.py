"""Work-arounds end where they should, and name the version they were written against."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import subprocess

import pytest
import torch
from megatron.core.datasets import utils
from megatron.core.inference.utils import InferenceMode
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import attention
from megatron.training import checkpointing, training

from megatron_trace import compat


def test_another_version_is_refused_by_the_name_of_what_relies_on_it():
    with pytest.raises(RuntimeError, match=r"paged attention was written against torch 1\.0\.x"):
        compat.require_version("torch", "1.0.", "paged attention")


def test_the_known_versions_are_installed():
    compat.require_version("megatron-core", compat.MEGATRON_CORE, "the rollout engine")
    compat.require_version("nvidia-modelopt", compat.MODELOPT, "the rollout engine")
    compat.require_version("torch", compat.TORCH, "the micro-batch in force")


def test_the_flash_attention_flag_is_what_it_was_also_after_an_error():
    before = attention.HAVE_FA3
    with contextlib.suppress(KeyboardInterrupt), compat.flash_attention_not_needed():
        assert attention.HAVE_FA3
        raise KeyboardInterrupt
    assert before == attention.HAVE_FA3


@pytest.mark.parametrize("active", [False, True])
def test_inference_mode_is_what_it_was(active):
    if active:
        InferenceMode.set_active()
    try:
        with compat.inference_mode_of_process():
            assert InferenceMode.is_active()
        assert InferenceMode.is_active() is active
    finally:
        InferenceMode.unset_active()


def test_linear_functions_that_modelopt_replaced_are_put_back():
    from modelopt.torch.quantization.utils import replace_function

    name = "linear_with_frozen_weight"
    original = getattr(layers, name)
    compat.restore_linear_functions()
    assert getattr(layers, name) is original, "nothing was replaced, so nothing may change"
    with contextlib.suppress(ValueError), replace_function(layers, name, print):
        raise ValueError
    if getattr(layers, name) is original:
        pytest.fail("ModelOpt restores its replacement now: drop restore_linear_functions")
    compat.restore_linear_functions()
    assert getattr(layers, name) is original
    assert not hasattr(layers, f"_{name}")


def test_a_share_in_a_help_text_is_printed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=3, help="of 10%%, or (10%) of %(default)s")
    compat.let_help_be_printed(parser)
    assert "of 10%, or (10%) of 3" in parser.format_help()


def test_megatron_starts_no_make_for_data_sets(monkeypatch):
    """The wheel has no Makefile: `make` would fail, and Megatron ends the program then."""
    monkeypatch.setattr(utils, "compile_helpers", utils.compile_helpers)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("make was started"))
    compat.data_set_helpers_not_compiled()
    utils.compile_helpers()


def test_a_training_step_is_told_with_what_megatrons_log_gets_and_no_longer_after_the_context(
    monkeypatch,
):
    names = list(inspect.signature(training.training_log).parameters)
    assert {"loss_dict", "learning_rate", "iteration", "skipped_iter", "grad_norm"} <= set(names)
    logged, told = [], []

    def training_log(loss_dict, total, learning_rate, iteration, skipped_iter, grad_norm, **more):
        logged.append(iteration)
        return more["report_memory_flag"]

    monkeypatch.setattr(training, "training_log", training_log)
    with compat.training_steps_told(told.append):
        losses = {"policy loss": torch.tensor([0.5])}
        values = (losses, {}, 1e-6, 7, 0, None)
        assert training.training_log(*values, report_memory_flag=True)
    assert told == [compat.StepOutcome(7, {"policy loss": 0.5}, None, 1e-6, False)]
    assert (training.training_log, logged) == (training_log, [7])


def test_flags_of_a_checkpoint_are_told_after_megatrons_check_and_no_longer_after_the_context(
    monkeypatch,
):
    assert "check_checkpoint_args(checkpoint_args" in inspect.getsource(
        checkpointing.load_checkpoint
    )
    seen = []
    monkeypatch.setattr(
        checkpointing, "check_checkpoint_args", lambda of, skip_args=None: seen.append("checked")
    )
    with compat.checkpoint_flags_told(seen.append):
        checkpointing.check_checkpoint_args("flags", skip_args=None)
    checkpointing.check_checkpoint_args("flags")
    assert seen == ["checked", "flags", "checked"]
