"""Digest of quantised expert weights, equal for every layout of experts over ranks.

Each matrix is hashed with its place; the hashes are summed, so that ranks may digest their experts
in any order and add the partial sums.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_trace.formats import BLOCK_SIZE, MX_BLOCK_SIZE

_MODULUS = 1 << 128
# Of codes and scale bytes, held a second time on the device while they are copied.
_BYTES_AT_ONCE = 64 << 20
# So that a few times as many bytes wait on the host, not those of all matrices.
_BATCHES_HASHING = 2
# SHA-256 of a core without instructions for it is a few hundred MB a second, of 17 GiB at 35B.
_THREADS = min(32, os.cpu_count() or 1)


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


class DigestSum:
    """The sum of `matrix_digest` of many matrices, which threads hash while more are added.

    Those of a device come to the host many at a time: one by one, each would wait for it three
    times.
    """

    def __init__(self) -> None:
        self._total = self._num_bytes = 0
        self._waiting: list[tuple[tuple[int, int, str], list[torch.Tensor]]] = []
        self._hashing: deque[list[Future[int]]] = deque()
        self._threads = ThreadPoolExecutor(_THREADS)

    def add(
        self,
        layer: int,
        expert: int,
        matrix: str,
        packed_codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        global_scale: float | torch.Tensor | None,
    ) -> None:
        """Adds a matrix, as of `matrix_digest`; its tensors must stay as they are until `total`."""
        parts = [packed_codes, scale_bytes]
        if global_scale is not None:
            parts.append(torch.as_tensor(global_scale, dtype=torch.float32).reshape(1))
        self._waiting.append(((layer, expert, matrix), parts))
        self._num_bytes += packed_codes.numel() + scale_bytes.numel()
        if self._num_bytes >= _BYTES_AT_ONCE:
            self._hash()

    def total(self) -> int:
        """Gives the sum of the digests of all matrices."""
        self._hash()
        self._collect(0)
        return self._total

    def _hash(self) -> None:
        matrices = _on_host([parts for _, parts in self._waiting])
        self._hashing.append(
            [
                self._threads.submit(_digest_at, place, parts)
                for (place, _), parts in zip(self._waiting, matrices, strict=True)
            ]
        )
        self._waiting, self._num_bytes = [], 0
        self._collect(_BATCHES_HASHING)

    def _collect(self, num_left: int) -> None:
        while len(self._hashing) > num_left:
            self._total += sum(digest.result() for digest in self._hashing.popleft())


def _digest_at(place: tuple[int, int, str], parts: list[torch.Tensor]) -> int:
    packed_codes, scale_bytes, *scale = parts
    return matrix_digest(*place, packed_codes, scale_bytes, scale[0] if scale else None)


def _on_host(matrices: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Gives tensors in host memory, by one copy of those on a device."""
    tensors = [tensor.detach() for parts in matrices for tensor in parts]
    moved = [index for index, tensor in enumerate(tensors) if tensor.is_cuda]
    if moved:
        flat = [tensors[index].contiguous().view(torch.uint8).flatten() for index in moved]
        lengths = [len(piece) for piece in flat]
        # Page-locked memory, which torch keeps for the next push, is copied to ten times faster.
        on_host = torch.empty(sum(lengths), dtype=torch.uint8, pin_memory=True)
        pieces = on_host.copy_(torch.cat(flat)).split(lengths)
        for index, piece in zip(moved, pieces, strict=True):
            tensor = tensors[index]
            if tensor.dtype != torch.uint8:  # A view of floats would have to be aligned.
                piece = piece.clone()
            tensors[index] = piece.view(tensor.dtype).view(tensor.shape)
    found = iter(tensors)
    return [[next(found) for _ in parts] for parts in matrices]


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
