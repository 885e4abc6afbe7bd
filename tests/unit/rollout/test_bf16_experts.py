"""Engines without routed experts in BF16, and what a failed push puts back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_trace.formats import encode, global_scale_from_amax, pack_codes
from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.models.hybrid import named_expert_linears
from megatron_trace.rollout import SamplingSettings, rollback
from megatron_trace.rollout.rollback import kept_on_failure
from megatron_trace.testing.rollouts import assert_same_rollout
from megatron_trace.testing.tiny_rollout import (
    calibration_tokens,
    random_prompts,
    roll_out,
    tiny_engine,
)

PACKED = {"packed_experts": "torch", "hint_layers": "all", "diagnostic_share": 1.0}
WITHOUT: dict[str, Any] = {"keep_bf16_experts": False}


@pytest.fixture(scope="module")
def keeping(weights):
    return tiny_engine(weights, **PACKED)


@pytest.fixture(scope="module")
def dropping(keeping):
    engine = tiny_engine(None, limits=WITHOUT, **PACKED)
    engine.use_settings(keeping.settings)
    return engine


@pytest.fixture
def bits_before(request, weights):
    """Gives an engine under `weights`, and all bits that it holds."""

    def of(name):
        engine = request.getfixturevalue(name)
        engine.push_weights(weights, 0)
        return engine, _bits(engine)

    return of


def _tensors(engine):
    named = (*engine.model.named_parameters(), *engine.model.named_buffers())
    return {name: tensor for name, tensor in named if not tensor.is_meta}


def _bits(engine):
    return {
        name: tensor.detach().clone().reshape(-1).view(torch.uint8)
        for name, tensor in _tensors(engine).items()
    }


def _assert_bits(engine, expected):
    for name, bits in _bits(engine).items():
        assert torch.equal(bits, expected[name]), name


class _BreaksAtLastExpert(dict):
    """Parameters whose last expert cannot be read any more once the others have been."""

    def __init__(self, named):
        broken = [name for name in named if "local_experts" in name][-1]
        super().__init__(named)
        self[broken] = _Gone(named[broken])


class _Gone(torch.Tensor):
    """A tensor whose values are lost; its shape is not."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if "shape" in str(func) or "device" in str(func):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise OSError("the trainer's memory is gone")

    def __new__(cls, tensor):
        return tensor.as_subclass(cls)


def test_an_engine_without_bf16_experts_serves_and_records_what_one_with_them_does(
    keeping, dropping, weights, other_weights
):
    prompts = random_prompts(6)
    for version, pushed in enumerate((weights, other_weights, weights)):
        digests = [engine.push_weights(pushed, version) for engine in (keeping, dropping)]
        assert digests[0] == digests[1]
        assert_same_rollout(roll_out(dropping, prompts), roll_out(keeping, prompts))


def _halved(_, weight):
    """Chooses codes as rounding to nearest does under half the global scale."""
    scale = global_scale_from_amax(weight.abs().amax()) / 2
    codes, scale_bytes = encode(weight, scale)
    return PackedMatrix(pack_codes(codes), scale_bytes, scale)


@pytest.mark.parametrize("rule", [None, _halved], ids=["to nearest", "a rule"])
def test_packed_weights_that_are_kept_are_those_of_an_engine_with_bf16_experts(
    keeping, weights, rule
):
    limits = {"keep_packed_weights": True}
    with_them = tiny_engine(None, limits=limits, **PACKED)
    without = tiny_engine(None, limits=limits | WITHOUT, **PACKED)
    models = []
    for engine in (with_them, without):
        engine.use_settings(keeping.settings)
        digest = engine.push_weights(weights, 0, rule=rule)
        models.append((digest, *engine.quantised_model()))
    (digest, parameters, matrices, _), (other_digest, others, other_matrices, _) = models
    assert digest == other_digest
    assert parameters.keys() == others.keys()
    assert matrices.keys() == other_matrices.keys()
    for place, one in matrices.items():
        other = other_matrices[place]
        assert torch.equal(one.packed_codes, other.packed_codes), place
        assert torch.equal(one.scale_bytes, other.scale_bytes), place
        assert torch.equal(one.global_scale, other.global_scale), place


def test_nan_in_an_expert_is_named_where_only_codes_are_held(dropping, weights, bits_before):
    dropping, before = bits_before("dropping")
    name = next(name for name in weights if "layers.3" in name and "experts.5.linear_fc2" in name)
    broken = weights | {name: torch.full_like(weights[name], torch.nan)}
    with pytest.raises(ValueError, match=r"1 of 16 .* hold NaN or Inf: layer 1, expert 5, fc2"):
        dropping.push_weights(broken, 1)
    _assert_bits(dropping, before)


def test_an_engine_without_bf16_experts_holds_none(dropping):
    linears = [linear for layer in dropping.layers for *_, linear in named_expert_linears(layer)]
    assert len(linears) == 2 * 2 * 16
    assert all(linear.weight.is_meta for linear in linears)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("load_weights", lambda weights: (weights,)),
        ("calibrate", lambda _: (calibration_tokens(),)),
        ("recalibrate", lambda weights: (weights, calibration_tokens(), 1)),
    ],
)
def test_what_needs_bf16_experts_is_refused_with_the_way_out(dropping, weights, call, arguments):
    message = f"{call} needs the routed experts in BF16.*keep_bf16_experts=False.*use_settings"
    with pytest.raises(ValueError, match=message):
        getattr(dropping, call)(*arguments(weights))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packed_experts": "off"}, r"leaves no routed experts .*packed_experts=off\)"),
        (
            {"packed_experts": "auto"},  # On a GPU it is the tiny model that is too narrow.
            "leaves no routed experts .*packed_experts=auto: (it needs a|hidden size)",
        ),
        ({"quantised_parts": "kv"}, "quantises no routed experts .*quantised_parts=kv"),
        ({"method": "bf16"}, "quantises no routed experts .*method=bf16"),
        ({"pattern": "*-*-"}, "quantises no routed experts .*pattern"),
    ],
)
def test_experts_that_nothing_could_compute_are_refused_at_start(settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_engine(None, limits=WITHOUT, **settings)


@pytest.mark.parametrize("engine", ["keeping", "dropping"])
def test_a_push_that_fails_at_the_last_expert_leaves_every_bit(bits_before, engine, other_weights):
    engine, before = bits_before(engine)
    with pytest.raises(OSError, match="memory is gone"):
        engine.push_weights(_BreaksAtLastExpert(other_weights), 1)
    _assert_bits(engine, before)
    engine.push_weights(other_weights, 1)
    codes = [name for name in before if name.endswith("fc2_codes")]
    after = _bits(engine)
    assert codes
    assert all(not torch.equal(after[name], before[name]) for name in codes)


def _interrupted_push(engine, lent):
    with kept_on_failure(engine.model, lent=lent, packed_layers=engine.layers):
        for tensor in _tensors(engine).values():
            tensor.detach().view(-1).view(torch.uint8).fill_(1)
        raise KeyboardInterrupt


@pytest.mark.parametrize("lent_bytes", [0, 5000, 1 << 24])
def test_weights_are_put_back_wherever_they_were_kept(keeping, lent_bytes):
    before, device = _bits(keeping), torch.cuda.current_device()
    lent = torch.full((lent_bytes,), 7, dtype=torch.uint8, device=device)
    with pytest.raises(KeyboardInterrupt):
        _interrupted_push(keeping, lent)
    _assert_bits(keeping, before)
    used = (lent == 0).nonzero().flatten().tolist()
    assert len(used) == (used[-1] + 1 if used else 0), "what was used is zero, the rest untouched"
    assert bool(used) == (lent_bytes > 0)
    assert lent_bytes < 1 << 24 or len(used) < lent_bytes


def test_lent_memory_is_zero_again_where_weights_could_not_all_be_kept():
    model = torch.nn.Linear(8, 8, bias=False)
    model.register_buffer("gone", _Gone(torch.zeros(8)))
    lent = torch.full((1 << 12,), 7, dtype=torch.uint8)
    with pytest.raises(OSError, match="memory is gone"), kept_on_failure(model, lent=lent):
        pass
    num_kept = model.weight.numel() * model.weight.element_size()
    assert (lent[:num_kept] == 0).all()
    assert (lent[num_kept:] == 7).all()


@pytest.fixture
def memory(monkeypatch):
    """Gives a GPU's free, whole and reserved bytes, and the share that the process may take."""
    device = {"free": 100, "total": 1000, "reserved": 0, "share": 1.0}
    monkeypatch.setattr(rollback, "_SPARED_BYTES", 10)
    for name, read in (
        ("mem_get_info", lambda _: (device["free"], device["total"])),
        ("memory_reserved", lambda _: device["reserved"]),
        ("get_per_process_memory_fraction", lambda _: device["share"]),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, read, raising=False)
    return device


def _rooms(*num_bytes):
    keeper = rollback._Keeper(None)
    return [keeper._has_room(number, torch.device("cuda")) for number in num_bytes]


def test_what_torch_holds_for_reuse_is_released_before_weights_go_to_the_host(memory, monkeypatch):
    """As after the push before: its copies are nobody's, but the driver does not say so."""
    released = []

    def release():
        released.append(memory["free"])
        memory["free"] = 500

    monkeypatch.setattr(torch.cuda, "empty_cache", release)
    assert _rooms(60, 30) == [True, True]
    assert not released, "there was room"
    assert _rooms(60, 400, 200, 90) == [True, True, False, True]
    assert released == [100], "released once"


def test_weights_are_kept_within_the_share_of_a_gpu_that_the_process_may_take(memory):
    memory |= {"free": 900, "share": 0.5, "reserved": 300}
    assert _rooms(190) == [True]
    assert _rooms(191) == [False]


def test_bf16_experts_beside_packed_ones_are_not_copied(keeping):
    """All else of the tiny engine fits where they would not."""
    experts = {
        id(linear.weight) for layer in keeping.layers for *_, linear in named_expert_linears(layer)
    }
    every = _tensors(keeping).values()
    others = sum(t.numel() * t.element_size() for t in every if id(t) not in experts)
    lent = torch.ones(1 << 24, dtype=torch.uint8, device=torch.cuda.current_device())
    with kept_on_failure(keeping.model, lent=lent, packed_layers=keeping.layers):
        pass
    # Each tensor begins at a multiple of 256 bytes.
    assert others <= int((lent == 0).sum()) <= others + 256 * len(every)


def test_the_cache_is_lent_for_a_push_but_not_while_samples_are_in_flight(keeping):
    lent = keeping._lent_memory()
    assert lent is not None
    assert lent.data_ptr() == keeping._server.context.memory_buffer.data_ptr()
    sampling = SamplingSettings(max_new_tokens=4)
    session = keeping.open_session(store=None, sampling=sampling, on_push="keep")
    try:
        assert keeping._lent_memory() is None
    finally:
        session.close()
