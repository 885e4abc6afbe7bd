"""Where fla's backward pass of the gated delta rule would end in an error, that is told at once."""

from __future__ import annotations

import pytest
import torch

from megatron_trace.models.delta_rule import delta_rule_kernels
from megatron_trace.models.fla_backward import FlaSetup, fla_setup, why_fla_cannot_train
from megatron_trace.testing.delta_rule_gradients import (
    TOLERANCE,
    errors,
    output_and_gradients,
    random_inputs,
)

HOPPER, AMPERE, BLACKWELL = (9, 0), (8, 0), (10, 0)
MISSING = "tilelang is not installed"


@pytest.mark.parametrize("triton", ["3.4.0", "3.5.1", "3.6.0", "3.7.0", "3.7.0+git1a2b3c4d"])
def test_hopper_with_a_wrong_triton_and_no_tilelang_is_refused_with_both_cures(triton):
    reason = why_fla_cannot_train(FlaSetup(HOPPER, triton, MISSING))
    assert reason is not None
    assert f"(compute capability 9.0) with Triton {triton}" in reason
    assert f"because {MISSING}; pip install 'megatron-trace[gpu]' and have nvcc" in reason
    assert "--trace-delta-rule torch" in reason


@pytest.mark.parametrize(
    "setup",
    [
        FlaSetup(HOPPER, "3.6.0", ""),
        FlaSetup(HOPPER, "3.3.1", MISSING),
        FlaSetup(HOPPER, "3.7.1", MISSING),
        FlaSetup(HOPPER, "3.10.0", MISSING),
        FlaSetup(AMPERE, "3.6.0", MISSING),
        FlaSetup(BLACKWELL, "3.6.0", MISSING),
    ],
    ids=str,
)
def test_tilelang_another_triton_or_another_gpu_is_not_refused(setup):
    assert why_fla_cannot_train(setup) is None


def _require_fla_that_trains() -> None:
    reason = why_fla_cannot_train(fla_setup())
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [None, (0, 500, 503, 1000)], ids=["padded", "packed"])
def test_flas_gradients_are_torchs(bounds):
    """At the width of Qwen3.5's heads, from BF16, against torch's in FP32."""
    _require_fla_that_trains()
    inputs = random_inputs(
        1 if bounds else 2,
        1000,
        num_heads=32,
        head_dim=128,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    ends = None if bounds is None else torch.tensor(bounds, device="cuda")
    exact = [x.float() for x in inputs]
    expected = output_and_gradients(delta_rule_kernels("torch").mix, exact, ends)
    got = output_and_gradients(delta_rule_kernels("fla").mix, inputs, ends)
    found = errors(expected, got)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.gpu
def test_where_fla_cannot_train_the_kernels_are_refused_for_training_only():
    reason = why_fla_cannot_train(fla_setup())
    assert not delta_rule_kernels("fla", trains=False).are_torchs
    if reason is None:
        assert not delta_rule_kernels("auto").are_torchs
        return
    with pytest.raises(RuntimeError, match="has no right backward pass"):
        delta_rule_kernels("auto")
