"""A Gated DeltaNet of the engine moves its states on in their slots as torch does with copies."""

import dataclasses

import pytest
import torch

from megatron_trace.models.delta_rule import delta_rule_kernels, mix
from megatron_trace.models.hybrid import build_hybrid_model
from megatron_trace.rollout.gated_delta_net import delta_nets
from megatron_trace.rollout.model import engine_modules
from megatron_trace.testing.single_process import QWEN_FIELDS, tiny_moe_config


def _steps(layer, kernels, *, device):
    """Gives what three tokens of three requests leave: outputs and states."""
    layer.kernels = kernels
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    conv, recurrent = normal(5, *layer.conv_state_shape), normal(5, *layer.recurrent_state_shape)
    slots = torch.tensor([3, -1, 0], dtype=torch.int32, device=device)
    width = layer.in_proj.weight.shape[0]
    with torch.inference_mode():
        outputs = [layer._step(normal(3, 1, width), conv, recurrent, slots) for _ in range(3)]
    return torch.stack(outputs), conv, recurrent


def _compare(device):
    torch.manual_seed(0)
    model = build_hybrid_model(
        tiny_moe_config("GE*E", **QWEN_FIELDS),
        pattern="GE*E",
        vocab_size=16,
        max_sequence_length=64,
        modules=engine_modules(delta_rule="torch"),
        rotary_percent=0.25,
    )
    (layer,) = delta_nets(model)
    for parameter in (layer.A_log, layer.dt_bias, layer.out_norm.weight):
        torch.nn.init.normal_(parameter)
    torchs = delta_rule_kernels("torch")
    # Kernels of a GPU by their kind; none of them is called.
    others = dataclasses.replace(torchs, mix=lambda *given, **options: mix(*given, **options))
    expected = _steps(layer, torchs, device=device)
    got = _steps(layer, others, device=device)
    for ours, theirs in zip(got, expected, strict=True):
        # Measured in Triton's interpreter: 3e-7.
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert any(not torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.gpu
def test_three_tokens_in_their_slots_leave_what_they_leave_in_copies():
    _compare("cuda")
