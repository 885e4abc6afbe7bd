"""Calls of a user's function in processes of their own, each with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from socket import socketpair
from typing import Any, Literal

Kind = Literal["raised", "timed_out", "crashed", "invalid"]


@dataclass(frozen=True)
class Failure:
    """A call that gave no result.

    Attributes:
        kind: `raised` an exception; `timed_out`; `crashed` its process; `invalid` result.
        reason: In words, or the traceback.
    """

    kind: Kind
    reason: str

    @property
    def sentence(self) -> str:
        """The reason in one line: of a traceback the last one."""
        return f"{self.kind}: {self.reason.strip().splitlines()[-1]}"


class _Worker:
    """A process that waits for calls, and the connection to it."""

    def __init__(self, name: str, result: str) -> None:
        ours, theirs = socketpair()
        command = [sys.executable, "-m", "megatron_trace.rl.function_worker"]
        descriptor = theirs.fileno()
        self.process = subprocess.Popen(
            [*command, name, result, str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # So that what the function starts can be ended with it.
        )
        theirs.close()
        self.connection = Connection(ours.detach())

    def wait_until_ready(self, name: str, timeout_s: float) -> None:
        """Raises ValueError unless the function is loaded in time."""
        reason = f"it took more than {timeout_s:g} s to import"
        if self.connection.poll(timeout_s):
            try:
                state, reason = self.connection.recv()
            except (EOFError, OSError):
                state, reason = "failed", f"its process ended with {self.process.wait()}"
            if state == "ready":
                return
        self.end()
        raise ValueError(
            f"function {name} cannot be loaded: {reason.strip()}\nname it as module:function, with "
            "the module in the current folder or on PYTHONPATH, or as path/to/file.py:function"
        )

    def end(self) -> int:
        """Ends the process and what it started; gives its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


class FunctionPool:
    """Processes that call one function of the user's.

    A call that raises, takes too long, ends its process or gives no proper result gives a
    `Failure`; a process that is lost is replaced. Processes start when they are needed.

    Args:
        name: `module:function` or `path/to/file.py:function`.
        result: What it must return: a `number`, or a `reply` (see `function_worker`).
        num_workers: Processes at most.
        timeout_s: Seconds that a call may take.
        start_timeout_s: Seconds that importing the module may take.

    Raises:
        ValueError: The function cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        *,
        result: Literal["number", "reply"],
        num_workers: int,
        timeout_s: float,
        start_timeout_s: float = 300.0,
    ) -> None:
        self.name = name
        self._result = result
        self._num_workers = num_workers
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._idle: list[_Worker] = []
        self._start(1)

    def results(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Gives what the function returned for each tuple of arguments, or a `Failure`."""
        waiting = deque(enumerate(calls))
        results: list[Any] = [None] * len(calls)
        running: dict[Connection, tuple[_Worker, int, float]] = {}
        self._start(min(self._num_workers, len(calls)) - len(self._idle))
        try:
            while waiting or running:
                while waiting and len(running) < self._num_workers:
                    number, arguments = waiting.popleft()
                    worker = self._sent(arguments)
                    deadline = time.monotonic() + self._timeout_s
                    running[worker.connection] = (worker, number, deadline)
                until = min(deadline for _, _, deadline in running.values())
                ready = wait(list(running), max(0.0, until - time.monotonic()))
                now = time.monotonic()
                for connection in list(running):
                    worker, number, deadline = running[connection]
                    if connection in ready or now >= deadline:
                        del running[connection]
                        results[number] = self._received(worker, is_ready=connection in ready)
        finally:
            for worker, _, _ in running.values():
                worker.end()
        return results

    def close(self) -> None:
        """Ends all processes."""
        while self._idle:
            self._idle.pop().end()

    def _start(self, number: int) -> None:
        started = [_Worker(self.name, self._result) for _ in range(number)]
        try:
            for worker in started:
                worker.wait_until_ready(self.name, self._start_timeout_s)
        except BaseException:
            for worker in started:
                if worker.process.poll() is None:
                    worker.end()
            raise
        self._idle += started

    def _sent(self, arguments: tuple[Any, ...]) -> _Worker:
        """Gives a worker that got the arguments; one that ended while it was idle is replaced."""
        while True:
            if not self._idle:
                self._start(1)
            worker = self._idle.pop()
            try:
                worker.connection.send(arguments)
            except (BrokenPipeError, ConnectionResetError):
                worker.end()
                continue
            return worker

    def _received(self, worker: _Worker, *, is_ready: bool) -> Any:
        if not is_ready:
            worker.end()
            return Failure("timed_out", f"it took more than {self._timeout_s:g} s")
        try:
            state, value = worker.connection.recv()
        except (EOFError, OSError):
            status = worker.process.wait()
            worker.end()
            how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
            return Failure("crashed", f"its process ended {how}")
        self._idle.append(worker)
        return value if state == "value" else Failure(state, value)
