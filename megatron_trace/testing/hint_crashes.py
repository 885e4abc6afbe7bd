"""Kills writers of hint files, at random and at each system call, and looks what is left.

A child process writes; it says through a pipe what it begins and what it has done. After its death,
what it said is done must be readable and identical, what it had begun may be either way, and
nothing else may be there. What a dead process wrote is still in the page cache, so this does not
show what a power failure leaves: that follows from the order of the syncs, which a test checks.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.findings import FindingKind
from megatron_trace.testing.hint_samples import commit_recorded, recorded_sample, require_same

# What the package calls on its way to disk; each call of each is a place to die.
_CALLS = (
    *("open", "write", "pwrite", "fsync", "truncate", "ftruncate"),
    *("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "listdir"),
)
_LEFT_BY_CRASHES = {
    FindingKind.STALE_LOCK,
    FindingKind.TEMPORARY,
    FindingKind.ORPHAN,
    FindingKind.TORN,
}
_KEPT_VERSIONS = 2
_DIED = 77
Say = Callable[[str, object], None]


@dataclass
class Journal:
    """What writers have said so far.

    Attributes:
        present: Committed samples, with their policy version and number of response tokens.
        doubtful: Samples of the operation that was interrupted.
        next_number: Number of the next sample.
    """

    present: dict[str, tuple[int, int]] = field(default_factory=dict)
    doubtful: dict[str, tuple[int, int]] = field(default_factory=dict)
    next_number: int = 0

    def begin(self, samples: dict[str, tuple[int, int]]) -> None:
        """Notes an operation on samples."""
        self.doubtful = samples

    def end(self, committed: bool) -> None:
        """Notes that the operation is done."""
        for sample_id, shape in self.doubtful.items():
            self.present.pop(sample_id, None)
            if committed:
                self.present[sample_id] = shape
        self.doubtful = {}

    def known(self) -> dict[str, tuple[int, int]]:
        """Gives all samples that may be there."""
        return self.present | self.doubtful


def kill_at_random(folder: Path, num_kills: int, seed: int) -> Counter:
    """Kills a writer of one folder again and again, each after a random time up to .1 s.

    Returns:
        How many samples were committed, how often each kind of finding was reported.

    Raises:
        AssertionError: Something committed was lost or something half-written was visible.
    """
    counts = Counter()
    journal = Journal()
    for number in range(num_kills):
        rng = random.Random(f"{seed} {number}")
        child, messages = _fork(lambda say, rng=rng: _write_forever(folder, journal, say, rng))
        time.sleep(rng.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counts["committed"] += _replay(messages, journal)
        counts += _require_intact(folder, journal, f"seed {seed}, kill {number}")
    return counts


def kill_at_each_call(make_folder: Callable[[], Path]) -> int:
    """Ends a writer at each of its calls of the file system, each time in a new folder.

    Args:
        make_folder: Gives an empty folder.

    Returns:
        Number of calls.

    Raises:
        AssertionError: Something committed was lost or something half-written was visible.
    """
    for number in itertools.count(1):
        folder, journal = make_folder(), Journal()
        child, messages = _fork(lambda say: _write_once(folder, say, number))  # noqa: B023
        _, status = os.waitpid(child, 0)
        _replay(messages, journal)
        _require_intact(folder, journal, f"call {number}")
        if os.waitstatus_to_exitcode(status) == 0:
            return number - 1
        assert os.waitstatus_to_exitcode(status) == _DIED, f"the writer failed at call {number}"
    raise AssertionError("unreachable")


def _fork(write: Callable[[Say], None]) -> tuple[int, int]:
    """Runs a writer in a child; gives its process and the pipe it speaks through."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    status = 1
    real_write = os.write
    try:
        write(lambda what, samples: _say(real_write, writing, what, samples))
        status = 0
    finally:
        os._exit(status)


def _say(write: Callable[[int, bytes], int], pipe: int, what: str, samples: object) -> None:
    write(pipe, json.dumps([what, samples]).encode() + b"\n")


def _replay(pipe: int, journal: Journal) -> int:
    with os.fdopen(pipe, "rb") as stream:
        lines = stream.read().splitlines()
    committed = 0
    for line in lines:
        what, samples = json.loads(line)
        if what == "done":
            committed += len(journal.doubtful) if samples else 0
            journal.end(bool(samples))
        else:
            journal.begin({name: tuple(shape) for name, shape in samples.items()})
            journal.next_number += len(samples) if what == "commit" else 0
    return committed


def _commit(files: HintFilesWriter, samples: dict[str, tuple[int, int]], say: Say) -> None:
    recorded = [
        recorded_sample(name, version, response_tokens=tokens)
        for name, (version, tokens) in samples.items()
    ]
    say("commit", samples)
    commit_recorded(files, recorded)
    say("done", True)


def _drop(files: HintFilesWriter, samples: dict[str, tuple[int, int]], say: Say) -> None:
    say("drop", samples)
    for sample_id in samples:
        files.drop_sample(sample_id)
    say("done", False)


def _expire(
    files: HintFilesWriter, before: int, present: dict[str, tuple[int, int]], say: Say
) -> None:
    say("expire", {name: shape for name, shape in present.items() if shape[0] < before})
    files.expire(before=before)
    say("done", False)


def _write_forever(folder: Path, journal: Journal, say: Say, rng: random.Random) -> None:
    files = HintFilesWriter(folder)
    present = dict(journal.present)
    number = journal.next_number
    while True:
        version = number // 12
        samples = {
            f"s{number + index}": (version, rng.choice((1, 20, 2000)))
            for index in range(rng.randrange(1, 4))
        }
        number += len(samples)
        _commit(files, samples, say)
        present |= samples
        if rng.random() < 0.3:
            name = rng.choice(list(present))
            _drop(files, {name: present.pop(name)}, say)
        if rng.random() < 0.3:
            before = version - _KEPT_VERSIONS
            _expire(files, before, present, say)
            present = {name: shape for name, shape in present.items() if shape[0] >= before}


def _write_once(folder: Path, say: Say, last_call: int) -> None:
    """Collects leftovers and does everything else that a writer does, up to one of its calls."""
    version = folder / "v00000001"
    version.mkdir(parents=True)
    for name in ("s7.0of1.hints.tmp", "s8.0of1.hints", "manifest.0of1.jsonl.tmp"):
        (version / name).write_bytes(b"left by a crash")
    _die_at(last_call)
    with HintFilesWriter(folder) as files:
        early = {"s0": (1, 4), "s1": (1, 9)}
        _commit(files, early, say)
        _drop(files, {"s0": early["s0"]}, say)
        _commit(files, {"s2": (2, 4)}, say)
        _expire(files, 2, {"s1": early["s1"]}, say)
        _commit(files, {"s0": (2, 5), "s3": (2, 6)}, say)


def _die_at(last_call: int) -> None:
    calls = itertools.count(1)

    def counted(function: Callable) -> Callable:
        def call(*arguments: object, **options: object) -> object:
            if next(calls) == last_call:
                if function.__name__ == "write":
                    _write_half(function, *arguments)
                os._exit(_DIED)
            return function(*arguments, **options)

        return call

    for name in _CALLS:
        setattr(os, name, counted(getattr(os, name)))


def _write_half(write: Callable, descriptor: Any, text: Any) -> None:
    write(descriptor, text[: len(text) // 2])


def _require_intact(folder: Path, journal: Journal, context: str) -> Counter:
    """Compares a folder with the journal, as a reader and as the next writer."""
    if not folder.exists():
        assert not journal.present, f"{context}: the folder is gone"
        return Counter()
    before = _require_readable(HintFiles(folder), journal, context)
    with HintFilesWriter(folder) as files:
        after = _require_readable(files, journal, context)
        findings = Counter(str(finding.kind) for finding in files.findings)
    assert before == after, f"{context}: the next writer sees other samples"
    reader = HintFiles(folder)
    assert _require_readable(reader, journal, context) == after, f"{context}: collecting lost some"
    assert not reader.findings, f"{context}: left after collection: {reader.findings}"
    journal.present = {name: shape for name, shape in journal.known().items() if name in after}
    journal.doubtful = {}
    return findings


def _require_readable(files: HintFiles, journal: Journal, context: str) -> set[str]:
    strange = [f for f in files.findings if f.kind not in _LEFT_BY_CRASHES]
    assert not strange, f"{context}: {strange}"
    visible = set(files.sample_ids())
    lost = set(journal.present) - set(journal.doubtful) - visible
    assert not lost, f"{context}: committed samples {lost} are lost"
    known = journal.known()
    assert visible <= set(known), f"{context}: {visible - set(known)} were never committed"
    # One operation concerns samples of one policy version or, at expiry, whole versions.
    for version in {known[name][0] for name in journal.doubtful}:
        doubtful = {name for name in journal.doubtful if known[name][0] == version}
        assert doubtful <= visible or not doubtful & visible, f"{context}: half an operation"
    for name in visible:
        version, tokens = known[name]
        require_same(files, recorded_sample(name, version, response_tokens=tokens))
    return visible
