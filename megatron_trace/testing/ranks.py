"""Runs a function of a test file on several gloo ranks."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from megatron_trace.testing import cpu_runtime


def run_ranks(
    file: str, function: str, *, world_size: int, parallel: dict[str, int], **arguments: Any
) -> None:
    """Calls a function on every rank of a fresh gloo group with Megatron's parallel state.

    pytest rewrites no asserts in spawned ranks: give each its message.

    Args:
        file: Path of the Python file that defines the function, `__file__` of a test.
        function: Its name; it is called as function(rank, **arguments).
        world_size: Number of ranks.
        parallel: Sizes for `initialize_model_parallel`.
        **arguments: Picklable arguments of the function.

    Raises:
        ProcessRaisedException: A rank failed; the message holds its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        start_processes(
            _run,
            (file, function, store, world_size, parallel, arguments),
            nprocs=world_size,
            start_method="spawn",
        )


def _run(
    rank: int,
    file: str,
    function: str,
    store: Path,
    world_size: int,
    parallel: dict[str, int],
    arguments: dict[str, Any],
) -> None:
    cpu_runtime.install()
    torch.set_num_threads(1)
    # Only now: Megatron binds names of torch.cuda when it is imported.
    from megatron_trace.testing.single_process import init_rank

    init_rank(store, rank=rank, world_size=world_size, seed=0, **parallel)
    spec = importlib.util.spec_from_file_location("ranks_of_a_test", file)
    assert spec is not None, f"{file} is no Python file"
    assert spec.loader is not None, f"{file} is no Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        getattr(module, function)(rank, **arguments)
    finally:
        torch.distributed.destroy_process_group()
