"""Watches a process of this machine, and says where it stands when it makes no progress.

    python tools/stall_watch.py PID PROGRESS_FILE --after 4 [--native]

PROGRESS_FILE holds two int64 counters that the process raises: of its work, and of a thread that
does nothing else. If the first stands still for `--after` seconds, this prints what every thread
waits for in the kernel, how much processor time each took meanwhile, what the GPU does, and how
the machine's memory changed, and asks the process for the Python stack of every thread (SIGUSR1).
It also prints gaps of its own clock, in which the whole machine stood still.

The process joins in by `Progress`. Linux only; what needs root says so where it is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_COUNTERS = struct.Struct("qq")
_BEAT_S = 0.02
_GAP_S = 0.5
_MEMORY_STEP_KB = 1 << 20
_QUIET = "futex", "poll", "nanosleep"
_QUERIES = (
    "gpu=utilization.gpu,utilization.memory,memory.used,clocks.sm,pstate",
    "compute-apps=pid,used_memory",
)
_VMSTAT = ("allocstall", "compact_stall", "pgmajfault", "pswpout", "balloon", "thp_fault_alloc")


class Progress:
    """What a watched process counts.

    Args:
        path: File of the counters.

    Attributes:
        longest_gap_s: Longest time in which the counting thread did not get its turn.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(_COUNTERS.pack(0, 0))
        with path.open("r+b") as file:
            self._counters = mmap.mmap(file.fileno(), _COUNTERS.size)
        self._work = self._beats = 0
        self.longest_gap_s = 0.0
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        threading.Thread(target=self._beat, name="stall-watch-beat", daemon=True).start()

    def made(self) -> None:
        """Says that some work was done."""
        self._work += 1
        self._store()

    def _store(self) -> None:
        self._counters[:] = _COUNTERS.pack(self._work, self._beats)

    def _beat(self) -> None:
        last = time.perf_counter()
        while True:
            time.sleep(_BEAT_S)
            now = time.perf_counter()
            self.longest_gap_s = max(self.longest_gap_s, now - last - _BEAT_S)
            last = now
            self._beats += 1
            self._store()


@contextlib.contextmanager
def watched(folder: Path, *, after_s: float, native: bool) -> Iterator[Progress]:
    """Watches this process inside the context, from a process of its own.

    Args:
        folder: Gets the file of the counters.
        after_s: Seconds without progress that are too many.
        native: Whether cuda-gdb is asked for native stacks, which stops the process meanwhile.
    """
    path = folder / "progress"
    progress = Progress(path)
    command = [sys.executable, __file__, str(os.getpid()), str(path), "--after", str(after_s)]
    watcher = subprocess.Popen(command + ["--native"] * native)
    try:
        yield progress
    finally:
        watcher.terminate()
        watcher.wait()


def watch(pid: int, path: Path, after_s: float, *, native: bool) -> None:
    """Watches until the process is gone."""
    started = last = time.monotonic()
    work, since, reported = -1, last, 0
    memory = {"MemTotal": 0}
    before = _vmstat()
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.1)
        now = time.monotonic()
        if now - last - 0.1 > _GAP_S:
            _say(started, f"this watcher itself stood still for {now - last - 0.1:.1f} s")
        last = now
        known = _meminfo()
        if abs(known["MemTotal"] - memory["MemTotal"]) >= _MEMORY_STEP_KB:
            _say(started, "memory " + ", ".join(f"{k} {v >> 20} GiB" for k, v in known.items()))
            memory = known
        current, beats = _COUNTERS.unpack(path.read_bytes())
        if current != work:
            if reported:
                _say(started, f"goes on, after {now - since:.1f} s")
            work, since, reported = current, now, 0
        elif now - since > after_s * (1 + 2 * reported):
            reported += 1
            _say(started, f"no progress beyond {work} for {now - since:.1f} s; {beats} beats")
            _report(pid, path, before)
            # Not before the first work is done: until then it compiles.
            if native and reported == 2 and work:
                _native(pid)


def _report(pid: int, path: Path, before: dict[str, int]) -> None:
    beats = _COUNTERS.unpack(path.read_bytes())[1]
    tasks = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))
    ticks = {task: _ticks(task) for task in tasks}
    time.sleep(0.4)
    more_beats = _COUNTERS.unpack(path.read_bytes())[1] - beats
    print(f"  beats in .4 s: {more_beats} (0: no thread of Python gets a turn)")
    num_quiet = 0
    for task in tasks:
        used = _ticks(task) - ticks[task]
        parts = {name: _read(task / name) for name in ("comm", "wchan", "syscall", "stack")}
        state = _read(task / "stat").rpartition(")")[2].split()[:1]
        if not used and any(name in parts["wchan"] for name in _QUIET):
            num_quiet += 1
            continue
        call, stack = parts["syscall"].split()[:3], " < ".join(parts["stack"].split("\n")[:8])
        print(f"  {task.name} {parts['comm']} {state} {used} ticks {parts['wchan']} {call} {stack}")
    print(f"  {num_quiet} more threads wait for another one, a timer or a socket")
    now = _vmstat()
    print("  vmstat since start:", {k: v - before.get(k, 0) for k, v in now.items()}, _meminfo())
    for query in _QUERIES:
        command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader"]
        print("  nvidia-smi", query, _output(command, 5), flush=True)
    # The GPU's driver tells of its faults here.
    print("  kernel log:", _output(["dmesg"], 5)[-600:], flush=True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)


def _native(pid: int) -> None:
    command = ["cuda-gdb", "-p", str(pid), "--batch", "-ex", "thread apply all bt 14"]
    print(_output(command, 25)[-12000:], flush=True)


def _output(command: list[str], limit_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return repr(error)
    return (done.stdout + done.stderr).strip()


def _say(started: float, text: str) -> None:
    print(f"[watch {time.monotonic() - started:.1f} s] {text}", flush=True)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        return f"({error.strerror})"


def _ticks(task: Path) -> int:
    fields = _read(task / "stat").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12]) if len(fields) > 12 else 0


def _meminfo() -> dict[str, int]:
    """Gives some lines of /proc/meminfo, in kB."""
    names = ("MemTotal", "MemFree", "MemAvailable", "Cached")
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) for line in lines if line[0][:-1] in names}


def _vmstat() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return {line[0]: int(line[1]) for line in lines if line[0].startswith(_VMSTAT)}


def main() -> None:
    """Watches as the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pid", type=int)
    parser.add_argument("progress", type=Path)
    parser.add_argument("--after", type=float, default=4.0, help="seconds without progress")
    parser.add_argument("--native", action="store_true", help="native stacks, by cuda-gdb")
    options = parser.parse_args()
    watch(options.pid, options.progress, options.after, native=options.native)


if __name__ == "__main__":
    main()
