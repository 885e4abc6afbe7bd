"""Runs a program with Triton's interpreter doing the same in less time; Triton's version is pinned.

python quick_interpreter.py PROGRAM ARGUMENTS...

Three things of it are slow for no reason: it makes a table of types anew to look one up, makes
`triton.language` its own again in every call of a function within a kernel, and folds an axis one
value after the other where a fold of whole slices calls the same function in the same order. The
first fold by each function is compared with Triton's own.
"""

from __future__ import annotations

import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_reduce_values = interpreter.ReduceOps.generic_reduce
_find_np_dtype = interpreter._get_np_dtype
_patch_language = interpreter._patch_lang
_np_dtypes: dict[str, np.dtype] = {}
_compared: list[Any] = []
# Kernels see the first module, the functions of Triton's own that they call see the second.
_LANGUAGE = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def install() -> None:
    """Replaces the three in this process, before its first kernel."""
    interpreter._get_np_dtype = _np_dtype
    interpreter._patch_lang = lambda kernel: _patch_language(_LANGUAGE)
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.ReduceOps.generic_reduce = reduce_slices


def reduce_slices(self: interpreter.ReduceOps, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """Folds slices of an axis in their order, as Triton folds values."""
    if self.axis is None or inputs[0].handle.data.ndim < 2:
        return _reduce_values(self, inputs)
    found = _folded(self, inputs)
    if self.combine_fn not in _compared:
        _compared.append(self.combine_fn)
        for mine, theirs in zip(found, _reduce_values(self, inputs), strict=True):
            assert mine.type == theirs.type, f"{mine.type} {theirs.type}"
            assert np.array_equal(mine.handle.data, theirs.handle.data, equal_nan=True), "folds"
    return found


def _folded(self: interpreter.ReduceOps, inputs: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    data = [np.moveaxis(one.handle.data, self.axis, 0) for one in inputs]
    kinds = [one.dtype for one in inputs]

    def slices(at: int) -> list[tl.tensor]:
        return [self.to_tensor(array[at], kind) for array, kind in zip(data, kinds, strict=True)]

    found = slices(0)
    for at in range(1, len(data[0])):
        folded = self.combine_fn.fn(*found, *slices(at))
        found = list(folded) if isinstance(folded, tuple) else [folded]
    if not self.keep_dims:
        return found
    return [
        self.to_tensor(np.expand_dims(one.handle.data, self.axis), kind)
        for one, kind in zip(found, kinds, strict=True)
    ]


def _np_dtype(kind: tl.dtype) -> np.dtype:
    name = kind.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _find_np_dtype(kind.scalar)
    return _np_dtypes[name]


def _call(self: interpreter.InterpretedFunction, *arguments: Any, **options: Any) -> Any:
    """Calls a function within a kernel, whose start made `triton.language` the interpreter's."""
    function: Callable[..., Any] = self.rewrite()
    try:
        return function(*arguments, **options)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


if __name__ == "__main__":
    install()
    del sys.argv[0]
    runpy.run_path(str(Path(__file__).with_name(sys.argv[0])), run_name="__main__")
