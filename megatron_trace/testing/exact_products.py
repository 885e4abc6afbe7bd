"""Products whose result for a row does not depend on the other rows of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_PRODUCTS = {
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
    F.linear,
    F.scaled_dot_product_attention,
}


class ExactProducts(TorchFunctionMode):
    """Lets torch's products and attention accumulate in FP64, and round once, while entered.

    In BF16 and FP32 the last bit of a row depends on how many rows there are, and on how long the
    other sequences of a batch, so that two rollouts with other batches cannot be compared bit by
    bit. In FP64 what depends on them is lost in the rounding.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls a function of torch, on FP64 if it is a product."""
        kwargs = kwargs or {}
        if func is torch._grouped_mm:  # pyright: ignore[reportPrivateImportUsage]
            return _grouped_mm(*args, **kwargs)
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        dtype, out = args[0].dtype, kwargs.pop("out", None)
        args, kwargs = tree_map(_in_fp64, (args, kwargs))
        result = func(*args, **kwargs).to(dtype)
        return result if out is None else out.copy_(result)


def _grouped_mm(
    rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor, **others: None
) -> torch.Tensor:
    """Gives rows [N, K] of one matrix [K, M] after those of another, times theirs; ends in offs."""
    assert not any(others.values()), "no bias, no other dtype"
    bounds = [0, *offs.tolist()]
    parts = [
        rows[start:end].double() @ matrix.double()
        for start, end, matrix in zip(bounds, bounds[1:], weights, strict=False)
    ]
    return torch.cat(parts).to(rows.dtype)


def _in_fp64(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value
