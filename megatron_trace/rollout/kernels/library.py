"""CUDA C++ built at first use, which may include files of this folder, as a shared library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path

import torch

FOLDER = Path(__file__).parent


@functools.cache
def why_no_compiler() -> str | None:
    """Says why nothing can be built; None if it can."""
    from torch.utils import cpp_extension

    if cpp_extension.CUDA_HOME is None:
        return "it is built at first use, and there is no nvcc; install the CUDA toolkit"
    if not cpp_extension.is_ninja_available():
        return "it is built at first use, and there is no ninja; install it"
    return None


@functools.cache
def library(source: Path, *flags: str) -> ctypes.CDLL:
    """Builds a file, once for each version of it and its flags, into torch's folder of extensions.

    Args:
        source: A `.cu` file.
        flags: Further flags of nvcc, such as `-DNAME=1`.

    Raises:
        RuntimeError: There is no compiler, or it found an error.
    """
    from torch.utils import cpp_extension

    reason = why_no_compiler()
    if reason is not None:
        raise RuntimeError(f"{source.name} cannot be built: {reason}")
    major, minor = torch.cuda.get_device_capability()
    arch = f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}"
    variant = "".join(c if c.isalnum() else "_" for flag in flags for c in flag)
    path = cpp_extension.load(
        f"trace_{source.stem}_sm{major}{minor}{variant}",
        [str(source)],
        extra_cuda_cflags=["-O3", arch, *flags],
        extra_include_paths=[str(FOLDER)],
        is_python_module=False,
    )
    return ctypes.CDLL(str(path))


def pointers(tensors: Iterable[torch.Tensor | None]) -> list[ctypes.c_void_p]:
    """Gives where tensors lie, and null for None."""
    return [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]


def current_stream(device: torch.device) -> ctypes.c_void_p:
    """Gives torch's current stream of a device."""
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
