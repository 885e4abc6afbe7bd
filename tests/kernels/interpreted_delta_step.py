"""Compares a Gated DeltaNet's step in its slots with torch; a program, for TRITON_INTERPRET.

python interpreted_delta_step.py DEVICE DTYPE     prints how many layers were compared
"""

import itertools
import sys

import torch
import torch.nn.functional as F

from megatron_trace.models import delta_rule
from megatron_trace.rollout.kernels.delta_step import DeltaParameters, delta_step

# Measured in FP32, interpreted: 3e-7. BF16: a rounding of a value up to 4, or of what follows it.
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 4e-2}
SLOTS = 6


def by_torch(
    projected: torch.Tensor,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    p: DeltaParameters,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives output and states by the functions of `models/delta_rule.py`."""
    heads, key_dim, value_dim = recurrent.shape[1:]
    sections = [conv.shape[1], heads * value_dim, heads, heads]
    qkv, gate, beta, alpha = projected[:, None].split(sections, dim=-1)
    qkv, conv = delta_rule.convolve(qkv, p.weight, p.bias, conv, keep_state=True)
    sizes = [p.key_heads * key_dim, p.key_heads * key_dim, heads * value_dim]
    query, key, value = (
        part.unflatten(-1, (-1, dim))
        for part, dim in zip(qkv.split(sizes, dim=-1), (key_dim, key_dim, value_dim), strict=True)
    )
    if p.normalises:
        query, key = delta_rule.normalise(query), delta_rule.normalise(key)
    query, key = (x.repeat_interleave(heads // p.key_heads, dim=2) for x in (query, key))
    decay = -p.a_log.float().exp() * F.softplus(alpha.float() + p.dt_bias.float())
    mixed, recurrent = delta_rule.mix(
        query, key, value, decay, beta.sigmoid(), recurrent, keep_state=True
    )
    normed = F.rms_norm(mixed, (value_dim,), p.norm_weight, p.norm_eps)
    gated = normed * F.silu(gate.unflatten(-1, (-1, value_dim)).float())
    return gated.to(projected.dtype).flatten(1), conv, recurrent


def compare(device: str, dtype: torch.dtype) -> int:
    """Gives the number of layers: heads, taps, bias, normalised or not, alphas of all sizes."""
    torch.manual_seed(0)
    num_compared = 0
    for (key_heads, heads), taps, has_bias, normalises in itertools.product(
        ((1, 2), (2, 2)), (2, 4), (False, True), (False, True)
    ):
        key_dim, value_dim = 16, 32
        channels = 2 * key_heads * key_dim + heads * value_dim

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape).to(device, dtype)

        parameters = DeltaParameters(
            normal(channels, taps),
            normal(channels) if has_bias else None,
            normal(heads),
            normal(heads),
            1 + normal(value_dim) / 8,
            1e-6,
            key_heads,
            normalises,
        )
        slots = torch.tensor([4, 0, -1, 2], device=device)
        projected = normal(len(slots), channels + heads * value_dim + 2 * heads)
        projected[:, -heads:] *= torch.tensor([[1.0], [10.0], [30.0], [-30.0]], device=device)
        conv = normal(SLOTS, channels, taps)
        recurrent = torch.randn(SLOTS, heads, key_dim, value_dim).to(device)
        expected = by_torch(projected, conv[slots], recurrent[slots], parameters)
        own_conv, own_recurrent = conv.clone(), recurrent.clone()
        output = delta_step(projected, own_conv, own_recurrent, slots, parameters)
        conv[slots] = expected[1].to(dtype)
        assert torch.equal(own_conv, conv), "the convolution's states, or another slot's"
        others = [1, 3]
        assert torch.equal(own_recurrent[others], recurrent[others]), "states of other slots"
        for name, ours, theirs in (
            ("output", output, expected[0]),
            ("state", own_recurrent[slots], expected[2]),
        ):
            error = (ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()
            assert error <= TOLERANCES[dtype], f"{name}: {error:.1e} of the largest, {parameters}"
        num_compared += 1
    return num_compared


if __name__ == "__main__":
    count = compare(sys.argv[1], getattr(torch, sys.argv[2]))
    sys.stdout.write(f"{count} layers")
