"""Inputs at the edges of NVFP4, shared by every test of a quantiser.

Random tensors miss them: midpoints and their neighbours, zeros, scales that underflow or saturate,
NaN and Inf, partial tiles, views, no tokens at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron_trace.formats import BLOCK_SIZE, E2M1_MAX, E2M1_VALUES, E4M3_MAX

MIDPOINTS = tuple((low + high) / 2 for low, high in itertools.pairwise(E2M1_VALUES))


@dataclass(frozen=True)
class HardInput:
    """One tensor and the global scale to quantise it with.

    Attributes:
        name: What is hard about it.
        x: float [..., K].
        global_scale: Decode-side FP32 scale.
        finite: Whether x holds neither NaN nor Inf.
    """

    name: str
    x: torch.Tensor
    global_scale: float
    finite: bool = True


def hard_inputs(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> list[HardInput]:
    """Gives every hard input, with equal values on every device.

    Args:
        dtype: torch.float32, torch.bfloat16 or torch.float16.
        device: Where the tensors lie.
    """
    inputs = []
    for name, make in _MAKERS.items():
        x, global_scale = make(dtype)
        x = x.to(dtype)
        if name == "view":
            x = _strided(x, device)
        x = x.to(device)
        inputs.append(HardInput(name, x, _fp32(global_scale), bool(x.isfinite().all())))
    return inputs


def num_of_whole_blocks() -> int:
    """Gives how many hard inputs hold blocks of 32: not one block of 16, nor two without values."""
    return len(hard_inputs()) - 3


def hard_rows(
    dtype: torch.dtype, *, max_values: int, length: int = 32
) -> Iterator[tuple[HardInput, torch.Tensor]]:
    """Gives the hard inputs that fill a row, each with its first values as rows.

    Args:
        dtype: See `hard_inputs`.
        max_values: Values of an input, at most; a multiple of `length`.
        length: Values of a row.
    """
    for case in hard_inputs(dtype):
        values = case.x.flatten()
        values = values[: min(values.numel() // length * length, max_values)]
        if values.numel():
            yield case, values.reshape(-1, length)


def near(values: torch.Tensor, ulps: int = 2) -> torch.Tensor:
    """Gives each value with its neighbours up to `ulps` away, in its own dtype; 1-d."""
    found = [values]
    for direction in (math.inf, -math.inf):
        neighbour = values
        for _ in range(ulps):
            neighbour = torch.nextafter(neighbour, torch.full_like(neighbour, direction))
            found.append(neighbour)
    return torch.cat([tensor.flatten() for tensor in found])


def in_blocks(values: torch.Tensor, amax: float) -> torch.Tensor:
    """Gives [blocks, 16] whose first value is `amax`, the others being `values`, then zeros."""
    width = BLOCK_SIZE - 1
    padded = torch.zeros(math.ceil(values.numel() / width) * width, dtype=values.dtype)
    padded[: values.numel()] = values
    blocks = padded.reshape(-1, width)
    return torch.cat((torch.full_like(blocks[:, :1], amax), blocks), dim=1)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_generator())


def _static_scale(x: torch.Tensor) -> float:
    return x.abs().max().float().item() / (E2M1_MAX * E4M3_MAX)


def _around(values: tuple[float, ...], dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    both_signs = torch.tensor(values + tuple(-value for value in values), dtype=dtype)
    return in_blocks(near(both_signs), E2M1_MAX), 1.0


def _midpoints(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    return _around(MIDPOINTS, dtype)


def _ladder(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    return _around(E2M1_VALUES, dtype)


def _midpoints_awkward_scale(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    # Products of scale and midpoint that FP32 rounds: a quotient off by one ulp changes a code.
    global_scale = _fp32(0.0123)
    rows = []
    for eighths in range(8, 16):
        effective = _fp32(_fp32(global_scale) * eighths / 8)
        values = (torch.tensor(MIDPOINTS) * effective).to(dtype)
        rows.append(in_blocks(near(torch.cat((values, -values))), E2M1_MAX * effective))
    return torch.cat(rows), global_scale


def _scale_midpoints(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    # Block maxima on and beside the places where the E4M3 byte changes, subnormal ones included.
    bytes_ = torch.arange(0x7E, dtype=torch.uint8)
    low, high = (t.view(torch.float8_e4m3fn).float() for t in (bytes_, bytes_ + 1))
    maxima = near(((low + high) / 2 * E2M1_MAX).to(dtype), 1)
    return torch.cat([in_blocks(_random(15).to(dtype) * 0.1 * m, m.item()) for m in maxima]), 1.0


def _signed_zeros(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    x = torch.zeros(4, 32, dtype=dtype)
    x[:, 1::2] = -0.0
    x[0, 0] = x[1, 31] = 6.0
    return x, 1.0


def _tiny_negatives(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    x = torch.full((2, 16), -0.01, dtype=dtype)
    x[:, 3] = 6.0
    return x, 1.0


def _zero_block(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    x = _random(8, 64)
    x[2, 16:32] = 0
    x[5] = 0
    return x, _static_scale(x)


def _scale_underflow(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    x = _random(4, 48)
    x[:, 16:32] *= 1e-7
    x[1, 32:] = 0
    x[1, 40] = 1e-30
    x[2, 32:] = 0
    x[2, 47] = torch.finfo(dtype).smallest_normal / 4
    return x, _static_scale(x)


def _saturation(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    # A static scale that has drifted: most blocks exceed what scale and code can hold together.
    x = _random(8, 64) * 10
    return x, _static_scale(x) / 37


def _outlier(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    x = _random(16, 32)
    x[7, 19] = -30000.0
    return x, _static_scale(x)


def _nan(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    x = _random(4, 64)
    x[1, 5] = math.nan
    x[2, 16:32] = -math.nan
    return x, 0.002


def _inf(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    x = _random(4, 64)
    x[0, 0] = math.inf
    x[3, 20] = -math.inf
    return x, 0.002


def _nan_and_inf(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    x = _random(2, 32)
    x[0, 1], x[0, 2], x[1, 30] = math.nan, -math.inf, math.nan
    return x, 0.002


def _tensor_of(value: float) -> Callable[[torch.dtype], tuple[torch.Tensor, float]]:
    def make(dtype: torch.dtype) -> tuple[torch.Tensor, float]:
        x = _random(3, 32)
        x = (x / x.abs().max()).double() * value
        return x, _fp32(value) / (E2M1_MAX * E4M3_MAX)

    return make


def _scaled_by(global_scale: float) -> Callable[[torch.dtype], tuple[torch.Tensor, float]]:
    return lambda dtype: (_random(3, 48), global_scale)


def _shaped(*shape: int) -> Callable[[torch.dtype], tuple[torch.Tensor, float]]:
    return lambda dtype: (_random(*shape), 0.002)


def _strided(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    wide = torch.zeros(x.shape[1] * 2, x.shape[0] + 1, dtype=x.dtype, device=device)
    view = wide[::2, 1:].T
    view.copy_(x)
    return view


_MAKERS: dict[str, Callable[[torch.dtype], tuple[torch.Tensor, float]]] = {
    "midpoints": _midpoints,
    "ladder": _ladder,
    "midpoints_awkward_scale": _midpoints_awkward_scale,
    "scale_midpoints": _scale_midpoints,
    "signed_zeros": _signed_zeros,
    "tiny_negatives": _tiny_negatives,
    "zero_block": _zero_block,
    "scale_underflow": _scale_underflow,
    "saturation": _saturation,
    "outlier": _outlier,
    "nan": _nan,
    "inf": _inf,
    "nan_and_inf": _nan_and_inf,
    "amax_zero": _tensor_of(0.0),
    "amax_1e-38": _tensor_of(1e-38),
    "amax_3e38": _tensor_of(3e38),
    "global_scale_zero": _scaled_by(0.0),
    "global_scale_denormal": _scaled_by(1e-42),
    "global_scale_huge": _scaled_by(1e30),
    "global_scale_nan": _scaled_by(math.nan),
    "partial_tile": _shaped(3, 48),
    "one_block": _shaped(16),
    "three_axes": _shaped(5, 3, 80),
    "odd_rows": _shaped(17, 48),
    "rows_144": _shaped(144, 128),
    "view": _shaped(7, 32),
    "no_tokens": _shaped(0, 64),
    "no_columns": _shaped(4, 0),
}
