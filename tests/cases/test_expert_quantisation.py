"""Cases 1, 5, 8, 10 and 12: faults in how experts and their inputs were quantised elsewhere.

Each test's name starts with the number of its case.
"""

import contextlib
import io
from pathlib import Path

import pytest
import torch

from megatron_trace.formats import (
    NUMBER_FORMATS,
    NumberFormat,
    format_set,
    global_scale_from_amax,
    ops,
)
from megatron_trace.hints import Site
from megatron_trace.models.hybrid import named_expert_linears
from megatron_trace.rollout.calibration import calibrated_scales
from megatron_trace.rollout.quantize import site_quantisers
from megatron_trace.testing.assertions import assert_same_bytes
from megatron_trace.testing.programs import load_program
from megatron_trace.testing.roundings import recorded_rounding
from megatron_trace.testing.tiny_rollout import calibration_tokens, tiny_engine, tiny_weights
from megatron_trace.training.te_rows import LinearCall, moved, pad_rows
from megatron_trace.training.weights import WeightRule, quantise_weight

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOOLS = Path(__file__).parents[2] / "tools"


def random_rows(num_rows: int, num_values: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_values, generator=generator).bfloat16()


@pytest.mark.parametrize("expert", [0, 1])
def test_01_gate_and_up_of_another_size_share_the_scale_that_both_are_decoded_with(
    expert: int,
) -> None:
    gate, x = 0.02 * random_rows(32, 32, seed=expert), random_rows(8, 32, seed=9)
    weight = torch.cat((gate, 10 * gate))
    quantised = quantise_weight(weight, WeightRule(torch.bfloat16, power_of_two_scales=False))
    assert quantised.global_scale is not None
    assert_same_bytes(quantised.global_scale, global_scale_from_amax(weight.abs().amax()))
    # Dequantised by the one scale, each half is itself: .095 is the error of NVFP4's codes.
    for half, given in zip(quantised.values.chunk(2), weight.chunk(2), strict=True):
        error = (half.float() - given.float()).norm() / given.float().norm()
        assert 0.05 < float(error) < 0.12
    # The grouped product of codes and block scales with one scale afterwards is that of the values.
    scale = float(quantised.global_scale)
    codes = ops.decode(quantised.packed_codes, quantised.scale_bytes, scale)
    fused = (x.double() @ (codes.double() / scale).T) * scale
    expected = x.double() @ codes.double().T
    torch.testing.assert_close(fused, expected, rtol=1e-6, atol=1e-9)
    # By the scale of gate alone, as elsewhere, up would be a tenth of itself.
    of_gate = global_scale_from_amax(gate.abs().amax())
    wrong = fused[:, 32:] / scale * float(of_gate)
    assert float(wrong.norm() / expected[:, 32:].norm()) == pytest.approx(0.1, rel=0.05)


@pytest.mark.usefixtures("one_rank")
def test_05_no_input_scale_is_lost_where_those_of_experts_differ() -> None:
    weights = tiny_weights(0)
    engine = tiny_engine(None, hint_layers="all")
    engine.load_weights(weights)
    engine.calibrate(calibration_tokens())
    for layer in engine.layers:
        quantisers = site_quantisers(layer)
        # Gate and up read one input, which is quantised once; no expert has another scale for it.
        assert list(quantisers[Site.FC1]) == [0]
        for _, matrix, linear in named_expert_linears(layer):
            assert linear.input_quantizer.is_enabled == (matrix == "fc2")
        # Each expert's input of fc2 has its own amax, of which the largest becomes that of all.
        for expert, quantiser in quantisers[Site.FC2].items():
            quantiser.amax = torch.tensor(1.0 + expert)
        largest = float(len(quantisers[Site.FC2]))
        scales, _ = calibrated_scales([layer], format_set("nvfp4"), power_of_two=False)
        assert scales[layer.index, Site.FC2] == float(global_scale_from_amax(largest))
        assert {float(quantiser.amax) for quantiser in quantisers[Site.FC2].values()} == {largest}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [96, 128, 192])
@pytest.mark.parametrize("fmt", NUMBER_FORMATS.values(), ids=NUMBER_FORMATS)
def test_08_any_whole_number_of_blocks_is_quantised_by_running_it(
    fmt: NumberFormat, length: int, device: str
) -> None:
    x = random_rows(5, length)
    scale = 0.002 if fmt.has_global_scale else None
    how = {"num_bits": 1, "number_format": fmt}
    expected = ops.rtn_record(x, scale, implementation="torch", **how)
    for got, wanted in zip(ops.rtn_record(x.to(device), scale, **how), expected, strict=True):
        assert_same_bytes(got.cpu(), wanted, f"{fmt.name} {length}")
    if device == "cpu":
        # What cannot run says so; nothing claims that it could.
        with pytest.raises(ValueError, match=r"needs? x on a GPU; got cpu"):
            ops.rtn_record(x, scale, implementation="triton", **how)


@pytest.mark.parametrize("multiple", [32, 64])
def test_10_experts_padded_to_32_or_64_rows_get_their_own_rows_and_no_others(multiple: int) -> None:
    splits = (1, 0, 63, 64)
    padded_splits = tuple(-(-rows // multiple) * multiple for rows in splits)
    values = random_rows(sum(splits), 32)
    rounding = recorded_rounding(
        (values.float() * 1.02).bfloat16(), 0.002, num_bits=1, implementation="torch"
    )

    def pad(rows: torch.Tensor) -> torch.Tensor:
        return pad_rows(rows, splits, padded_splits)

    padded = pad(values)
    call = LinearCall("fc1", padded, moved(rounding, pad))
    got = [call.quantised(part) for part in torch.split(padded, padded_splits)]
    alone = torch.split(rounding.quantised(values), splits)
    for expert, (rows, expected) in enumerate(zip(got, alone, strict=True)):
        assert_same_bytes(rows[: len(expected)], expected, f"expert {expert}")
        assert not rows[len(expected) :].any()
    # The hints differ from rounding to nearest, so that a hint of another row would show.
    assert (torch.cat(list(alone)) != ops.rtn(values, 0.002)).any()


def test_12_the_benchmark_reports_what_a_call_for_one_experts_few_tokens_costs() -> None:
    bench = load_program(TOOLS / "bench_formats.py")
    assert {1, 8, 64} <= set(bench.SMALL_TOKENS)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        bench.print_small({"8": {"copy": 1.14, "rtn": 1.27}})
    # 8 tokens cost what a launch costs: 64 experts, one call each, cost 64 of them.
    assert "8 x 2048, us: copy 1.14, rtn 1.27; one call each for 64 experts: rtn 81" in (
        printed.getvalue()
    )
