"""A stand-in for Transformer Engine's CUDA parts, so that grouped experts run on a CPU.

Inside `te_on_cpu()` TE's Python stays its own: modules, recipes, quantisers, autograd functions.
Replaced are the grouped product (one torch product per expert), the padding of rows, and the checks
for a device. Needs `cpu_runtime.install()`. Sums are in another order than on a GPU, so this proves
which operands are multiplied, not their products' last bits.

Source: Transformer Engine 2.20.2, pytorch/module/{base,grouped_linear,fp8_padding}.py and
pytorch/cpp_extensions/gemm.py.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import transformer_engine_torch as tex
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as optimizer_step
from megatron.core.transformer.moe import moe_utils
from megatron.core.utils import (
    local_multi_tensor_applier,
    local_multi_tensor_l2_norm,
    local_multi_tensor_scale,
)
from transformer_engine.pytorch.cpp_extensions.gemm import _unwrap_tensor
from transformer_engine.pytorch.module import grouped_linear
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

CAPABILITY = (9, 0)
STEPS = (optimizer_step, clip_grads)


@contextlib.contextmanager
def te_on_cpu() -> Iterator[None]:
    """Runs Transformer Engine's grouped linears on the CPU, inside the context."""
    replacements = [
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "get_device_capability", lambda *_: CAPABILITY),
        (FP8GlobalStateManager, "is_fp8_available", lambda: (True, "")),
        (TransformerEngineBaseModule, "prepare_forward", _prepare_forward),
        (TransformerEngineBaseModule, "end_forward", lambda self: None),
        (grouped_linear, "general_grouped_gemm", _grouped_product),
        (grouped_linear, "is_module_grouped_tensor_path_supported", lambda *_: False),
        # Megatron's router then multiplies by torch.
        (moe_utils, "te_general_gemm", None),
        # Its optimizer then does without TE's fused Adam, as where TE is not installed.
        (optimizer, "Adam", torch.optim.AdamW),
        (optimizer, "USING_PYTORCH_OPTIMIZER", True),
        *((module, "multi_tensor_applier", local_multi_tensor_applier) for module in STEPS),
        *((module, "multi_tensor_scale_impl", local_multi_tensor_scale) for module in STEPS),
        (clip_grads, "multi_tensor_scale_tensor_impl", None),
        (clip_grads, "l2_norm_impl", local_multi_tensor_l2_norm),
        (tex, "fused_multi_row_padding", _pad),
        (tex, "fused_multi_row_unpadding", _unpad),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(mock.patch.object(owner, name, replacement))
        yield


def _prepare_forward(self: Any, inp: torch.Tensor, num_gemms: int = 1, **_: Any) -> torch.Tensor:
    self.fast_setattr("allow_different_data_and_param_types", False)
    self.set_activation_dtype(inp)
    self.init_fp8_metadata(num_gemms=num_gemms)
    return inp.contiguous()


def _grouped_product(
    a: Sequence[Any],
    b: Sequence[Any],
    out: Sequence[torch.Tensor],
    *_: Any,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    accumulate: bool = False,
    single_output: bool = False,
    **__: Any,
) -> tuple[Any, list[None], None]:
    """Gives what `general_grouped_gemm` writes: b @ a^T (TN), b @ a (NN), or b^T @ a (NT)."""
    usages = (
        ("rowwise" if layout[0] == "T" else "columnwise"),
        ("columnwise" if layout[1] == "T" else "rowwise"),
    )
    lefts = [_unwrap_tensor(part, usages[1]) for part in b]
    rights = [_unwrap_tensor(part, usages[0]) for part in a]
    targets = list(out)
    if single_output:
        assert m_splits is not None, "rows of each expert"
        targets = list(out[0].split(list(m_splits)))
    for left, right, target in zip(lefts, rights, targets, strict=True):
        left = left.t() if layout[1] == "T" else left
        product = left @ (right.t() if layout[0] == "T" else right)
        if accumulate:
            target.add_(product)
        else:
            target.copy_(product)
    return (out[0] if single_output else out), [None] * len(a), None


def _pad(
    rows: torch.Tensor, out: torch.Tensor, splits: Sequence[int], padded: Sequence[int]
) -> None:
    out.zero_()
    _unpad(out, rows, padded, splits, back=True)


def _unpad(
    padded_rows: torch.Tensor,
    rows: torch.Tensor,
    padded: Sequence[int],
    splits: Sequence[int],
    *,
    back: bool = False,
) -> None:
    parts = zip(padded_rows.split(list(padded)), rows.split(list(splits)), strict=True)
    for with_padding, without in parts:
        if back:
            with_padding[: len(without)] = without
        else:
            without.copy_(with_padding[: len(without)])
