"""Multi-token prediction of published checkpoints: their tensors, and what they compute."""

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_trace.conversion.convert import hf_to_megatron, megatron_to_hf
from megatron_trace.conversion.weight_rows import PublishedNames, weight_rows
from megatron_trace.models.hybrid import causal_mask
from megatron_trace.models.presets import QWEN3_5_35B_A3B
from megatron_trace.testing.published_model import (
    add_tensors,
    converted_model,
    mtp_tensors,
    published_model,
)
from megatron_trace.testing.published_mtp import published_draft_logits

pytestmark = pytest.mark.usefixtures("one_rank")

LENGTH = 24


@pytest.fixture(scope="module", params=["qwen3_5_moe", "qwen3_next"])
def published(request, tmp_path_factory):
    """A folder with multi-token prediction, the model in it, and the tensors that it ignores."""
    folder = tmp_path_factory.mktemp("published") / request.param
    model = published_model(request.param, folder)
    tensors = mtp_tensors(folder)
    add_tensors(folder, tensors)
    return folder, model, tensors


def draft_logits(checkpoint, architecture, tokens):
    """What our model, loaded from a converted checkpoint, predicts two tokens ahead; FP32."""
    model = converted_model(checkpoint, architecture, torch.float32, mtp=True)
    seen = []
    model.mtp.register_forward_hook(lambda module, inputs, output: seen.append(output))
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        model(tokens, positions, causal_mask(tokens.shape[1]))
        # Hidden states of the decoder, then those of multi-token prediction.
        _, hidden = seen[0].chunk(2)
        return model.output_layer(hidden)[0].transpose(0, 1)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the published code takes fla's kernels, on the CPU too"
)
def test_drafts_are_those_of_the_published_code(published, tmp_path):
    folder, model, tensors = published
    converted = hf_to_megatron(folder, tmp_path / "megatron", mtp=True)
    tokens = torch.randint(0, 64, (2, LENGTH))
    ours = draft_logits(tmp_path / "megatron", converted.architecture, tokens)
    model.float()
    with torch.no_grad():
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
        expected = published_draft_logits(model, tensors, tokens)
        swapped = {**tensors, "mtp.fc.weight": tensors["mtp.fc.weight"].roll(64, dims=1)}
        other = published_draft_logits(model, swapped, tokens)
    # The last position has no next token. Measured: 4.3e-5 and 7.3e-5 of logits up to 5.2.
    torch.testing.assert_close(ours[:, :-1], expected, atol=7e-4, rtol=0)
    assert (other - expected).abs().max() > 1, "the halves of the projection cannot be told apart"


def test_the_35b_model_has_the_19_tensors_that_are_published():
    prefix, experts = "model.language_model.", "mlp.experts.gate_up_proj"
    names = {f"{prefix}embed_tokens.weight", f"{prefix}layers.0.{experts}"}
    names |= {f"mtp.layers.0.{experts}"}
    rows = weight_rows(
        replace(QWEN3_5_35B_A3B, num_layers=4), PublishedNames.of(names), mtp=True
    ).values()
    found = {part.name for parts in rows for part in parts if part.name.startswith("mtp.")}
    layer = (
        "input_layernorm post_attention_layernorm self_attn.q_proj self_attn.k_proj "
        "self_attn.v_proj self_attn.o_proj self_attn.q_norm self_attn.k_norm mlp.gate "
        "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj mlp.shared_expert.down_proj "
        "mlp.shared_expert_gate"
    )
    assert found == {
        *(f"mtp.layers.0.{name}.weight" for name in layer.split()),
        "mtp.layers.0.mlp.experts.gate_up_proj",
        "mtp.layers.0.mlp.experts.down_proj",
        *(f"mtp.{n}.weight" for n in ["fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]),
    }
    assert len(found) == 19


@pytest.mark.parametrize("published", ["qwen3_5_moe"], indirect=True)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("mtp.fc.weight"), "missing: mtp.fc.weight"),
        (
            lambda t: t.pop("mtp.layers.0.mlp.experts.5.up_proj.weight"),
            "missing: mtp.layers.0.mlp.experts.5.up_proj.weight",
        ),
        (
            lambda t: t.update({"mtp.fc.weight": torch.zeros(64, 64)}),
            "of another shape: mtp.fc.weight ([64, 64], not [64, 128])",
        ),
        (
            lambda t: t.update({"mtp.embed_tokens.weight": torch.zeros(64, 64)}),
            "unknown: mtp.embed_tokens.weight",
        ),
        (
            lambda t: t.update({"mtp.layers.1.input_layernorm.weight": torch.zeros(64)}),
            "unknown: mtp.layers.1.input_layernorm.weight",
        ),
    ],
)
def test_tensors_that_are_missing_wrong_or_too_many_are_named(published, tmp_path, change, message):
    folder = tmp_path / "published"
    folder.mkdir()
    for path in published[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(message)):
        hf_to_megatron(folder, tmp_path / "megatron", mtp=True)


def test_a_checkpoint_without_it_is_refused_if_it_is_asked_for(tmp_path):
    folder = tmp_path / "published"
    published_model("qwen3_5_moe", folder)
    with pytest.raises(ValueError, match=r"no tensors of multi-token prediction \(mtp"):
        hf_to_megatron(folder, tmp_path / "megatron", mtp=True)


@pytest.mark.parametrize("published", ["qwen3_5_moe"], indirect=True)
def test_what_was_trained_with_it_is_not_published_without_it(published, tmp_path):
    """The folder that is written like has no such tensors, so they would be lost."""
    folder, _, _ = published
    hf_to_megatron(folder, tmp_path / "megatron", mtp=True)
    without = tmp_path / "without"
    without.mkdir()
    for path in folder.iterdir():
        (without / path.name).write_bytes(path.read_bytes())
    tensors = load_file(without / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, without / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"without has no tensors of multi-token prediction"):
        megatron_to_hf(tmp_path / "megatron", without, tmp_path / "back")
