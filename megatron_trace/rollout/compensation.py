"""Residual compensation of the rollout's experts (QUADS): what quantising took away, added again.

    R = X - DQ(Q(X)),   S = the half of the channels with the largest residual
    Y = DQ(Q(X)) W^T + DQ(Q(R_S)) W_S^T

Published [L] (arXiv 2607.15810): the two products and the share of one half. Our reading:

* the channels are chosen anew for each product, from the rows that an expert gets in a step of the
  engine (a micro-batch), by the sum of |R| over them. A token's numbers then depend on the tokens
  that share its step and its expert: the same sample, generated in other company, gets other
  log-probs, and no trainer can know them. Padding has no say.
* R_S is quantised by the rule of X, blocks along the chosen channels in ascending order, and under
  the static global scale of X. No residual exceeds its value: one saturates only where X did.
* K and V, which are operands of no such product, stay as they are quantised.

Both products are rounded to BF16 before they are added.

Legend: N rows of one expert, K input channels, C chosen ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_trace.formats import ops
from megatron_trace.hints import Site
from megatron_trace.rollout.sites import OPERAND_DTYPE, RolloutSites


def num_compensated(num_channels: int, share: float, block_size: int) -> int:
    """Gives how many channels are quantised twice: their share in whole blocks."""
    return int(num_channels * share) // block_size * block_size


def largest_channels(residual: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Gives the channels with the largest residual, int64 [C] in ascending order.

    Args:
        residual: FP32 [N, K].
        num_chosen: C; of equal channels the first ones are chosen.
    """
    order = residual.abs().sum(0).sort(descending=True, stable=True).indices
    return order[:num_chosen].sort().values


class ResidualCompensation:
    """Quantises the input of one expert's linear, and adds the residual's product to its output.

    Args:
        sites: Sites of the engine.
        place: Decoder layer and site, fc1 or fc2.
        quantise: Gives DQ(Q(X)) of [N, K].
        tokens: Gives the row in the step of the token that each row belongs to, int64 [N].
    """

    def __init__(
        self,
        sites: RolloutSites,
        place: tuple[int, Site],
        quantise: Callable[[torch.Tensor], torch.Tensor],
        tokens: Callable[[], torch.Tensor],
    ) -> None:
        self._sites = sites
        self._place = place
        self._quantise = quantise
        self._tokens = tokens
        self._residual: torch.Tensor | None = None

    def quantise(self, x: torch.Tensor) -> torch.Tensor:
        """Gives DQ(Q(X)), BF16 [N, K], and keeps the residual until `add`."""
        y = self._quantise(x)
        self._residual = x.float() - y.float()
        return y

    def add(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """A forward hook of the linear: adds the product of the quantised residual.

        Outside a rollout (calibration) nothing was quantised, and the output stays as it is.
        """
        residual, self._residual = self._residual, None
        if residual is None or not len(residual):
            return output
        number_format = self._sites.format_of(self._place[1])
        num_chosen = num_compensated(
            residual.shape[1], self._sites.trace.residual_share, number_format.block_size
        )
        channels = largest_channels(residual[self._real_rows(len(residual))], num_chosen)
        quantised = ops.rtn(
            residual[:, channels],
            self._sites.scale(*self._place),
            number_format=number_format,
            dtype=OPERAND_DTYPE,
            implementation=self._sites.trace.implementation,
        )
        linear: Any = module
        product, bias = output
        operand = quantised.to(product.dtype)
        return product + operand @ linear.weight[:, channels].t(), bias

    def _real_rows(self, num_rows: int) -> torch.Tensor:
        num_real = self._sites.recorder.num_rows
        if num_real is None:
            return torch.arange(num_rows)
        return (self._tokens() < num_real).nonzero()[:, 0]
