"""Attention whose result for a row does not depend on the other rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F


@contextmanager
def attention_in_fp64() -> Iterator[None]:
    """Lets torch's attention accumulate in FP64 inside the context.

    In BF16 its last bit depends on how long the other sequences of a batch are, so that two
    rollouts with other batches cannot be compared bit by bit.
    """
    attention = F.scaled_dot_product_attention

    def in_fp64(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        output = attention(query.double(), key.double(), value.double(), **kwargs)
        return output.to(query.dtype)

    with mock.patch.object(F, "scaled_dot_product_attention", in_fp64):
        yield
