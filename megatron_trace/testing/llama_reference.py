"""A dense Llama in plain torch from tensors by GGUF name, and random ones to try it with.

It rotates neighbouring values of q and k, as llama.cpp does with the rows in a GGUF's order: an
independent check of whoever puts the rows into another order.

Legend: B sequences, S positions, N query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from megatron_trace.study.gguf_llama import LlamaShape

TINY = LlamaShape(
    num_layers=2,
    hidden_size=96,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=160,
    vocab_size=32,
    context=64,
    norm_epsilon=1e-5,
    rotary_base=100_000,
)


def random_tensors(shape: LlamaShape, *, seed: int) -> dict[str, torch.Tensor]:
    """Gives FP32 tensors by GGUF name, with a tied head and norm weights around 1."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm() -> torch.Tensor:
        return 1 + 0.1 * torch.randn(shape.hidden_size, generator=generator)

    hidden, keys = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    tensors = {"token_embd.weight": matrix(shape.vocab_size, hidden), "output_norm.weight": norm()}
    for layer in range(shape.num_layers):
        named = {
            "attn_norm": norm(),
            "attn_q": matrix(shape.num_heads * shape.head_dim, hidden),
            "attn_k": matrix(keys, hidden),
            "attn_v": matrix(keys, hidden),
            "attn_output": matrix(hidden, shape.num_heads * shape.head_dim),
            "ffn_norm": norm(),
            "ffn_gate": matrix(shape.ffn_size, hidden),
            "ffn_up": matrix(shape.ffn_size, hidden),
            "ffn_down": matrix(hidden, shape.ffn_size),
        }
        tensors |= {f"blk.{layer}.{name}.weight": value for name, value in named.items()}
    return tensors


def logits(
    tensors: Mapping[str, torch.Tensor], shape: LlamaShape, tokens: torch.Tensor
) -> torch.Tensor:
    """Gives FP32 logits [B, S, vocab] of tokens, int64 [B, S]."""
    x = tensors["token_embd.weight"][tokens]
    for layer in range(shape.num_layers):
        block = {
            name: tensors[f"blk.{layer}.{name}.weight"]
            for name in (
                *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
                *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
            )
        }
        normed = _rms_norm(x, block["attn_norm"], shape)
        query, key, value = (
            (normed @ block[f"attn_{name}"].T).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        attended = F.scaled_dot_product_attention(
            _rotate(query, shape), _rotate(key, shape), value, is_causal=True, enable_gqa=True
        )
        x = x + attended.transpose(1, 2).flatten(2) @ block["attn_output"].T
        normed = _rms_norm(x, block["ffn_norm"], shape)
        gate, up = normed @ block["ffn_gate"].T, normed @ block["ffn_up"].T
        x = x + (F.silu(gate) * up) @ block["ffn_down"].T
    return _rms_norm(x, tensors["output_norm.weight"], shape) @ tensors["token_embd.weight"].T


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, shape: LlamaShape) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + shape.norm_epsilon).rsqrt() * weight


def _rotate(heads: torch.Tensor, shape: LlamaShape) -> torch.Tensor:
    """Rotates neighbouring values of [B, N or G, S, D] by RoPE."""
    frequency = shape.rotary_base ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    angle = torch.arange(heads.shape[2])[:, None] * frequency
    first, second = heads[..., 0::2], heads[..., 1::2]
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)
