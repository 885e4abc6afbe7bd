"""Files in the safetensors format, read by rows and written tensor by tensor.

A file is the length of its header (8 bytes), the header (JSON: name -> dtype, shape, byte range),
and the tensors' bytes. The `safetensors` package maps whole files into memory and writes them at
once; here a file may be larger than the memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
# Bytes of a value of each dtype of the format that has whole ones.
_VALUE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 1),
}
_LENGTH_BYTES = 8
# No header of a real file is longer; a longer one is another format.
_MAX_HEADER_BYTES = 1 << 30


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in a file.

    Attributes:
        dtype: Name of its dtype in the format, such as `BF16`.
        shape: Its shape.
        start: First byte, from the beginning of the file.
        num_bytes: Its size.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A file and what its header says.

    Attributes:
        path: The file.
        header: Its bytes up to the first tensor's.
        tensors: Where each tensor lies, in the order of their bytes.
    """

    path: Path
    header: bytes
    tensors: dict[str, StoredTensor]

    @staticmethod
    def open(path: Path) -> SafetensorsFile:
        """Reads a file's header.

        Args:
            path: The file.

        Raises:
            ValueError: It is not a whole safetensors file.
        """
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
                raise ValueError(f"{path} is not a safetensors file: its header of {length} bytes")
            text = file.read(length)
        start = _LENGTH_BYTES + length
        try:
            tensors = _stored_tensors(json.loads(text), start)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a safetensors file: {error!r}") from None
        end = max((t.start + t.num_bytes for t in tensors.values()), default=start)
        if end != size:
            raise ValueError(f"{path} has {size} bytes, but its header tells of {end}: incomplete")
        return SafetensorsFile(path, len(text).to_bytes(_LENGTH_BYTES, "little") + text, tensors)

    def read_rows(
        self, name: str, start: int, stop: int, *, entry: int | None = None
    ) -> torch.Tensor:
        """Reads rows of a tensor.

        Args:
            name: The tensor.
            start: First row.
            stop: Row after the last.
            entry: Which of the first dim to take the rows of; None if rows are the first dim.

        Returns:
            [stop - start, ...] in the stored dtype, in memory of its own.

        Raises:
            ValueError: The dtype is none of `DTYPES`, as in checkpoints that are quantised.
        """
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise ValueError(
                f"{name} in {self.path} has dtype {stored.dtype}; only {', '.join(DTYPES)} can be "
                "converted: take the checkpoint that is not quantised"
            )
        dtype = DTYPES[stored.dtype]
        row_shape = stored.shape[1:] if entry is None else stored.shape[2:]
        row_bytes = math.prod(row_shape) * dtype.itemsize
        first_row = start if entry is None else entry * stored.shape[1] + start
        data = bytearray((stop - start) * row_bytes)
        with self.path.open("rb") as file:
            file.seek(stored.start + first_row * row_bytes)
            num_read = file.readinto(data)
        assert num_read == len(data), f"{self.path} became shorter while it was read"
        return torch.frombuffer(data, dtype=dtype).reshape(stop - start, *row_shape)

    def chunks(self, name: str, *, chunk_bytes: int = 64 << 20) -> Iterator[bytes]:
        """Yields a tensor's bytes in parts, whatever its dtype."""
        stored = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(stored.start)
            for done in range(0, stored.num_bytes, chunk_bytes):
                yield file.read(min(chunk_bytes, stored.num_bytes - done))


def _stored_tensors(header: dict[str, Any], start: int) -> dict[str, StoredTensor]:
    """Gives what a header says, checked: tensors fill the file, each with its shape's bytes.

    Args:
        header: What the JSON holds.
        start: First byte of the tensors.

    Raises:
        AttributeError: The header is no object; likewise KeyError, TypeError.
        ValueError: A tensor has another size than its shape, or does not begin where the one before
            ends.
    """
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    tensors, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        shape, value_bytes = tuple(entry["shape"]), _VALUE_BYTES.get(entry["dtype"])
        expected = last - first if value_bytes is None else math.prod(shape) * value_bytes
        if first != end or last - first != expected:
            raise ValueError(
                f"{name} of {entry['dtype']} {list(shape)} lies at bytes {first} to {last}, where "
                f"{expected} bytes from {end} on were expected"
            )
        tensors[name] = StoredTensor(entry["dtype"], shape, start + first, last - first)
        end = last
    return tensors


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Gives the bytes of a tensor on the CPU, without a copy where it is contiguous."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())


def write_like(
    path: Path, like: SafetensorsFile, contents: Iterable[Iterable[bytes | memoryview]]
) -> None:
    """Writes a file with the names, dtypes, shapes and order of another, part by part.

    Args:
        path: File to write.
        like: The other file.
        contents: Parts of each tensor, in the order of `like.tensors`.

    Raises:
        ValueError: The bytes are not as many as the header says.
    """
    with path.open("wb") as file:
        file.write(like.header)
        for (name, stored), parts in zip(like.tensors.items(), contents, strict=True):
            written = sum(file.write(part) for part in parts)
            if written != stored.num_bytes:
                raise ValueError(
                    f"{name} has {written} bytes, but {like.path} has {stored.num_bytes}"
                )
