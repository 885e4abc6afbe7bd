"""The gated delta rule and the short convolution before it: in torch, or flash-linear-attention's.

Of each head, with a state S [K, V], a decay exp(g) and a writing strength beta:

    S_t = exp(g_t) S_{t-1} + k_t w_t^T      w_t = beta_t (v_t - exp(g_t) S_{t-1}^T k_t)
    o_t = S_t^T q_t / sqrt(K)

Legend: N sequences, T tokens of each, H heads, K key dim, V value dim, C channels, W taps of the
convolution, L tokens of a chunk. Packed sequences: one row of T tokens, and the bounds [N + 1] of
each; states are [N, ...] in both cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.ssm import gated_delta_net as megatron_gdn

from megatron_trace.config import DeltaRule
from megatron_trace.models.fla_backward import require_fla

CHUNK_TOKENS = 64
_L2_EPS = 1e-6


@dataclass(frozen=True)
class DeltaRuleKernels:
    """The three functions of a Gated DeltaNet that have kernels.

    Attributes:
        convolve: As `convolve` of this file.
        normalise: As `normalise`.
        mix: As `mix`.
    """

    convolve: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    normalise: Callable[[torch.Tensor], torch.Tensor]
    mix: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

    @property
    def are_torchs(self) -> bool:
        """Whether they are the functions of this file."""
        return self.mix is mix


def delta_rule_kernels(
    choice: DeltaRule, *, deterministic: bool = False, trains: bool = True
) -> DeltaRuleKernels:
    """Gives the kernels of a Gated DeltaNet on this process's device.

    Args:
        choice: `torch`, `fla`, or `auto`: fla on a GPU, torch on a CPU or if determinism is asked.
        deterministic: Whether equal inputs must give equal bits; fla's backward does not.
        trains: Whether there will be a backward pass.

    Raises:
        ValueError: `choice` is unknown, or contradicts the device or `deterministic`.
        RuntimeError: fla is chosen but not installed, or has no backward pass here.
    """
    on_gpu = _device_is_gpu()
    if choice not in ("auto", "torch", "fla"):
        raise ValueError(f"delta_rule must be auto, torch or fla; got {choice!r}")
    if choice == "torch" or (choice == "auto" and (deterministic or not on_gpu)):
        return DeltaRuleKernels(convolve, normalise, mix)
    if deterministic:
        raise ValueError(
            "delta_rule=fla contradicts deterministic_mode: fla's backward adds in any order; "
            "choose delta_rule=torch"
        )
    if not on_gpu:
        raise ValueError("delta_rule=fla needs a GPU, and this process has none; choose torch")
    require_fla(installed=megatron_gdn.HAVE_FLA, trains=trains)
    return DeltaRuleKernels(_convolve_fla, _normalise_fla, _mix_fla)


def _device_is_gpu() -> bool:
    # Stand-ins for CUDA and for Transformer Engine's products say that it is available.
    return torch.empty(0, device=torch.cuda.current_device()).is_cuda


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    *,
    keep_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gives SiLU of the causal convolution of every channel, in FP32 inside.

    Args:
        x: float [N, T, C], or packed [1, T, C].
        weight: float [C, W].
        bias: float [C].
        before: float [N, C, W]; the W tokens before these, oldest first. None are zeros.
        bounds: integer [N + 1]; where each packed sequence begins, and the end.
        keep_state: Whether the last W tokens are asked for.

    Returns:
        x's dtype and shape, and [N, C, W] in x's dtype: the W tokens before those that follow.
    """
    if bounds is not None:
        parts = [
            convolve(x[:, start:end], weight, bias, own, keep_state=keep_state)
            for start, end, own in _sequences(bounds, before)
        ]
        return torch.cat([y for y, _ in parts], 1), _joined([state for _, state in parts])
    num_tokens, taps = x.shape[1], weight.shape[1]
    if before is None:
        before = x.new_zeros(len(x), x.shape[2], taps)
    window = torch.cat((before.to(x.dtype), x.mT), dim=-1)
    shifted = window[..., 1:].float()
    y = sum(
        shifted[..., tap : tap + num_tokens] * weight[:, tap, None].float() for tap in range(taps)
    )
    assert isinstance(y, torch.Tensor), "a convolution has a tap"
    if bias is not None:
        y = y + bias[:, None].float()
    # A view would keep all tokens alive.
    after = window[..., -taps:].clone() if keep_state else None
    return F.silu(y).to(x.dtype).mT, after


def normalise(x: torch.Tensor) -> torch.Tensor:
    """Gives x with its last dim scaled to Euclidean length 1, in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _L2_EPS)).to(x.dtype)


def mix(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    *,
    keep_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gives the output of the gated delta rule, computed in FP32 a chunk at a time.

    Args:
        query: float [N, T, H, K], or packed [1, T, H, K]; normalised.
        key: float, query's shape; normalised.
        value: float [N, T, H, V].
        decay: FP32 [N, T, H]; g, the logarithm of the decay.
        beta: float [N, T, H]; writing strength, 0 to 1.
        state: FP32 [N, H, K, V]; S before the first token. None are zeros.
        bounds: integer [N + 1]; where each packed sequence begins, and the end.
        keep_state: Whether S after the last token is asked for.

    Returns:
        [N, T, H, V] in value's dtype, and FP32 [N, H, K, V].
    """
    if bounds is not None:
        parts = [
            mix(
                query[:, start:end],
                key[:, start:end],
                value[:, start:end],
                decay[:, start:end],
                beta[:, start:end],
                own,
                keep_state=keep_state,
            )
            for start, end, own in _sequences(bounds, state)
        ]
        return torch.cat([y for y, _ in parts], 1), _joined([own for _, own in parts])
    if state is None:
        state = value.new_zeros(
            len(value), value.shape[2], key.shape[3], value.shape[3], dtype=torch.float32
        )
    query, key, wide = (x.transpose(1, 2).float() for x in (query, key, value))
    decay, beta = (x.transpose(1, 2).float() for x in (decay, beta))
    outputs = [wide[:, :, :0]]
    for start in range(0, wide.shape[2], CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        q, k, v, g, b = (x[:, :, rows] for x in (query, key, wide, decay, beta))
        y, state = _chunk(q, k, v, g, b, state)
        outputs.append(y)
    output = torch.cat(outputs, dim=2).transpose(1, 2).to(value.dtype)
    return output, state if keep_state else None


def _chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives output [N, H, L, V] and state after L tokens of FP32 [N, H, L, ...].

    What the tokens write solves a triangular system, as each subtracts what earlier ones wrote.
    """
    total = decay.cumsum(-1)
    # Above the diagonal the difference is positive and could overflow.
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    since_start = total.exp()[..., None]
    system = (beta[..., None] * (key @ key.mT) * between).tril(-1)
    written = torch.linalg.solve_triangular(
        system,
        beta[..., None] * (value - since_start * (key @ state)),
        upper=False,
        unitriangular=True,
    )
    read = since_start * (query @ state) + ((query @ key.mT) * between) @ written
    last = total[..., -1, None, None]
    until_end = (last - total[..., None]).exp()
    state = last.exp() * state + (until_end * key).mT @ written
    return read * query.shape[-1] ** -0.5, state


def _sequences(
    bounds: torch.Tensor, states: torch.Tensor | None
) -> list[tuple[int, int, torch.Tensor | None]]:
    """Gives first token, end and state [1, ...] of every packed sequence."""
    pairs = itertools.pairwise(bounds.tolist())
    return [
        (start, end, None if states is None else states[index, None])
        for index, (start, end) in enumerate(pairs)
    ]


def _joined(states: list[torch.Tensor | None]) -> torch.Tensor | None:
    present = [state for state in states if state is not None]
    return torch.cat(present) if present else None


def _convolve_fla(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    *,
    keep_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return megatron_gdn.causal_conv1d(
        x=x,
        weight=weight,
        bias=bias,
        activation="silu",
        initial_state=before,
        output_final_state=keep_state,
        cu_seqlens=bounds,
    )


def _normalise_fla(x: torch.Tensor) -> torch.Tensor:
    return megatron_gdn.l2norm(x.contiguous(), eps=_L2_EPS)


def _mix_fla(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    *,
    keep_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        fused_recurrent_gated_delta_rule,
    )

    # The recurrent kernel has no backward, and is the faster one for a token.
    is_decode = query.shape[1] == 1 and not torch.is_grad_enabled()
    rule = fused_recurrent_gated_delta_rule if is_decode else megatron_gdn.chunk_gated_delta_rule
    return rule(
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        g=decay.contiguous(),
        beta=beta.contiguous(),
        initial_state=state,
        output_final_state=keep_state,
        cu_seqlens=bounds,
    )
