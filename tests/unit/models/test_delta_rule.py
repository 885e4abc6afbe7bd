"""The gated delta rule and its convolution: by the definition, continued, packed, and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_trace.models import delta_rule
from megatron_trace.models.delta_rule import convolve, delta_rule_kernels, mix, normalise

# One token, one chunk, one token more, and several chunks.
LENGTHS = [1, 64, 65, 150]


def _inputs(num_tokens, *, sequences=2, heads=3, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(sequences, num_tokens, heads, *shape, generator=generator)

    query, key = normalise(normal(8)), normalise(normal(8))
    return query, key, normal(16), -F.softplus(normal()), normal().sigmoid()


def _state(sequences=2, heads=3):
    return torch.randn(sequences, heads, 8, 16, generator=torch.Generator().manual_seed(1))


def _by_definition(query, key, value, decay, beta, state):
    """Token by token, in FP64."""
    query, key, value, decay, beta, state = (
        x.double() for x in (query, key, value, decay, beta, state)
    )
    outputs = []
    for t in range(value.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        read = torch.einsum("nhkv,nhk->nhv", state, key[:, t])
        written = beta[:, t, :, None] * (value[:, t] - read)
        state = state + torch.einsum("nhk,nhv->nhkv", key[:, t], written)
        outputs.append(torch.einsum("nhkv,nhk->nhv", state, query[:, t]) * query.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_output_and_state_are_those_of_the_definition(num_tokens):
    inputs, state = _inputs(num_tokens), _state()
    got = mix(*inputs, state, keep_state=True)
    for ours, expected in zip(got, _by_definition(*inputs, state), strict=True):
        # Measured: 6e-7.
        torch.testing.assert_close(ours.double(), expected, atol=4e-6, rtol=0)


@pytest.mark.parametrize(
    "harder",
    [
        lambda query, key, *rest: (query, key[:, :1].expand_as(key), *rest),
        lambda query, key, value, decay, beta: (query, key, value, 0 * decay, 0 * beta + 1),
        lambda query, key, value, decay, beta: (query, key, value, 20 * decay, beta),
        lambda query, key, value, decay, beta: (query, key, value, decay, 0 * beta),
    ],
    ids=["one key", "all is written and kept", "most is forgotten", "nothing is written"],
)
def test_hard_inputs_give_what_the_definition_gives(harder):
    inputs, state = harder(*_inputs(150)), _state()
    got = mix(*inputs, state, keep_state=True)
    for ours, expected in zip(got, _by_definition(*inputs, state), strict=True):
        # Measured: 1.4e-6.
        torch.testing.assert_close(ours.double(), expected, atol=5e-6, rtol=0)


def test_gradients_are_those_of_the_definition():
    inputs = [*_inputs(70), _state()]
    grads = []
    for function in (lambda *given: mix(*given, keep_state=True), _by_definition):
        leaves = [x.clone().requires_grad_() for x in inputs]
        output, state = function(*leaves)
        grads.append(torch.autograd.grad(output.square().sum() + state.square().sum(), leaves))
    for ours, expected in zip(*grads, strict=True):
        # Measured: 1e-6 of the largest.
        scale = expected.abs().max().item()
        torch.testing.assert_close(ours, expected, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("cut", [1, 63, 64, 70])
def test_a_sequence_in_two_parts_gives_what_it_gives_in_one(cut):
    inputs = _inputs(71)
    whole, end = mix(*inputs, keep_state=True)
    first, state = mix(*(x[:, :cut] for x in inputs), keep_state=True)
    second, last = mix(*(x[:, cut:] for x in inputs), state, keep_state=True)
    # Measured: 5e-7; other chunks add up in another order.
    torch.testing.assert_close(torch.cat((first, second), 1), whole, atol=2e-6, rtol=0)
    torch.testing.assert_close(last, end, atol=2e-6, rtol=0)


def test_without_its_state_the_second_part_differs():
    inputs = _inputs(71)
    whole, _ = mix(*inputs)
    second, _ = mix(*(x[:, 35:] for x in inputs))
    assert (second - whole[:, 35:]).abs().max() > 0.1


def test_a_decay_of_nearly_everything_has_finite_gradients():
    query, key, value, decay, beta = _inputs(64)
    decay = (decay - 200).requires_grad_()
    output, _ = mix(query, key, value, decay, beta)
    output.sum().backward()
    assert decay.grad.isfinite().all()


def test_packed_sequences_are_mixed_as_separate_ones():
    """Also an empty one, which leaves its state as it was."""
    query, key, value, decay, beta = inputs = _inputs(100, sequences=1)
    bounds, states = torch.tensor([0, 30, 30, 100]), _state(sequences=3)
    packed, after = mix(query, key, value, decay, beta, states, bounds, keep_state=True)
    for index, (start, end) in enumerate(((0, 30), (30, 30), (30, 100))):
        own = states[index, None]
        alone, state = mix(*(x[:, start:end] for x in inputs), own, keep_state=True)
        assert torch.equal(packed[:, start:end], alone)
        assert torch.equal(after[index, None], state)
    assert torch.equal(after[1], states[1])


def _convolution_inputs(num_tokens=40):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, num_tokens, 6, generator=generator), torch.randn(
        6, 4, generator=generator
    )


def test_the_convolution_is_torchs_with_silu():
    x, weight = _convolution_inputs()
    bias = torch.arange(6.0)
    expected = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], bias, groups=6)).mT
    # Measured: 5e-7.
    torch.testing.assert_close(convolve(x, weight, bias)[0], expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_convolution_in_two_parts_gives_what_it_gives_in_one(cut):
    """Also where the first part is shorter than the convolution's width."""
    x, weight = _convolution_inputs()
    whole, end = convolve(x, weight, keep_state=True)
    first, state = convolve(x[:, :cut], weight, keep_state=True)
    second, last = convolve(x[:, cut:], weight, before=state, keep_state=True)
    # Measured: 1e-7; SiLU rounds otherwise where the lengths do not fill a vector of the CPU.
    torch.testing.assert_close(torch.cat((first, second), 1), whole, atol=1e-6, rtol=0)
    assert torch.equal(last, end)
    assert torch.equal(end, x[:, -4:].mT)


def test_packed_sequences_are_convolved_as_separate_ones():
    x, weight = _convolution_inputs()
    packed, after = convolve(x[:1], weight, bounds=torch.tensor([0, 7, 40]), keep_state=True)
    for index, (start, end) in enumerate(((0, 7), (7, 40))):
        alone, state = convolve(x[:1, start:end], weight, keep_state=True)
        assert torch.equal(packed[:, start:end], alone)
        assert torch.equal(after[index, None], state)


def test_a_zero_vector_stays_zero_when_normalised():
    assert torch.equal(normalise(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_the_kernels_on_a_cpu_are_torchs(choice):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert delta_rule_kernels(choice).mix is mix


def test_fla_is_refused_on_a_cpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="needs a GPU"):
        delta_rule_kernels("fla")


def test_a_gpu_without_fla_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setattr(delta_rule, "_device_is_gpu", lambda: True)
    monkeypatch.setattr(delta_rule.megatron_gdn, "HAVE_FLA", False)
    with pytest.raises(RuntimeError, match=r"pip install 'megatron-trace\[gpu\]', or choose"):
        delta_rule_kernels("auto")
    assert delta_rule_kernels("torch").mix is mix


def test_determinism_takes_torchs_kernels_and_contradicts_fla(monkeypatch):
    monkeypatch.setattr(delta_rule, "_device_is_gpu", lambda: True)
    assert delta_rule_kernels("auto", deterministic=True).mix is mix
    with pytest.raises(ValueError, match="contradicts deterministic_mode"):
        delta_rule_kernels("fla", deterministic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [None, (0, 30, 100)])
def test_flas_kernels_give_what_torchs_give(bounds):
    """Output and state of a BF16 layer on a GPU, with a state before, packed or not."""
    ours, theirs = delta_rule_kernels("torch"), delta_rule_kernels("fla", trains=False)
    inputs = [x.cuda() for x in _inputs(100, sequences=1 if bounds else 2)]
    inputs[:3] = [x.bfloat16() for x in inputs[:3]]
    ends = None if bounds is None else torch.tensor(bounds, device="cuda")
    expected = ours.mix(*inputs, _state().cuda(), ends, keep_state=True)
    got = theirs.mix(*inputs, _state().cuda(), ends, keep_state=True)
    for name, mine, other in zip(("output", "state"), expected, got, strict=True):
        error = (mine.float() - other.float()).abs().max() / mine.float().abs().max()
        assert error < 2e-2, f"{name}: {error:.1e}"
    x = torch.randn(1 if bounds else 2, 100, 96, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(96, 4, device="cuda", dtype=torch.bfloat16)
    before = torch.randn(2, 96, 4, device="cuda", dtype=torch.bfloat16)
    expected = ours.convolve(x, weight, None, before, ends, keep_state=True)
    got = theirs.convolve(x, weight, None, before, ends, keep_state=True)
    torch.testing.assert_close(got[0], expected[0], atol=2e-2, rtol=2e-2)
    assert torch.equal(got[1], expected[1])


@pytest.mark.gpu
def test_flas_decode_step_gives_what_torchs_gives():
    inputs = [x.cuda() for x in _inputs(1)]
    inputs[:3] = [x.bfloat16() for x in inputs[:3]]
    with torch.no_grad():
        expected = delta_rule_kernels("torch").mix(*inputs, _state().cuda(), keep_state=True)
        kernels = delta_rule_kernels("fla", trains=False)
        got = kernels.mix(*inputs, _state().cuda(), keep_state=True)
    torch.testing.assert_close(got[0], expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got[1], expected[1], atol=1e-3, rtol=1e-3)
