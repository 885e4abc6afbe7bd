"""Quantised weights of the engine to a checkpoint in ModelOpt's layout, and back bit by bit."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file, save_file

from megatron_trace.config import TraceConfig
from megatron_trace.conversion.modelopt_folder import (
    QuantisedModel,
    read_modelopt_folder,
    write_modelopt_folder,
)
from megatron_trace.conversion.published_folder import PublishedFolder, published_architecture
from megatron_trace.conversion.weight_rows import PublishedNames, weight_rows
from megatron_trace.models.hybrid import named_expert_linears
from megatron_trace.models.local_config import architecture_config
from megatron_trace.rollout import RolloutEngine
from megatron_trace.testing.published_model import add_tensors, mtp_tensors, published_model

pytestmark = pytest.mark.usefixtures("one_rank")

GATE, UP = (f"model.layers.1.mlp.experts.5.{name}_proj" for name in ("gate", "up"))


@pytest.fixture(scope="module", params=["qwen3_5_moe", "qwen3_next"])
def published(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published") / request.param
    published_model(request.param, folder)
    add_tensors(folder, mtp_tensors(folder))
    return folder


@pytest.fixture(scope="module")
def engine(published):
    """Serves the published weights; those of up are ten times those of gate."""
    folder, architecture = PublishedFolder(published), published_architecture(published)
    rows = weight_rows(architecture, PublishedNames.of(folder.names), mtp=False)
    named = {name: folder.read(parts) for name, parts in rows.items()}
    for name, value in named.items():
        if "local_experts.5.linear_fc1" in name:
            value[len(value) // 2 :] *= 10
    engine = RolloutEngine(
        architecture_config(architecture),
        pattern=architecture.pattern(),
        vocab_size=architecture.vocab_size,
        max_sequence_length=32,
        trace=TraceConfig(),
        eod_token=0,
        max_requests=4,
        rotary_percent=architecture.rope_share,
        rotary_base=architecture.rope_base,
        keep_packed_weights=True,
    )
    engine.load_weights(named)
    generator = torch.Generator().manual_seed(0)
    engine.calibrate([torch.randint(0, 64, (16, 24), generator=generator)])
    engine.digest = engine.push_weights(named, 0)
    return engine


@pytest.fixture(scope="module")
def exported(engine, published, tmp_path_factory):
    """The folder, in files of at most 200 kB, and what was copied into it."""
    folder = tmp_path_factory.mktemp("exported") / "nvfp4"
    copied = write_modelopt_folder(
        QuantisedModel(*engine.quantised_model()), published, folder, max_shard_bytes=200_000
    )
    return folder, copied


def _stored(folder):
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def test_what_is_read_back_is_the_engines_bit_by_bit(engine, published, exported):
    model = QuantisedModel(*engine.quantised_model())
    back = read_modelopt_folder(exported[0], published)
    assert back.parameters.keys() == model.parameters.keys()
    for name, value in model.parameters.items():
        assert torch.equal(back.parameters[name].to(value), value), name
    assert back.experts.keys() == model.experts.keys()
    for place, matrix in model.experts.items():
        for field in dataclasses.fields(matrix):
            one, other = (getattr(m, field.name) for m in (matrix, back.experts[place]))
            assert torch.equal(one, other), (place, field.name)
    assert back.input_scales == model.input_scales
    assert back.quantises_kv


def test_dequantised_by_modelopt_it_is_what_the_engine_multiplies_by(engine, exported):
    stored = _stored(exported[0])
    for layer in engine.layers:
        for expert, matrix, linear in named_expert_linears(layer):
            module = f"model.layers.{layer.index}.mlp.experts.{expert}."
            parts = ("gate_proj", "up_proj") if matrix == "fc1" else ("down_proj",)
            values = []
            for part in parts:
                codes = stored[f"{module}{part}.weight"]
                shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
                quantised = NVFP4QTensor(shape, torch.bfloat16, codes)
                values.append(
                    quantised.dequantize(
                        scale=stored[f"{module}{part}.weight_scale"],
                        double_scale=stored[f"{module}{part}.weight_scale_2"],
                        block_sizes={-1: 16},
                    )
                )
            assert torch.equal(torch.cat(values), linear.weight.cpu()), (layer.index, expert)


def test_case_1_gate_and_up_have_one_weight_scale_also_where_up_is_ten_times_gate(exported):
    stored = _stored(exported[0])
    assert torch.equal(stored[f"{GATE}.weight_scale_2"], stored[f"{UP}.weight_scale_2"])
    gate, up = (stored[f"{name}.weight_scale"].float().amax() for name in (GATE, UP))
    assert up > 5 * gate, "block scales tell them apart"


def test_case_5_gate_and_up_and_all_experts_of_a_layer_have_one_input_scale(engine, exported):
    stored = _stored(exported[0])
    for layer in range(4):
        scales = {
            part: {
                float(value)
                for name, value in stored.items()
                if f"layers.{layer}.mlp.experts." in name and f"{part}_proj.input_scale" in name
            }
            for part in ("gate", "up", "down")
        }
        assert scales["gate"] == scales["up"] == {engine.settings.global_scales[layer, "fc1"]}
        assert scales["down"] == {engine.settings.global_scales[layer, "fc2"]}


@pytest.mark.parametrize("kind", ["weight_scale_2", "input_scale"])
def test_a_checkpoint_in_which_gate_and_up_differ_is_refused(exported, published, tmp_path, kind):
    folder = tmp_path / "other"
    folder.mkdir()
    for path in exported[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    name = f"{UP}.{kind}"
    file = (
        folder
        / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    )
    tensors = load_file(file)
    tensors[name] = tensors[name] * 10
    save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"gate_proj\.{kind} is .*, but .*up_proj\.{kind} is"):
        read_modelopt_folder(folder, published)


def test_files_are_cut_and_named_by_the_index(exported):
    index = json.loads((exported[0] / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in exported[0].glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    stored = _stored(exported[0])
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    dtypes = {
        name.rsplit(".", 1)[-1]: stored[f"{GATE}.{name}"].dtype
        for name in ("weight", "weight_scale", "weight_scale_2", "input_scale")
    }
    assert dtypes == {
        "weight": torch.uint8,
        "weight_scale": torch.float8_e4m3fn,
        "weight_scale_2": torch.float32,
        "input_scale": torch.float32,
    }


def test_the_configuration_says_what_is_quantised(exported, published):
    told = json.loads((exported[0] / "hf_quant_config.json").read_text())["quantization"]
    assert (told["quant_algo"], told["kv_cache_quant_algo"], told["group_size"]) == (
        "NVFP4",
        "NVFP4",
        16,
    )
    stored = _stored(exported[0])
    excluded = set(told["exclude_modules"])
    assert "lm_head" in excluded
    assert "model.layers.0.mlp.gate" in excluded
    for name, tensor in stored.items():
        if name.endswith(".weight") and tensor.dim() == 2:
            assert (name.removesuffix(".weight") in excluded) == (tensor.dtype != torch.uint8), name
    config = json.loads((exported[0] / "config.json").read_text())
    published_config = json.loads((published / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "modelopt"
    assert config == published_config
    last = "model.layers.3.self_attn."
    assert {f"{last}k_proj.k_scale", f"{last}v_proj.v_scale"} <= stored.keys()


def test_tensors_that_the_engine_has_not_are_copied(exported, published):
    folder, copied = exported
    assert copied
    assert all(name.startswith("mtp.") for name in copied)
    stored, original = _stored(folder), load_file(published / "model.safetensors")
    for name in copied:
        assert torch.equal(stored[name], original[name]), name


def test_another_model_is_refused_and_nothing_is_written(engine, published, tmp_path):
    parameters, experts, scales = engine.quantised_model()
    short = {place: matrix for place, matrix in experts.items() if place != (1, 5, "fc2")}
    with pytest.raises(ValueError, match=r"lacks decoder.layers.3.mlp.*5.linear_fc2.weight"):
        write_modelopt_folder(QuantisedModel(parameters, short, scales), published, tmp_path / "o")
    surplus = {**parameters, "surplus": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"has the unknown surplus"):
        write_modelopt_folder(QuantisedModel(surplus, experts, scales), published, tmp_path / "o")
    with pytest.raises(ValueError, match=r"lacks input scale of \(0, 'fc1'\)"):
        write_modelopt_folder(QuantisedModel(parameters, experts, {}), published, tmp_path / "o")
    assert list(tmp_path.iterdir()) == []
