"""Whether flash-linear-attention gives a Gated DeltaNet's gradients on this GPU, and why not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version

import torch

from megatron_trace.compat import require_version

FLA = "0.6."
HOPPER = 9
# Triton's first release that computes wrong gradients on Hopper, and the first that does not again.
WRONG_FROM, RIGHT_FROM = (3, 4, 0), (3, 7, 1)


@dataclass(frozen=True)
class FlaSetup:
    """What decides it.

    Attributes:
        capability: Compute capability of the GPU, such as (9, 0).
        triton: Version of Triton.
        lacks: Why fla would not take TileLang's kernel; empty if it would.
    """

    capability: tuple[int, int]
    triton: str
    lacks: str


def require_fla(*, installed: bool, trains: bool) -> None:
    """Does nothing if fla can compute Gated DeltaNet layers on this process's GPU.

    Args:
        installed: Whether fla is there.
        trains: Whether there will be a backward pass.

    Raises:
        RuntimeError: fla is missing, or has no backward pass here.
    """
    if not installed:
        raise RuntimeError(missing_fla())
    setup = fla_setup() if trains else None
    if setup is not None and why_fla_cannot_train(setup) is not None:
        raise RuntimeError(why_fla_cannot_train(setup))


def missing_fla() -> str:
    """Gives what to do where fla is not installed."""
    return (
        "Gated DeltaNet layers on a GPU compute with flash-linear-attention, which is not "
        "installed; pip install 'megatron-trace[gpu]', or choose delta_rule=torch "
        "(--trace-delta-rule torch), which is slow"
    )


def fla_setup() -> FlaSetup:
    """Gives that of this process, which has a GPU and fla.

    Raises:
        RuntimeError: fla has another version than the one whose choice of a kernel we know.
    """
    require_version("fla-core", FLA, "the check of Gated DeltaNet's backward pass")
    from fla.ops.common.backends.tilelang import (  # pyright: ignore[reportMissingImports]
        CommonTileLangBackend,
    )
    from fla.utils import find_spec_cached  # pyright: ignore[reportMissingImports]

    backend, lacks = CommonTileLangBackend(), ""
    if find_spec_cached(backend.package_name) is None:
        lacks = "tilelang is not installed"
    elif not backend.is_available():
        lacks = "tilelang finds no nvcc (on the path, below CUDA_HOME or in /usr/local/cuda)"
    elif not backend.is_enabled():
        lacks = f"{backend.env_var}=0 switches it off"
    return FlaSetup(torch.cuda.get_device_capability(), version("triton"), lacks)


def why_fla_cannot_train(setup: FlaSetup) -> str | None:
    """Gives why fla's backward pass of the gated delta rule would end in an error; None if not.

    fla 0.6 raises in the first backward pass, after minutes of tuning (`ops/common/chunk_o.py`):
    on Hopper, Triton's code for dk multiplies wrongly transposed products of tensor cores (fla
    issues 640 and 983), and torch 2.11 wants one of these versions of Triton. It takes TileLang's
    kernel in its place where that is there.
    """
    release = tuple(int(part) for part in re.findall(r"\d+", setup.triton)[:3])
    is_wrong = setup.capability[0] == HOPPER and WRONG_FROM <= release < RIGHT_FROM
    if not is_wrong or not setup.lacks:
        return None
    return (
        "flash-linear-attention has no right backward pass of Gated DeltaNet layers on this GPU "
        f"(compute capability {'.'.join(map(str, setup.capability))}) with Triton {setup.triton}, "
        "which computes wrong gradients there, and cannot take TileLang's, because "
        f"{setup.lacks}; pip install 'megatron-trace[gpu]' and have nvcc, or choose "
        "delta_rule=torch (--trace-delta-rule torch), which is slow"
    )
