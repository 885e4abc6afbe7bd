"""Damages a folder of hint files in every way we could think of, and judges what a reader says.

A mutation is detected (the reader refuses what it concerns and names a file that was changed),
or harmless (every sample reads back identical). Anything else raises AssertionError.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_trace.hints.files import HintFiles
from megatron_trace.hints.files_writer import HintFilesWriter
from megatron_trace.hints.tensor_file import DamagedFileError
from megatron_trace.testing.hint_samples import (
    RecordedSample,
    commit_recorded,
    recorded_sample,
    require_same,
)

# Relative path -> content; None means that there is no such file.
Content = dict[str, bytes]
Changes = Mapping[str, bytes | None]
# Every this many mutations, a writer also opens the folder: it must lose nothing readable.
_WRITER_EVERY = 15
_PAGE_BYTES = 512


@dataclass(frozen=True)
class Original:
    """An undamaged folder and what could get into it by mistake.

    Attributes:
        recorded: The committed samples.
        content: Its manifests and files.
        foreign: Files of the same names from another run.
        stale: An earlier file of one sample, which was dropped and rolled out again.
    """

    recorded: tuple[RecordedSample, ...]
    content: Content
    foreign: Content
    stale: Content


def make_original(scratch: Path) -> Original:
    """Writes the folder to be damaged; what is written is removed again."""
    recorded = _samples("")
    earlier = recorded_sample("s3", 7, response_tokens=5)
    stale = _write(scratch, [earlier])
    with HintFilesWriter(scratch) as files:
        commit_recorded(files, [recorded[0], earlier])
        files.drop_sample("s3")
        for one in recorded[1:]:
            commit_recorded(files, [one])
    content = _read(scratch)
    shutil.rmtree(scratch)
    return Original(recorded, content, _write(scratch, _samples("2")), stale)


def damage(folder: Path, original: Original, num_mutations: int, seed: int) -> dict[str, Counter]:
    """Damages a folder again and again and gives what became of each kind of mutation.

    Args:
        folder: An empty folder to work in.
        original: What is damaged.
        num_mutations: How often.
        seed: Decides the mutations.

    Returns:
        By kind of mutation, how many were `detected` and how many `harmless`.

    Raises:
        AssertionError: Damage was not detected; the message names seed, number and mutation.
    """
    _restore(folder, original.content)
    outcomes = {name: Counter() for name in MUTATIONS}
    names = list(MUTATIONS)
    for number in range(num_mutations):
        rng = random.Random(f"{seed} {number}")
        name = names[number % len(names)]
        changes = MUTATIONS[name](rng, original)
        for path, content in changes.items():
            _put(folder / path, content)
        try:
            outcome = _judge(folder, original, changes)
            if number % _WRITER_EVERY == 0:
                _require_writer_loses_nothing(folder, original)
                _restore(folder, original.content)
        except Exception as error:
            raise AssertionError(
                f"seed {seed}, mutation {number}, {name} of {', '.join(changes)}: {error!r}"
            ) from error
        outcomes[name][outcome] += 1
        for path in changes:
            _put(folder / path, original.content.get(path))
    return outcomes


def _judge(folder: Path, original: Original, changes: Changes) -> str:
    files = HintFiles(folder)
    lost = _unreadable(files, original)
    extra = set(files.sample_ids()) - {one.sample.sample_id for one in original.recorded}
    assert not extra, f"samples {extra} appeared"
    if not lost:
        return "harmless"
    reports = [str(finding) for finding in (*files.findings, *files.verify())]
    names = [Path(path).name for path in changes]
    assert any(name in report for name in names for report in reports), (
        f"samples {lost} are lost, but no finding names what was changed: {reports}"
    )
    return "detected"


def _unreadable(files: HintFiles, original: Original) -> set[str]:
    lost = set()
    for one in original.recorded:
        sample_id = one.sample.sample_id
        try:
            require_same(files, one)
            continue
        except (DamagedFileError, LookupError) as error:
            message = str(error)
        except AssertionError:
            # A sample that no manifest names has no places: lost, not different.
            if sample_id in files.sample_ids():
                raise
            message = f"sample {sample_id}"
        lost.add(sample_id)
        named = f"sample {sample_id}" in message or f"{sample_id}.0of1" in message
        assert named, f"the error does not name sample {sample_id}: {message}"
    return lost


def _require_writer_loses_nothing(folder: Path, original: Original) -> None:
    before = _unreadable(HintFiles(folder), original)
    with HintFilesWriter(folder) as files:
        assert _unreadable(files, original) == before, "the writer reads other samples"
    after = _unreadable(HintFiles(folder), original)
    assert after == before, f"opening for writing lost samples {after - before}"
    kept = {path.name for path in folder.rglob("*.hints")}
    assert kept >= {Path(path).name for path in original.content if path.endswith(".hints")} - {
        f"{sample_id}.0of1.hints" for sample_id in before
    }


def _flip_bits(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return {path: bytes(content)}


def _overwrite_run(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original)
    start, stop = _range(rng, len(content))
    content[start:stop] = rng.randbytes(stop - start)
    return {path: bytes(content)}


def _zero_page(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original)
    start = rng.randrange(len(content)) // _PAGE_BYTES * _PAGE_BYTES
    size = len(content[start : start + _PAGE_BYTES])
    content[start : start + size] = bytes(size)
    return {path: bytes(content)}


def _truncate(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original)
    return {path: bytes(content[: rng.randrange(len(content))])}


def _half_written(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original)
    written = rng.randrange(len(content))
    return {path: bytes(content[:written]) + bytes(len(content) - written)}


def _append(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original)
    return {path: bytes(content) + rng.choice((b"\0", b"\n", rng.randbytes(rng.randrange(1, 99))))}


def _repeat_range(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original)
    start, stop = _range(rng, len(content))
    return {path: bytes(content[:stop] + content[start:])}


def _remove_range(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original)
    start, stop = _range(rng, len(content))
    return {path: bytes(content[:start] + content[stop:])}


def _move_range(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original)
    start, stop = _range(rng, len(content))
    part = content[start:stop]
    del content[start:stop]
    target = rng.randrange(len(content) + 1)
    return {path: bytes(content[:target] + part + content[target:])}


def _delete(rng: random.Random, original: Original) -> Changes:
    return {_any_file(rng, original)[0]: None}


def _empty(rng: random.Random, original: Original) -> Changes:
    return {_any_file(rng, original)[0]: b""}


def _swap_files(rng: random.Random, original: Original) -> Changes:
    first, second = rng.sample(sorted(original.content), 2)
    return {first: original.content[second], second: original.content[first]}


def _copy_over(rng: random.Random, original: Original) -> Changes:
    source, target = rng.sample(sorted(original.content), 2)
    return {target: original.content[source]}


def _copy_beside(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original, ".hints")
    name = rng.choice(("s9.0of1.hints", "s0 (copy).hints", "s0.0of1.hints.tmp", "s0.1of2.hints"))
    return {str(Path(path).with_name(name)): bytes(content)}


def _foreign(rng: random.Random, original: Original) -> Changes:
    path, _ = _any_file(rng, original)
    return {path: original.foreign[path]}


def _stale(rng: random.Random, original: Original) -> Changes:
    return {path: text for path, text in original.stale.items() if path.endswith(".hints")}


def _mixed_file(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original, ".hints")
    other = original.foreign[path]
    cut = rng.randrange(len(content))
    return {path: bytes(content[:cut]) + other[cut:]}


def _swap_tensors(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original, ".hints")
    start, document = _header(content)
    entries = sorted(document["tensors"].values(), key=lambda entry: entry["offset"])
    spans = [(start + e["offset"], e["shape"][0] * e["shape"][-1]) for e in entries if e["shape"]]
    (first, size), (second, other_size) = rng.sample(spans, 2)
    size = min(size, other_size)
    moved = content[first : first + size]
    content[first : first + size] = content[second : second + size]
    content[second : second + size] = moved
    return {path: bytes(content)}


def _forge_header(rng: random.Random, original: Original) -> Changes:
    path, content = _any_file(rng, original, ".hints")
    _, document = _header(content)
    attributes = document["attributes"]
    change = rng.choice(("sample_id", "policy_version", "layer", "scale", "offset", "nothing"))
    if change == "sample_id":
        attributes["sample_id"] = "s9"
    elif change == "policy_version":
        attributes["policy_version"] += 1
    elif change == "layer":
        rng.choice(attributes["records"])["layer"] += 1
    elif change == "scale":
        rng.choice(attributes["records"])["values"]["global_scale"] *= 2
    elif change == "offset":
        rng.choice(list(document["tensors"].values()))["offset"] += 64
    else:
        attributes["records"] = None
    header = json.dumps(document).encode()
    header += b" " * max(0, struct.unpack_from("<Q", content, 16)[0] - len(header))
    head = bytearray(content[:32])
    struct.pack_into("<I", head, 12, zlib.crc32(header))
    struct.pack_into("<Q", head, 16, len(header))
    forged = bytes(head) + header
    return {path: forged + bytes(content[len(forged) :])}


def _remove_lines(rng: random.Random, original: Original) -> Changes:
    path, lines = _manifest(rng, original)
    start, stop = _range(rng, len(lines))
    del lines[start:stop]
    return {path: b"".join(lines)}


def _repeat_line(rng: random.Random, original: Original) -> Changes:
    path, lines = _manifest(rng, original)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return {path: b"".join(lines)}


def _shuffle_lines(rng: random.Random, original: Original) -> Changes:
    path, lines = _manifest(rng, original)
    rng.shuffle(lines)
    return {path: b"".join(lines)}


MUTATIONS: dict[str, Callable[[random.Random, Original], Changes]] = {
    function.__name__.strip("_"): function
    for function in (
        _flip_bits,
        _overwrite_run,
        _zero_page,
        _truncate,
        _half_written,
        _append,
        _repeat_range,
        _remove_range,
        _move_range,
        _delete,
        _empty,
        _swap_files,
        _copy_over,
        _copy_beside,
        _foreign,
        _stale,
        _mixed_file,
        _swap_tensors,
        _forge_header,
        _remove_lines,
        _repeat_line,
        _shuffle_lines,
    )
}


def _samples(run: str) -> tuple[RecordedSample, ...]:
    return tuple(
        recorded_sample(f"s{index}", 6 + index // 2, run=run, response_tokens=3 + 2 * index)
        for index in range(4)
    )


def _any_file(rng: random.Random, original: Original, suffix: str = "") -> tuple[str, bytearray]:
    path = rng.choice(sorted(path for path in original.content if path.endswith(suffix)))
    return path, bytearray(original.content[path])


def _manifest(rng: random.Random, original: Original) -> tuple[str, list[bytes]]:
    path, content = _any_file(rng, original, ".jsonl")
    return path, bytes(content).splitlines(keepends=True)


def _range(rng: random.Random, size: int) -> tuple[int, int]:
    start = rng.randrange(size)
    return start, min(size, start + rng.choice((1, 2, 16, 64, size)))


def _header(content: bytearray) -> tuple[int, dict]:
    size = struct.unpack_from("<Q", content, 16)[0]
    return -(-(32 + size) // 64) * 64, json.loads(content[32 : 32 + size])


def _write(scratch: Path, recorded: Iterable[RecordedSample]) -> Content:
    with HintFilesWriter(scratch) as files:
        commit_recorded(files, recorded)
    content = _read(scratch)
    shutil.rmtree(scratch)
    return content


def _read(folder: Path) -> Content:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in (".hints", ".jsonl")
    }


def _put(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(content)


def _restore(folder: Path, content: Content) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for path, text in content.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text)
