"""The Triton kernels of the hint codec against their specification in torch."""

from __future__ import annotations

import torch

from megatron_trace.formats import hint_kernels, packing, reference, residues
from megatron_trace.testing.assertions import assert_same_bytes


def assert_codec_kernels_equal_torch(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    trainer_x: torch.Tensor | None = None,
    what: str = "",
) -> None:
    """Asserts equal bytes of narrowed, pack_residues, unpack_residues and restored.

    Args:
        x: float [..., K] where the kernels run: the rollout's values, without NaN.
        global_scale: Decode-side scale, or one for each row.
        trainer_x: Values beside which residues are restored; None is 1.1 x.
        what: Name of the input in the messages.

    Raises:
        AssertionError: Something differs; names it, and the first place.
    """
    trainer_x = x * 1.1 if trainer_x is None else trainer_x
    scale = torch.as_tensor(global_scale, dtype=torch.float32).cpu()
    _, codes, scale_bytes = reference.rtn_record(x.cpu(), scale, num_bits=4)
    for num_bits in (1, 2, 4):
        hint = packing.narrowed(codes, num_bits)
        got = hint_kernels.narrowed(codes.to(x.device), num_bits)
        assert_same_bytes(got.cpu(), hint, f"{what}, narrowed to {num_bits} bit")
        hint, of_scales = residues.to_residues(hint, scale_bytes, num_bits=num_bits)
        packed = packing.pack_residues(of_scales)
        got = hint_kernels.pack_residues(of_scales.to(x.device))
        assert_same_bytes(got.cpu(), packed, f"{what}, packed residues")
        got = hint_kernels.unpack_residues(packed.to(x.device), of_scales.shape[-1])
        assert_same_bytes(got.cpu(), of_scales, f"{what}, residues")
        for name, values in (("x", x), ("trainer", trainer_x)):
            got = hint_kernels.restored(
                values, hint.to(x.device), of_scales.to(x.device), scale, num_bits=num_bits
            )
            expected = residues.restored(values.cpu(), hint, of_scales, scale, num_bits=num_bits)
            assert_same_bytes(
                got.cpu(), expected, f"{what}, {num_bits} bit, restored beside {name}"
            )
