"""The gated delta rule's output and gradients of one implementation, to compare with another's.

Legend: N sequences, T tokens of each, H heads, D dim of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from megatron_trace.models.delta_rule import normalise

# What flash-linear-attention's own tests allow, as a share of the root mean square. Measured on an
# H200: 4.4e-3.
TOLERANCE = 2e-2
NAMES = ("output", "query", "key", "value", "decay", "beta")


def random_inputs(
    num_sequences: int,
    num_tokens: int,
    *,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Gives query, key, value, decay and beta as a freshly initialised layer's projections.

    Decays of a token are between nothing and nearly all, as Megatron initialises them.

    Args:
        num_sequences: N.
        num_tokens: T.
        num_heads: H.
        head_dim: D, of keys and values.
        dtype: Of all but the decay, which is FP32.
        device: Where.
        seed: Of the random state.

    Returns:
        [N, T, H, D] three times, [N, T, H] twice.
    """
    generator = torch.Generator(device).manual_seed(seed)
    shape = (num_sequences, num_tokens, num_heads)

    def normal(*more: int) -> torch.Tensor:
        return torch.randn(*shape, *more, generator=generator, device=device)

    rate = 16 * torch.rand(num_heads, generator=generator, device=device)
    decay = -rate * F.softplus(normal() - 4)
    query, key = (normalise(normal(head_dim)).to(dtype) for _ in range(2))
    return [query, key, normal(head_dim).to(dtype), decay, normal().sigmoid().to(dtype)]


def output_and_gradients(
    mix: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    inputs: Sequence[torch.Tensor],
    bounds: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Gives the output and the gradient of every input, of one random linear function of it.

    Args:
        mix: As `models.delta_rule.mix`.
        inputs: As `random_inputs` gives them.
        bounds: integer [sequences + 1], of packed sequences.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output, _ = mix(*leaves, None, bounds)
    generator = torch.Generator(output.device).manual_seed(1)
    weights = torch.randn(output.shape, generator=generator, device=output.device)
    grads = torch.autograd.grad(output, leaves, weights.to(output.dtype))
    return [output.detach(), *grads]


def errors(expected: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> dict[str, float]:
    """Gives the root mean square of each difference over that of what was expected.

    Args:
        expected: What `output_and_gradients` gives.
        got: The same, of another implementation.
    """
    found = {}
    for name, ours, theirs in zip(NAMES, expected, got, strict=True):
        scale = ours.double().square().mean().sqrt()
        difference = (theirs.double() - ours.double()).square().mean().sqrt()
        found[name] = (difference / scale).item()
    return found
