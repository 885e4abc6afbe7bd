"""Products of the routed experts, with what backward needs kept as BF16 values or as packed codes.

    fc1   y = X Wq^T             X the quantised routed input
    fc2   y = (Q(a) Wq^T) p      a the activation, p the router's probability of each row

dgrad uses the quantised weight Wq, wgrad the quantised input, and the gradient of a passes its
quantiser unchanged. fc2's output is not kept: backward multiplies Q(a) and Wq again for the
gradient of p. Both ways of keeping the input give the same bits.

Legend: N rows of one expert, K values of a row, M outputs of a row.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_trace.training.rounding import PackedRows, Rounding


def quantised_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    quantised_weight: torch.Tensor,
    packed: PackedRows | None,
) -> torch.Tensor:
    """Gives the product of a quantised input with a quantised weight.

    Args:
        x: float [N, K]; the quantised input.
        weight: float [M, K]; the parameter, which gets the gradient.
        quantised_weight: [M, K]; its dequantised codes.
        packed: Codes of x, which backward then keeps instead of x; None keeps x.

    Returns:
        [N, M] in the dtype of x.
    """
    return _QuantisedProduct.apply(x, weight, quantised_weight, packed)  # pyright: ignore[reportReturnType]


def weighted_product(
    activation: torch.Tensor,
    probs: torch.Tensor,
    weight: torch.Tensor,
    quantised_weight: torch.Tensor,
    rounding: Rounding | None,
    *,
    save_packed: bool,
) -> torch.Tensor:
    """Gives the product of an activation, quantised here, with a quantised weight, times p.

    Args:
        activation: float [N, K], not multiplied by p.
        probs: float [N]; p.
        weight: float [M, K]; the parameter, which gets the gradient.
        quantised_weight: [M, K]; its dequantised codes.
        rounding: How the activation is quantised; None leaves it as it is.
        save_packed: Whether backward keeps the quantised activation as codes.

    Returns:
        [N, M] in the dtype of the activation.
    """
    packed = quantised = None
    if rounding is None:
        quantised = activation.detach()
    elif save_packed:
        packed = rounding.packed(activation)
    else:
        quantised = rounding.quantised(activation)
    return _WeightedProduct.apply(  # pyright: ignore[reportReturnType]
        activation, weight, probs, quantised_weight, quantised, packed
    )


class _QuantisedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, weight, quantised_weight, packed):
        _keep(ctx, x, packed, quantised_weight)
        return x @ quantised_weight.to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *grad_outputs):
        (grad,) = grad_outputs
        x, quantised_weight = _kept(ctx, grad.dtype)
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        grad_x = grad.matmul(quantised_weight) if needs_x else None
        grad_weight = grad.t().matmul(x) if needs_weight else None
        return grad_x, grad_weight, None, None


class _WeightedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation, weight, probs, quantised_weight, quantised, packed):
        _keep(ctx, quantised, packed, quantised_weight, probs)
        if quantised is None:
            quantised = packed.values(activation.dtype)
        output = quantised @ quantised_weight.to(activation.dtype).t()
        return (output * probs.unsqueeze(-1)).to(output.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs):
        (grad,) = grad_outputs
        quantised, quantised_weight, probs = _kept(ctx, grad.dtype)
        # As autograd differentiates the multiplication, which runs in the wider of both dtypes.
        wide = grad.to(torch.promote_types(grad.dtype, probs.dtype))
        needs_activation, needs_weight, needs_probs, *_ = ctx.needs_input_grad
        grad_probs = None
        if needs_probs:
            output = quantised @ quantised_weight.t()
            grad_probs = (wide * output).sum(-1).to(probs.dtype)
        grad_output = (wide * probs.unsqueeze(-1)).to(grad.dtype)
        grad_activation = grad_output.matmul(quantised_weight) if needs_activation else None
        grad_weight = grad_output.t().matmul(quantised) if needs_weight else None
        return grad_activation, grad_weight, grad_probs, None, None, None


def _keep(
    ctx: Any, quantised: torch.Tensor | None, packed: PackedRows | None, *others: torch.Tensor
) -> None:
    if packed is None:
        assert quantised is not None, "the input is kept one way or the other"
        ctx.packed = None
        ctx.save_for_backward(quantised, *others)
        return
    ctx.packed = packed.global_scale, packed.operand_dtype, packed.number_format
    ctx.save_for_backward(packed.packed_codes, packed.scale_bytes, *others)


def _kept(ctx: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gives the quantised input, the quantised weight in the same dtype, and what else was kept."""
    if ctx.packed is None:
        values, quantised_weight, *others = ctx.saved_tensors
    else:
        packed_codes, scale_bytes, quantised_weight, *others = ctx.saved_tensors
        values = PackedRows(packed_codes, scale_bytes, *ctx.packed).values(dtype)
    return [values, quantised_weight.to(dtype), *others]
