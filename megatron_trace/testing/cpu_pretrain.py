"""What Megatron's training loop needs beyond `cpu_runtime` to run without a GPU.

Source: Megatron-Core 0.19.2, training/initialize.py, training/training.py.
"""

from __future__ import annotations

import functools

from megatron_trace.testing import cpu_runtime


def install() -> None:
    """Lets `megatron.training.pretrain` run on the CPU; does nothing where CUDA is available.

    Call it after `cpu_runtime.install()`. Megatron asserts that CUDA is available, and warms fused
    kernels up.
    """
    if not cpu_runtime.is_installed():
        return
    from megatron.training import training

    training.initialize_megatron = functools.partial(
        training.initialize_megatron, allow_no_cuda=True
    )
    training.set_jit_fusion_options = lambda **_: None
