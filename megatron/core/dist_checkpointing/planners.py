"""Save and load plans for pieces: who writes which chunk, who reads which chunk.

torch.distributed.checkpoint does the planning over ranks, the removal of duplicates and the
resharding; these planners tell it what a :class:`Piece` is. Only tensors are stored: an entry
of any other kind is refused, since reading it would mean unpickling it.
"""

import io
import math
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.core.dist_checkpointing.errors import CheckpointError, CheckpointMismatch
from megatron.core.dist_checkpointing.pieces import Piece
from megatron.core.dist_checkpointing.progress import Progress, no_progress


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.tensor.shape))


class PieceSavePlanner(DefaultSavePlanner):
    """Writes pieces; a chunk that several ranks hold is written once."""

    def __init__(self, pieces: dict[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, piece in self._pieces.items():
            chunk = _chunk(piece)
            data = TensorWriteData(
                chunk=chunk,
                properties=TensorProperties(dtype=piece.tensor.dtype),
                size=torch.Size(piece.global_size),
            )
            index = MetadataIndex(name, chunk.offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        tensor = self._pieces[write_item.index.fqn].tensor.detach()
        # torch.save writes the whole storage of a view: give it a tensor of its own.
        if tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size():
            tensor = tensor.clone()
        return tensor.contiguous()


def _stored(name: str, piece: Piece, stored: Any) -> TensorStorageMetadata:
    """What the checkpoint has for a piece, if it is the tensor that the piece is of."""
    kind = name.partition(".")[0]
    cure = "pass --no-load-rng" if kind == "rng" else f"give the {kind} flags it was saved with"
    if stored is None:
        raise CheckpointMismatch(f"the checkpoint has no {name!r}; {cure}")
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(f"{name!r} in the checkpoint is not a tensor")
    if tuple(stored.size) != piece.global_size:
        raise CheckpointMismatch(
            f"{name!r} has shape {tuple(stored.size)} in the checkpoint and "
            f"{piece.global_size} in this run; {cure}"
        )
    before, now = stored.properties.dtype, piece.tensor.dtype
    if before != now:
        text = f"{name!r} has the type {before} in the checkpoint and {now} in this run".replace(
            "torch.", ""
        )
        if before.is_floating_point and now.is_floating_point:
            raise CheckpointMismatch(f"{text}; give the --params-dtype it was saved with")
        raise CheckpointError(text)
    return stored


class PieceLoadPlanner(DefaultLoadPlanner):
    """Reads into the pieces' live memory; every name, size and type must be in the checkpoint."""

    def __init__(self, pieces: dict[str, Piece], progress: Progress = no_progress) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces
        self._progress = progress

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
    ) -> None:
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self._pieces.items():
            stored = _stored(name, piece, self.metadata.state_dict_metadata.get(name))
            found = create_read_items_for_chunk_list(name, stored, [_chunk(piece)])
            elements = sum(math.prod(item.lengths) for item in found)
            assert elements == piece.tensor.numel(), "a listing covers every element once"
            items += found
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn!r} is not a tensor; it is not read")

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._progress()

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._pieces[index.fqn].tensor
