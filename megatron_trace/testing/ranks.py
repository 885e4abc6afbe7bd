"""Runs a function on several gloo ranks, each a process of its own, without ever hanging.

The function lives in a file, given by path, so that a test module needs no importable name. Each
rank gets a file store, so no port is fixed. pytest does not rewrite asserts there: the function
writes its own messages.

Ranks are forked from one process that imported Megatron, and have its environment; it starts with
the first of them and ends with this process. Where there is a GPU, whose driver does not survive a
fork, ranks are started anew.
"""

from __future__ import annotations

import importlib.util
import multiprocessing.process
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_trace.testing import cpu_runtime

POLL_S = 0.05
# After one rank failed, the others may still finish and tell what they saw.
GRACE_S = 3.0
TAIL_CHARACTERS = 4000

# Imported once, before ranks are forked from the process that did; Megatron takes seconds.
_PRELOAD = ("megatron_trace.testing.cpu_runtime_installed", "megatron_trace.testing.single_process")


def run_ranks(
    file: str | Path,
    function: str,
    *,
    world_size: int,
    parallel: Mapping[str, int] | None = None,
    seed: int = 0,
    timeout_s: float = 600.0,
    echo: Callable[[str], Any] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Runs `function(rank, **arguments)` on every rank of a gloo group.

    Args:
        file: Python file that defines the function.
        function: Its name.
        world_size: Number of ranks.
        parallel: Sizes for Megatron's `initialize_model_parallel`, such as
            expert_model_parallel_size=2; None leaves Megatron alone.
        seed: Seed of every rank.
        timeout_s: Seconds after which all ranks are ended.
        echo: Takes each line that a rank prints, as it comes.
        **arguments: What `torch.save` can write.

    Returns:
        What each rank returned, by rank.

    Raises:
        RuntimeError: A rank failed or was ended; the message holds the end of the output of each.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save((arguments, parallel, seed), folder / "arguments.pt")
        processes = [_start(file, function, folder, rank, world_size) for rank in range(world_size)]
        outputs = _Outputs(folder, world_size, echo)
        try:
            timed_out = _wait(processes, timeout_s, outputs)
        finally:
            for process in processes:
                process.kill()
                process.join()
            outputs.pass_on()
        codes = [process.exitcode for process in processes]
        if any(codes):
            raise RuntimeError(_failure(folder, codes, timeout_s if timed_out else None))
        return [
            torch.load(folder / f"result-{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


def run_rank(function: Callable[..., Any], folder: str, rank: int, world_size: int) -> None:
    """Runs one rank within its own process; called by the process that `run_ranks` starts."""
    torch.set_num_threads(1)
    arguments, parallel, seed = torch.load(Path(folder) / "arguments.pt", weights_only=False)
    store = Path(folder) / "store"
    if parallel is None:
        torch.manual_seed(seed)
        join_group(store, rank=rank, world_size=world_size)
    else:
        # Only here: Megatron takes seconds to import.
        from megatron_trace.testing.single_process import init_rank

        init_rank(store, rank=rank, world_size=world_size, seed=seed, **parallel)
    result = function(rank, **arguments)
    torch.save(result, Path(folder) / f"result-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def join_group(store: Path, *, rank: int, world_size: int) -> None:
    """Joins the group of a file store that is fresh for it: gloo, and NCCL with a GPU per rank."""
    file_store = dist.FileStore(str(store), world_size)  # pyright: ignore[reportPrivateImportUsage]
    backend = "gloo"
    if torch.cuda.is_available() and world_size <= torch.cuda.device_count():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=file_store, rank=rank, world_size=world_size)


def _start(
    file: str | Path, function: str, folder: Path, rank: int, world_size: int
) -> multiprocessing.process.BaseProcess:
    (folder / f"output-{rank}.txt").touch()
    start = multiprocessing.get_context("spawn").Process
    if not torch.cuda.is_available():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOAD))
        start = context.Process
    process = start(
        target=_run_in_process,
        args=(str(file), function, str(folder), rank, world_size),
    )
    process.start()
    return process


def _run_in_process(file: str, function: str, folder: str, rank: int, world_size: int) -> None:
    """Is the whole life of a rank's process."""
    output = os.open(Path(folder) / f"output-{rank}.txt", os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Its own processes start as those of any program do, not as it did.
    multiprocessing.set_start_method(None, force=True)
    cpu_runtime.install()
    spec = importlib.util.spec_from_file_location("ranks_target", file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules["ranks_target"] = module
    spec.loader.exec_module(module)
    run_rank(getattr(module, function), folder, rank, world_size)


class _Outputs:
    """Passes on whole lines of the ranks' outputs, with the seconds since the start.

    Args:
        folder: Where the outputs are.
        world_size: Number of ranks.
        echo: Takes each line; None for nobody.
    """

    def __init__(self, folder: Path, world_size: int, echo: Callable[[str], Any] | None) -> None:
        self._paths = [folder / f"output-{rank}.txt" for rank in range(world_size)]
        self._passed_bytes = [0] * world_size
        self._begun = time.monotonic()
        self._echo = echo

    def pass_on(self) -> None:
        """Passes on the lines that were not passed on yet."""
        if self._echo is None:
            return
        for rank, path in enumerate(self._paths):
            with path.open("rb") as output:
                output.seek(self._passed_bytes[rank])
                whole, end, _ = output.read().rpartition(b"\n")
            self._passed_bytes[rank] += len(whole + end)
            for line in whole.decode(errors="replace").splitlines():
                self._echo(f"[{time.monotonic() - self._begun:5.1f} s, rank {rank}] {line}")


def _wait(
    processes: Sequence[multiprocessing.process.BaseProcess], timeout_s: float, outputs: _Outputs
) -> bool:
    """Waits until all ranks ended, or one failed and the grace is over; whether time ran out."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while any(process.exitcode is None for process in processes):
        outputs.pass_on()
        if not failed and any(process.exitcode not in (None, 0) for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return not failed
        time.sleep(POLL_S)
    return False


def _failure(folder: Path, codes: Sequence[int | None], timeout_s: float | None) -> str:
    reason = "a rank failed" if timeout_s is None else f"not finished after {timeout_s:g} s"
    outputs = [
        f"--- rank {rank}, exit code {code}{' (ended by the spawner)' if code == -9 else ''}\n"
        + (folder / f"output-{rank}.txt").read_text(errors="replace")[-TAIL_CHARACTERS:]
        for rank, code in enumerate(codes)
    ]
    return f"{reason}, exit codes {codes}\n" + "\n".join(outputs)
