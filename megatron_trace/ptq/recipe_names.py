"""Names of the recipes (`ptq.recipes`), for programs that must not wait for Megatron's import."""

RECIPE_NAMES = ("vanilla", "4over6", "mse", "h_scale")
