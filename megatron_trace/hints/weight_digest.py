"""Digest of quantised expert weights, equal for every layout of experts over ranks.

Each matrix is hashed with its place; the hashes are summed, so that ranks may digest their experts
in any order and add the partial sums.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import torch

from megatron_trace.formats import BLOCK_SIZE, MX_BLOCK_SIZE

_MODULUS = 1 << 128


def matrix_digest(
    layer: int,
    expert: int,
    matrix: str,
    packed_codes: torch.Tensor,
    scale_bytes: torch.Tensor,
    global_scale: float | torch.Tensor | None,
) -> int:
    """Gives the digest of one quantised weight matrix.

    Args:
        layer: Decoder layer of the checkpoint.
        expert: Global index of the expert.
        matrix: `fc1` (gate and up together) or `fc2`.
        packed_codes: uint8 [rows, K / 2].
        scale_bytes: uint8 [rows, K / 16], or [rows, K / 32].
        global_scale: FP32 decode-side scale of the matrix; None if the format has none, which is
            that of blocks of 32.

    Returns:
        An integer below 2**128; partial sums modulo 2**128 combine by addition.

    Raises:
        ValueError: The codes or scale bytes are not uint8 matrices of fitting shapes.
    """
    rows, code_bytes = _matrix_shape("packed_codes", packed_codes, layer, expert, matrix)
    num_blocks = code_bytes // (MX_BLOCK_SIZE // 2 if global_scale is None else BLOCK_SIZE // 2)
    if _matrix_shape("scale_bytes", scale_bytes, layer, expert, matrix) != (rows, num_blocks):
        raise ValueError(
            f"scale_bytes must be {(rows, num_blocks)} for packed codes {(rows, code_bytes)}; "
            f"got {tuple(scale_bytes.shape)} (layer {layer}, expert {expert}, {matrix})"
        )
    digest = hashlib.sha256(f"{layer}/{expert}/{matrix}/{rows}x{code_bytes}/".encode())
    if global_scale is not None:
        digest.update(struct.pack("<f", float(global_scale)))
    digest.update(packed_codes.detach().cpu().contiguous().numpy())
    digest.update(scale_bytes.detach().cpu().contiguous().numpy())
    return int.from_bytes(digest.digest()[:16], "little")


def combine_digests(digests: Iterable[int]) -> str:
    """Gives 32 hexadecimal digits, the same for every order and grouping of the matrices.

    Args:
        digests: `matrix_digest` of every matrix of the model, or sums of them.
    """
    return f"{sum(digests) % _MODULUS:032x}"


def _matrix_shape(
    name: str, tensor: torch.Tensor, layer: int, expert: int, matrix: str
) -> tuple[int, int]:
    if tensor.dtype != torch.uint8 or tensor.dim() != 2:
        raise ValueError(
            f"{name} must be a uint8 matrix; got {tensor.dtype} {tuple(tensor.shape)} "
            f"(layer {layer}, expert {expert}, {matrix})"
        )
    return tensor.shape[0], tensor.shape[1]
