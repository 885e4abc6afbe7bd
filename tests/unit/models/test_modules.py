"""RMSNorm and core attention of the local spec."""

from __future__ import annotations

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from megatron_trace.models.attention import SDPACoreAttention
from megatron_trace.models.norm import RMSNorm, UncentredRMSNorm
from megatron_trace.testing.single_process import tiny_moe_config

pytestmark = pytest.mark.usefixtures("one_rank")


def _attention(**overrides):
    config = tiny_moe_config("*E", **overrides)
    return SDPACoreAttention(config, 1, AttnMaskType.causal, "self")


def test_rmsnorm_equals_its_formula():
    x = torch.randn(5, 128)
    norm = RMSNorm(tiny_moe_config("*E"), 128, eps=1e-6)
    torch.nn.init.uniform_(norm.weight)
    expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.weight
    torch.testing.assert_close(norm(x), expected, atol=1e-6, rtol=0)  # Measured: 2.4e-7.


def test_zero_centred_rmsnorm_scales_by_one_plus_weight():
    x = torch.randn(5, 128)
    plain = RMSNorm(tiny_moe_config("*E"), 128)
    centred = RMSNorm(tiny_moe_config("*E", layernorm_zero_centered_gamma=True), 128)
    assert centred.weight.eq(0).all()
    torch.testing.assert_close(centred(x), plain(x), atol=0, rtol=0)


def test_zero_centred_rmsnorm_adds_one_in_fp32():
    """1 + 2**-9 is 1 in BF16."""
    config = tiny_moe_config("*E", layernorm_zero_centered_gamma=True, params_dtype=torch.bfloat16)
    norm = RMSNorm(config, 128, eps=0.0)
    torch.nn.init.constant_(norm.weight, 2.0**-9)
    x = torch.full((1, 128), 2.0, dtype=torch.float32)
    assert norm(x).eq(1 + 2.0**-9).all()


def test_an_uncentred_rmsnorm_stores_its_weight_whatever_the_others_do():
    config = tiny_moe_config("*E", layernorm_zero_centered_gamma=True)
    x, norm = torch.randn(5, 128), UncentredRMSNorm(config, 128)
    assert norm.weight.eq(1).all()
    torch.testing.assert_close(norm(x), RMSNorm(config, 128)(x), atol=1e-6, rtol=0)


def test_packed_sequences_attend_only_within_themselves():
    lengths = [5, 7, 3]
    query, key, value = (torch.randn(15, n, 32) for n in (4, 2, 2))
    ends = torch.tensor([0, 5, 12, 15], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    attention = _attention()
    together = attention(query, key, value, packed_seq_params=packed)
    alone = [
        attention(q[:, None], k[:, None], v[:, None])
        for q, k, v in zip(
            query.split(lengths), key.split(lengths), value.split(lengths), strict=True
        )
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=0)  # Measured: 0.


@pytest.mark.parametrize("overrides", [{"attention_dropout": 0.1}])
def test_attention_names_what_it_does_not_support(overrides):
    with pytest.raises(ValueError, match=next(iter(overrides))):
        _attention(**overrides)
