"""What all tests share: CUDA stand-in, threads, deterministic GPUs, meaning of the gpu marker."""

import gc
import os

import pytest
import torch

from megatron_trace.testing import cpu_runtime

HAS_GPU = torch.cuda.is_available()

# Megatron binds names of torch.cuda at import, and pytest imports this file before any test.
cpu_runtime.install()
# Models of this size gain nothing from a second thread, and sums stay the same on any machine.
torch.set_num_threads(1)
if HAS_GPU:
    # Passes are compared bit by bit, but atomic additions (tokens back from their experts, the
    # embedding's gradient) come in another order each time. Some operations have no other way.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture(scope="module")
def one_rank():
    """Megatron's parallel state of one process, for all tests of a module."""
    # Only here: its import takes seconds.
    from megatron_trace.testing.single_process import single_process

    with single_process(seed=0):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu where there is no CUDA device."""
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Gives a test and its fixtures the same numbers, whatever this process ran before."""
    torch.random.default_generator.manual_seed(0)


def pytest_collection_finish() -> None:
    """Spares every collection of garbage the million objects that imports made."""
    gc.collect()
    gc.freeze()
