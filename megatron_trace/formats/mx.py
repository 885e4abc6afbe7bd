"""The MX formats in plain torch: small floats in blocks of 32 under power-of-two scales.

| | code | beside |
|---|---|---|
| `mxfp4` | E2M1, 0 to 15 | activations of the same (W4A4), or of `mxfp8` (W4A8) |
| `mxfp8` | E4M3, the byte of torch.float8_e4m3fn | weights of `mxfp4` |

Legend: `...` any leading shape, K values of a row (a multiple of 32), B = K / 32 blocks of a row.
value = code * 2^(scale byte - 127). There is no global scale: the argument is there so that every
format is called alike, and must be None.

The rounding of codes is `minifloat`'s, the rules of the scale are `scales_e8m0`'s. A hint of 1 bit
says which of the two values beside x is the rollout's: neighbours differ in the lowest bit of the
code. At the edges:
* The default rule is rceil: what ModelOpt, Transformer Engine and Blackwell's instruction do, hence
  what a rollout does and its trainer must do. docs/formats.md has the errors of each rule.
* A block whose byte is 0 has codes 0, and `guided` gives zeros for it, whatever the trainer has;
  `decode` multiplies by the 2^-127 that OCP says.
* A block with a NaN has byte 255 and decodes to NaN. A block with an Inf has the byte of the
  largest scale, and products beyond FP32 are Inf.
* In MXFP8, beyond 448 lies 448, or 416 or 448 when guided.

Source: OCP Microscaling Formats MX 1.0, sections 5.3.1, 5.3.3 and 6.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_trace.formats import minifloat, scales_e8m0
from megatron_trace.formats.blocks import fp32_blocks, rounded_like, split
from megatron_trace.formats.checks import (
    require_blocks,
    require_guide,
    require_input,
    require_no_global_scale,
    require_num_bits,
    require_scales,
)
from megatron_trace.formats.constants import MX_BLOCK_SIZE
from megatron_trace.formats.minifloat import E2M1, E4M3, Minifloat
from megatron_trace.formats.packing import pack_hint, unpack_hint
from megatron_trace.formats.scales_e8m0 import DEFAULT_RULE, ScaleRule


@dataclass(frozen=True)
class MXFormat:
    """The specification of one of them, by functions of the names that other formats' have.

    Attributes:
        element: The small float of the codes.
    """

    element: Minifloat

    def encode(
        self, x: torch.Tensor, global_scale: None = None, *, scale_rule: ScaleRule = DEFAULT_RULE
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gives codes and block scales of x, rounded to nearest even.

        Args:
            x: float [..., K].
            global_scale: None.
            scale_rule: How the scale follows from the largest magnitude of a block.

        Returns:
            codes: uint8 [..., K].
            scale_bytes: uint8 [..., B], E8M0.

        Raises:
            ValueError: K is not a multiple of 32, a global scale is given, or the rule is unknown.
        """
        blocks, scale_bytes, effective = self._own_scales(x, global_scale, scale_rule)
        codes = minifloat.nearest_codes(self.element, blocks, effective)
        return codes.reshape(x.shape), scale_bytes

    def own_scale_bytes(
        self, x: torch.Tensor, global_scale: None = None, *, scale_rule: ScaleRule = DEFAULT_RULE
    ) -> torch.Tensor:
        """Gives the block scales that `encode` gives, without its codes.

        Args:
            x: float [..., K].
            global_scale: None.
            scale_rule: How the scale follows from the largest magnitude of a block.

        Returns:
            uint8 [..., B], E8M0.

        Raises:
            ValueError: K is not a multiple of 32, a global scale is given, or the rule is unknown.
        """
        require_no_global_scale(global_scale)
        require_input(x, MX_BLOCK_SIZE)
        # Magnitudes and their largest are exact in every dtype.
        amax = split(x, MX_BLOCK_SIZE).abs().amax(-1).to(torch.float32)
        return scales_e8m0.scale_bytes_of(amax, self.element, scale_rule)

    def scale_distance(
        self,
        x: torch.Tensor,
        scale_bytes: torch.Tensor,
        global_scale: None = None,
        *,
        scale_rule: ScaleRule = DEFAULT_RULE,
    ) -> torch.Tensor:
        """Gives how far block scales are from those that x has, in eighths of a power of two.

        Args:
            x: float [..., K].
            scale_bytes: uint8 [..., B], E8M0.
            global_scale: None.
            scale_rule: How the scale follows from the largest magnitude of a block.

        Returns:
            int16 [..., B], multiples of 8; 0 only where the bytes are equal.

        Raises:
            ValueError: Shapes disagree, K is not a multiple of 32, a global scale is given, or the
                rule is unknown.
        """
        require_scales(x, scale_bytes, MX_BLOCK_SIZE)
        own = self.own_scale_bytes(x, global_scale, scale_rule=scale_rule)
        return (own.to(torch.int16) - scale_bytes.to(torch.int16)).abs_().mul_(8)

    def decode(
        self,
        codes: torch.Tensor,
        scale_bytes: torch.Tensor,
        global_scale: None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Gives the values of codes.

        Args:
            codes: uint8 [..., K].
            scale_bytes: uint8 [..., B], E8M0.
            global_scale: None.
            dtype: dtype of the result; the FP32 products are rounded to it.

        Returns:
            dtype [..., K].

        Raises:
            ValueError: Shapes disagree, K is not a multiple of 32, or a global scale is given.
        """
        require_no_global_scale(global_scale)
        require_blocks(codes, MX_BLOCK_SIZE)
        require_scales(codes, scale_bytes, MX_BLOCK_SIZE)
        scales = scales_e8m0.decode(scale_bytes)
        values = minifloat.decoded(self.element, split(codes, MX_BLOCK_SIZE), scales)
        return values.reshape(codes.shape).to(dtype)

    def rtn(
        self,
        x: torch.Tensor,
        global_scale: None = None,
        *,
        dtype: torch.dtype | None = None,
        scale_rule: ScaleRule = DEFAULT_RULE,
    ) -> torch.Tensor:
        """Gives x fake-quantised by rounding to nearest even under its own block scales.

        Args:
            x: float [..., K].
            global_scale: None.
            dtype: dtype in which the dequantised values are rounded; None is that of x.
            scale_rule: How the scale follows from the largest magnitude of a block.

        Returns:
            [..., K] in the dtype of x: the decoded codes of `encode`.

        Raises:
            ValueError: K is not a multiple of 32, a global scale is given, or the rule is unknown.
        """
        blocks, _, effective = self._own_scales(x, global_scale, scale_rule)
        return rounded_like(minifloat.nearest_values(self.element, blocks, effective), x, dtype)

    def rtn_record(
        self,
        x: torch.Tensor,
        global_scale: None = None,
        *,
        num_bits: int,
        dtype: torch.dtype | None = None,
        scale_rule: ScaleRule = DEFAULT_RULE,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives what `rtn` gives, with the hint and the block scales that it used.

        Args:
            x: float [..., K].
            global_scale: None.
            num_bits: 1, 2 (lowest bits) or those of a code per value of the hint.
            dtype: dtype in which the dequantised values are rounded; None is that of x.
            scale_rule: How the scale follows from the largest magnitude of a block.

        Returns:
            y: [..., K] in the dtype of x.
            hint: uint8 [..., K * num_bits / 8].
            scale_bytes: uint8 [..., B], E8M0.

        Raises:
            ValueError: K is not a multiple of 32, num_bits is not that of a hint, a global scale
                is given, or the rule is unknown.
        """
        require_num_bits(num_bits, self.element.code_bits)
        blocks, scale_bytes, effective = self._own_scales(x, global_scale, scale_rule)
        codes, values = minifloat.nearest(self.element, blocks, effective)
        hint = pack_hint(codes.reshape(x.shape), num_bits)
        return rounded_like(values, x, dtype), hint, scale_bytes

    def guided_codes(
        self,
        x: torch.Tensor,
        hint: torch.Tensor,
        scale_bytes: torch.Tensor,
        global_scale: None = None,
        *,
        num_bits: int,
    ) -> torch.Tensor:
        """Gives, of the two codes beside x, the one that the rollout's hint says.

        Args:
            x: float [..., K]; the trainer's values.
            hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes.
            scale_bytes: uint8 [..., B]; the rollout's block scales.
            global_scale: None.
            num_bits: 1, 2, or those of a code.

        Returns:
            uint8 [..., K], with the sign of x.

        Raises:
            ValueError: Shapes disagree, K is not a multiple of 32, num_bits is not that of a hint,
                or a global scale is given.
        """
        blocks, effective, wanted = self._guide(x, hint, scale_bytes, global_scale, num_bits)
        codes = minifloat.guided_codes(self.element, blocks, effective, wanted, num_bits=num_bits)
        return codes.reshape(x.shape)

    def guided(
        self,
        x: torch.Tensor,
        hint: torch.Tensor,
        scale_bytes: torch.Tensor,
        global_scale: None = None,
        *,
        num_bits: int,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Gives x fake-quantised to the codes that the rollout's hint says.

        Args:
            x: float [..., K]; the trainer's values.
            hint: uint8 [..., K * num_bits / 8]; packed lowest bits (1, 2) or codes.
            scale_bytes: uint8 [..., B]; the rollout's block scales.
            global_scale: None.
            num_bits: 1, 2, or those of a code.
            dtype: dtype in which the dequantised values are rounded; None is that of x.

        Returns:
            [..., K] in the dtype of x: the decoded `guided_codes`, but NaN where x is NaN.

        Raises:
            ValueError: Shapes disagree, K is not a multiple of 32, num_bits is not that of a hint,
                or a global scale is given.
        """
        blocks, effective, wanted = self._guide(x, hint, scale_bytes, global_scale, num_bits)
        values = minifloat.guided_values(self.element, blocks, effective, wanted, num_bits=num_bits)
        return rounded_like(values, x, dtype)

    def _own_scales(
        self, x: torch.Tensor, global_scale: None, scale_rule: ScaleRule
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives blocks FP32 [..., B, 32], scale bytes, effective scales FP32 [..., B]."""
        require_no_global_scale(global_scale)
        require_input(x, MX_BLOCK_SIZE)
        blocks = fp32_blocks(x, MX_BLOCK_SIZE)
        scale_bytes = scales_e8m0.scale_bytes_of(blocks.abs().amax(-1), self.element, scale_rule)
        return blocks, scale_bytes, scales_e8m0.effective(scale_bytes)

    def _guide(
        self,
        x: torch.Tensor,
        hint: torch.Tensor,
        scale_bytes: torch.Tensor,
        global_scale: None,
        num_bits: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives blocks, effective scales, and the rollout's bits or codes uint8 [..., K]."""
        require_no_global_scale(global_scale)
        require_guide(
            x,
            hint,
            scale_bytes,
            num_bits,
            block_size=MX_BLOCK_SIZE,
            code_bits=self.element.code_bits,
        )
        blocks = fp32_blocks(x, MX_BLOCK_SIZE)
        return blocks, scales_e8m0.effective(scale_bytes), unpack_hint(hint, num_bits)


mxfp4 = MXFormat(E2M1)
mxfp8 = MXFormat(E4M3)
