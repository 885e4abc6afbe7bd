"""Routed experts in NVFP4 in CUDA C++: built at first use, called on torch's current stream.

Legend: T tokens of a step, k expert slots of a token, E experts, H hidden size, F intermediate
size of an expert.
"""

from __future__ import annotations

import ctypes

import torch

from megatron_trace.rollout.kernels.experts_reference import PackedExperts, RoutedOutput
from megatron_trace.rollout.kernels.library import (
    FOLDER,
    current_stream,
    library,
    pointers,
    why_no_compiler,
)

SOURCE = FOLDER / "experts.cu"
# As in experts_layout.cuh.
WIDTH_MULTIPLE = 512
MAX_EXPERTS = 1024
_GROUP_SLOTS = 16
_MAX_SLOTS = 16384
# More tokens are computed in parts, which bounds the memory of what lies between the kernels.
MAX_TOKENS = 2048


def why_not(hidden_size: int, width: int, num_experts: int, device: torch.device) -> str | None:
    """Says why `routed_experts` cannot run; None if it can.

    Args:
        hidden_size: H.
        width: F.
        num_experts: E.
        device: Where the weights lie.
    """
    if device.type != "cuda":
        return f"it needs a GPU, and the weights lie on {device}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "it needs compute capability 9.0 (E4M3 conversions, dependent launches)"
    for name, columns in (("hidden size", hidden_size), ("an expert's width", width)):
        if columns % WIDTH_MULTIPLE:
            return f"{name} must be a multiple of {WIDTH_MULTIPLE}; got {columns}"
    if num_experts > MAX_EXPERTS:
        return f"a layer may have at most {MAX_EXPERTS} experts; got {num_experts}"
    return why_no_compiler()


def routed_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    probabilities: torch.Tensor,
    weights: PackedExperts,
    *,
    keep_activations: bool = False,
    flags: tuple[str, ...] = (),
) -> RoutedOutput:
    """Gives `experts_reference.routed_experts`, without waiting for the GPU.

    Args:
        x: BF16 [T, H].
        experts: int64 [T, k], expert of each slot; negative where a slot has none.
        probabilities: FP32 [T, k].
        weights: The experts.
        keep_activations: Whether fc2's input in BF16 is given too.
        flags: Further flags of the build, for measurements.

    Raises:
        ValueError: A tensor has another dtype or shape, is not contiguous, or lies elsewhere.
        RuntimeError: CUDA refused the launch, or the kernel cannot be built.
    """
    num_tokens, num_slots = experts.shape
    _require_fitting(x, experts, probabilities, weights)
    hidden, width = weights.hidden_size, weights.width

    def bytes_of(*shape: int) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.uint8)

    result = RoutedOutput(
        torch.empty_like(x),
        bytes_of(num_tokens, hidden // 2),
        bytes_of(num_tokens, hidden // 16),
        bytes_of(num_tokens, num_slots, width // 2),
        bytes_of(num_tokens, num_slots, width // 16),
        x.new_empty((num_tokens, num_slots, width)) if keep_activations else None,
    )
    step = min(MAX_TOKENS, _MAX_SLOTS // num_slots)
    for start in range(0, num_tokens, step):
        part = slice(start, start + step)
        outputs = RoutedOutput(
            result.output[part],
            result.fc1_codes[part],
            result.fc1_scales[part],
            result.fc2_codes[part],
            result.fc2_scales[part],
            None if result.activations is None else result.activations[part],
        )
        _launch(x[part], experts[part], probabilities[part], weights, outputs, flags)
    return result


def _launch(
    x: torch.Tensor,
    experts: torch.Tensor,
    probabilities: torch.Tensor,
    weights: PackedExperts,
    outputs: RoutedOutput,
    flags: tuple[str, ...],
) -> None:
    num_tokens, num_slots = experts.shape
    hidden, width, num_experts = weights.hidden_size, weights.width, weights.num_experts
    total = num_tokens * num_slots
    operands1 = x.new_empty((num_tokens, hidden), dtype=torch.float16)
    operands2 = x.new_empty((total, width), dtype=torch.float16)
    products = x.new_empty((total, hidden))
    order = x.new_empty(total, dtype=torch.int32)
    # An expert has at most one group that is not full.
    max_groups = min(num_experts, total) + total // _GROUP_SLOTS
    groups = x.new_empty((max_groups, 4), dtype=torch.int32)
    counts = x.new_empty(3 + max_groups, dtype=torch.int32)
    tensors = (
        weights.fc1_codes,
        weights.fc1_scales,
        weights.fc1_global_scales,
        weights.fc2_codes,
        weights.fc2_scales,
        weights.fc2_global_scales,
        weights.fc1_input_scale,
        weights.fc2_input_scale,
        x,
        experts,
        probabilities,
        outputs.output,
        outputs.fc1_codes,
        outputs.fc1_scales,
        outputs.fc2_codes,
        outputs.fc2_scales,
        outputs.activations,
        operands1,
        operands2,
        products,
        order,
        groups,
        counts,
    )
    numbers = (num_tokens, num_slots, num_experts, hidden, width)
    num_blocks = torch.cuda.get_device_properties(x.device).multi_processor_count
    with torch.cuda.device_of(x):
        error = library(SOURCE, *flags).trace_routed_experts(
            *pointers(tensors),
            *(ctypes.c_int(number) for number in numbers),
            ctypes.c_int(num_blocks),
            current_stream(x.device),
        )
    if error:
        raise RuntimeError(
            f"routed experts with {numbers} (tokens, slots of each, experts, hidden size, width) "
            f"were refused by CUDA: error {error}"
        )


def _require_fitting(
    x: torch.Tensor, experts: torch.Tensor, probabilities: torch.Tensor, weights: PackedExperts
) -> None:
    num_experts, hidden, width = weights.num_experts, weights.hidden_size, weights.width
    for name, tensor, dtype, shape in (
        ("x", x, torch.bfloat16, (len(experts), hidden)),
        ("experts", experts, torch.int64, experts.shape),
        ("probabilities", probabilities, torch.float32, experts.shape),
        ("fc1_codes", weights.fc1_codes, torch.uint8, (num_experts, 2 * width, hidden // 2)),
        ("fc1_scales", weights.fc1_scales, torch.uint8, (num_experts, 2 * width, hidden // 16)),
        ("fc1_global_scales", weights.fc1_global_scales, torch.float32, (num_experts,)),
        ("fc2_codes", weights.fc2_codes, torch.uint8, (num_experts, hidden, width // 2)),
        ("fc2_scales", weights.fc2_scales, torch.uint8, (num_experts, hidden, width // 16)),
        ("fc2_global_scales", weights.fc2_global_scales, torch.float32, (num_experts,)),
        ("fc1_input_scale", weights.fc1_input_scale, torch.float32, ()),
        ("fc2_input_scale", weights.fc2_input_scale, torch.float32, ()),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{name} must be {dtype} {tuple(shape)}; got {tensor.dtype} {tuple(tensor.shape)}"
            )
        if tensor.device != x.device or not tensor.is_contiguous() or tensor.data_ptr() % 16 > 0:
            if tensor.numel() == 1 and tensor.device == x.device:
                continue
            raise ValueError(
                f"{name} must be contiguous, aligned to 16 bytes, and on {x.device}; got "
                f"{tensor.device}, strides {tensor.stride()}, address {tensor.data_ptr():#x}"
            )
