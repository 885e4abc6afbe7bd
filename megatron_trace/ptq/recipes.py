"""The recipes by name, each with the configuration of ModelOpt that it follows.

ModelOpt 0.47 can calibrate and run these on CUDA only (its static fake quantisation is a Triton
kernel), and knows neither our engine's experts nor its K/V cache. So the numbers are made here,
with torch, on any device; tests compare them with ModelOpt's own calibrators. What is served are
W4A4 experts and a KV4 cache for every recipe: only the scales of the weights differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_trace.formats.packed_matrix import PackedMatrix
from megatron_trace.ptq import weights
from megatron_trace.ptq.hessian import LocalHessian
from megatron_trace.ptq.recipe_names import RECIPE_NAMES
from megatron_trace.rollout.weights import MatrixPlace, WeightRule


@dataclass(frozen=True)
class Recipe:
    """A recipe of post-training quantisation.

    Attributes:
        name: Its name.
        modelopt_config: Name of ModelOpt's configuration, in `modelopt.torch.quantization`.
        needs_hessians: Whether it needs Hessians of calibration tokens.
        note: What it is, and what of it is our reading.
    """

    name: str
    modelopt_config: str
    needs_hessians: bool
    note: str

    def rule(self, hessians: Mapping[MatrixPlace, LocalHessian] | None = None) -> WeightRule:
        """Gives what `push_weights` takes.

        Args:
            hessians: Of every expert matrix, if the recipe needs them.

        Raises:
            ValueError: The recipe needs Hessians that are not given.
        """
        if not self.needs_hessians:
            without = _WITHOUT_HESSIANS[self.name]
            return lambda _, weight: without(weight)
        if hessians is None:
            raise ValueError(
                f"recipe {self.name} needs Hessians; collect them with calibrate_with_hessians"
            )

        def rule(place: MatrixPlace, weight: torch.Tensor) -> PackedMatrix:
            mean = hessians[place].mean()
            return weights.scale_search(weight, None if mean is None else mean.to(weight.device))

        return rule


_WITHOUT_HESSIANS = {
    "vanilla": weights.vanilla,
    "4over6": weights.four_over_six,
    "mse": weights.scale_search,
}
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "vanilla", "NVFP4_DEFAULT_CFG", False, "scales of the amax; what a push of ours gives"
        ),
        Recipe(
            "4over6",
            "NVFP4_FOUR_OVER_SIX_CFG",
            False,
            "the largest of a block at 6 or at 4, by squared error (arXiv 2512.02010); weights "
            "only, as ModelOpt has it",
        ),
        Recipe(
            "mse",
            "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG",
            False,
            "the block scale of least squared error, of all of E4M3",
        ),
        Recipe(
            "h_scale",
            "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG",
            True,
            "our reading of H-Scale, which has no public definition: the block scale of least "
            "dw H dw^T, of all of E4M3, H = X^T X of the block's 16 inputs",
        ),
    )
}
assert tuple(RECIPES) == RECIPE_NAMES, "one list of names"
