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
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        dtype, out = args[0].dtype, kwargs.pop("out", None)
        args, kwargs = tree_map(_in_fp64, (args, kwargs))
        result = func(*args, **kwargs).to(dtype)
        return result if out is None else out.copy_(result)


def _in_fp64(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value
