"""What formats and their kernels demand of their arguments, in the same words.

The defaults are those of NVFP4: blocks of 16, hints of 1, 2 or 4 bits.
"""

from __future__ import annotations

import torch

from megatron_trace.formats.constants import BLOCK_SIZE


def as_row_scales(global_scale: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """Gives a global scale as FP32 on the device of `like`: 0-d, or [..., 1] to fit its rows."""
    if not isinstance(global_scale, torch.Tensor):
        # A copy from the host would wait for the GPU.
        return torch.full((), global_scale, dtype=torch.float32, device=like.device)
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=like.device)
    if scale.numel() == 1:
        return scale.reshape(())
    rows = (*like.shape[:-1], 1)
    fits = scale.dim() == len(rows) and all(
        size in (1, wanted) for size, wanted in zip(scale.shape, rows, strict=True)
    )
    if not fits:
        raise ValueError(
            f"global_scale must hold one value, or one for each row in a shape that fits {rows}; "
            f"got shape {tuple(scale.shape)}"
        )
    return scale


def require_no_global_scale(global_scale: object) -> None:
    """Raises ValueError unless global_scale is None, where a format has none."""
    if global_scale is not None:
        raise ValueError(f"MX formats have no global scale: pass None; got {global_scale!r}")


def require_multiple(tensor: torch.Tensor, multiple: int) -> None:
    """Raises ValueError unless the last axis is a multiple of `multiple` long."""
    if tensor.dim() == 0 or tensor.shape[-1] % multiple:
        raise ValueError(
            f"the last axis must be a multiple of {multiple} long; got shape {tuple(tensor.shape)}"
        )


def require_blocks(tensor: torch.Tensor, block_size: int = BLOCK_SIZE) -> None:
    """Raises ValueError unless the last axis holds whole blocks."""
    require_multiple(tensor, block_size)


def require_input(x: torch.Tensor, block_size: int = BLOCK_SIZE) -> None:
    """Raises ValueError unless x is a float tensor of whole blocks."""
    if not x.is_floating_point():
        raise ValueError(f"x must be a float tensor; got {x.dtype}")
    require_blocks(x, block_size)


def require_num_bits(num_bits: int, code_bits: int = 4) -> None:
    """Raises ValueError unless num_bits is that of a hint."""
    if num_bits not in (1, 2, code_bits):
        raise ValueError(
            "num_bits must be 1 (lowest bits of the codes), 2 (two lowest bits) or "
            f"{code_bits} (codes); got {num_bits}"
        )


def require_scales(
    x: torch.Tensor, scale_bytes: torch.Tensor, block_size: int = BLOCK_SIZE
) -> None:
    """Raises ValueError unless scale_bytes holds one byte for each block of x."""
    _require_bytes("scale_bytes", scale_bytes, (*x.shape[:-1], x.shape[-1] // block_size))


def require_guide(
    x: torch.Tensor,
    hint: torch.Tensor,
    scale_bytes: torch.Tensor,
    num_bits: int,
    *,
    block_size: int = BLOCK_SIZE,
    code_bits: int = 4,
) -> None:
    """Raises ValueError unless hint and scale_bytes fit x."""
    require_input(x, block_size)
    require_num_bits(num_bits, code_bits)
    require_scales(x, scale_bytes, block_size)
    _require_bytes("hint", hint, (*x.shape[:-1], x.shape[-1] * num_bits // 8))


def _require_bytes(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype != torch.uint8 or tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be uint8 {shape}; got {tensor.dtype} {tuple(tensor.shape)}")
