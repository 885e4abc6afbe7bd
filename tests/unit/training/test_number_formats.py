"""What the trainer does in other formats than NVFP4; `tests/parity` compares it with the engine."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.config import HINT_SITES, TraceConfig
from megatron_trace.formats import MXFP4, MXFP8, NVFP4, NVFP4_4OVER6
from megatron_trace.formats.bad_values import note_bad_values
from megatron_trace.hints import (
    THRESHOLDS,
    GuardThresholds,
    HintStore,
    RecordKind,
    Site,
    encode_packed_hint,
)
from megatron_trace.testing.rollouts import record_of
from megatron_trace.training.micro_batch import make_micro_batch
from megatron_trace.training.model import token_logprobs
from megatron_trace.training.rounding import Rounding, guard_thresholds
from megatron_trace.training.te_rows import LinearCall

FORMATS = ["nvfp4_4over6", "mxfp4", "mxfp4_w4a8"]


def _ready(build, rolled, number_format, **trace):
    model, sites = build("trace", number_format=number_format, **trace)
    sites.settings = rolled.settings
    return model, sites


@pytest.mark.parametrize("number_format", FORMATS)
def test_gradients_pass_the_guided_quantisers(build, rollout, number_format):
    rolled = rollout(number_format=number_format)
    model, sites = _ready(build, rolled, number_format)
    micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
    with sites.micro_batch(micro_batch):
        token_logprobs(model, sites, micro_batch)[micro_batch.loss_mask].sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.isfinite().all(), name
    experts = model.decoder.layers[1].mlp.experts.local_experts
    assert any(expert.linear_fc1.weight.grad.abs().sum() > 0 for expert in experts)


@pytest.mark.parametrize("number_format", FORMATS)
def test_places_without_hints_are_rounded_to_nearest_and_counted(build, rollout, number_format):
    rolled = rollout(number_format=number_format, sites=HINT_SITES)
    options = {"hint_sites": HINT_SITES, "missing_hints": "rtn"}
    model, sites = _ready(build, rolled, number_format, **options)
    nearest, qat = build("qat", number_format=number_format)
    qat.settings = rolled.settings
    logprobs = []
    for one, its_sites, store in ((model, sites, HintStore()), (nearest, qat, None)):
        micro_batch = make_micro_batch(rolled.samples, store, its_sites)
        with torch.no_grad(), its_sites.micro_batch(micro_batch):
            logprobs.append(token_logprobs(one, its_sites, micro_batch))
    assert torch.equal(*logprobs)
    for site in Site:
        assert sites.report().sites[site].guided == 0
        assert sites.report().sites[site].missing > 0


@pytest.mark.parametrize("hint_bits", [1, 2, 4])
@pytest.mark.parametrize("number_format", FORMATS)
def test_hints_of_any_bits_give_the_recorded_codes(build, rollout, number_format, hint_bits):
    rolled = rollout(number_format=number_format, sites=HINT_SITES, num_bits=hint_bits, codes=True)
    options = {"hint_sites": HINT_SITES, "hint_bits": hint_bits}
    model, sites = _ready(build, rolled, number_format, **options)
    sites.diagnostics = True
    micro_batch = make_micro_batch(rolled.samples, rolled.store, sites)
    with torch.no_grad(), sites.micro_batch(micro_batch):
        token_logprobs(model, sites, micro_batch)
    for site in Site:
        counts = sites.report().code_mismatch[site]
        assert counts.guided_values == counts.values > 0
        assert counts.unexplained == 0
        # An FP32 trainer of a BF16 record; E4M3 values lie nearer to one another than its noise.
        assert counts.guided_share <= (0.04 if sites.format_of(site) is MXFP8 else 1e-3)


def test_hints_of_another_format_are_refused(build, rollout):
    rolled = rollout(number_format="mxfp4", codes=True)
    _, sites = _ready(build, rolled, "mxfp4")
    store, sample = HintStore(), rolled.samples[0]
    for layer, site in sites.recorded_places:
        codes = record_of(rolled.store, sample, layer, site, RecordKind.CODES)
        scale_bytes = codes.scale_bytes.repeat_interleave(2, -1).clamp(max=100)
        store.put(encode_packed_hint(codes.key, codes.payload, scale_bytes, 1.0, 1))
    with pytest.raises(ValueError, match="hint has number format nvfp4, expected mxfp4"):
        make_micro_batch([sample], store, sites)


@pytest.mark.parametrize(
    ("number_format", "config", "message"),
    [
        ("mxfp4", {"kv_channels": 16}, "kv_channels=16, not a multiple of 32, the block of mxfp4"),
        ("mxfp4_w4a8", {"moe_ffn_hidden_size": 80}, "moe_ffn_hidden_size=80, .* block of mxfp8"),
    ],
)
def test_a_width_that_is_not_whole_blocks_is_refused_by_name(build, number_format, config, message):
    with pytest.raises(ValueError, match=message):
        build("trace", number_format=number_format, config=config)


@pytest.mark.parametrize("number_format", [NVFP4_4OVER6, MXFP4, MXFP8])
def test_transformer_engines_native_products_refuse_other_formats(number_format):
    scale = 1.0 if number_format.has_global_scale else None
    values = torch.zeros(2, 32)
    call = LinearCall("fc1", values, Rounding(scale, number_format=number_format))
    assert torch.equal(call.quantised(values), values)
    with pytest.raises(ValueError, match=f"of nvfp4 only; got {number_format.name}"):
        call.codes(values)


def test_the_guards_thresholds_are_the_formats_unless_set():
    for number_format in (NVFP4, MXFP4):
        assert guard_thresholds(TraceConfig(), number_format) == THRESHOLDS[number_format.name]
    trace = TraceConfig(guard_max_scale_steps=0, guard_min_parity_agreement=0.9)
    assert guard_thresholds(trace, MXFP4) == GuardThresholds(0.25, 0, 0.9)


def test_only_a_global_scale_can_saturate():
    assert Rounding(None, number_format=MXFP4).largest is None
    values = torch.full((2, 64), 1e4)
    for scale, expected in ((1.0, 8), (4.0, 0)):
        largest, count = Rounding(scale, number_format=NVFP4_4OVER6).largest, torch.tensor([0])
        assert largest is not None
        note_bad_values(values, None, count, largest, NVFP4_4OVER6.block_size)
        assert count.tolist() == [expected]


@pytest.mark.parametrize("number_format", [NVFP4, NVFP4_4OVER6, MXFP4, MXFP8])
def test_packed_rows_are_the_values(number_format):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = number_format.global_scale_from_amax(x.abs().max())
    rounding = Rounding(None if scale is None else float(scale), number_format=number_format)
    packed = rounding.packed(x)
    assert packed.packed_codes.shape == (8, 64 * number_format.code_bits // 8)
    assert torch.equal(packed.values(x.dtype), rounding.quantised(x))
    assert torch.equal(packed.taken(slice(3, 8)).values(x.dtype), rounding.quantised(x[3:]))
