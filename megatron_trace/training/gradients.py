"""The gradients of a model inside Megatron's DDP: whether they are finite, and letting them not be.

Source: Megatron-Core 0.19.2, distributed/distributed_data_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def are_finite(chunks: Iterable[torch.nn.Module]) -> bool:
    """Says whether no gradient of a model's chunks on this rank is NaN or Inf.

    Args:
        chunks: Each inside Megatron's DDP.
    """
    # No second tensor of the gradients' size; NaN is larger than everything.
    largest = [torch.linalg.vector_norm(part, torch.inf) for part in _buffers(chunks)]
    return not largest or bool(torch.stack([part.float() for part in largest]).isfinite().all())


def make_infinite(chunks: Iterable[torch.nn.Module]) -> None:
    """Sets all gradients to Inf: an optimizer with a gradient scaler skips its step then.

    Args:
        chunks: Each inside Megatron's DDP.
    """
    for part in _buffers(chunks):
        part.fill_(torch.inf)


def _buffers(chunks: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in chunks:
        ddp: Any = chunk  # torch has a method `buffers`, Megatron's DDP a list.
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
            if buffer.grad_data.numel():
                yield buffer.grad_data
