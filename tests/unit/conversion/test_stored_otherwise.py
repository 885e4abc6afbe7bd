"""What Megatron stores otherwise than published checkpoints: FP32 tensors, and norms less one."""

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from safetensors.torch import load_file

from megatron_trace.conversion.convert import hf_to_megatron, megatron_to_hf
from megatron_trace.testing.published_model import (
    add_tensors,
    assert_same_folders,
    converted_model,
    published_model,
)

pytestmark = pytest.mark.usefixtures("one_rank")

A_LOG = "model.layers.0.linear_attn.A_log"
NORM = "model.layers.0.linear_attn.norm.weight"


@pytest.fixture
def precise(tmp_path):
    """A folder with FP32 values that BF16 cannot hold, as some published checkpoints have them."""
    folder = tmp_path / "published"
    published_model("qwen3_5_moe", folder)
    tensors = {A_LOG: torch.tensor([0.1, 0.2, 0.3, 0.4]), NORM: torch.linspace(0.7, 1.3, 16)}
    add_tensors(folder, tensors)
    return folder, tensors


def bf16_model(folder, tmp_path):
    """The converted model in BF16, cast again as Megatron's Float16Module does."""
    architecture = hf_to_megatron(folder, tmp_path / "megatron").architecture
    return converted_model(tmp_path / "megatron", architecture, torch.bfloat16).bfloat16()


def published_again(model, folder, tmp_path):
    saved = tmp_path / "trained"
    saved.mkdir()
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(saved))
    return megatron_to_hf(saved, folder, tmp_path / "back")


def test_megatron_rounds_fp32_tensors_in_a_bf16_model(precise, tmp_path):
    folder, tensors = precise
    net = bf16_model(folder, tmp_path).decoder.layers[0].self_attention
    assert torch.equal(net.A_log.cpu(), tensors[A_LOG].bfloat16())
    assert torch.equal(net.out_norm.weight.cpu(), tensors[NORM].bfloat16())


def test_through_a_bf16_model_that_was_not_trained_the_bytes_come_back(precise, tmp_path):
    folder, _ = precise
    done = published_again(bf16_model(folder, tmp_path), folder, tmp_path)
    assert_same_folders(folder, tmp_path / "back")
    assert (done.rounded, done.widened) == ((), (A_LOG, NORM))


def test_of_fp32_tensors_only_what_training_changed_is_its_own(precise, tmp_path):
    folder, tensors = precise
    model = bf16_model(folder, tmp_path)
    net = model.decoder.layers[0].self_attention
    with torch.no_grad():
        net.A_log[1] *= 1.5
        net.out_norm.weight[3] *= 1.5
    trained = {A_LOG: net.A_log.detach().float(), NORM: net.out_norm.weight.detach().float()}
    published_again(model, folder, tmp_path)
    back = load_file(tmp_path / "back" / "model.safetensors")
    for name, changed in ((A_LOG, 1), (NORM, 3)):
        expected = tensors[name].clone()
        expected[changed] = trained[name][changed]
        assert torch.equal(back[name], expected), name


def test_a_checkpoint_of_megatrons_own_gated_delta_net_is_refused_by_its_names(tmp_path):
    """Its out_norm is stored less one, which nothing but its names tells."""
    key = "decoder.layers.0.self_attention.in_proj.layer_norm_weight"
    published_model("qwen3_5_moe", tmp_path / "published")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    dist_checkpointing.save(
        {"w": ShardedTensor.from_rank_offsets(key, torch.ones(64))}, str(foreign)
    )
    with pytest.raises(ValueError, match=rf"Gated DeltaNet layers, as it has {key}: norms are"):
        megatron_to_hf(foreign, tmp_path / "published", tmp_path / "back")
