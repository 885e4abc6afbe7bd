"""Runs a function on several gloo ranks, each a process of its own, without ever hanging.

The function lives in a file, given by path, so that a test module needs no importable name. Each
rank gets a file store, so no port is fixed. pytest does not rewrite asserts there: the function
writes its own messages.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

POLL_S = 0.05
# After one rank failed, the others may still finish and tell what they saw.
GRACE_S = 3.0
TAIL_CHARACTERS = 4000

_CHILD = """
import importlib.util, sys
from megatron_trace.testing import cpu_runtime
cpu_runtime.install()
import torch
torch.set_num_threads(1)
path, name, folder, rank, world_size = sys.argv[1:6]
spec = importlib.util.spec_from_file_location("ranks_target", path)
module = importlib.util.module_from_spec(spec)
sys.modules["ranks_target"] = module
spec.loader.exec_module(module)
arguments = torch.load(folder + "/arguments.pt", weights_only=False)
result = getattr(module, name)(int(rank), int(world_size), folder + "/store", **arguments)
torch.save(result, folder + "/result-" + rank + ".pt")
"""


def run_ranks(
    file: str | Path, function: str, world_size: int, *, timeout_s: float, **arguments: Any
) -> list[Any]:
    """Runs `function(rank, world_size, store_path, **arguments)` on every rank.

    Args:
        file: Python file that defines the function.
        function: Its name.
        world_size: Number of ranks.
        timeout_s: Seconds after which all ranks are ended.
        **arguments: What `torch.save` can write.

    Returns:
        What each rank returned, by rank.

    Raises:
        RuntimeError: A rank failed or was ended; the message holds the end of the output of each.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(arguments, folder / "arguments.pt")
        processes = [_start(file, function, folder, rank, world_size) for rank in range(world_size)]
        try:
            timed_out = _wait(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        codes = [process.returncode for process in processes]
        if any(codes):
            raise RuntimeError(_failure(folder, codes, timeout_s if timed_out else None))
        return [
            torch.load(folder / f"result-{rank}.pt", weights_only=False)
            for rank in range(world_size)
        ]


def _start(
    file: str | Path, function: str, folder: Path, rank: int, world_size: int
) -> subprocess.Popen[bytes]:
    package = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / f"output-{rank}.txt").open("wb") as output:
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                _CHILD,
                str(file),
                function,
                str(folder),
                str(rank),
                str(world_size),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path},
        )


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Waits until all ranks ended, or one failed and the grace is over; whether time ran out."""
    deadline = time.monotonic() + timeout_s
    failed = False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() not in (None, 0) for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return not failed
        time.sleep(POLL_S)
    return False


def _failure(folder: Path, codes: list[int], timeout_s: float | None) -> str:
    reason = "a rank failed" if timeout_s is None else f"not finished after {timeout_s:g} s"
    outputs = [
        f"--- rank {rank}, exit code {code}{' (ended by the spawner)' if code == -9 else ''}\n"
        + (folder / f"output-{rank}.txt").read_text(errors="replace")[-TAIL_CHARACTERS:]
        for rank, code in enumerate(codes)
    ]
    return f"{reason}, exit codes {codes}\n" + "\n".join(outputs)
