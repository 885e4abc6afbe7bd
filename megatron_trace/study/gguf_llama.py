"""A dense Llama out of a GGUF file: sizes, FP32 tensors by GGUF name, tokenizer.

Needs the extra `study` (gguf, tokenizers); nothing else of the package imports them.

Source: the GGUF specification, and convert_hf_to_gguf.py of llama.cpp, which interleaves the rotary
halves of q and k.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]

# gguf's type of a token that is never the result of merging text.
CONTROL_TOKEN = 3


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a dense Llama.

    Attributes:
        num_layers: Decoder layers.
        hidden_size: Hidden size.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        head_dim: Values of a head.
        ffn_size: Width of the MLP.
        vocab_size: Rows of the embedding.
        context: Longest sequence that it was trained for, in tokens.
        norm_epsilon: Added to the mean square by RMSNorm.
        rotary_base: Base period of RoPE.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context: int
    norm_epsilon: float
    rotary_base: int


@dataclass(frozen=True, eq=False)
class GGUFLlama:
    """What a GGUF file holds.

    Attributes:
        shape: Sizes.
        tensors: FP32, dequantised, by GGUF name such as `blk.0.attn_q.weight`.
        metadata: The key-value pairs of the file, the tokenizer's among them.
    """

    shape: LlamaShape
    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, Any] = field(repr=False)


def read_gguf(path: Path) -> GGUFLlama:
    """Reads and dequantises a GGUF file of architecture llama.

    Args:
        path: The file.

    Raises:
        ModuleNotFoundError: Package gguf is not installed.
        ValueError: The file holds another architecture.
    """
    import gguf  # pyright: ignore[reportMissingImports]

    reader = gguf.GGUFReader(path)
    metadata = {name: value.contents() for name, value in reader.fields.items()}
    if metadata["general.architecture"] != "llama":
        raise ValueError(
            f"{path} holds a model of architecture {metadata['general.architecture']}; expected "
            "llama"
        )
    tensors = {
        tensor.name: torch.from_numpy(
            np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        for tensor in reader.tensors
    }
    num_heads = metadata["llama.attention.head_count"]
    shape = LlamaShape(
        num_layers=metadata["llama.block_count"],
        hidden_size=metadata["llama.embedding_length"],
        num_heads=num_heads,
        num_kv_heads=metadata["llama.attention.head_count_kv"],
        head_dim=metadata["llama.embedding_length"] // num_heads,
        ffn_size=metadata["llama.feed_forward_length"],
        vocab_size=len(tensors["token_embd.weight"]),
        context=metadata["llama.context_length"],
        norm_epsilon=metadata["llama.attention.layer_norm_rms_epsilon"],
        rotary_base=int(metadata["llama.rope.freq_base"]),
    )
    return GGUFLlama(shape, tensors, metadata)


def hybrid_weights(
    tensors: Mapping[str, torch.Tensor], shape: LlamaShape
) -> dict[str, torch.Tensor]:
    """Gives the parameters of a HybridModel of pattern `*-*-...` by name.

    Query, key and value become one matrix in Megatron's order (the queries of a key/value head, its
    key, its value); gate and up become one. A head that is tied to the embedding is copied, since
    our models keep it apart.

    Args:
        tensors: By GGUF name.
        shape: Sizes of the model.
    """
    weights = {
        "embedding.word_embeddings.weight": tensors["token_embd.weight"],
        "decoder.final_norm.weight": tensors["output_norm.weight"],
        "output_layer.weight": tensors.get("output.weight", tensors["token_embd.weight"]).clone(),
    }
    for layer in range(shape.num_layers):
        block = f"blk.{layer}"
        attention, mlp = f"decoder.layers.{2 * layer}", f"decoder.layers.{2 * layer + 1}"
        weights |= {
            f"{attention}.input_layernorm.weight": tensors[f"{block}.attn_norm.weight"],
            f"{attention}.self_attention.linear_qkv.weight": _fused_qkv(tensors, block, shape),
            f"{attention}.self_attention.linear_proj.weight": tensors[
                f"{block}.attn_output.weight"
            ],
            f"{mlp}.pre_mlp_layernorm.weight": tensors[f"{block}.ffn_norm.weight"],
            f"{mlp}.mlp.linear_fc1.weight": torch.cat(
                [tensors[f"{block}.ffn_gate.weight"], tensors[f"{block}.ffn_up.weight"]]
            ),
            f"{mlp}.mlp.linear_fc2.weight": tensors[f"{block}.ffn_down.weight"],
        }
    return weights


def _fused_qkv(tensors: Mapping[str, torch.Tensor], block: str, shape: LlamaShape) -> torch.Tensor:
    heads = {
        name: _rotary_halves(tensors[f"{block}.attn_{name}.weight"], shape.head_dim)
        for name in ("q", "k")
    }
    heads["v"] = tensors[f"{block}.attn_v.weight"].unflatten(0, (-1, shape.head_dim))
    groups = [part.unflatten(0, (shape.num_kv_heads, -1)) for part in heads.values()]
    return torch.cat(groups, dim=1).flatten(0, 2).contiguous()


def _rotary_halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Gives the heads [heads, head dim, in] of q or k with RoPE's halves apart again."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(1, 2)


def byte_level_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Gives the byte-level BPE tokenizer of a GGUF file whose digits are single tokens.

    Args:
        metadata: Key-value pairs of the file; `tokenizer.ggml.pre` is `smollm`.

    Raises:
        ModuleNotFoundError: Package tokenizers is not installed.
        ValueError: The file's tokenizer is another one.
    """
    from tokenizers import (  # pyright: ignore[reportMissingImports]
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
    )

    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"expected a tokenizer of kind ('gpt2', 'smollm'); got {kind}")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges: Any = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer
