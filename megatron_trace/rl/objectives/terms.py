"""What an objective gives: a term per response token, and what the metrics need of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Terms:
    """Terms of an objective, which is maximised. Legend: T response tokens.

    Attributes:
        gain: FP32 [T], differentiable; the loss is minus its sum over the mean's units.
        clipped: bool [T]; tokens that the objective's bounds leave without gradient.
        weight: FP32 [T]; importance weight of each token.
        capped: bool [T]; tokens whose weight was cut to the cap.
        masked: bool [T]; tokens whose weight was set to 0.
    """

    gain: torch.Tensor
    clipped: torch.Tensor
    weight: torch.Tensor
    capped: torch.Tensor
    masked: torch.Tensor
