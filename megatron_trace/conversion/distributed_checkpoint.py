"""Megatron's distributed checkpoint (torch_dist) of a model that need not be in memory.

The names, shapes and offsets are asked of a model on the meta device; the values are read when the
writer comes to them, and dropped when they are written. The format is that of torch's distributed
checkpoints, with two files of Megatron's beside it.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_trace import compat


@dataclass(frozen=True)
class Piece:
    """Rows of a parameter, and where they lie in the checkpoint.

    Attributes:
        parameter: Name of the parameter.
        start: Its first row.
        stop: Row after the last.
        key: Name of the checkpoint's tensor.
        global_shape: Shape of that tensor, with an expert dim first where it holds experts.
        offsets: Where the rows begin in it.
        shape: Their shape in it.
        row_dim: Which of its dims the rows are.
    """

    parameter: str
    start: int
    stop: int
    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    row_dim: int


def checkpoint_contents(model: torch.nn.Module) -> tuple[list[Piece], list[ShardedObject]]:
    """Gives where the rows of every parameter lie in the model's checkpoint, and its objects.

    Args:
        model: A model of one rank, as `build_meta_model` gives it.
    """
    pieces: list[Piece] = []
    objects: list[ShardedObject] = []
    state: Any = model
    for name, sharded in state.sharded_state_dict().items():
        is_factory = isinstance(sharded, ShardedTensorFactory)
        for part in nested_values(sharded.build()) if is_factory else (sharded,):
            if isinstance(part, ShardedTensor):
                pieces.append(_piece(name, part))
            else:
                assert isinstance(part, ShardedObject), f"{name} is neither tensor nor object"
                objects.append(part)
    return pieces, objects


def _piece(name: str, part: ShardedTensor) -> Piece:
    assert part.data is not None, "a model of one rank has all tensors"
    # A part is rows of its parameter, of which it is a view.
    start = int(part.data.storage_offset()) // max(1, math.prod(part.data.shape[1:]))
    return Piece(
        name,
        start,
        start + part.data.shape[0],
        part.key,
        tuple(part.global_shape),
        tuple(part.global_offset),
        (1,) * part.prepend_axis_num + tuple(part.local_shape),
        part.prepend_axis_num,
    )


class _PiecePlanner(SavePlanner):
    """Plans pieces and objects, and reads the values of each piece when it is written."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        objects: Sequence[ShardedObject],
        dtypes: Mapping[str, torch.dtype],
        read: Callable[[Piece], torch.Tensor],
    ) -> None:
        self.pieces = {MetadataIndex(p.key, torch.Size(p.offsets)): p for p in pieces}
        self.objects = {item.unique_key: _serialised(item) for item in objects}
        self.dtypes = dtypes
        self.read = read

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """Does nothing: what is saved was given to the constructor."""

    def create_local_plan(self) -> SavePlan:
        """Gives one item for every piece and object."""
        items = [
            WriteItem(
                MetadataIndex(key),
                WriteItemType.BYTE_IO,
                bytes_io_data=BytesIOWriteData(len(value)),
            )
            for key, value in self.objects.items()
        ]
        for index, piece in self.pieces.items():
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
            properties = TensorProperties(dtype=self.dtypes[piece.parameter])
            data = TensorWriteData(chunk, properties, torch.Size(piece.global_shape))
            items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        # A file holds consecutive items of a layer.
        return SavePlan(sorted(items, key=lambda item: _layer_of(item.index.fqn)))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Gives the plans and the checkpoint's metadata."""
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Gives the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Reads the values of an item."""
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.objects[index.fqn])
        piece = self.pieces[MetadataIndex(index.fqn, index.offset)]
        return self.read(piece).reshape(piece.shape)


def _serialised(item: ShardedObject) -> bytes:
    buffer = io.BytesIO()
    torch.save([item.data], buffer)
    return buffer.getvalue()


class _FilePerLayer(FileSystemWriter):
    """Writes a file for every layer: torch's writer keeps a file's tensors until it is written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[Any]]:
        """Writes the items of a plan."""
        results: list[Any] = []
        layers = itertools.groupby(plan.items, key=lambda item: _layer_of(item.index.fqn))
        for n, (_, items) in enumerate(layers):
            prefix = dataclasses.replace(plan.storage_data, prefix=f"__{n}_")
            part = dataclasses.replace(plan, items=list(items), storage_data=prefix)
            results += super().write_data(part, planner).wait()
        future: torch.futures.Future[list[Any]] = torch.futures.Future()
        future.set_result(results)
        return future


def _layer_of(key: str) -> str:
    return ".".join(key.split(".")[:3])


def write_checkpoint(
    folder: Path,
    pieces: Sequence[Piece],
    objects: Sequence[ShardedObject],
    dtypes: Mapping[str, torch.dtype],
    read: Callable[[Piece], torch.Tensor],
    common: Mapping[str, Any],
) -> None:
    """Writes a checkpoint that Megatron loads in any layout.

    Args:
        folder: An empty folder.
        pieces: What is written.
        objects: The model's objects.
        dtypes: dtype of every parameter.
        read: Gives the values of a piece, [stop - start, ...].
        common: What belongs to no layer, such as the iteration.

    Raises:
        OSError: The file system refuses, such as a full disk.
        ValueError: `read` fails.
    """
    # What Megatron calls the object of what belongs to no layer, and how it stores objects.
    compat.require_version("megatron-core", compat.MEGATRON_CORE, "write_checkpoint")
    shared = ShardedObject("common_state", dict(common), (1,), (0,))
    planner = _PiecePlanner(pieces, [*objects, shared], dtypes, read)
    # No copies ahead of the writer, which would hold more tensors than one.
    writer = _FilePerLayer(folder, per_thread_copy_ahead=0)
    with _own_error(f"{folder} cannot be written"):
        save({}, storage_writer=writer, planner=planner, no_dist=True)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


@contextmanager
def _own_error(what: str) -> Iterator[None]:
    """Raises the error that torch wraps, which is no Exception, as one of ours.

    Raises:
        OSError: The file system refused, such as a full disk.
        ValueError: Anything else.
    """
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        kind = OSError if isinstance(cause, OSError) else ValueError
        raise kind(f"{what}: {cause}") from error


class CheckpointTensors:
    """The tensors of a distributed checkpoint, read in parts, whatever layout wrote them.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        ValueError: There is none, or what it says of itself cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reader = _CachedReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except FileNotFoundError as error:
            raise ValueError(f"{folder} has no distributed checkpoint: {error}") from None
        except (EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{folder / '.metadata'} is broken: {error}") from error
        self.stored = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, key: str, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Reads a part of a tensor, in its stored dtype.

        Args:
            key: The tensor.
            offsets: Where the part begins.
            shape: Shape of the part.

        Raises:
            OSError: A file is missing or cannot be read.
            ValueError: A file is broken.
        """
        target = torch.empty(torch.Size(shape), dtype=self.stored[key].properties.dtype)
        planner = _PartPlanner(key, target, torch.Size(offsets))
        with _own_error(f"{key} of {self.folder} cannot be read"):
            load({}, storage_reader=self._reader, planner=planner, no_dist=True)
        return target

    def refuse_foreign(self) -> None:
        """Refuses a checkpoint of Megatron's own Gated DeltaNet layers.

        These exist with Transformer Engine only (0.19.2), which fuses the norm before the input
        projection into it, so that a name tells them; with `--apply-layernorm-1p` their `out_norm`
        is stored less one.

        Raises:
            ValueError: It is one.
        """
        fused = [key for key in self.stored if key.endswith(".in_proj.layer_norm_weight")]
        if fused:
            raise ValueError(
                f"{self.folder} was written by Megatron's own Gated DeltaNet layers, as it has "
                f"{fused[0]}: norms are fused into linears and out_norm is stored less one; "
                "publish it in Hugging Face's format by Megatron-Bridge, then convert that by "
                "tools/convert_checkpoint.py hf-to-megatron"
            )

    def problems(self, pieces: Sequence[Piece]) -> list[str]:
        """Gives what of a model is not in the checkpoint, or has another shape."""
        shapes = {piece.key: piece.global_shape for piece in pieces}
        missing = [f"{key} is missing" for key in shapes if key not in self.stored]
        return missing + [
            f"{key} has shape {list(self.stored[key].size)}, not {list(shape)}"
            for key, shape in shapes.items()
            if key in self.stored and tuple(self.stored[key].size) != shape
        ]


class _PartPlanner(LoadPlanner):
    """Reads a part of one tensor."""

    def __init__(self, key: str, target: torch.Tensor, offsets: torch.Size) -> None:
        self.key, self.target, self.offsets = key, target, offsets
        self.metadata: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: Any,
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the checkpoint's metadata."""
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Gives an item for each stored chunk that has some of the part."""
        assert self.metadata is not None, "set_up_planner comes first"
        stored: Any = self.metadata.state_dict_metadata[self.key]
        chunk = ChunkStorageMetadata(self.offsets, self.target.shape)
        return LoadPlan(create_read_items_for_chunk_list(self.key, stored, [chunk]))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Gives the plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Gives the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Is not called, as no objects are asked for."""
        raise AssertionError(f"{read_item.storage_index} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Gives where the values of an item go."""
        target = self.target
        for dim, (start, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            target = target.narrow(dim, start, size)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Does nothing: the values lie where they belong."""


class _CachedReader(FileSystemReader):
    """Reads the metadata once, not for every part."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Gives the checkpoint's metadata."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
