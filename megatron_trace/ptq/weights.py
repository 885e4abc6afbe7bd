"""How post-training quantisation chooses NVFP4 scales of a weight matrix.

Legend: O output features, K input features, B = K / 16 blocks of a row. Codes are always rounded
to nearest even under the scale that is chosen; what differs is the scales:

| rule | global scale | block scale |
|---|---|---|
| `vanilla` | amax / (6 * 448) | E4M3(block amax / (6 * global scale)) |
| `four_over_six` | amax / (6 * 256) | largest at 6 or at 4, the one of less squared error |
| `scale_search` | amax / (6 * 448) | of all E4M3 scales, the one of the least dw H dw^T |

dw is the error of a block and H its Hessian, 16 x 16; the identity makes it the squared error.
"""

from __future__ import annotations

import torch

from megatron_trace.formats import four_over_six as four_over_six_format
from megatron_trace.formats import minifloat, pack_codes, reference, scales_e4m3
from megatron_trace.formats.blocks import fp32_blocks
from megatron_trace.formats.constants import BLOCK_SIZE
from megatron_trace.formats.minifloat import E2M1
from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.formats.packing import unpack_codes

# Byte 0 is no scale, and 127 is NaN.
CANDIDATES = range(1, 127)
_VALUES_AT_A_TIME = 1 << 22


def vanilla(weight: torch.Tensor) -> PackedMatrix:
    """Gives what the engine itself makes of a matrix: the scales of its amax.

    Args:
        weight: float [O, K].
    """
    scale = scales_e4m3.global_scale_from_amax(weight.abs().amax().float())
    codes, scale_bytes = reference.encode(weight, scale)
    return PackedMatrix(pack_codes(codes), scale_bytes, scale)


def four_over_six(weight: torch.Tensor) -> PackedMatrix:
    """Gives the better of two block scales, by squared error.

    Args:
        weight: float [O, K].

    Source: arXiv 2512.02010; ModelOpt 0.47, `NVFP4_FOUR_OVER_SIX_CFG`.
    """
    scale = four_over_six_format.global_scale_from_amax(weight.abs().amax().float())
    codes, scale_bytes = four_over_six_format.encode(weight, scale, error="mse")
    return PackedMatrix(pack_codes(codes), scale_bytes, scale)


def scale_search(weight: torch.Tensor, hessian: torch.Tensor | None = None) -> PackedMatrix:
    """Gives the best of all block scales.

    Of scales that are equally good the smallest is taken. A block of zeros has the byte 0. Where
    the Hessian of a block is 0, as no token has anything there, the squared error decides: any
    scale would do on the tokens that were seen, but not on others.

    Args:
        weight: float [O, K].
        hessian: FP32 [B, 16, 16], positive semidefinite; None for the squared error everywhere.

    Raises:
        ValueError: The Hessian is of another shape, or not finite.

    Source: ModelOpt 0.47, `NVFP4MSECalibrator` with the metric of `local_hessian_calibrate`
        (`NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG`); without a Hessian, `..._MSE_FP8_SWEEP_CFG`.
    """
    scale = scales_e4m3.global_scale_from_amax(weight.abs().amax().float())
    metric = _metric(weight, hessian)
    rows = max(1, _VALUES_AT_A_TIME // weight.shape[1])
    scale_bytes = torch.cat([_best_bytes(part, scale, metric) for part in weight.split(rows)])
    blocks = fp32_blocks(weight, BLOCK_SIZE)
    codes = minifloat.nearest_codes(E2M1, blocks, scales_e4m3.effective(scale_bytes, scale))
    return PackedMatrix(pack_codes(codes.reshape(weight.shape)), scale_bytes, scale)


def block_errors(
    weight: torch.Tensor, packed: PackedMatrix, hessian: torch.Tensor | None = None
) -> torch.Tensor:
    """Gives dw H dw^T of every block.

    Args:
        weight: float [O, K].
        packed: Its codes and scales.
        hessian: As `scale_search`.

    Returns:
        FP32 [O, B].
    """
    codes = unpack_codes(packed.packed_codes)
    values = reference.decode(codes, packed.scale_bytes, packed.global_scale)
    differences = fp32_blocks(values, BLOCK_SIZE) - fp32_blocks(weight, BLOCK_SIZE)
    return _errors(differences[None], _metric(weight, hessian))[0]


def _metric(weight: torch.Tensor, hessian: torch.Tensor | None) -> torch.Tensor | None:
    """Gives the Hessian, with the identity where it is 0."""
    if hessian is None:
        return None
    expected = (weight.shape[1] // BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE)
    if hessian.shape != expected or not torch.isfinite(hessian).all():
        raise ValueError(
            f"the Hessian of a matrix {tuple(weight.shape)} must be finite, {expected}; got "
            f"{tuple(hessian.shape)}"
        )
    # It is positive semidefinite, so that it is 0 where its diagonal is.
    unseen = hessian.diagonal(dim1=1, dim2=2).sum(-1) == 0
    identity = torch.eye(BLOCK_SIZE, device=hessian.device)
    return torch.where(unseen[:, None, None], identity, hessian.float())


def _best_bytes(
    weight: torch.Tensor, scale: torch.Tensor, metric: torch.Tensor | None
) -> torch.Tensor:
    """Gives the best scale bytes uint8 [O, B] of some rows."""
    blocks = fp32_blocks(weight, BLOCK_SIZE)
    best = torch.full(blocks.shape[:2], torch.inf, device=weight.device)
    chosen = torch.zeros(blocks.shape[:2], dtype=torch.uint8, device=weight.device)
    every = torch.tensor(CANDIDATES, dtype=torch.uint8, device=weight.device)
    for candidates in every.split(max(1, _VALUES_AT_A_TIME // weight.numel())):
        effective = scales_e4m3.effective(candidates, scale)[:, None, None]
        many = blocks.expand(len(candidates), *blocks.shape)
        values = minifloat.nearest_values(E2M1, many, effective.expand(many.shape[:3]))
        errors, places = _errors(values.sub_(blocks), metric).min(0)
        better = errors < best
        best = torch.where(better, errors, best)
        chosen = torch.where(better, candidates[places], chosen)
    return chosen.masked_fill_(blocks.abs().amax(-1) == 0, 0)


def _errors(differences: torch.Tensor, metric: torch.Tensor | None) -> torch.Tensor:
    """Gives the errors FP32 [C, O, B] of differences FP32 [C, O, B, 16] under C candidates."""
    if metric is None:
        return differences.square().sum(-1)
    num_candidates, num_rows, num_blocks, size = differences.shape
    by_block = differences.permute(2, 0, 1, 3).reshape(num_blocks, -1, size)
    errors = (torch.bmm(by_block, metric) * by_block).sum(-1)
    return errors.reshape(num_blocks, num_candidates, num_rows).permute(1, 2, 0)
