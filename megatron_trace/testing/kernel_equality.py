"""The Triton kernels of NVFP4 against their specification, for tests and tools/bench_formats.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_trace.formats import NVFP4, kernels_whole, reference
from megatron_trace.formats.kernels_inputs import Launch
from megatron_trace.testing.assertions import assert_same_bytes


def assert_kernels_equal_reference(
    x: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    trainer_x: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    launch: Launch | None = None,
    reference_device: torch.device | str = "cpu",
    what: str = "",
    truncates: bool = False,
) -> None:
    """Asserts equal bytes of rtn, rtn_record and guided, with 1, 2 and 4 bits.

    Args:
        x: float [..., K] where the kernels run: the rollout's values.
        global_scale: Decode-side scale, or one for each row.
        trainer_x: Values to guide; None is 1.02 x. They are guided by the hints of x, and by
            random bytes.
        dtype: dtype in which the dequantised values are rounded.
        launch: Tiles and warps; None is each kernel's own.
        reference_device: Where the reference runs.
        what: Name of the input in the messages.
        truncates: Whether the kernels' cast to BF16 truncates, as Triton's interpreter's does.

    Raises:
        AssertionError: Something differs; names it, and the first place.
    """
    trainer_x = x * 1.02 if trainer_x is None else trainer_x
    options = {"dtype": dtype, "launch": launch}
    scale = torch.as_tensor(global_scale, dtype=torch.float32)

    def specified(
        function: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
        *tensors: torch.Tensor,
        **settings: int,
    ) -> tuple[torch.Tensor, ...]:
        values, *others = (tensor.to(reference_device) for tensor in (*tensors, scale))
        if truncates:
            values, rounded_to = values.float(), None
        else:
            rounded_to = dtype
        got = function(values, *others, **settings, dtype=rounded_to)
        y, *rest = (got,) if isinstance(got, torch.Tensor) else got
        if truncates:
            y = _truncated(y, dtype or x.dtype).to(x.dtype)
        return (y, *rest)

    def check(got: torch.Tensor, expected: torch.Tensor, name: str) -> None:
        # The payload of a NaN that was computed is the processor's own.
        assert_same_bytes(got.to(expected.device), expected, f"{what} {name}", any_nan=True)

    check(kernels_whole.rtn(x, scale, NVFP4, **options), specified(reference.rtn, x)[0], "rtn")
    generator = torch.Generator(x.device).manual_seed(0)
    for num_bits in (1, 2, 4):
        got = kernels_whole.rtn_record(x, scale, NVFP4, num_bits=num_bits, **options)
        expected = specified(reference.rtn_record, x, num_bits=num_bits)
        for name, mine, theirs in zip(("y", "hint", "scale bytes"), got, expected, strict=True):
            check(mine, theirs, f"rtn_record, {num_bits} bit, {name}")
        _, hint, scale_bytes = got
        other = torch.randint(
            0, 256, hint.shape, dtype=torch.uint8, device=x.device, generator=generator
        )
        for name, payload in (("its hints", hint), ("random hints", other)):
            y = kernels_whole.guided(
                trainer_x, payload, scale_bytes, scale, NVFP4, num_bits=num_bits, **options
            )
            expected_y = specified(
                reference.guided, trainer_x, payload, scale_bytes, num_bits=num_bits
            )
            check(y, expected_y[0], f"guided, {num_bits} bit, {name}")


def row_scales(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Gives a global scale for each row of x: around `global_scale`, 0, denormal, huge.

    Args:
        x: float [..., K].
        global_scale: What most rows have, give or take a factor of two.

    Returns:
        FP32 [..., 1] on the device of x.
    """
    num_rows = x.shape[:-1].numel()
    row = torch.arange(num_rows, device=x.device)
    scales = global_scale * (0.5 + 0.37 * (row % 5))
    for index, unusual in ((7, 0.0), (8, 1e-42), (9, 1e30)):
        scales = torch.where(row % 23 == index, unusual, scales)
    return scales.to(torch.float32).reshape(*x.shape[:-1], 1)


def _truncated(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gives FP32 y in dtype, but BF16 by dropping the low bits, keeping NaN."""
    if dtype != torch.bfloat16:
        return y.to(dtype)
    return (y.view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)
