"""Compares a Gated DeltaNet's step in its slots with its definition; for TRITON_INTERPRET.

python interpreted_delta_step.py DEVICE DTYPE     prints how many layers were compared
"""

import itertools
import sys

import torch
import torch.nn.functional as F

from megatron_trace.rollout.kernels.delta_step import DeltaParameters, delta_step

# Measured in FP32, interpreted: 3e-7. BF16: a rounding of a value up to 4, or of what follows it.
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 4e-2}
SLOTS = 6
# Key heads, value heads and value dim, taps, bias, normalised or not; channels and values of the
# last one are those of several programs.
LAYERS = [
    *itertools.product(((1, 2, 32), (2, 2, 32)), (2, 4), (False, True), (False, True)),
    ((4, 8, 64), 4, True, True),
]
# Two rows of padding share the last slot.
NUM_REAL = 4


def by_definition(
    projected: torch.Tensor,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    p: DeltaParameters,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gives output and states, in FP32, rounded where `models/gated_delta_net.py` rounds."""
    heads, key_dim, value_dim = recurrent.shape[1:]
    dtype, each = projected.dtype, heads // p.key_heads
    sections = [conv.shape[1], heads * value_dim, heads, heads]
    qkv, gate, beta, alpha = projected.split(sections, dim=-1)
    conv = torch.cat((conv[..., 1:], qkv[..., None]), dim=-1)
    y = (conv.float() * p.weight.float()).sum(-1)
    y = F.silu(y if p.bias is None else y + p.bias.float()).to(dtype)
    query_key, value = y.split([2 * p.key_heads * key_dim, heads * value_dim], dim=-1)
    query_key = query_key.unflatten(-1, (2, p.key_heads, key_dim)).float()
    if p.normalises:
        lengths = (query_key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        query_key = (query_key / lengths).to(dtype).float()
    query, key = query_key.repeat_interleave(each, dim=2).unbind(1)
    value = value.unflatten(-1, (heads, value_dim)).float()
    decay = -p.a_log.float().exp() * F.softplus(alpha.float() + p.dt_bias.float())
    recurrent = recurrent * decay.exp()[..., None, None]
    known = torch.einsum("nhkv,nhk->nhv", recurrent, key)
    written = beta.sigmoid().float()[..., None] * (value - known)
    recurrent = recurrent + key[..., None] * written[..., None, :]
    read = torch.einsum("nhkv,nhk->nhv", recurrent, query) * key_dim**-0.5
    normed = F.rms_norm(read.to(dtype), (value_dim,), p.norm_weight, p.norm_eps)
    gated = normed * F.silu(gate.unflatten(-1, (heads, value_dim)).float())
    return gated.to(dtype).flatten(1), conv, recurrent


def compare(device: str, dtype: torch.dtype) -> int:
    """Gives the number of layers; each gets alphas of all sizes."""
    torch.manual_seed(0)
    num_compared = 0
    for (key_heads, heads, value_dim), taps, has_bias, normalises in LAYERS:
        key_dim = 16
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
        slots = torch.tensor([4, 0, -4, 3, -1, -1], device=device)
        projected = normal(len(slots), channels + heads * value_dim + 2 * heads)
        sizes = torch.tensor([[1.0], [10.0], [30.0], [-30.0], [1.0], [1.0]], device=device)
        projected[:, -heads:] *= sizes
        conv = normal(SLOTS, channels, taps)
        recurrent = torch.randn(SLOTS, heads, key_dim, value_dim).to(device)
        own_conv, own_recurrent = conv.clone(), recurrent.clone()
        output = delta_step(projected, own_conv, own_recurrent, slots, parameters)
        assert output.isfinite().all(), "padding too"
        slots, output = slots[:NUM_REAL], output[:NUM_REAL]
        expected = by_definition(projected[:NUM_REAL], conv[slots], recurrent[slots], parameters)
        conv[slots] = expected[1].to(dtype)
        assert torch.equal(own_conv[:-1], conv[:-1]), "the convolution's states, or another slot's"
        assert torch.equal(own_recurrent[1], recurrent[1]), "the state of another slot"
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
