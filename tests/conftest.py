"""What all tests share: the CUDA stand-in, the number of threads, the meaning of the gpu marker."""

import pytest
import torch

from megatron_trace.testing import cpu_runtime

HAS_GPU = torch.cuda.is_available()

# Megatron binds names of torch.cuda at import, and pytest imports this file before any test.
cpu_runtime.install()
# Models of this size gain nothing from a second thread, and sums stay the same on any machine.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu where there is no CUDA device."""
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
