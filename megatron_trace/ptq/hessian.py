"""The local Hessians of expert weights, from what calibration tokens give an engine's experts.

Legend: N rows (tokens of one expert), K input features, B = K / 16 blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch

from megatron_trace.formats.constants import BLOCK_SIZE
from megatron_trace.models.hybrid import named_expert_linears
from megatron_trace.rollout.policy import ServedPolicy
from megatron_trace.rollout.weights import MatrixPlace


class LocalHessian:
    """The mean of x^T x over the rows x of a linear's input, in blocks on the diagonal.

    Attributes:
        num_rows: Rows that it has seen.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._sum: torch.Tensor | None = None

    @torch.no_grad()
    def add(self, rows: torch.Tensor) -> None:
        """Adds rows, float [N, K]; none is no harm."""
        blocks = rows.reshape(-1, rows.shape[-1] // BLOCK_SIZE, BLOCK_SIZE).float()
        product = torch.einsum("nbi,nbj->bij", blocks, blocks)
        self._sum = product if self._sum is None else self._sum.add_(product)
        self.num_rows += len(blocks)

    def mean(self) -> torch.Tensor | None:
        """Gives FP32 [B, 16, 16]; None if it saw no row."""
        return None if self._sum is None or not self.num_rows else self._sum / self.num_rows


def calibrate_with_hessians(
    policy: ServedPolicy, token_batches: Iterable[torch.Tensor]
) -> Mapping[MatrixPlace, LocalHessian]:
    """Calibrates an engine and collects the Hessians of its experts' weights in the same pass.

    The inputs are those of the unquantised model, as in ModelOpt's `local_hessian`.

    Args:
        policy: An engine with unquantised weights (`load_weights`) that quantises experts.
        token_batches: integer [B, S] each.

    Returns:
        One for each expert matrix; those of experts that no token reached saw no row.

    Raises:
        RuntimeError: As of `ServedPolicy.calibrate`.
        ValueError: As of `ServedPolicy.calibrate`.
    """
    hessians: dict[MatrixPlace, LocalHessian] = {}

    def note(hessian: LocalHessian, _: torch.nn.Module, args: tuple[Any, ...]) -> None:
        hessian.add(args[0])

    hooks = []
    for layer in policy.layers:
        for expert, matrix, linear in named_expert_linears(layer):
            hessian = hessians[layer.index, expert, matrix] = LocalHessian()
            module = cast("torch.nn.Module", linear)
            hooks.append(module.register_forward_pre_hook(partial(note, hessian)))
    try:
        policy.calibrate(token_batches)
    finally:
        for hook in hooks:
            hook.remove()
    return hessians
