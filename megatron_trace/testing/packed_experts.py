"""Random routed experts in NVFP4, and how far the kernel is from the specification."""

from __future__ import annotations

import torch

from megatron_trace.formats import ops
from megatron_trace.rollout.kernels import experts as kernel
from megatron_trace.rollout.kernels import experts_reference as reference
from megatron_trace.rollout.kernels.experts_reference import PackedExperts

# Sums have another order, so that a value next to a rounding boundary of BF16 differs by 2^-8.
TOLERANCE = 2.0**-7


def random_experts(
    num_experts: int, hidden_size: int, width: int, *, device: str, seed: int = 0
) -> PackedExperts:
    """Gives experts of random codes and block scales.

    Outputs have about the magnitude of the inputs, and global scales differ between experts.

    Args:
        num_experts: E.
        hidden_size: H.
        width: F, intermediate size of an expert.
        device: Where they lie.
        seed: Of the random numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random_bytes(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device=device, generator=generator
        )

    def global_scales(columns: int) -> torch.Tensor:
        # A value has magnitude 3 times a block scale of about 2.
        each = torch.rand(num_experts, device=device, generator=generator) + 0.5
        return each / (6 * columns**0.5)

    def scale(value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float32, device=device)

    shape1, shape2 = (num_experts, 2 * width), (num_experts, hidden_size)
    return PackedExperts(
        random_bytes(0, 256, *shape1, hidden_size // 2),
        # E4M3 from 0.5 to 7.5.
        random_bytes(0x30, 0x50, *shape1, hidden_size // 16),
        global_scales(hidden_size),
        random_bytes(0, 256, *shape2, width // 2),
        random_bytes(0x30, 0x50, *shape2, width // 16),
        global_scales(width),
        scale(4.0 / (6 * 448)),
        scale(3.7 / (6 * 448)),
    )


def random_routing(
    num_tokens: int, num_experts: int, top_k: int, *, device: str, skewed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives experts int64 [T, k] and probabilities FP32 [T, k] of tokens.

    Args:
        num_tokens: T.
        num_experts: E.
        top_k: k.
        device: Where they lie.
        skewed: Whether a few experts get most tokens, and some slots have none.
    """
    logits = torch.rand(num_tokens, num_experts, device=device)
    if skewed:
        logits[:, : top_k + 1] += 0.7
    experts = logits.topk(top_k, dim=-1).indices
    probabilities = torch.rand(num_tokens, top_k, device=device).softmax(-1)
    if skewed:
        experts[::3, -1] = -1
    return experts, probabilities


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Gives the largest difference over the largest magnitude of its row, NaN at like places."""
    ours, theirs = ours.float().flatten(0, -2), theirs.float().flatten(0, -2)
    if (ours.isnan() != theirs.isnan()).any():
        return float("inf")
    rows = (ours - theirs).abs().nan_to_num(0.0).amax(-1)
    largest = theirs.abs().nan_to_num(0.0).amax(-1)
    return float((rows / largest.clamp(min=1e-30)).max())


def compared(
    x: torch.Tensor,
    experts: torch.Tensor,
    probabilities: torch.Tensor,
    weights: PackedExperts,
    flags: tuple[str, ...] = (),
) -> dict[str, float]:
    """Gives how far the kernel is from the specification, stage by stage.

    Args:
        x: BF16 [T, H].
        experts: int64 [T, k].
        probabilities: FP32 [T, k].
        weights: The experts.
        flags: Of the kernel's build.

    Returns:
        `..._differ`: bytes of codes and scales that differ from those of the values that were
        quantised, and of the output of a second call from the first. `activations`, `output`: the
        largest difference from what the reference computes of the kernel's own codes, over the
        largest magnitude of the row; at most TOLERANCE.
    """
    arguments = (x, experts, probabilities, weights)
    ours = kernel.routed_experts(*arguments, keep_activations=True, flags=flags)
    again = kernel.routed_experts(*arguments, flags=flags)
    assert ours.activations is not None, "asked for"
    routed = experts >= 0
    activations = reference.expert_activations(ours.fc1_codes, ours.fc1_scales, experts, weights)
    output = reference.expert_output(
        ours.fc2_codes, ours.fc2_scales, experts, probabilities, weights
    )
    records = (
        ("fc1", x, ours.fc1_codes, ours.fc1_scales, weights.fc1_input_scale),
        (
            "fc2",
            ours.activations[routed],
            ours.fc2_codes[routed],
            ours.fc2_scales[routed],
            weights.fc2_input_scale,
        ),
    )
    result = {}
    for site, values, codes, scales, scale in records:
        expected = ops.encode(values, scale, implementation="torch")
        result[f"{site}_codes_differ"] = int((codes != expected[0]).sum())
        result[f"{site}_scales_differ"] = int((scales != expected[1]).sum())
    result["repeat_differ"] = int(
        (ours.output.view(torch.int16) != again.output.view(torch.int16)).sum()
    )
    result["activations"] = _difference(ours.activations[routed], activations[routed])
    result["output"] = _difference(ours.output, output)
    return result


def assert_as_specified(result: dict[str, float]) -> None:
    """Asserts what `compared` gives: no byte of a record differs, and values are near."""
    assert {name: value for name, value in result.items() if name.endswith("differ")} == {
        "fc1_codes_differ": 0,
        "fc1_scales_differ": 0,
        "fc2_codes_differ": 0,
        "fc2_scales_differ": 0,
        "repeat_differ": 0,
    }
    assert max(result["activations"], result["output"]) <= TOLERANCE
