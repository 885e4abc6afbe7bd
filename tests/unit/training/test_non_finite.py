"""NaN and Inf at quantised places: what is noted, when it is asked for, what the error names."""

from __future__ import annotations

import contextlib
import math
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_trace.config import HINT_SITES
from megatron_trace.formats.bad_values import note_bad_values
from megatron_trace.hints.types import Site
from megatron_trace.testing.tiny_trainer import recorded_rollout, tiny_trainer
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.non_finite import NonFiniteNotes
from megatron_trace.training.rounding import NonFiniteError

PLACES = ((0, Site.FC1), (0, Site.K), (1, Site.FC1))
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@pytest.fixture(scope="module")
def rolled(_one_rank):
    return recorded_rollout(((5, 3), (3, 2), (7, 4)), sites=HINT_SITES)


@pytest.fixture
def reads():
    """Counts how often the host asks the device."""
    read = NonFiniteNotes._read
    with mock.patch.object(NonFiniteNotes, "_read", autospec=True, side_effect=read) as counted:
        yield counted


def _trainer(rolled, method: Any = "trace", **options):
    model: Any
    model, sites = tiny_trainer(method, settings=rolled.settings, **options)
    model.train()
    return model, sites, [make_micro_batch([s], rolled.store, sites) for s in rolled.samples]


def _forward(model, sites, micro_batch):
    with sites.micro_batch(micro_batch):
        return token_logprobs(model, sites, micro_batch)


def _spoil(module, *, calls, row=2, column=3, value=math.nan):
    """Puts a value into what a module gives in some of its calls, in the order of all."""
    called = []

    def spoilt(_module, _inputs, output):
        called.append(len(called))
        if called[-1] not in calls:
            return None
        whole = output[0] if isinstance(output, tuple) else output
        bad = whole.clone()
        bad.view(-1, bad.shape[-1])[row, column] = value
        return (bad, *output[1:]) if isinstance(output, tuple) else bad

    return module.register_forward_hook(spoilt)


def _norm(model):
    """Gives what stands before the MoE of decoder layer 0, whose output is its fc1."""
    return model.decoder.layers[1].pre_mlp_layernorm


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_bad_value_of_the_earliest_place_is_named(value):
    errors = []
    notes = NonFiniteNotes(PLACES, lambda: errors.append)
    good, bad, worse = torch.zeros(4, 32), torch.zeros(4, 32), torch.full((4, 32), math.nan)
    bad[1, 5], bad[2, 3], bad[1, 6] = value, math.nan, -math.inf
    # In the order of execution, which is not that of the places.
    for place, values in ((PLACES[2], good), (PLACES[1], bad), (PLACES[0], worse)):
        note = notes.of(place, values, lambda row: f"row {row}")
        note_bad_values(values, note, None, 0.0, 16)
    assert errors == []
    notes.ask()
    notes.ask()
    (error,) = errors
    assert str(error).startswith(f"{value} at layer 0, site k, row 1, column 5: quantisers need")


def test_what_was_noted_is_gone_once_it_was_told():
    errors = []
    notes = NonFiniteNotes(PLACES, lambda: errors.append)
    for values in (torch.full((1, 16), math.inf), torch.zeros(1, 16)):
        note_bad_values(values, notes.of(PLACES[0], values, str), None, 0.0, 16)
        notes.ask()
    assert len(errors) == 1


def test_a_place_that_comes_again_is_asked_for_before():
    errors = []
    notes = NonFiniteNotes(PLACES, lambda: errors.append)
    for values, name in ((torch.full((1, 16), math.inf), "first"), (torch.zeros(1, 16), "second")):
        note = notes.of(PLACES[0], values, lambda row, name=name: name)
        note_bad_values(values, note, None, 0.0, 16)
    assert "first" in str(errors[0])


@pytest.mark.parametrize("method", ["qat", "trace"])
@pytest.mark.parametrize(("config", "reads_of_backward"), [({}, 0), (FULL, 1)])
def test_a_pass_is_asked_for_once(rolled, reads, method, config, reads_of_backward):
    model, sites, micro_batches = _trainer(rolled, method, hint_sites=HINT_SITES, config=config)
    outputs = []
    for number, micro_batch in enumerate(micro_batches):
        outputs.append(_forward(model, sites, micro_batch))
        assert reads.call_count == number + 1
    reads.reset_mock()
    for number, output in enumerate(outputs):
        output.sum().backward()
        assert reads.call_count == (number + 1) * reads_of_backward


def test_the_error_comes_where_the_forward_ends_and_names_what_came_first(rolled):
    model, sites, (micro_batch, *_) = _trainer(rolled, hint_sites=HINT_SITES)
    hook = _spoil(_norm(model), calls=[0], value=-math.inf)
    with sites.micro_batch(micro_batch):
        with pytest.raises(
            NonFiniteError, match="-inf at layer 0, site fc1, sample sample-0, token 2, column 3"
        ):
            token_logprobs(model, sites, micro_batch)
        hook.remove()
        assert token_logprobs(model, sites, micro_batch).isfinite().all()


def test_what_ran_without_the_models_forward_is_asked_for_where_the_scope_ends(rolled):
    _, sites, (micro_batch, *_) = _trainer(rolled)
    x = torch.full((*micro_batch.valid.shape, 128), math.inf, device=sites.device)
    scope = contextlib.ExitStack()
    scope.enter_context(sites.micro_batch(micro_batch))
    sites.quantise_rows(x, (0, Site.FC1))
    with pytest.raises(NonFiniteError, match="inf at layer 0, site fc1, sample sample-0, token 0"):
        scope.close()
    assert sites.micro_batch_in_force is None


def test_an_error_of_its_own_is_not_hidden_and_its_values_are_forgotten(rolled):
    def fails():
        sites.quantise_rows(x, (0, Site.FC1))
        raise KeyError("of its own")

    model, sites, (first, second, _) = _trainer(rolled)
    x = torch.full((*first.valid.shape, 128), math.nan, device=sites.device)
    with pytest.raises(KeyError, match="of its own"), sites.micro_batch(first):
        fails()
    _forward(model, sites, second)


@pytest.mark.parametrize("num_others", [0, 1])
def test_what_recomputation_finds_is_an_error_of_backward_with_the_name_of_its_sample(
    rolled, num_others
):
    model, sites, (first, second, _) = _trainer(rolled, config=FULL)
    logprobs = _forward(model, sites, first)
    others = [_forward(model, sites, second) for _ in range(num_others)]
    hook = _spoil(_norm(model), calls=[0])
    with pytest.raises(NonFiniteError, match="nan at layer 0, site fc1, sample sample-0, token 2"):
        logprobs.sum().backward()
    hook.remove()
    assert sites.micro_batch_in_force is None
    for other in others:
        other.sum().backward()


def test_what_a_backward_that_raised_found_is_not_another_ones(rolled):
    def fails(_):
        raise KeyError("in backward")

    model, sites, (first, second, _) = _trainer(rolled, config=FULL)
    logprobs, other = (_forward(model, sites, micro_batch) for micro_batch in (first, second))
    spoiling = _spoil(_norm(model), calls=[0])
    failing = model.decoder.layers[0].self_attention.linear_qkv.weight.register_hook(fails)
    with pytest.raises(KeyError, match="in backward"):
        logprobs.sum().backward()
    spoiling.remove()
    failing.remove()
    other.sum().backward()


def test_a_backward_through_two_passes_names_the_sample_and_token_of_the_right_one(rolled):
    """The layer is recomputed for both before anybody asks, so its dispatcher knows the last."""
    model, sites, (first, second, _) = _trainer(rolled, hint_sites=HINT_SITES, config=FULL)
    outputs = [_forward(model, sites, micro_batch) for micro_batch in (first, second)]
    # Autograd takes the later pass first; its row 7 is of the 8th slot by expert.
    hook = _spoil(model.decoder.layers[1].mlp.experts.activation, calls=[0], row=7)
    slot = second.routing[0].flatten().sort(stable=True).indices[7]
    expert = second.routing[0].flatten()[slot]
    token = slot // second.routing.shape[-1]
    with pytest.raises(
        NonFiniteError,
        match=f"nan at layer 0, site fc2, expert {expert}, sample sample-1, token {token}, column",
    ):
        torch.cat(outputs, 1).sum().backward()
    hook.remove()


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_every_dispatcher_names_the_token_at_fc2(rolled, dispatcher):
    config = {"moe_token_dispatcher_type": dispatcher}
    model, sites, (micro_batch, *_) = _trainer(rolled, hint_sites=HINT_SITES, config=config)
    _spoil(model.decoder.layers[3].mlp.experts.activation, calls=[0], row=0)
    expert = int(micro_batch.routing[1].min())
    token = int((micro_batch.routing[1] == expert).any(-1).nonzero()[0, 0])
    named = f"layer 1, site fc2, expert {expert}, sample sample-0, token {token}, column 3"
    with pytest.raises(NonFiniteError, match=named):
        _forward(model, sites, micro_batch)


def test_who_takes_errors_gets_one_of_a_pass_and_the_pass_goes_on(rolled):
    model, sites, (first, second, _) = _trainer(rolled, hint_sites=HINT_SITES, config=FULL)
    errors = []
    sites.on_non_finite = errors.append
    hook = _spoil(_norm(model), calls=[0, 2])
    logprobs = _forward(model, sites, first)
    assert logprobs.isnan().any()
    assert ["site fc1, sample sample-0" in str(error) for error in errors] == [True]
    _forward(model, sites, second)
    assert len(errors) == 1
    hook.remove()
    logprobs.sum().backward()
    # Recomputation starts from what the layers before gave: NaN again, from the layer after.
    assert ["layer 1" in str(error) for error in errors] == [False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["qat", "trace"])
def test_on_a_gpu_a_pass_waits_once_for_its_places(rolled, method):
    model, sites, (micro_batch, *_) = _trainer(rolled, method, hint_sites=HINT_SITES)
    assert sites.device.type == "cuda"
    _forward(model, sites, micro_batch)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            _forward(model, sites, micro_batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = [Path(w.filename).name for w in noted if "synchronizing" in str(w.message)]
    ours = ("non_finite.py", "sites.py", "tally.py", "rounding.py", "bad_values.py")
    assert [line for line in lines if line in ours] == ["non_finite.py"]
