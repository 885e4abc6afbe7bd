"""The experts' products beside autograd's own differentiation of the same arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_trace.formats import ops
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.moe_reference import quantised_weight
from megatron_trace.testing.roundings import recorded_rounding
from megatron_trace.training import products
from megatron_trace.training.products import ExpertWeights, quantised_products, weighted_products
from megatron_trace.training.rounding import Rounding

ROWS, K, M = 37, 64, 48
SCALE = 2.0**-9
DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
]


def quantised_product(x, weight, quantised, packed):
    """Gives the product of one expert."""
    return quantised_products(x, [len(x)], ExpertWeights([weight], [quantised]), packed)


def weighted_product(activation, probs, weight, quantised, rounding, *, save_packed):
    """Gives the weighted product of one expert."""
    weights = ExpertWeights([weight], [quantised])
    splits = [len(activation)]
    return weighted_products(activation, probs, splits, weights, rounding, save_packed=save_packed)


def _leaves(dtype, probs_dtype, rows=ROWS):
    generator = torch.Generator().manual_seed(1)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    activation, weight = randn(rows, K).to(dtype), randn(M, K).to(dtype)
    probs, grad = torch.rand(rows, generator=generator).to(probs_dtype), randn(rows, M).to(dtype)
    return [t.requires_grad_() for t in (activation, probs, weight)], grad


def _guided(activation):
    """Gives a rounding whose hints are those of noisy values, missing for every third row."""
    values = activation.detach()
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(2))
    has_hint = torch.arange(len(values)) % 3 != 0
    return recorded_rounding(values + 0.01 * noise, SCALE, num_bits=1, has_hint=has_hint)


def _plain(activation, probs, weight, rounding):
    quantised = ops.straight_through(activation, rounding.quantised(activation))
    values = quantised_weight(weight).to(weight.dtype)
    output = quantised @ ops.straight_through(weight, values).t()
    return (output * probs.unsqueeze(-1)).to(output.dtype)


@pytest.mark.parametrize("save_packed", [False, True])
@pytest.mark.parametrize(("dtype", "probs_dtype"), DTYPES)
@pytest.mark.parametrize("rows", [ROWS, 1, 0])
def test_weighted_products_have_the_bits_of_autograd(dtype, probs_dtype, rows, save_packed):
    ours, grad = _leaves(dtype, probs_dtype, rows)
    theirs, _ = _leaves(dtype, probs_dtype, rows)
    rounding = _guided(ours[0]) if rows else Rounding(SCALE)
    expected = _plain(*theirs, rounding)
    expected.backward(grad)
    got = weighted_product(
        *ours, quantised_weight(ours[2]).bfloat16(), rounding, save_packed=save_packed
    )
    got.backward(grad)
    assert_same_bytes(got.detach(), expected.detach(), "output")
    for name, a, b in zip(("activation", "probs", "weight"), ours, theirs, strict=True):
        assert_same_bytes(a.grad, b.grad, name)


@pytest.mark.parametrize("save_packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_quantised_inputs_have_the_bits_of_autograd(dtype, save_packed):
    (activation, _, weight), grad = _leaves(dtype, dtype)
    (other, _, other_weight), _ = _leaves(dtype, dtype)
    packed = _guided(activation).packed(activation)
    values = quantised_weight(weight)
    expected = (
        ops.straight_through(other, packed.values(dtype))
        @ ops.straight_through(other_weight, values.to(dtype)).t()
    )
    expected.backward(grad)
    quantised = ops.straight_through(activation, packed.values(dtype))
    got = quantised_product(quantised, weight, values, packed if save_packed else None)
    got.backward(grad)
    assert_same_bytes(got.detach(), expected.detach(), "output")
    assert_same_bytes(activation.grad, other.grad, "input")
    assert_same_bytes(weight.grad, other_weight.grad, "weight")


def test_a_packed_product_keeps_no_values_of_its_input():
    (activation, probs, weight), _ = _leaves(torch.bfloat16, torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        weighted_product(
            activation,
            probs,
            weight,
            quantised_weight(weight),
            _guided(activation),
            save_packed=True,
        )
    shapes = sorted((str(t.dtype), tuple(t.shape)) for t in kept)
    assert shapes == [
        ("torch.bfloat16", (1, M, K)),
        ("torch.float32", (ROWS,)),
        ("torch.uint8", (ROWS, K // 16)),
        ("torch.uint8", (ROWS, K // 2)),
    ]


def test_the_output_is_not_kept_and_the_probabilitys_gradient_is_right():
    """Against a formula: the gradient of p is the sum over outputs of gradient times output."""
    (activation, probs, weight), grad = _leaves(torch.float32, torch.float32)
    rounding = Rounding(SCALE)
    values = quantised_weight(weight)
    weighted_product(activation, probs, weight, values, rounding, save_packed=True).backward(grad)
    output = rounding.quantised(activation).double() @ values.double().t()
    expected = (output * grad.double()).sum(-1)
    error = (probs.grad.double() - expected).abs().max() / expected.abs().max()
    assert error <= 1e-6  # measured 1e-7


@pytest.mark.parametrize("frozen", range(3))
def test_what_is_frozen_gets_no_gradient(frozen):
    (activation, probs, weight), grad = _leaves(torch.bfloat16, torch.float32)
    leaves = (activation, probs, weight)
    leaves[frozen].requires_grad_(False)
    values, rounding = quantised_weight(weight), Rounding(SCALE)
    weighted_product(activation, probs, weight, values, rounding, save_packed=False).backward(grad)
    assert [leaf.grad is None for leaf in leaves] == [index == frozen for index in range(3)]


def test_a_frozen_weight_of_fc1_gets_no_gradient():
    (activation, _, weight), grad = _leaves(torch.bfloat16, torch.bfloat16)
    weight.requires_grad_(False)
    quantised_product(activation, weight, quantised_weight(weight), None).backward(grad)
    assert weight.grad is None
    assert activation.grad is not None


@pytest.mark.parametrize("part_rows", [1, 12, 16384])
@pytest.mark.parametrize("save_packed", [False, True])
def test_all_experts_at_once_have_the_bits_of_each_by_itself(monkeypatch, save_packed, part_rows):
    """Also an expert without rows, and where parts have one expert, some, or all."""
    monkeypatch.setattr(products, "_PART_ROWS", part_rows)
    splits = [5, 0, 20, 12]
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(M, K, generator=generator).bfloat16() for _ in splits]
    (gate, probs, _), grad = _leaves(torch.bfloat16, torch.float32)
    results = []
    for together in (True, False):
        leaves = [t.detach().clone().requires_grad_() for t in (gate, probs, *weights)]
        x, p, own = leaves[0], leaves[1], leaves[2:]
        quantised = [quantised_weight(w).bfloat16() for w in own]
        rounding = _guided(x)
        if together:
            given = ExpertWeights(own, quantised)
            outputs = [
                weighted_products(x, p, splits, given, rounding, save_packed=save_packed),
                quantised_products(x, splits, given, rounding.packed(x) if save_packed else None),
            ]
        else:
            values = rounding.packed(x)
            rows, parts = 0, []
            for size, weight, q in zip(splits, own, quantised, strict=True):
                part = slice(rows, rows + size)
                hint = rounding.hint.mapped(lambda tensor, part=part: tensor[part])
                of_expert = dataclasses.replace(rounding, hint=hint)
                taken = values.taken(part) if save_packed else None
                parts.append(
                    (
                        weighted_product(
                            x[part], p[part], weight, q, of_expert, save_packed=save_packed
                        ),
                        quantised_product(x[part], weight, q, taken),
                    )
                )
                rows += size
            outputs = [torch.cat(of_all) for of_all in zip(*parts, strict=True)]
        (outputs[0] + outputs[1]).backward(grad)
        results.append([*(o.detach() for o in outputs), *(leaf.grad for leaf in leaves)])
    for index, (one, other) in enumerate(zip(*results, strict=True)):
        assert_same_bytes(one, other, f"result {index}")


@pytest.mark.parametrize(("part_rows", "part_experts"), [(12, 1023), (16384, 2), (16384, 1023)])
@pytest.mark.parametrize("save_packed", [False, True])
def test_grouped_products_have_the_bits_of_one_product_for_each_expert(
    monkeypatch, save_packed, part_rows, part_experts
):
    """As a GPU takes them, on integers, whose sums are exact; some experts have no rows."""
    monkeypatch.setattr(products, "_PART_ROWS", part_rows)
    monkeypatch.setattr(products, "_PART_EXPERTS", part_experts)
    splits = [5, 0, 20, 12, 0]
    generator = torch.Generator().manual_seed(4)

    def integers(*shape):
        return torch.randint(-3, 4, shape, generator=generator).bfloat16()

    together, alone = integers(3, M, K), integers(2, M, K)
    quantised = [*together, alone[0], alone[1].clone()]
    assert [len(of) for of in ExpertWeights([], quantised).stacks] == [3, 1, 1]
    x, probs, grad = integers(ROWS, K), torch.ones(ROWS), integers(ROWS, M)
    results = []
    for grouped in (True, False):
        monkeypatch.setattr(products, "can_group", lambda *_, grouped=grouped: grouped)
        leaves = [t.clone().requires_grad_() for t in (x, probs, *quantised)]
        given = ExpertWeights(leaves[2:], quantised)
        rounding = Rounding(1.0)
        outputs = [
            weighted_products(*leaves[:2], splits, given, rounding, save_packed=save_packed),
            quantised_products(
                leaves[0], splits, given, rounding.packed(x) if save_packed else None
            ),
        ]
        sum(outputs).backward(grad)
        results.append([*(o.detach() for o in outputs), *(leaf.grad for leaf in leaves)])
    for index, (one, other) in enumerate(zip(*results, strict=True)):
        assert_same_bytes(one, other, f"result {index}")


def test_matrices_that_are_not_side_by_side_are_stacks_of_their_own():
    memory = torch.arange(4 * M * K, dtype=torch.float32).view(4, M, K)
    of_other_memory = memory[2].clone()
    stacks = products.side_by_side([memory[0], memory[1], memory[3], of_other_memory])
    assert [len(stack) for stack in stacks] == [2, 1, 1]
    assert_same_bytes(torch.cat(stacks), torch.stack([*memory[:2], memory[3], memory[2]]), "all")


def test_matrices_of_other_sizes_strides_or_dtypes_are_stacks_of_their_own():
    memory = torch.arange(6 * M * K, dtype=torch.float32).view(6, M, K)
    given = [
        memory[0],
        memory[1].view(torch.int32).view(M, K),
        memory[2].t(),
        memory[3].view(K, M),
        memory[4],
        memory[5],
    ]
    stacks = products.side_by_side(given)
    assert [len(stack) for stack in stacks] == [1, 1, 1, 1, 2]
    for stack, matrix in zip(stacks[:4], given, strict=False):
        assert_same_bytes(stack[0], matrix, "a matrix by itself")
    assert products.side_by_side([]) == ()
