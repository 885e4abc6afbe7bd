"""Megatron's parallel state for one process, and the tiny MoE that tests and examples use."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron_trace.models.local_config import local_config, local_moe_config
from megatron_trace.testing.ranks import join_group

# What the layers of Qwen3.5 have, beside its pattern and a RoPE of a quarter of the head dim.
QWEN_FIELDS: dict[str, Any] = {
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
    "layernorm_epsilon": 1e-6,
    "moe_shared_expert_intermediate_size": 64,
    "moe_shared_expert_gate": True,
}

# The MoE of `tiny_moe_config("*E*E")`, and what makes Megatron train it on a CPU.
TINY_MOE_FLAGS = """
    --hybrid-layer-pattern *E*E --hidden-size 128 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 32 --qk-layernorm --swiglu --normalization RMSNorm
    --position-embedding-type rope --no-rope-fusion --disable-bias-linear
    --untie-embeddings-and-output-weights --num-experts 16 --moe-router-topk 4
    --moe-ffn-hidden-size 64 --ffn-hidden-size 64 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type none --moe-router-dtype fp32 --moe-enable-routing-replay
    --seq-length 16 --max-position-embeddings 16 --use-cpu-initialization --vocab-size 16
    --make-vocab-size-divisible-by 16 --bf16 --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 4 --distributed-backend gloo
"""


@contextlib.contextmanager
def single_process(*, seed: int) -> Iterator[None]:
    """Initialises torch.distributed (file store) and Megatron for one rank.

    Args:
        seed: Seed of torch and of Megatron's model-parallel random states.
    """
    with tempfile.TemporaryDirectory() as folder:
        init_rank(Path(folder) / "store", rank=0, world_size=1, seed=seed)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            _forget_models()


def _forget_models() -> None:
    """Frees models that nothing uses: they hold their groups, and a gloo group wakes threads."""
    # Holds the modules that it was called with.
    RotaryEmbedding.forward.cache_clear()
    # The hooks of these lead back to the model, but by a way that the collector does not see.
    for ddp in [of for of in gc.get_objects() if type(of) is DistributedDataParallel]:
        ddp.grad_accs.clear()
    gc.collect()


def init_rank(store: Path, *, rank: int, world_size: int, seed: int, **parallel: Any) -> None:
    """Joins a group through a file store and initialises Megatron's parallel state.

    Args:
        store: Path of the file store, fresh for each group.
        rank: This rank.
        world_size: Number of ranks.
        seed: Seed of torch and of Megatron's model-parallel random states.
        **parallel: Sizes for `initialize_model_parallel`, such as expert_model_parallel_size=2.
    """
    join_group(store, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(**parallel)
    model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
    torch.manual_seed(seed)


def tiny_moe_config(pattern: str, **overrides: Any) -> TransformerConfig:
    """Gives the configuration of a tiny MoE: hidden 128, 16 experts top-4, 2 KV heads x 32.

    A pattern without E gives a dense model, without the MoE's fields. Gated DeltaNets (G) have 4
    key and 8 value heads x 16.

    Args:
        pattern: Hybrid layer pattern, such as `*E*E`; its length is the number of positions.
        **overrides: Fields of `TransformerConfig` to set otherwise.
    """
    fields: dict[str, Any] = {
        "num_layers": len(pattern.replace("|", "").split("/")[0]),
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 32,
        "ffn_hidden_size": 64,
        "pipeline_dtype": torch.float32,
    }
    if "G" in pattern:
        fields |= {
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
    if "E" not in pattern:
        return local_config(**(fields | overrides))
    fields |= {
        "num_moe_experts": 16,
        "moe_router_topk": 4,
        "moe_ffn_hidden_size": 64,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    return local_moe_config(**(fields | overrides))
