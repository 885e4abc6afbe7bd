"""A quantised weight matrix as it is stored and exchanged.

Legend: O output features, K input features, B = K / 16 blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedMatrix:
    """Codes and scales of a matrix in NVFP4.

    Attributes:
        packed_codes: uint8 [O, K / 2]; the even column in the low nibble.
        scale_bytes: uint8 [O, B], block scales as E4M3.
        global_scale: FP32 0-d tensor; value = code * block scale * global scale.
    """

    packed_codes: torch.Tensor
    scale_bytes: torch.Tensor
    global_scale: torch.Tensor

    def rows(self, start: int, stop: int) -> PackedMatrix:
        """Gives some rows, under the same global scale."""
        return PackedMatrix(
            self.packed_codes[start:stop], self.scale_bytes[start:stop], self.global_scale
        )

    def to(self, device: torch.device) -> PackedMatrix:
        """Gives the matrix on a device."""
        return PackedMatrix(
            self.packed_codes.to(device), self.scale_bytes.to(device), self.global_scale.to(device)
        )
