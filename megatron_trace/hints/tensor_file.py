"""A file of attributes and named tensors: JSON header, aligned tensors, a checksum for each.

Layout (`docs/hint_files.md`); integers are little-endian:

    0   8 bytes   magic
    8   uint32    schema version
    12  uint32    CRC-32 of the header
    16  uint64    bytes of the header
    24  uint64    bytes of the file
    32  header    UTF-8 JSON {"attributes": {...}, "tensors": {name: entry}}
        entry     {"dtype": str, "shape": [int], "offset": int, "crc32": int}
        tensors   C order; offset 0 is the first multiple of 64 bytes after the header, every offset
                  is a multiple of 64, zeros fill what is between and the end

Not safetensors, although it is installed: it forbids gaps between tensors, so every alignment would
be a filler tensor; its metadata are strings only, and nothing checks the header, where a flipped
digit of a layer or a scale would go unseen. What remains to write ourselves is this file.

CRC-32 from zlib: it finds every burst of up to 32 bits and misses other accidents once in 4e9, and
runs at 2.3 GB/s on one core of ours (SHA-256 .7, BLAKE2b .4). It does not resist an attacker,
and need not: who can write the folder can write the checksums.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_trace.hints.durable import write_temporary

MAGIC = b"\x89THINT\r\n"
SCHEMA_VERSION = 1
ALIGNMENT = 64
_PREAMBLE = struct.Struct("<8sIIQQ")
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float32,
        torch.bfloat16,
    )
}


class DamagedFileError(ValueError):
    """A file is not what was written; the message names it."""


@dataclass
class BytesRead:
    """Bytes that were read of files.

    Attributes:
        header_bytes: Preambles and headers.
        tensor_bytes: Tensors.
    """

    header_bytes: int = 0
    tensor_bytes: int = 0


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    crc32: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_tensor_file(
    path: Path, attributes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[Path, int]:
    """Writes a file under its temporary name and syncs it.

    Args:
        path: Name that the file will have.
        attributes: What JSON can hold.
        tensors: Tensors of any shape and device, of the dtypes in `DTYPES`.

    Returns:
        The temporary name and the checksum of the header, which stands for the whole content.

    Raises:
        OSError: The file system refuses; nothing is left behind.
    """
    contents = {name: _bytes_of(tensor) for name, tensor in tensors.items()}
    # The header's size moves the offsets, whose digits are part of it: count them from its end.
    entries, end = {}, 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        entry = TensorEntry(dtype, tuple(tensor.shape), end, zlib.crc32(contents[name]))
        entries[name] = asdict(entry)
        end = _aligned(end + entry.num_bytes)
    header = json.dumps({"attributes": attributes, "tensors": entries}).encode()
    checksum = zlib.crc32(header)
    start = _aligned(_PREAMBLE.size + len(header))

    def write(stream: BinaryIO) -> None:
        stream.write(_PREAMBLE.pack(MAGIC, SCHEMA_VERSION, checksum, len(header), start + end))
        stream.write(header)
        for name, entry in entries.items():
            _fill(stream, start + entry["offset"])
            stream.write(contents[name])
        _fill(stream, start + end)

    return write_temporary(path, write), checksum


class TensorFile:
    """A file of tensors, memory-mapped: what is not asked for is not read.

    Attributes:
        path: The file.
        num_bytes: Its size.
        header_crc32: Checksum of the header, which stands for the whole content.
        attributes: Attributes as written.
        entries: Where the tensors lie, by name.
        tensors_start: Byte of the file at which offset 0 lies.
    """

    def __init__(self, path: Path, counter: BytesRead) -> None:
        """Reads and checks the header.

        Args:
            path: The file.
            counter: Counts what is read.

        Raises:
            FileNotFoundError: There is no such file.
            DamagedFileError: The file is not complete, or its header is not what was written.
        """
        self.path = path
        self._counter = counter
        self.num_bytes = path.stat().st_size
        if self.num_bytes < _PREAMBLE.size:
            raise DamagedFileError(
                f"{path}: {self.num_bytes} bytes, but a hint file has at least {_PREAMBLE.size}"
            )
        # Private, hence writable without changing the file; keeps no file descriptor.
        self._content = torch.from_file(
            str(path), shared=False, size=self.num_bytes, dtype=torch.uint8
        )
        # Of the same memory; asked by the reading thread hundreds of times, torch would give the
        # training's thread as many turns to wait for.
        self._bytes = memoryview(self._content.numpy())
        self.header_crc32, header = self._read_header()
        try:
            document = json.loads(header)
            self.attributes: dict[str, Any] = document["attributes"]
            self.entries = {
                name: TensorEntry(**entry | {"shape": tuple(entry["shape"])})
                for name, entry in document["tensors"].items()
            }
            self.tensors_start = _aligned(_PREAMBLE.size + len(header))
            for name, entry in self.entries.items():
                self._require_inside(name, entry)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DamagedFileError(f"{path}: not the header of a hint file ({error!r})") from error

    def tensor(self, name: str) -> torch.Tensor:
        """Gives a tensor without copying it, after comparing its checksum.

        Raises:
            DamagedFileError: The bytes are not those that were written.
        """
        tensor, entry = self.unread_tensor(name), self.entries[name]
        self._counter.tensor_bytes += entry.num_bytes
        start = self.tensors_start + entry.offset
        found = zlib.crc32(self._bytes[start : start + entry.num_bytes])
        if found != entry.crc32:
            raise DamagedFileError(
                f"{self.path}: tensor {name} has checksum {found:08x}, but {entry.crc32:08x} was "
                "written"
            )
        return tensor

    def unread_tensor(self, name: str) -> torch.Tensor:
        """Gives a tensor as a map of the file, unread: no checksum is compared, nothing counted.

        Raises:
            DamagedFileError: The file was cut since it was opened.
        """
        entry = self.entries[name]
        self._require_uncut()
        content = self._slice(self.tensors_start + entry.offset, entry.num_bytes)
        dtype = DTYPES[entry.dtype]
        return (content if dtype == content.dtype else content.view(dtype)).view(entry.shape)

    def _read_header(self) -> tuple[int, bytes]:
        magic, version, checksum, header_bytes, file_bytes = _PREAMBLE.unpack(
            self._slice(0, _PREAMBLE.size).numpy()
        )
        if magic != MAGIC:
            raise DamagedFileError(f"{self.path}: not a hint file: it starts with {magic!r}")
        if version != SCHEMA_VERSION:
            raise DamagedFileError(
                f"{self.path}: schema version {version}, but this reader knows {SCHEMA_VERSION}"
            )
        if file_bytes != self.num_bytes:
            raise DamagedFileError(
                f"{self.path}: {self.num_bytes} bytes, but {file_bytes} were written"
            )
        if header_bytes > self.num_bytes - _PREAMBLE.size:
            raise DamagedFileError(f"{self.path}: a header of {header_bytes} bytes does not fit")
        header = self._slice(_PREAMBLE.size, header_bytes).numpy().tobytes()
        self._counter.header_bytes += _PREAMBLE.size + header_bytes
        if zlib.crc32(header) != checksum:
            raise DamagedFileError(
                f"{self.path}: the header has checksum {zlib.crc32(header):08x}, but "
                f"{checksum:08x} was written"
            )
        return checksum, header

    def _require_inside(self, name: str, entry: TensorEntry) -> None:
        inside = 0 <= entry.offset <= self.num_bytes - self.tensors_start - entry.num_bytes
        if min(entry.shape, default=0) < 0 or entry.offset % ALIGNMENT or not inside:
            raise ValueError(f"tensor {name} at {entry} does not fit into {self.num_bytes} bytes")

    def _require_uncut(self) -> None:
        # Reading a page beyond the end of a file that was cut since ends the process (SIGBUS).
        try:
            num_bytes = self.path.stat().st_size
        except FileNotFoundError:
            return  # Removed files stay readable through the map.
        if num_bytes < self.num_bytes:
            raise DamagedFileError(
                f"{self.path}: cut to {num_bytes} of {self.num_bytes} bytes while it was read"
            )

    def _slice(self, start: int, num_bytes: int) -> torch.Tensor:
        return self._content[start : start + num_bytes]


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _fill(stream: BinaryIO, position: int) -> None:
    stream.write(bytes(position - stream.tell()))
