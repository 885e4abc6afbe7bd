"""Published checkpoints to Megatron's and back, with models that `transformers` makes."""

import gc
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeTextConfig

from megatron_trace.conversion.convert import hf_to_megatron, megatron_to_hf
from megatron_trace.conversion.published_folder import published_architecture
from megatron_trace.models.architecture import size_differences
from megatron_trace.models.hybrid import causal_mask
from megatron_trace.models.presets import QWEN3_5_35B_A3B
from megatron_trace.testing.file_size_limit import file_size_limit
from megatron_trace.testing.published_model import (
    add_tensors,
    assert_same_folders,
    converted_model,
    make_it_see,
    mtp_tensors,
    published_model,
    stack_experts,
)

pytestmark = pytest.mark.usefixtures("one_rank")

FAMILIES = ("qwen3_5_moe", "qwen3_next")
LENGTH = 40


@pytest.fixture(scope="module", params=FAMILIES)
def published(request, tmp_path_factory):
    """A folder in BF16, of one file, and the model in it."""
    folder = tmp_path_factory.mktemp("published") / request.param
    return folder, published_model(request.param, folder)


def round_trip(folder, tmp_path, **options):
    converted = hf_to_megatron(folder, tmp_path / "megatron", **options)
    back = megatron_to_hf(tmp_path / "megatron", folder, tmp_path / "back")
    assert_same_folders(folder, tmp_path / "back")
    assert back.rounded == ()
    return converted


def test_a_round_trip_gives_the_same_bytes(published, tmp_path):
    converted = round_trip(published[0], tmp_path)
    assert converted.num_parameters == sum(p.numel() for p in published[1].parameters())
    assert converted.left_out == ()


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the published code takes fla's kernels, on the CPU too"
)
def test_logits_are_those_of_the_published_model(published, tmp_path):
    folder, model = published
    converted = hf_to_megatron(folder, tmp_path / "megatron")
    ours = converted_model(tmp_path / "megatron", converted.architecture, torch.float32)
    tokens = torch.randint(0, 64, (2, LENGTH))
    with torch.no_grad():
        expected = model.float()(tokens).logits
        logits = ours(tokens, torch.arange(LENGTH).expand(2, -1), causal_mask(LENGTH))
    # Measured: 3.1e-5 of logits up to 2.8; attention and delta rule add in another order.
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)
    assert expected.abs().max() > 1


def test_megatron_is_told_that_the_checkpoint_is_a_hybrid_models(published, tmp_path):
    """Its loader takes a checkpoint without a pattern for a GPTModel's, and refuses that."""
    hf_to_megatron(published[0], tmp_path / "megatron")
    common = load_common_state_dict(tmp_path / "megatron" / "iter_0000000")
    assert common["args"].hybrid_layer_pattern == "GEGEGE*E"
    assert common["iteration"] == 0


def test_several_files_come_back_as_they_were(tmp_path):
    folder = tmp_path / "published"
    published_model("qwen3_5_moe", folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 4
    round_trip(folder, tmp_path)


def test_stacked_experts_vision_and_multi_token_prediction_come_back(tmp_path):
    folder = tmp_path / "published"
    published_model("qwen3_5_moe", folder)
    add_tensors(folder, mtp_tensors(folder))
    stack_experts(folder)
    make_it_see(folder)
    with_mtp = round_trip(folder, tmp_path / "with", mtp=True)
    without = round_trip(folder, tmp_path / "without")
    assert with_mtp.left_out == ("model.visual.patch_embed.proj.weight",)
    assert {name.split(".")[0] for name in without.left_out} == {"model", "mtp"}
    assert with_mtp.num_parameters > without.num_parameters


def test_a_checkpoint_that_megatron_saved_is_published_with_its_weights(published, tmp_path):
    folder, _ = published
    converted = hf_to_megatron(folder, tmp_path / "megatron")
    model = converted_model(tmp_path / "megatron", converted.architecture, torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    saved = tmp_path / "trained"
    saved.mkdir()
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(saved))
    megatron_to_hf(saved, folder, tmp_path / "back")
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "back"))
    for name, tensor in before.items():
        assert torch.equal(after[name], 2 * tensor), name


def test_everything_that_is_wrong_with_a_checkpoint_is_in_one_error(tmp_path):
    folder = tmp_path / "published"
    published_model("qwen3_5_moe", folder)
    path = folder / "model.safetensors"
    stored = load_file(path)
    del stored["model.layers.2.mlp.experts.5.up_proj.weight"]
    stored["model.layers.3.self_attn.q_norm.weight"] = torch.zeros(8)
    stored["model.layers.0.linear_attn.dt_bias"] = torch.zeros(4, dtype=torch.float8_e4m3fn)
    stored["model.layers.4.input_layernorm.weight"] = torch.zeros(64)
    save_file(stored, path)
    with pytest.raises(ValueError, match="does not hold the model") as error:
        hf_to_megatron(folder, tmp_path / "megatron")
    for part in (
        "missing: model.layers.2.mlp.experts.5.up_proj.weight;",
        "of another shape: model.layers.3.self_attn.q_norm.weight ([8], not [16]);",
        "neither BF16 nor F32 nor F16: model.layers.0.linear_attn.dt_bias (F8_E4M3);",
        "unknown: model.layers.4.input_layernorm.weight",
    ):
        assert part in str(error.value)
    assert not (tmp_path / "megatron").exists(), "nothing may be left of a refused conversion"


def test_the_preset_of_35b_has_the_sizes_that_transformers_gives_it(tmp_path):
    """`Qwen3_5MoeTextConfig()` is that of Qwen3.5-35B-A3B, but for the period of RoPE."""
    Qwen3_5MoeTextConfig().save_pretrained(tmp_path)
    differences = size_differences(published_architecture(tmp_path), QWEN3_5_35B_A3B)
    assert differences == ["rope_base=10000, not 10000000"]


def test_a_checkpoint_of_another_model_is_refused_by_its_sizes(published, tmp_path):
    with pytest.raises(ValueError, match=r"is not Qwen3.5-35B-A3B: num_layers=4, not 40, hidden"):
        hf_to_megatron(published[0], tmp_path / "megatron", model=QWEN3_5_35B_A3B)


def test_a_distributed_checkpoint_of_another_model_names_what_it_lacks(published, tmp_path):
    folder, _ = published
    hf_to_megatron(folder, tmp_path / "megatron")
    larger = tmp_path / "larger"
    shutil.copytree(folder, larger)
    config = json.loads((larger / "config.json").read_text())
    config["num_hidden_layers"], config["layer_types"] = 8, 2 * config["layer_types"]
    (larger / "config.json").write_text(json.dumps(config))
    stored = load_file(folder / "model.safetensors")
    more = {
        name.replace(f"layers.{n}.", f"layers.{n + 4}."): tensor.clone()
        for name, tensor in stored.items()
        for n in range(4)
        if f"layers.{n}." in name
    }
    save_file(stored | more, larger / "model.safetensors")
    with pytest.raises(ValueError, match=r"decoder.layers.8.input_layernorm.weight is missing"):
        megatron_to_hf(tmp_path / "megatron", larger, tmp_path / "back")


def memory_of_process(name):
    """In MB: `VmRSS` now, `VmHWM` at most since it was reset."""
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", text).group(1)) / 1000


def test_neither_direction_holds_the_model(tmp_path):
    folder = tmp_path / "published"
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 64}
    published_model("qwen3_5_moe", folder, sizes=sizes)
    size = (folder / "model.safetensors").stat().st_size / 1e6
    gc.collect()
    growth = []
    for convert in (
        lambda: hf_to_megatron(folder, tmp_path / "megatron"),
        lambda: megatron_to_hf(tmp_path / "megatron", folder, tmp_path / "back"),
    ):
        Path("/proc/self/clear_refs").write_text("5")
        before = memory_of_process("VmRSS")
        convert()
        growth.append(memory_of_process("VmHWM") - before)
    # Measured: 0.4 and 18 MB of 102.
    assert size > 100
    assert max(growth) < size / 3, growth


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type=llama"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7}}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types other than full attention"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"head_dim": None}, "head_dim"),
        ({"num_experts": "8"}, "has a size that is no number: "),
        (
            {"model_type": "qwen4_exp", "hc_count": 4, "indexer_n_heads": 8},
            r"model_type=qwen4_exp, hc_count \(hyper-connections\), indexer_n_heads \(sparse",
        ),
        (
            {"model_type": "qwen4_exp", "text_config": {"hc_count": 4, "ple_layer_ids": [2]}},
            r"hc_count \(hyper-connections\), ple_layer_ids \(n-gram embeddings\), which cannot",
        ),
    ],
)
def test_a_configuration_that_cannot_be_converted_is_refused(published, tmp_path, changes, message):
    folder = tmp_path / "published"
    shutil.copytree(published[0], folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        hf_to_megatron(folder, tmp_path / "megatron")


def test_no_folder_is_written_over(published, tmp_path):
    (tmp_path / "megatron").mkdir()
    with pytest.raises(ValueError, match="exists; remove it"):
        hf_to_megatron(published[0], tmp_path / "megatron")


def edit_header(folder, edit):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    stop = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:stop])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[stop:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda of: (of / "model.safetensors").write_bytes(b"\x02"), "is not a safetensors file"),
        (
            lambda of: os.truncate(of / "model.safetensors", 100_000),
            r"has 100000 bytes, but its header tells of \d+: incomplete",
        ),
        (
            lambda of: edit_header(of, lambda header: header["model.norm.weight"].pop("shape")),
            r"not a safetensors file: KeyError\('shape'\)",
        ),
        (
            lambda of: edit_header(
                of, lambda header: header["model.norm.weight"].update(dtype="F32")
            ),
            r"model.norm.weight of F32 \[64\] lies at bytes \d+ to \d+, where 256 bytes",
        ),
        (
            lambda of: (of / "model.safetensors.index.json").write_text("{}"),
            "index.json has no weight_map",
        ),
        (lambda of: (of / "config.json").write_text("{"), "config.json is no JSON"),
        (lambda of: (of / "config.json").write_text("[]"), "must hold a JSON object; got list"),
        (
            lambda of: (of / "config.json").write_text('{"model_type": "llama"}'),
            "has model_type=llama, which cannot be converted; qwen3_5_moe",
        ),
    ],
)
def test_a_damaged_folder_is_refused_in_words_before_anything_is_written(
    published, tmp_path, damage, message
):
    folder = tmp_path / "published"
    shutil.copytree(published[0], folder)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        hf_to_megatron(folder, tmp_path / "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["published"]


def test_a_full_disk_is_an_error_of_the_file_system_and_leaves_nothing(published, tmp_path):
    unwritable = r"megatron\.tmp/iter_0000000 cannot be written: .*too large"
    with pytest.raises(OSError, match=unwritable), file_size_limit(10_000):
        hf_to_megatron(published[0], tmp_path / "megatron")
    assert not list(tmp_path.iterdir())


def test_a_conversion_that_was_ended_is_repeated(published, tmp_path):
    for left in ("megatron.tmp/iter_0000000", "back.tmp"):
        (tmp_path / left).mkdir(parents=True)
        (tmp_path / left / "model.safetensors").write_bytes(b"half")
    round_trip(published[0], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "megatron"]


def largest_file(iteration):
    return max(iteration.glob("*.distcp"), key=lambda path: path.stat().st_size)


def damage_file(iteration):
    path = largest_file(iteration)
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (damage_file, ValueError, r" of \S+ cannot be read: "),
        (
            lambda iteration: largest_file(iteration).unlink(),
            OSError,
            r" of \S+ cannot be read: .*No such file",
        ),
        (
            lambda iteration: (iteration / ".metadata").write_bytes(b"xx"),
            ValueError,
            r"\.metadata is broken",
        ),
        (
            lambda iteration: (iteration.parent / "latest_checkpointed_iteration.txt").write_text(
                "x"
            ),
            ValueError,
            "must name an iteration; got 'x'",
        ),
    ],
)
def test_a_damaged_distributed_checkpoint_is_refused_and_leaves_nothing(
    published, tmp_path, damage, error, message
):
    hf_to_megatron(published[0], tmp_path / "megatron")
    damage(tmp_path / "megatron" / "iter_0000000")
    with pytest.raises(error, match=message):
        megatron_to_hf(tmp_path / "megatron", published[0], tmp_path / "back")
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


def test_weights_that_are_nan_are_not_published(published, tmp_path):
    folder = tmp_path / "published"
    shutil.copytree(published[0], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors")
    hf_to_megatron(folder, tmp_path / "megatron")
    with pytest.raises(ValueError, match=r"decoder.final_norm.weight of \S+ has NaN or Inf"):
        megatron_to_hf(tmp_path / "megatron", folder, tmp_path / "back")
