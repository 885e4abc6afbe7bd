"""The two conversions, top to bottom; Megatron's parallel state is that of one rank."""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_trace.conversion.distributed_checkpoint import (
    CheckpointTensors,
    Piece,
    checkpoint_contents,
    write_checkpoint,
)
from megatron_trace.conversion.output_folder import output_folder, require_absent
from megatron_trace.conversion.published_folder import (
    PublishedFolder,
    listing,
    published_architecture,
)
from megatron_trace.conversion.safetensors_file import DTYPES, tensor_bytes, write_like
from megatron_trace.conversion.weight_rows import PublishedNames, Rows, weight_rows
from megatron_trace.models.architecture import Architecture, size_differences
from megatron_trace.models.meta_model import build_meta_model
from megatron_trace.models.presets import refuse_left_out

TRACKER_FILE = "latest_checkpointed_iteration.txt"
FIRST_ITERATION = "iter_0000000"


@dataclass(frozen=True)
class Converted:
    """What a conversion did.

    Attributes:
        architecture: The model.
        num_parameters: Parameters that were converted.
        left_out: Published tensors that no parameter is made of; to Megatron they are lost, from
            Megatron they are copied from the checkpoint that is written like.
        rounded: Published tensors that a narrower dtype than the checkpoint's changed.
        widened: Published tensors whose dtype is wider than the checkpoint's.
    """

    architecture: Architecture
    num_parameters: int
    left_out: tuple[str, ...]
    rounded: tuple[str, ...] = ()
    widened: tuple[str, ...] = ()


def hf_to_megatron(
    published: Path, output: Path, *, mtp: bool = False, model: Architecture | None = None
) -> Converted:
    """Converts a published checkpoint to a distributed one, as of Megatron's iteration 0.

    Tensors keep their dtype; Megatron converts them to the model's when it loads them.

    Args:
        published: Folder of the published checkpoint.
        output: Folder to make; `--load` of Megatron takes it.
        mtp: Whether multi-token prediction is converted, too.
        model: The model that it must be; None takes any of the family.

    Raises:
        ValueError: The checkpoint is not one of this family, not that model or not whole, or
            `output` exists.
    """
    require_absent(output)
    folder = PublishedFolder(published)
    architecture = published_architecture(published, mtp_layers=_mtp(folder))
    if model is not None:
        refuse_left_out(model)
        differences = size_differences(architecture, model)
        if differences:
            raise ValueError(f"{published} is not {model.name}: {', '.join(differences)}")
    parts = _Parts.of(folder, architecture, mtp=mtp)
    left_out = folder.require(parts.rows, parts.row_shapes)
    dtypes = _dtypes(folder, parts.rows)
    reader = _PieceReader(folder, parts.rows)
    common = {
        "checkpoint_version": 3.0,
        "iteration": 0,
        # Without a pattern, Megatron takes it for a GPTModel's.
        "args": Namespace(
            **{
                name.replace("-", "_"): value
                for name, value in architecture.arguments(mtp=mtp).items()
            }
        ),
    }
    with output_folder(output) as made:
        checkpoint = made / FIRST_ITERATION
        checkpoint.mkdir()
        write_checkpoint(checkpoint, parts.pieces, parts.objects, dtypes, reader.read, common)
        (made / TRACKER_FILE).write_text("0", encoding="utf-8")
    return Converted(architecture, parts.num_parameters, tuple(left_out))


def megatron_to_hf(checkpoint: Path, like: Path, output: Path) -> Converted:
    """Writes a published checkpoint from a distributed one.

    The files have the names, order and dtypes of another published checkpoint of the same model.
    What Megatron's does not have, such as vision, is copied from there, as are the configuration
    and the tokenizer. Of a tensor that the other has in a wider dtype than Megatron's (FP32, and
    BF16), the values that are still the other's, rounded, are the other's: what Megatron rounded
    when it loaded them is not published as if training had changed it.

    Args:
        checkpoint: Folder that Megatron's `--save` wrote, or of one iteration in it.
        like: Folder of the other published checkpoint.
        output: Folder to make.

    Raises:
        ValueError: One of them is not whole or not of this family, `output` exists, or a weight is
            NaN or Inf.
    """
    require_absent(output)
    folder = PublishedFolder(like)
    tensors = CheckpointTensors(iteration_folder(checkpoint))
    tensors.refuse_foreign()
    has_mtp = any(key.startswith("mtp.") for key in tensors.stored)
    architecture = published_architecture(like, mtp_layers=_mtp(folder))
    parts = _Parts.of(folder, architecture, mtp=has_mtp)
    left_out = folder.require(parts.rows, parts.row_shapes)
    problems = tensors.problems(parts.pieces)
    if problems:
        raise ValueError(f"{tensors.folder} does not hold the model of {like}: {listing(problems)}")
    writer = _TensorWriter(tensors, parts, folder)
    with output_folder(output) as made:
        for file in folder.files.values():
            contents = (
                file.chunks(name) if name in left_out else writer.parts(name, DTYPES[stored.dtype])
                for name, stored in file.tensors.items()
            )
            write_like(made / file.path.name, file, contents)
        for path in sorted(like.iterdir()):
            if path.is_file() and path.name not in folder.files:
                shutil.copyfile(path, made / path.name)
    return Converted(
        architecture,
        parts.num_parameters,
        tuple(left_out),
        tuple(sorted(writer.rounded)),
        tuple(sorted(writer.widened)),
    )


def iteration_folder(checkpoint: Path) -> Path:
    """Gives the folder of the newest iteration that Megatron saved.

    Args:
        checkpoint: What Megatron's `--save` names, or the folder of an iteration.

    Raises:
        ValueError: The file that tells the newest iteration tells none.
    """
    tracker = checkpoint / TRACKER_FILE
    if not tracker.is_file():
        return checkpoint
    iteration = tracker.read_text(encoding="utf-8").strip()
    if iteration == "release":
        return checkpoint / iteration
    if not iteration.isdecimal():
        raise ValueError(f"{tracker} must name an iteration; got {iteration[:40]!r}")
    return checkpoint / f"iter_{int(iteration):07d}"


@dataclass(frozen=True)
class _Parts:
    """What of a model both directions need."""

    pieces: list[Piece]
    objects: list[ShardedObject]
    rows: dict[str, tuple[Rows, ...]]
    row_shapes: dict[str, tuple[int, ...]]
    num_parameters: int

    @staticmethod
    def of(folder: PublishedFolder, architecture: Architecture, *, mtp: bool) -> _Parts:
        if mtp and not architecture.mtp_layers:
            raise ValueError(f"{folder.folder} has no tensors of multi-token prediction (mtp.*)")
        model = build_meta_model(architecture, mtp=mtp)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        rows = weight_rows(architecture, PublishedNames.of(folder.names), mtp=mtp)
        assert rows.keys() == shapes.keys(), (
            f"parameters without a source or the other way: {sorted(rows.keys() ^ shapes.keys())}"
        )
        for name, parts in rows.items():
            num_rows = sum(part.stop - part.start for part in parts)
            assert num_rows == shapes[name][0], f"{name} has {shapes[name][0]} rows, not {num_rows}"
        return _Parts(
            *checkpoint_contents(model),
            rows,
            {name: shape[1:] for name, shape in shapes.items()},
            sum(p.numel() for p in model.parameters()),
        )


class _PieceReader:
    """Reads the rows of pieces from published tensors."""

    def __init__(self, folder: PublishedFolder, rows: Mapping[str, Sequence[Rows]]) -> None:
        self.folder, self.rows = folder, rows

    def read(self, piece: Piece) -> torch.Tensor:
        return self.folder.read(list(_cut(self.rows[piece.parameter], piece.start, piece.stop)))


def _cut(rows: Sequence[Rows], start: int, stop: int) -> Iterator[Rows]:
    """Yields what of a parameter's rows lies between two of its rows."""
    first = 0
    for part in rows:
        size = part.stop - part.start
        low, high = max(start, first), min(stop, first + size)
        if low < high:
            shift = part.start - first
            yield Rows(part.name, low + shift, high + shift, part.expert)
        first += size


class _TensorWriter:
    """Gives the bytes of published tensors from a distributed checkpoint."""

    def __init__(self, tensors: CheckpointTensors, model: _Parts, like: PublishedFolder) -> None:
        self.tensors, self.like = tensors, like
        self.rounded: set[str] = set()
        self.widened: set[str] = set()
        self.pieces: dict[str, list[Piece]] = {}
        for piece in model.pieces:
            self.pieces.setdefault(piece.parameter, []).append(piece)
        # Of each published tensor: its rows, the parameter that they are in, their first row there.
        self.sources: dict[str, list[tuple[Rows, str, int]]] = {}
        for parameter, parts in model.rows.items():
            first = 0
            for part in parts:
                self.sources.setdefault(part.name, []).append((part, parameter, first))
                first += part.stop - part.start

    def parts(self, name: str, dtype: torch.dtype) -> Iterator[memoryview]:
        """Yields a tensor's bytes, expert by expert and row by row."""
        sources = sorted(self.sources[name], key=lambda s: (s[0].expert or 0, s[0].start))
        for rows, parameter, start in sources:
            size = rows.stop - rows.start
            for piece in sorted(self.pieces[parameter], key=lambda p: p.start):
                low, high = max(start, piece.start), min(start + size, piece.stop)
                if low < high:
                    values = self._read(piece, low - piece.start, high - low)
                    cast = values.to(dtype)
                    if dtype.itemsize > values.dtype.itemsize:
                        shift = rows.start - start
                        original = self.like.read(
                            [Rows(name, low + shift, high + shift, rows.expert)]
                        )
                        cast = torch.where(original.to(values.dtype) == values, original, cast)
                        self.widened.add(name)
                    if not cast.isfinite().all():
                        raise ValueError(
                            f"{parameter} of {self.tensors.folder} has NaN or Inf, or values that "
                            f"{dtype} of the original cannot hold: no model to publish; take an "
                            "earlier iteration"
                        )
                    if not cast.to(values.dtype).equal(values):
                        self.rounded.add(name)
                    yield tensor_bytes(cast)

    def _read(self, piece: Piece, start: int, size: int) -> torch.Tensor:
        offsets, shape = list(piece.offsets), list(piece.shape)
        offsets[piece.row_dim] += start
        shape[piece.row_dim] = size
        return self.tensors.read(piece.key, offsets, shape)


def _dtypes(folder: PublishedFolder, rows: Mapping[str, Sequence[Rows]]) -> dict[str, torch.dtype]:
    """Gives the dtype of every parameter, that of the tensors it is made of.

    Raises:
        ValueError: They have several.
    """
    dtypes, mixed = {}, []
    for name, parts in rows.items():
        found = sorted({folder.stored(part.name).dtype for part in parts})
        if len(found) > 1:
            mixed.append(f"{', '.join(sorted({p.name for p in parts}))} ({', '.join(found)})")
        dtypes[name] = DTYPES[found[0]]
    if mixed:
        raise ValueError(f"{folder.folder} has tensors of several dtypes for one: {listing(mixed)}")
    return dtypes


def _mtp(folder: PublishedFolder) -> int:
    return int(any(name.startswith("mtp.") for name in folder.names))
