"""Lets Triton's interpreter run the kernels' path in pairs of BF16, whose PTX it does not know.

Each function of `kernels_bf16` that is an instruction gets a stand-in of the same meaning; `fma`
rounds once. What a GPU only approximates (reciprocals, powers of two) is exact here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from megatron_trace.formats import (
    kernels_bf16,
    kernels_fused,
    kernels_inputs,
    kernels_rows,
    kernels_whole,
)


class _Emulated:
    """A function of tensors that calls one of numpy arrays; the first gives the result's dtype."""

    def __init__(self, function: Callable[..., np.ndarray | tuple], *dtypes: tl.dtype) -> None:
        self.function, self.dtypes = function, dtypes

    def fn(self, *tensors: tl.tensor | tl.constexpr) -> tl.tensor | tuple[tl.tensor, ...]:
        with np.errstate(all="ignore"):
            results = self.function(*map(_values_of, tensors))
        results = results if isinstance(results, tuple) else (results,)
        found = []
        for result, dtype in zip(results, self.dtypes, strict=True):
            shape = np.shape(result)
            kind = tl.block_type(dtype, list(shape)) if shape else dtype
            data = np.atleast_1d(result) if not shape else result
            found.append(tl.tensor(TensorHandle(data, dtype), kind))
        return tuple(found) if len(found) > 1 else found[0]

    __call__ = fn


def _values_of(tensor: tl.tensor | tl.constexpr) -> np.ndarray:
    if isinstance(tensor, tl.constexpr):
        return np.float32(tensor.value)
    return np.asarray(tensor.handle.data)


def install() -> None:
    """Replaces the instructions in this process, and has BF16 taken in pairs and FP32 in quads."""
    for name, emulated in _INSTRUCTIONS.items():
        assert hasattr(kernels_bf16, name), name
        setattr(kernels_bf16, name, emulated)
    InterpreterBuilder.create_fma = _create_fma
    InterpreterBuilder.create_splat = _create_splat
    # Without its flag a GPU's minimum is the number beside a NaN.
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    cast = InterpreterBuilder.cast_impl

    def cast_impl(builder, source: TensorHandle, kind: tl.dtype) -> TensorHandle:
        # Triton's own loses denormal numbers.
        if source.dtype.scalar == tl.bfloat16 and kind.scalar == tl.float32:
            bits = source.data.view(np.uint16).astype(np.uint32) << np.uint32(16)
            return TensorHandle(bits.view(np.float32), tl.float32)
        return cast(builder, source, kind)

    InterpreterBuilder.cast_impl = cast_impl
    # Small tiles take less time.
    kernels_rows._LAUNCH = kernels_inputs.Launch(tiles=1, num_warps=1)
    kernels_fused._SWIGLU_WARPS = kernels_fused._SWIGLU_WARPS_4OVER6 = 1
    constants_of = kernels_inputs.constants_of

    def in_pairs(x, scales, number_format, dtype):
        constants = constants_of(x, scales, number_format, dtype)
        return constants | {"PAIRS": x.dtype == (dtype or x.dtype) == torch.bfloat16}

    kernels_inputs.constants_of = in_pairs
    kernels_whole.HAS_PTX = tl.constexpr(True)


def _create_fma(builder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    with np.errstate(all="ignore"):
        total = _fma(x.data, y.data, z.data)[0]
    # The one NaN that a GPU makes.
    total = np.where(np.isnan(total), np.uint32(0x7FFFFFFF).view(np.float32), total)
    return TensorHandle(total, z.dtype.scalar)


def _create_splat(builder, kind: tl.block_type, scalar: TensorHandle) -> TensorHandle:
    # Triton's own makes numbers of a comparison's result.
    return TensorHandle(np.full(kind.shape, scalar.data, dtype=scalar.data.dtype), scalar.dtype)


def _fma(x, y, z) -> tuple[np.ndarray, np.ndarray]:
    """Gives x * y + z rounded to nearest, FP32, and what that lacks, of the same sign."""
    product = x.astype(np.float64) * y.astype(np.float64)
    z = z.astype(np.float64)
    total = product + z
    part = total - product
    lost = (product - (total - part)) + (z - part)
    # FP64 rounded to odd holds on which side of the middle of two FP32 numbers the sum lies.
    is_even = (total.view(np.int64) & 1) == 0
    beyond = np.nextafter(total, np.copysign(np.inf, lost))
    nearest = np.where((lost != 0) & is_even, beyond, total).astype(np.float32)
    return nearest, (total - nearest.astype(np.float64)) + lost


def _fma_down(x, y, z):
    nearest, lacking = _fma(x, y, z)
    return np.where(lacking < 0, np.nextafter(nearest, np.float32(0)), nearest)


def _fma_up(x, y, z):
    nearest, lacking = _fma(x, y, z)
    return np.where(lacking > 0, np.nextafter(nearest, np.float32(np.inf)), nearest)


def _halves(pairs):
    bits = pairs.view(np.uint32)
    return (bits << np.uint32(16)).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)


def _pair_of(high, low):
    both = []
    for half in (np.atleast_1d(high), np.atleast_1d(low)):
        rounded = torch.from_numpy(np.ascontiguousarray(half)).bfloat16()
        bits = rounded.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        both.append(np.where(np.isnan(half), np.uint32(0x7FFF), bits).astype(np.uint32))
    return ((both[0] << np.uint32(16)) | both[1]).view(np.int32).reshape(np.shape(high))


def _of_pairs(function: Callable[..., np.ndarray]) -> _Emulated:
    def of_both(a, b):
        (low_a, high_a), (low_b, high_b) = _halves(np.atleast_1d(a)), _halves(np.atleast_1d(b))
        pairs = _pair_of(function(high_a, high_b), function(low_a, low_b))
        return pairs.reshape(np.broadcast_shapes(np.shape(a), np.shape(b)))

    return _Emulated(of_both, tl.int32)


def _near_reciprocal(x):
    y = (1 / x.astype(np.float64)).astype(np.float32)
    return np.where(np.abs(y) < np.float32(2.0**-126), np.copysign(np.float32(0), y), y)


def _e4m3(scale):
    values = torch.from_numpy(np.ascontiguousarray(np.atleast_1d(scale))).clamp(-448, 448)
    rounded = values.to(torch.float8_e4m3fn)
    byte = rounded.view(torch.uint8).numpy().astype(np.int32)
    shape = np.shape(scale)
    return byte.reshape(shape), rounded.float().numpy().reshape(shape)


def _e4m3_value(byte):
    bits = torch.from_numpy(np.atleast_1d(byte).astype(np.uint8))
    return bits.view(torch.float8_e4m3fn).float().numpy().reshape(np.shape(byte))


_INSTRUCTIONS = {
    "max_pairs": _of_pairs(np.maximum),
    "min_pairs": _of_pairs(np.minimum),
    "product_of_pairs": _of_pairs(np.multiply),
    "pair_of": _Emulated(_pair_of, tl.int32),
    "near_reciprocal": _Emulated(_near_reciprocal, tl.float32),
    "near_power_of_two": _Emulated(
        lambda x: np.exp2(x.astype(np.float64)).astype(np.float32), tl.float32
    ),
    "number_of_bits": _Emulated(
        lambda word: np.bitwise_count(word.view(np.uint32)).astype(np.int32), tl.int32
    ),
    "fma_down": _Emulated(_fma_down, tl.float32),
    "fma_up": _Emulated(_fma_up, tl.float32),
    "e4m3": _Emulated(_e4m3, tl.int32, tl.float32),
    "e4m3_value": _Emulated(_e4m3_value, tl.float32),
}
