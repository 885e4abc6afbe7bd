"""Assertions that say where two tensors first differ, and in what."""

from __future__ import annotations

import torch

from megatron_trace.testing import cpu_runtime

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bytes(
    got: torch.Tensor, expected: torch.Tensor, what: str = "tensor", *, any_nan: bool = False
) -> None:
    """Asserts equal shape, dtype and bits; -0 differs from 0, and NaN equals NaN of equal bits.

    Args:
        got: Any tensor.
        expected: What it must be; may lie on another device.
        what: Name of the tensor in the message.
        any_nan: Whether a NaN equals every other NaN: processors differ in the payload of a NaN
            that they compute.

    Raises:
        AssertionError: They differ; names the number of differing elements, the index of the
            first, and both values and bytes there.
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: expected {expected.dtype} {tuple(expected.shape)}, got {got.dtype} "
            f"{tuple(got.shape)}"
        )
    expected = expected.to(got.device)
    differ = _bits(got) != _bits(expected)
    if any_nan and got.is_floating_point():
        differ &= ~(got.isnan() & expected.isnan())
    count = int(differ.sum())
    if count == 0:
        return
    index = tuple(differ.nonzero()[0].tolist())
    raise AssertionError(
        f"{what}: {count} of {differ.numel()} elements differ, first at {list(index)}: expected "
        f"{_describe(expected[index])}, got {_describe(got[index])}"
    )


def tolerance(*, cpu: float, gpu: float, without_avx: float | None = None) -> float:
    """Gives the tolerance of the device that the tests run on.

    Args:
        cpu: On a CPU, where products of the same rows are often equal bit by bit.
        gpu: On a GPU, whose products add up in another order for another number of rows.
        without_avx: On a CPU whose products do so too, as it has no AVX; None: as on others.
    """
    if not cpu_runtime.is_installed():
        return gpu
    has_avx = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    return cpu if has_avx or without_avx is None else without_avx


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor.contiguous().view(_INTEGERS[tensor.element_size()])
    return tensor


def _describe(element: torch.Tensor) -> str:
    bits = int(_bits(element)) & ((1 << (8 * element.element_size())) - 1)
    return f"{element.item()!r} (0x{bits:0{2 * element.element_size()}x})"
