"""One token of a Gated DeltaNet in Triton, over the slots of its states, where they lie.

The arithmetic is that of `models/gated_delta_net.py` for one token of each request: convolution,
normalised keys, gated delta rule in FP32, output norm and gate; rounded to the model's dtype where
it rounds. Three kernels instead of some thirty, and no copy of the states.

Legend: N requests, Q slots, X columns of the input projection, C channels of the convolution, W its
taps, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megatron_trace.formats.kernels_inputs import INTERPRETED

_L2_EPS: tl.constexpr = tl.constexpr(1e-6)
_CHANNELS = 512
_VALUES = 32
_WARPS = 4


@dataclass(frozen=True)
class DeltaParameters:
    """What a layer has, beside its projections.

    Attributes:
        weight: float [C, W], taps of the convolution.
        bias: float [C], or None.
        a_log: float [H].
        dt_bias: float [H].
        norm_weight: float [V], of the output norm.
        norm_eps: Of the output norm.
        key_heads: G.
        normalises: Whether queries and keys are scaled to length 1.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    key_heads: int
    normalises: bool


def why_not(key_dim: int, value_dim: int, device: torch.device) -> str | None:
    """Says why `delta_step` cannot run; None if it can.

    Args:
        key_dim: K.
        value_dim: V.
        device: Where the states lie.
    """
    if not (device.type == "cuda" or INTERPRETED):
        return f"it needs a GPU, and the states lie on {device}"
    for name, dim in (("key", key_dim), ("value", value_dim)):
        if dim < 16 or dim & (dim - 1):
            return f"a head's {name} dim must be a power of two from 16; got {dim}"
    return None


def delta_step(
    projected: torch.Tensor,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    slots: torch.Tensor,
    parameters: DeltaParameters,
    *,
    values: int = _VALUES,
    num_warps: int = _WARPS,
) -> torch.Tensor:
    """Gives what the last linear reads, and moves the states in the slots on by a token.

    Args:
        projected: float [N, X]: queries, keys and values of the convolution, gates [H * V], beta
            [H], alpha [H].
        conv: float [Q, C, W], the last W inputs of the convolution, oldest first.
        recurrent: FP32 [Q, H, K, V].
        slots: integer [N], where each request's states are; negative ones count from the end. What
            rows of the same slot leave there is of one of them, or mixed.
        parameters: What the layer has.
        values: Columns of a head's state that a program holds.
        num_warps: Warps of a program.

    Returns:
        [N, H * V] in projected's dtype.

    Raises:
        ValueError: It cannot run on these; says why.
    """
    num_requests, (num_slots, channels, taps) = len(projected), conv.shape
    heads, key_dim, value_dim = recurrent.shape[1:]
    reason = why_not(key_dim, value_dim, recurrent.device)
    if reason is not None:
        raise ValueError(f"the Gated DeltaNet's step cannot run in its slots: {reason}")
    if not (conv.is_contiguous() and recurrent.is_contiguous() and projected.stride(1) == 1):
        raise ValueError("states and rows of the projection must be contiguous")
    p = parameters
    mixed = projected.new_empty(num_requests, channels)
    read = projected.new_empty(num_requests, heads * value_dim)
    output = torch.empty_like(read)
    if num_requests == 0:
        return output
    values = min(values, value_dim)
    with torch.cuda.device_of(projected):
        _convolve_kernel[num_requests, triton.cdiv(channels, _CHANNELS)](
            projected,
            conv,
            slots,
            p.weight,
            p.weight if p.bias is None else p.bias,
            mixed,
            projected.stride(0),
            num_slots,
            channels,
            TAPS=taps,
            HAS_BIAS=p.bias is not None,
            BLOCK=_CHANNELS,
            num_warps=4,
        )
        _mix_kernel[num_requests, heads, value_dim // values](
            projected,
            mixed,
            recurrent,
            slots,
            p.a_log,
            p.dt_bias,
            read,
            projected.stride(0),
            channels,
            num_slots,
            G=p.key_heads,
            H=heads,
            K=key_dim,
            V=value_dim,
            NORMALISES=p.normalises,
            VALUES=values,
            num_warps=num_warps,
        )
        _gate_kernel[num_requests, heads](
            projected,
            read,
            p.norm_weight,
            output,
            projected.stride(0),
            channels,
            p.norm_eps,
            H=heads,
            V=value_dim,
            num_warps=1,
        )
    return output


@triton.jit
def _slot(slots_ptr, request, num_slots):
    slot = tl.load(slots_ptr + request).to(tl.int64)
    return tl.where(slot < 0, slot + num_slots, slot)


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _convolve_kernel(
    projected_ptr,
    conv_ptr,
    slots_ptr,
    weight_ptr,
    bias_ptr,
    mixed_ptr,
    row_stride,
    num_slots,
    channels,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = channel < channels
    state_ptr = conv_ptr + (_slot(slots_ptr, request, num_slots) * channels + channel) * TAPS
    x = tl.load(projected_ptr + request * row_stride + channel, mask=is_there, other=0.0)
    y = tl.zeros((BLOCK,), dtype=tl.float32)
    # A tap is written once it has been read: by the same thread, or behind the barrier at which
    # another one, that loads several channels at a time, handed over what it had read.
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(state_ptr + tap + 1, mask=is_there, other=0.0)
        weight = tl.load(weight_ptr + channel * TAPS + tap, mask=is_there, other=0.0)
        y += value.to(tl.float32) * weight.to(tl.float32)
        tl.store(state_ptr + tap, value, mask=is_there)
    weight = tl.load(weight_ptr + channel * TAPS + TAPS - 1, mask=is_there, other=0.0)
    y += x.to(tl.float32) * weight.to(tl.float32)
    tl.store(state_ptr + TAPS - 1, x.to(conv_ptr.dtype.element_ty), mask=is_there)
    if HAS_BIAS:
        y += tl.load(bias_ptr + channel, mask=is_there, other=0.0).to(tl.float32)
    tl.store(
        mixed_ptr + request * channels + channel,
        _silu(y).to(mixed_ptr.dtype.element_ty),
        mask=is_there,
    )


@triton.jit
def _head(row_ptr, start, SIZE: tl.constexpr, NORMALISES: tl.constexpr):
    """Gives a query or key, FP32 [SIZE] of the dtype's values."""
    x = tl.load(row_ptr + start + tl.arange(0, SIZE)).to(tl.float32)
    if NORMALISES:
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) + _L2_EPS)
        x = x.to(row_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _softplus(x):
    """Gives log(1 + exp(x)), also where exp(x) is lost beside 1."""
    e = tl.exp(tl.minimum(x, 20.0))
    wide = 1.0 + e
    # What the sum rounds off is made good by the quotient.
    exact = tl.where(wide == 1.0, e, tl.log(wide) * (e / tl.where(wide == 1.0, 1.0, wide - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def _mix_kernel(
    projected_ptr,
    mixed_ptr,
    recurrent_ptr,
    slots_ptr,
    a_log_ptr,
    dt_bias_ptr,
    read_ptr,
    row_stride,
    channels,
    num_slots,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    NORMALISES: tl.constexpr,
    VALUES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    value_at = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    slot = _slot(slots_ptr, request, num_slots)
    at = tl.arange(0, K)[:, None] * V + value_at[None, :]
    state_ptr = recurrent_ptr + (slot * H + head) * (K * V)
    state = tl.load(state_ptr + at)
    row_ptr = mixed_ptr + request * channels
    key_head = head // (H // G)
    query = _head(row_ptr, key_head * K, K, NORMALISES)
    key = _head(row_ptr, (G + key_head) * K, K, NORMALISES)
    value = tl.load(row_ptr + 2 * G * K + head * V + value_at).to(tl.float32)
    scalars_ptr = projected_ptr + request * row_stride + channels + H * V + head
    beta = tl.load(scalars_ptr).to(tl.float32)
    beta = (1.0 / (1.0 + tl.exp(-beta))).to(projected_ptr.dtype.element_ty).to(tl.float32)
    alpha = tl.load(scalars_ptr + H).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    alpha += tl.load(dt_bias_ptr + head).to(tl.float32)
    state *= tl.exp(-rate * _softplus(alpha))
    written = beta * (value - tl.sum(state * key[:, None], axis=0))
    state += key[:, None] * written[None, :]
    tl.store(state_ptr + at, state)
    read = tl.sum(state * query[:, None], axis=0) * (1.0 / tl.sqrt(K * 1.0))
    tl.store(read_ptr + (request * H + head) * V + value_at, read.to(read_ptr.dtype.element_ty))


@triton.jit
def _gate_kernel(
    projected_ptr,
    read_ptr,
    weight_ptr,
    output_ptr,
    row_stride,
    channels,
    eps,
    H: tl.constexpr,
    V: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    head, value = tl.program_id(1), tl.arange(0, V)
    at = (request * H + head) * V + value
    x = tl.load(read_ptr + at).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / V + eps)
    normed = normed * tl.load(weight_ptr + value).to(tl.float32)
    normed = normed.to(read_ptr.dtype.element_ty).to(tl.float32)
    gate_ptr = projected_ptr + request * row_stride + channels + head * V + value
    gate = tl.load(gate_ptr).to(tl.float32)
    tl.store(output_ptr + at, (normed * _silu(gate)).to(output_ptr.dtype.element_ty))
