"""Triton kernels of `fused`: the same names, arguments and bits, for BF16 on a GPU.

Legend: as `kernels` and `kernels_bf16`. SwiGLU works on tiles of any rows; RMSNorm on one row in a
program, whose squares are added in the order that `fused` fixes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from megatron_trace.formats import kernels_bf16 as bf16
from megatron_trace.formats import kernels_octets as octets
from megatron_trace.formats.checks import as_fp32, require_guide, require_input, require_multiple
from megatron_trace.formats.constants import BLOCK_SIZE

_SWIGLU_WARPS = 4
_SWIGLU_TILES = 2
# Octets of a thread of RMSNorm, when it rounds to nearest and when it is guided.
_NORM_OCTETS = 4
_NORM_OCTETS_GUIDED = 2
# Octets of a row that a program of RMSNorm holds.
_MAX_ROW_OCTETS = 4096


def swiglu_rtn(
    gate_up: torch.Tensor, global_scale: torch.Tensor | float, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Gives `fused.swiglu_rtn`.

    Args:
        gate_up: BF16 [..., 2 K] on a GPU.
        global_scale: FP32 0-d tensor or number, decode side.
        dtype: None or BF16.

    Returns:
        BF16 [..., K].

    Raises:
        ValueError: K is not a multiple of 16, or a dtype is not BF16, or gate_up not on a GPU.
    """
    gate_up, y = _swiglu_tensors(gate_up, dtype)
    _launch_swiglu(gate_up, y, y, y, as_fp32(global_scale, gate_up), 0, guided=False)
    return y


def swiglu_rtn_record(
    gate_up: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `fused.swiglu_rtn_record`.

    Args:
        gate_up: BF16 [..., 2 K] on a GPU.
        global_scale: FP32 0-d tensor or number, decode side.
        num_bits: 1 or 4.
        dtype: None or BF16.

    Returns:
        y: BF16 [..., K].
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16, num_bits is not 1 or 4, a dtype is not BF16, or
            gate_up is not on a GPU.
    """
    gate_up, y = _swiglu_tensors(gate_up, dtype)
    hint, scale_bytes = _new_hint(y, num_bits)
    scale = as_fp32(global_scale, gate_up)
    _launch_swiglu(gate_up, y, hint, scale_bytes, scale, num_bits, guided=False)
    return y, hint, scale_bytes


def swiglu_guided(
    gate_up: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    num_bits: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Gives `fused.swiglu_guided`.

    Args:
        gate_up: BF16 [..., 2 K] on a GPU; the trainer's values.
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number; the rollout's, decode side.
        num_bits: 1 or 4.
        dtype: None or BF16.

    Returns:
        BF16 [..., K].

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16, num_bits is not 1 or 4, a dtype is
            not BF16, or gate_up is not on a GPU.
    """
    gate_up, y = _swiglu_tensors(gate_up, dtype)
    hint, scale_bytes = _given_hint(y, hint, scale_bytes, num_bits)
    scale = as_fp32(global_scale, gate_up)
    _launch_swiglu(gate_up, y, hint, scale_bytes, scale, num_bits, guided=True)
    return y


def rms_norm_rtn(
    x: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives `fused.rms_norm_rtn`.

    Args:
        x: BF16 [..., K] on a GPU, K at most 32768.
        weight: float [K].
        global_scale: FP32 0-d tensor or number, decode side.
        eps: Added to the mean square.
        dtype: None or BF16.

    Returns:
        normed: BF16 [..., K].
        y: BF16 [..., K].

    Raises:
        ValueError: K is not a multiple of 16 or too large, or a dtype is not BF16, or x not on a
            GPU.
    """
    x, normed, y = _norm_tensors(x, weight, dtype)
    _launch_norm(x, weight, normed, y, y, y, as_fp32(global_scale, x), eps, 0, guided=False)
    return normed, y


def rms_norm_rtn_record(
    x: torch.Tensor,
    weight: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    eps: float,
    num_bits: int,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives `fused.rms_norm_rtn_record`.

    Args:
        x: BF16 [..., K] on a GPU, K at most 32768.
        weight: float [K].
        global_scale: FP32 0-d tensor or number, decode side.
        eps: Added to the mean square.
        num_bits: 1 or 4.
        dtype: None or BF16.

    Returns:
        normed: BF16 [..., K].
        y: BF16 [..., K].
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B], E4M3.

    Raises:
        ValueError: K is not a multiple of 16 or too large, num_bits is not 1 or 4, a dtype is not
            BF16, or x is not on a GPU.
    """
    x, normed, y = _norm_tensors(x, weight, dtype)
    hint, scale_bytes = _new_hint(y, num_bits)
    scale = as_fp32(global_scale, x)
    _launch_norm(x, weight, normed, y, hint, scale_bytes, scale, eps, num_bits, guided=False)
    return normed, y, hint, scale_bytes


def rms_norm_guided(
    x: torch.Tensor,
    weight: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    eps: float,
    num_bits: int,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives `fused.rms_norm_guided`.

    Args:
        x: BF16 [..., K] on a GPU, K at most 32768; the trainer's values.
        weight: float [K].
        hint: uint8 [..., K * num_bits / 8].
        scale_bytes: uint8 [..., B]; the rollout's block scales.
        global_scale: FP32 0-d tensor or number; the rollout's, decode side.
        eps: Added to the mean square.
        num_bits: 1 or 4.
        dtype: None or BF16.

    Returns:
        normed: BF16 [..., K].
        y: BF16 [..., K].

    Raises:
        ValueError: Shapes disagree, K is not a multiple of 16 or too large, num_bits is not 1 or
            4, a dtype is not BF16, or x is not on a GPU.
    """
    x, normed, y = _norm_tensors(x, weight, dtype)
    hint, scale_bytes = _given_hint(y, hint, scale_bytes, num_bits)
    scale = as_fp32(global_scale, x)
    _launch_norm(x, weight, normed, y, hint, scale_bytes, scale, eps, num_bits, guided=True)
    return normed, y


@triton.jit(do_not_specialize=["num_octets"])
def _swiglu_kernel(
    x_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    num_octets,
    row_octets,
    NUM_BITS: tl.constexpr,
    GUIDED: tl.constexpr,
    T: tl.constexpr,
    TILES: tl.constexpr,
):
    first, left = octets.octets_of_program(num_octets, T, TILES)
    y_ptr += first * 8
    hint_ptr += first
    scale_bytes_ptr += first // 2
    g = tl.load(scale_ptr)
    for tile in tl.static_range(TILES):
        octet = tl.arange(0, T) + tile * T
        # Before the gate of row r lie r rows of gates and r of ups.
        row = (first.to(tl.int32) + octet) // row_octets
        gates = (first + octet + row.to(tl.int64) * row_octets)[:, None] * 4
        gates += tl.arange(0, 4)[None, :]
        mask = (octet < left)[:, None]
        hint = _hint(hint_ptr, scale_bytes_ptr, left, tile, GUIDED, T)
        gate = tl.load(bf16.as_pairs(x_ptr) + gates, mask=mask, other=0)
        up = tl.load(bf16.as_pairs(x_ptr) + gates + row_octets * 4, mask=mask, other=0)
        silu = bf16.pair_of(_silu(bf16.high_half(gate)), _silu(bf16.low_half(gate)))
        pairs = bf16.pair_of(
            bf16.high_half(silu) * bf16.high_half(up), bf16.low_half(silu) * bf16.low_half(up)
        )
        _quantise_tile(
            pairs,
            hint,
            y_ptr,
            hint_ptr,
            scale_bytes_ptr,
            g,
            left,
            tile,
            NUM_BITS,
            GUIDED,
            T,
        )


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    normed_ptr,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    scale_ptr,
    eps,
    row_octets,
    NUM_BITS: tl.constexpr,
    GUIDED: tl.constexpr,
    T: tl.constexpr,
    LOG_T: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * row_octets
    x = octets.load_tile(x_ptr + first * 8, row_octets, 0, T).to(tl.float32)
    weight = octets.load_tile(weight_ptr, row_octets, 0, T).to(tl.float32)
    hint_ptr += first
    scale_bytes_ptr += first // 2
    hint = _hint(hint_ptr, scale_bytes_ptr, row_octets, 0, GUIDED, T)
    g = tl.load(scale_ptr)
    mean = tl.div_rn(_sum_of_neighbours(x * x, T, LOG_T), (row_octets * 8).to(tl.float32))
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    pairs = bf16.paired(x * inverse * weight, T)
    bf16.store_pairs(normed_ptr + first * 8, pairs, row_octets, 0, T)
    _quantise_tile(
        pairs,
        hint,
        y_ptr + first * 8,
        hint_ptr,
        scale_bytes_ptr,
        g,
        row_octets,
        0,
        NUM_BITS,
        GUIDED,
        T,
    )


@triton.jit
def _silu(gate):
    return tl.div_rn(gate, 1.0 + libdevice.exp(-gate))


@triton.jit
def _sum_of_neighbours(values, T: tl.constexpr, LOG_T: tl.constexpr):
    """Gives the sum of [T, 8], adding neighbours, then neighbours of the sums, and so on."""
    even, odd = tl.split(tl.reshape(values, (T, 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (T, 2, 2)))
    even, odd = tl.split(even + odd)
    sums = even + odd
    for step in tl.static_range(LOG_T):
        sums = tl.sum(tl.reshape(sums, (T >> (step + 1), 2)), axis=1)
    return tl.sum(sums, axis=0)


@triton.jit
def _hint(hint_ptr, scale_bytes_ptr, left, tile, GUIDED: tl.constexpr, T: tl.constexpr):
    hint = ()
    if GUIDED:
        hint = octets.load_hint(hint_ptr, scale_bytes_ptr, left, tile, T)
    return hint


@triton.jit
def _quantise_tile(
    pairs,
    hint,
    y_ptr,
    hint_ptr,
    scale_bytes_ptr,
    global_scale,
    left,
    tile,
    NUM_BITS: tl.constexpr,
    GUIDED: tl.constexpr,
    T: tl.constexpr,
):
    """Quantises BF16 pairs [T, 4] and stores the result, and a hint if recorded.

    A hint that guides has been loaded before, so as not to wait for it here.
    """
    BITS: tl.constexpr = NUM_BITS if NUM_BITS else 1
    if GUIDED:
        word, byte = hint
        if bf16.is_usual(global_scale):
            y = bf16.guided(pairs, word, byte, global_scale, BITS)
        else:
            general = octets.guided_octets(bf16.unpaired(pairs, T), word, byte, global_scale, BITS)
            y = bf16.paired(general, T)
    else:
        if bf16.is_usual(global_scale):
            y, word, byte = bf16.recorded(pairs, global_scale, BITS, T)
        else:
            general, word, byte = octets.rounded_octets(
                bf16.unpaired(pairs, T), global_scale, BITS, T
            )
            y = bf16.paired(general, T)
        if NUM_BITS:
            octets.store_hint(hint_ptr, scale_bytes_ptr, word, byte, left, tile, T)
    bf16.store_pairs(y_ptr, y, left, tile, T)


def _launch_swiglu(
    gate_up: torch.Tensor,
    y: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    scale: torch.Tensor,
    num_bits: int,
    *,
    guided: bool,
) -> None:
    num_octets = y.numel() // 8
    if num_octets == 0:
        return
    if num_octets >= 2**31:
        raise ValueError(f"swiglu takes up to 2^34 values at once; got {tuple(y.shape)}")
    octets_per_tile = 32 * _SWIGLU_WARPS
    grid = (triton.cdiv(num_octets, octets_per_tile * _SWIGLU_TILES),)
    with torch.cuda.device_of(y):
        _swiglu_kernel[grid](
            gate_up,
            y,
            _words(hint, num_bits),
            scale_bytes,
            scale,
            num_octets,
            y.shape[-1] // 8,
            NUM_BITS=num_bits,
            GUIDED=guided,
            T=octets_per_tile,
            TILES=_SWIGLU_TILES,
            num_warps=_SWIGLU_WARPS,
        )


def _launch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    normed: torch.Tensor,
    y: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    num_bits: int,
    *,
    guided: bool,
) -> None:
    if x.numel() == 0:
        return
    row_octets = x.shape[-1] // 8
    tile = triton.next_power_of_2(row_octets)
    per_thread = _NORM_OCTETS_GUIDED if guided else _NORM_OCTETS
    with torch.cuda.device_of(x):
        _rms_norm_kernel[(x.numel() // x.shape[-1],)](
            x,
            weight,
            normed,
            y,
            _words(hint, num_bits),
            scale_bytes,
            scale,
            eps,
            row_octets,
            NUM_BITS=num_bits,
            GUIDED=guided,
            T=tile,
            LOG_T=tile.bit_length() - 1,
            num_warps=min(max(tile // (32 * per_thread), 1), 16),
            # A product and a sum round twice, as in `fused`.
            enable_fp_fusion=False,
        )


def _swiglu_tensors(
    gate_up: torch.Tensor, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    require_multiple(gate_up, 2 * BLOCK_SIZE)
    gate_up = _require_bf16(gate_up, dtype)
    return gate_up, gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _norm_tensors(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    require_input(x)
    length = x.shape[-1]
    if length > _MAX_ROW_OCTETS * 8:
        raise ValueError(f"rows must be at most {_MAX_ROW_OCTETS * 8} long; got {length}")
    if weight.shape != (length,) or weight.device != x.device or not weight.is_contiguous():
        raise ValueError(
            f"weight must be [{length}], contiguous, on {x.device}; got {tuple(weight.shape)} on "
            f"{weight.device}"
        )
    x = _require_bf16(x, dtype)
    return x, torch.empty_like(x), torch.empty_like(x)


def _require_bf16(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if not x.is_cuda or x.dtype != torch.bfloat16 or dtype not in (None, torch.bfloat16):
        raise ValueError(
            f"fused kernels take BF16 on a GPU and round to it; got {x.dtype} on {x.device}, "
            f"rounded to {dtype}"
        )
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _new_hint(y: torch.Tensor, num_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    _require_num_bits(num_bits)
    *rows, length = y.shape
    hint = y.new_empty((*rows, length * num_bits // 8), dtype=torch.uint8)
    return hint, y.new_empty((*rows, length // BLOCK_SIZE), dtype=torch.uint8)


def _given_hint(
    y: torch.Tensor, hint: torch.Tensor, scale_bytes: torch.Tensor, num_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    _require_num_bits(num_bits)
    require_guide(y, hint, scale_bytes, num_bits)
    for name, tensor in (("hint", hint), ("scale_bytes", scale_bytes)):
        if tensor.device != y.device:
            raise ValueError(f"{name} must lie on {y.device} like x; got {tensor.device}")
    hint = hint.contiguous()
    return hint if hint.data_ptr() % 4 == 0 else hint.clone(), scale_bytes.contiguous()


def _require_num_bits(num_bits: int) -> None:
    if num_bits not in (1, 4):
        raise ValueError(f"fused kernels take num_bits 1 or 4; got {num_bits}")


def _words(hint: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Gives a hint as one byte or word for each octet."""
    return hint.flatten().view(torch.int32) if num_bits == 4 else hint
