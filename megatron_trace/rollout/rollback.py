"""The weights that serve, kept while new ones are taken, and put back if that fails.

They are kept where it costs least: in memory that is lent, such as the cache of keys and values
while no sample is in flight; in free memory of the device; else on the host. BF16 experts beside
packed ones are not kept at all, as they are the values of the packed codes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron_trace.formats import ops
from megatron_trace.models.hybrid import DecoderLayer, named_expert_linears
from megatron_trace.rollout.packed_experts import PackedRoutedExperts
from megatron_trace.rollout.sites import OPERAND_DTYPE

# Of the device, for what else is allocated during a push.
_SPARED_BYTES = 2 << 30
_ALIGNMENT = 256


class _Keeper:
    """Copies tensors, each to the first place that has room for it.

    Args:
        lent: Memory of the device, uint8 [bytes], whose contents nobody needs; None if there is
            none.
    """

    def __init__(self, lent: torch.Tensor | None) -> None:
        self._lent, self._used = lent, 0
        self._room_bytes: int | None = None
        self._has_released = False
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copies tensors."""
        for tensor in tensors:
            self._pairs.append((tensor, self._place(tensor).copy_(tensor)))

    def put_back(self) -> None:
        """Gives every tensor the values that it had; it stays where it is."""
        for tensor, kept in self._pairs:
            tensor.copy_(kept)

    def end(self) -> None:
        """Forgets the copies; what was lent is zero then, as a new cache is."""
        self._pairs.clear()
        if self._lent is not None:
            self._lent[: self._used].zero_()

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        num_bytes = tensor.numel() * tensor.element_size()
        lent = self._lent
        if lent is not None and lent.device == tensor.device:
            stop = self._used + num_bytes
            if stop <= len(lent):
                part = lent[self._used : stop]
                self._used = min(math.ceil(stop / _ALIGNMENT) * _ALIGNMENT, len(lent))
                return part.view(tensor.dtype).view(tensor.shape)
        if tensor.is_cuda and self._has_room(num_bytes, tensor.device):
            return torch.empty_like(tensor)
        return torch.empty_like(tensor, device="cpu")

    def _has_room(self, num_bytes: int, device: torch.device) -> bool:
        """Whether a device has so many more bytes for copies; they are taken off then."""
        if self._room_bytes is None:
            self._room_bytes = _free_bytes(device)
        if num_bytes > self._room_bytes and not self._has_released:
            # What torch holds for reuse, such as the copies of the push before, counts as taken.
            self._has_released = True
            torch.cuda.empty_cache()
            self._room_bytes = _free_bytes(device)
        if num_bytes > self._room_bytes:
            return False
        self._room_bytes -= num_bytes
        return True


def _free_bytes(device: torch.device) -> int:
    """Gives the bytes that the device has and this process may take, without what is spared."""
    free, total = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min(free, int(share * total) - torch.cuda.memory_reserved(device)) - _SPARED_BYTES


@contextlib.contextmanager
def kept_on_failure(
    model: torch.nn.Module,
    *,
    lent: torch.Tensor | None = None,
    packed_layers: Sequence[DecoderLayer] = (),
) -> Iterator[None]:
    """Puts the model's parameters and buffers back if what is done inside the context fails.

    They stay where they are, so that graphs that read them stay valid.

    Args:
        model: Model of the engine.
        lent: Memory of the device, uint8 [bytes], that may be overwritten meanwhile and is zero
            afterwards where it was; None if there is none.
        packed_layers: Layers whose BF16 experts have the values of their packed ones.
    """
    experts = [
        (packed, expert, matrix, linear.weight)
        for layer in packed_layers
        if isinstance(packed := getattr(layer.moe, "routed_experts", None), PackedRoutedExperts)
        for expert, matrix, linear in named_expert_linears(layer)
        if isinstance(linear.weight, torch.Tensor) and not linear.weight.is_meta
    ]
    decoded = {id(weight) for *_, weight in experts}
    keeper = _Keeper(lent)
    try:
        # The cache is a tensor of inference mode, which refuses to be changed outside of it.
        with torch.inference_mode():
            keeper.keep(
                tensor
                for tensor in (*model.parameters(), *model.buffers())
                if not tensor.is_meta and id(tensor) not in decoded
            )
        try:
            yield
        except BaseException:
            with torch.inference_mode():
                keeper.put_back()
                for packed, expert, matrix, weight in experts:
                    weight.copy_(ops.decode(*packed.matrix(expert, matrix), dtype=OPERAND_DTYPE))
            raise
    finally:
        with torch.inference_mode():
            keeper.end()
