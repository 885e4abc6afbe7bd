"""Runs append and attention interpreted; a program, because Triton decides at import."""

import dataclasses
import sys

import emulated_ptx
import torch
import triton.runtime.interpreter as interpreter

from megatron_trace.formats import NVFP4
from megatron_trace.rollout.kernels import append, attention, plain_attention
from megatron_trace.rollout.pages import PageLayout, Pages
from megatron_trace.testing.hard_inputs import hard_inputs
from megatron_trace.testing.paged_kv import (
    assert_append_equals_reference,
    exact_attention,
    exact_plain_attention,
    plain_cache,
    random_cache,
    relative_error,
)

# It takes about 20 us a value, in Python.
MAX_VALUES = 96
# Measured 3.5e-3: the interpreter truncates FP32 to BF16. A GPU has 1.7e-3.
TOLERANCE = 5e-3

_patch = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor, scope) -> None:
    """Lets a loop run to a loaded number: numpy makes no number of an array of one element."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def main() -> None:
    torch.set_num_threads(1)
    interpreter._patch_lang_tensor = _patch_lang_tensor
    num_checked = _check_append(torch.float32)
    for head_dim, page, ratio, lengths, new, splits in (
        (64, 8, 4, [33, 0, 1], [1, 1, 1], 3),
        (64, 8, 4, [20, 9], [3, 9], 1),
        (96, 4, 1, [17], [1], 1),
        (256, 32, 8, [70], [1], 2),
    ):
        cache = random_cache(
            PageLayout(NVFP4, head_dim, page), lengths, new, num_heads=1, ratio=ratio
        )
        got = attention.paged_attention(
            *cache.arguments, max_new_tokens=max(new), num_splits=splits
        )
        error = relative_error(got, exact_attention(cache))
        assert error < TOLERANCE, f"head dim {head_dim}, {splits} splits: {error}"
        num_checked += 1
    for head_dim, page, heads, ratio, lengths, splits in (
        (64, 8, 2, 4, [33, 0, 1], 3),
        (32, 64, 1, 1, [70], 1),
    ):
        cache = random_cache(
            PageLayout(NVFP4, head_dim, page), lengths, num_heads=heads, ratio=ratio
        )
        # The interpreter multiplies BF16 as whole numbers.
        cache = dataclasses.replace(cache, query=cache.query.half())
        keys, values = (Pages(pages.stored.half()) for pages in plain_cache(cache))
        got = plain_attention.paged_attention(
            cache.query, keys, values, *cache.arguments[3:], num_splits=splits
        )
        error = relative_error(got, exact_plain_attention(cache, keys, values))
        assert error < TOLERANCE, f"plain pages, head dim {head_dim}, {splits} splits: {error}"
        num_checked += 1
    # Last, as it changes how the interpreter computes.
    emulated_ptx.install()
    append._goes_in_pairs = lambda x: x.dtype == torch.bfloat16
    num_checked += _check_append(torch.bfloat16)
    sys.stdout.write(f"{num_checked} inputs")


def _check_append(dtype: torch.dtype) -> int:
    cases = hard_inputs(dtype)
    for number, case in enumerate(cases):
        values = case.x.flatten()
        values = values[: min(MAX_VALUES, values.numel() // 16 * 16)]
        assert_append_equals_reference(
            append.append,
            values.view(-1, 1, 16),
            case.global_scale,
            page_tokens=4,
            num_bits=(None, 1, 2, 4)[number % 4],
            what=f"{case.name} {dtype}",
        )
    return len(cases)


if __name__ == "__main__":
    main()
