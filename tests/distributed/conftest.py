"""Where these tests run: their ranks are of the CPU, and compared with this process."""

import pytest
import torch

REASON = (
    "ranks of a GPU are shown by tools/check_run.py; these tests compare gloo ranks of the CPU: "
    "CUDA_VISIBLE_DEVICES= pytest tests/distributed"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips all of this folder where a GPU is visible."""
    if not torch.cuda.is_available():
        return
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.skip(reason=REASON))
