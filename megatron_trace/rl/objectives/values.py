"""What an objective reads of a micro-batch, and its response tokens in one row.

Legend: B samples, S positions, T response tokens of the micro-batch, K most likely tokens of the
rollout at a position. `rollout` (the engine that sampled), `old` (the trainer before the step) and
`theta` (the trainer now, differentiable) are log-probabilities of one sampled token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_trace.training.rounding import NonFiniteError

# Ratios of e^30 have gradients whose squares are finite in FP32, which ends at e^88.
_LARGEST_EXPONENT = 30.0


@dataclass(frozen=True)
class PolicyBatch:
    """A micro-batch as the losses take it.

    Attributes:
        theta: FP32 [B, S], differentiable.
        old: FP32 [B, S].
        rollout: FP32 [B, S].
        advantages: FP32 [B].
        mask: bool [B, S]; True at response tokens. What other positions hold is never read.
        own: bool [B, S]; positions whose terms this rank adds up, under context parallelism; None
            for all. Statistics of sequences are of all positions.
        top_theta: FP32 [B, S, K], differentiable; the trainer's log-probs of the rollout's most
            likely tokens. Score centering only, as the next one.
        top_rollout: FP32 [B, S, K]; the rollout's, -Inf where a position has fewer.
    """

    theta: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    own: torch.Tensor | None = None
    top_theta: torch.Tensor | None = None
    top_rollout: torch.Tensor | None = None


@dataclass(frozen=True)
class ResponseTokens:
    """The response tokens of a micro-batch.

    Attributes:
        theta: FP32 [T], differentiable.
        old: FP32 [T].
        rollout: FP32 [T].
        advantage: FP32 [T]; that of the token's sample.
        sample: int64 [T], ascending; row of the token's sample.
        length: FP32 [T]; response tokens of the token's sample.
        own: bool [T] or None; see `PolicyBatch`.
        top_theta: FP32 [T, K] or None.
        top_rollout: FP32 [T, K] or None.
    """

    theta: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    advantage: torch.Tensor
    sample: torch.Tensor
    length: torch.Tensor
    own: torch.Tensor | None
    top_theta: torch.Tensor | None
    top_rollout: torch.Tensor | None

    def of_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Gives each token the sum of [T] over its sample, without gradient."""
        values = values.detach()
        sums = values.new_zeros(int(self.sample.max()) + 1 if len(values) else 0)
        return sums.index_add_(0, self.sample, values)[self.sample]

    def mean_of_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Gives each token the mean of [T] over its sample, without gradient."""
        return self.of_sequence(values) / self.length


def ratio_of(drift: torch.Tensor) -> torch.Tensor:
    """Gives exp(drift), held at e^30, with the gradient of what it gives.

    An Inf that a bound leaves out of the loss would be a NaN in the gradient, 0 * Inf.

    Args:
        drift: FP32, differentiable; log-probs now less those before the step.
    """
    return torch.exp(drift + (drift.detach().clamp(max=_LARGEST_EXPONENT) - drift.detach()))


def response_tokens(batch: PolicyBatch) -> ResponseTokens:
    """Gives the response tokens of a micro-batch, sample after sample.

    Raises:
        NonFiniteError: A value inside the mask is NaN or Inf.
        ValueError: Shapes or dtypes contradict each other.
    """
    _check(batch)
    mask = batch.mask
    per_sample = mask.sum(1)
    tokens = ResponseTokens(
        theta=batch.theta[mask],
        old=batch.old[mask].detach(),
        rollout=batch.rollout[mask].detach(),
        advantage=batch.advantages.detach()[:, None].expand_as(mask)[mask],
        sample=mask.nonzero()[:, 0],
        length=per_sample.to(torch.float32)[:, None].expand_as(mask)[mask],
        own=None if batch.own is None else batch.own[mask],
        top_theta=None if batch.top_theta is None else batch.top_theta[mask],
        top_rollout=None if batch.top_rollout is None else batch.top_rollout[mask].detach(),
    )
    for name in ("theta", "old", "rollout", "advantage", "top_theta"):
        values = getattr(tokens, name)
        if values is not None and not torch.isfinite(values).all():
            raise NonFiniteError(f"{name} must be finite at every response token; got NaN or Inf")
    top = tokens.top_rollout
    # -Inf says that there is no such token.
    if top is not None and (top.isnan() | top.isposinf()).any():
        raise NonFiniteError("top_rollout must be finite or -Inf; got NaN or Inf")
    return tokens


def _check(batch: PolicyBatch) -> None:
    mask = batch.mask
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be bool [samples, positions]; got {mask.dtype} {tuple(mask.shape)}"
        )
    top = batch.top_rollout if batch.top_theta is None else batch.top_theta
    top_shape = (*mask.shape, 0 if top is None else top.shape[-1])
    for name, shape in (
        ("theta", mask.shape),
        ("old", mask.shape),
        ("rollout", mask.shape),
        ("advantages", mask.shape[:1]),
        ("top_theta", top_shape),
        ("top_rollout", top_shape),
    ):
        tensor: torch.Tensor | None = getattr(batch, name)
        if tensor is None:  # Only the fields of score centering may be.
            continue
        if tuple(tensor.shape) != tuple(shape) or tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} must be FP32 {tuple(shape)}, as the mask is {tuple(mask.shape)}; got "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )
    if (batch.top_theta is None) != (batch.top_rollout is None):
        raise ValueError("top_theta and top_rollout belong together; got one of them")
    if batch.own is not None and (batch.own.shape != mask.shape or batch.own.dtype != torch.bool):
        raise ValueError(f"own must be bool {tuple(mask.shape)}; got {batch.own.dtype}")
