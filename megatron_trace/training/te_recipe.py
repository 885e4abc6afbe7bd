"""Guided FP4 rounding as a Transformer Engine `CustomRecipe`.

    --fp4-format e2m1 --fp4-recipe custom
    --fp4-quantizer-factory megatron_trace.training.te_recipe.guided_fake_quantizer_factory

The factories give quantisers of ours for the routed experts' grouped linears and TE's
`IdentityQuantizer` (no quantisation) for everything else, gradients included: dgrad then uses the
fake-quantised weight, wgrad the guided activation, and the gradient passes straight through.

    factory                         input of the experts' linears    their weights      trainer
    weight_fake_quantizer_factory   as it is, rounded before TE      fake-quantised     te
    guided_fake_quantizer_factory   guided, rounded in TE            fake-quantised     te_recipe
    guided_nvfp4_quantizer_factory  guided codes, native FP4         codes, native FP4  te_recipe

Written for Transformer Engine 2.20, whose custom recipes are experimental. Factories are functions
of a module because TE pickles the recipe by their name.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

# First: TE finds NCCL and cuBLAS among the libraries that torch has loaded.
import torch
from transformer_engine.common.recipe import CustomRecipe
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.quantization import QuantizerRole
from transformer_engine.pytorch.quantized_tensor import Quantizer
from transformer_engine.pytorch.tensor import (
    HybridQuantizer,
    IdentityQuantizer,
    NVFP4Tensor,
    NVFP4TensorStorage,
)

from megatron_trace.formats import E2M1_MAX, E4M3_MAX
from megatron_trace.training.te_rows import current_linear_call

# cuBLAS reads block scales in tiles of this shape.
SCALE_TILE_ROWS = 128
SCALE_TILE_COLUMNS = 4


def weight_fake_quantizer_factory(role: QuantizerRole | None) -> Quantizer:
    """Gives the quantiser of a role for operands whose activations are rounded before TE."""
    if _routed_expert_tensor(role) == "weight":
        return WeightFakeQuantizer()
    return IdentityQuantizer()


def guided_fake_quantizer_factory(role: QuantizerRole | None) -> Quantizer:
    """Gives the quantiser of a role for FP4 emulated in BF16, on any GPU generation."""
    tensor_type = _routed_expert_tensor(role)
    if tensor_type == "input":
        return GuidedFakeQuantizer()
    if tensor_type == "weight":
        return WeightFakeQuantizer()
    return IdentityQuantizer()


def guided_nvfp4_quantizer_factory(role: QuantizerRole | None) -> Quantizer:
    """Gives the quantiser of a role for native FP4 products, compute capability 10 or higher.

    The forward product takes the codes; dgrad and wgrad take their dequantised values in BF16.
    Not run natively by us: we had no such GPU.
    """
    tensor_type = _routed_expert_tensor(role)
    if tensor_type not in ("input", "weight"):
        return IdentityQuantizer()
    rowwise = GuidedNVFP4Quantizer() if tensor_type == "input" else WeightNVFP4Quantizer()
    return HybridQuantizer(
        rowwise_quantizer=rowwise,
        columnwise_quantizer=IdentityQuantizer(),
        columnwise_source="rowwise_dequantized",
    )


def _routed_expert_tensor(role: QuantizerRole | None) -> str:
    if role is None or role.module_type != "grouped_linear":
        return ""
    return role.tensor_type


class _FakeQuantizer(IdentityQuantizer):
    """Holds a fake-quantised tensor, which TE multiplies in its own dtype."""

    def copy(self) -> _FakeQuantizer:
        # A quantised tensor keeps a copy of its quantiser, and TE's would be a plain Identity.
        quantizer = type(self)(
            dtype=self.dtype, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage
        )
        quantizer.internal = self.internal
        quantizer.optimize_for_gemm = self.optimize_for_gemm
        return quantizer

    def fake_quantised(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives the values that are held, in the shape and dtype of the tensor."""
        raise NotImplementedError

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        return super().quantize_impl(self.fake_quantised(tensor))

    def update_quantized(
        self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None
    ) -> Any:
        return super().update_quantized(self.fake_quantised(src), dst, noop_flag=noop_flag)


class GuidedFakeQuantizer(_FakeQuantizer):
    """Rounds one expert's rows of the running linear's input as that call says.

    Raises:
        LookupError: It is called outside of a TRACE grouped linear.
    """

    def fake_quantised(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives the expert's rows, guided by their hints or rounded to nearest."""
        return current_linear_call().quantised(tensor)

    def is_requantization_safe(self) -> bool:
        """No: backward has no hints, so TE must keep the quantised operand."""
        return False


class WeightFakeQuantizer(_FakeQuantizer):
    """Gives an expert's weight as the engine holds it (`training.weights`).

    That is, rounded to nearest in blocks of 1 x 16, no Hadamard, nothing stochastic, with one amax
    for the whole matrix; quantised once per change of the parameter.

    Raises:
        LookupError: It is called outside of a TRACE grouped linear.
    """

    def fake_quantised(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gives the weight's values as the engine multiplies them."""
        return current_linear_call().weight(tensor).values


class _CodesQuantizer(Quantizer):
    """Hands TE NVFP4 tensors made of codes and block scales of ours.

    Scales are left linear (TE swizzles them for the product) and zero beyond the tensor.
    """

    def __init__(self, *, rowwise: bool = True, columnwise: bool = False) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)

    def copy(self) -> _CodesQuantizer:
        quantizer = type(self)(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        quantizer.internal = self.internal
        quantizer.optimize_for_gemm = self.optimize_for_gemm
        return quantizer

    def codes(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives packed codes uint8 [M, K / 2], block scales uint8 [M, B], and the global scale."""
        raise NotImplementedError

    def quantize_impl(self, tensor: torch.Tensor) -> NVFP4TensorStorage:
        packed, scale_bytes, global_scale = self.codes(tensor)
        fields = {
            "rowwise_data": packed.contiguous(),
            "rowwise_scale_inv": tiled_scales(scale_bytes),
            "columnwise_data": None,
            "columnwise_scale_inv": None,
            # TE decodes with amax / (6 * 448), within one FP32 rounding of our global scale.
            "amax_rowwise": (global_scale * (E2M1_MAX * E4M3_MAX)).reshape(1),
            "amax_columnwise": None,
            "fp4_dtype": DType.kFloat4E2M1,
            "quantizer": self,
            "with_gemm_swizzled_scales": False,
        }
        if self.internal:
            return NVFP4TensorStorage(**fields, fake_dtype=tensor.dtype)
        return NVFP4Tensor(**fields, shape=tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def update_quantized(
        self, src: torch.Tensor, dst: Any, *, noop_flag: torch.Tensor | None = None
    ) -> Any:
        if noop_flag is not None:
            raise ValueError(
                f"{type(self).__name__} cannot skip an update by a flag on the device (CUDA "
                "graphs); run without graphs or without cached weights"
            )
        dst.copy_from_storage(self.quantize_impl(src))
        return dst

    def _get_compatible_recipe(self) -> type[CustomRecipe]:
        return CustomRecipe


class GuidedNVFP4Quantizer(_CodesQuantizer):
    """Gives one expert's rows of the running linear's input as an NVFP4 operand of guided codes.

    Not run natively by us: the product needs compute capability 10. Its codes and TE's decoding of
    them are tested.

    Raises:
        LookupError: It is called outside of a TRACE grouped linear.
    """

    def codes(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives the codes of the expert's rows, guided or rounded to nearest."""
        call = current_linear_call()
        packed, scale_bytes = call.codes(tensor)
        global_scale = torch.tensor(call.rounding.global_scale, device=tensor.device)
        return packed, scale_bytes, global_scale


class WeightNVFP4Quantizer(_CodesQuantizer):
    """Gives an expert's weight as an NVFP4 operand, with the codes of `WeightFakeQuantizer`.

    Not run natively by us, like `GuidedNVFP4Quantizer`.
    """

    def codes(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gives the weight's codes, rounded to nearest."""
        weight = current_linear_call().weight(tensor)
        assert weight.global_scale is not None, "te_choice refuses formats without one"
        return weight.packed_codes, weight.scale_bytes, weight.global_scale


def tiled_scales(scale_bytes: torch.Tensor) -> torch.Tensor:
    """Gives block scales filled up with zeros to whole tiles of 128 rows and 4 columns.

    Args:
        scale_bytes: uint8 [M, B].

    Returns:
        uint8 [M rounded up to 128, B rounded up to 4].
    """
    rows, columns = scale_bytes.shape
    tiled = scale_bytes.new_zeros(
        -(-rows // SCALE_TILE_ROWS) * SCALE_TILE_ROWS,
        -(-columns // SCALE_TILE_COLUMNS) * SCALE_TILE_COLUMNS,
    )
    tiled[:rows, :columns] = scale_bytes
    return tiled
