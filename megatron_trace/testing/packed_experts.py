"""Random routed experts in NVFP4, for tests and measurements."""

from __future__ import annotations

import torch

from megatron_trace.rollout.kernels.experts_reference import PackedExperts


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
