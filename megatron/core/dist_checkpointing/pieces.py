"""A piece: the part of a named global tensor that this rank holds.

Weights and optimizer state, whether DTensors over (dpcp, tp), plain tensors, or padded
vocabularies, all become pieces: a local tensor, its offsets, and the size of the whole as it
is stored. Pieces know nothing of meshes, so they can be copied for a background save, and
read back by any other layout.

A vocabulary is stored without its padding: ``rows`` caps the first dimension.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor


@dataclasses.dataclass(frozen=True)
class Piece:
    """Local part of a global tensor; ``tensor`` is live memory unless copied."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    global_size: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the local part."""
        return self.tensor.numel() * self.tensor.element_size()

    def copied(self, memory: torch.Tensor | None = None) -> "Piece":
        """The piece with memory of its own on the CPU, for a snapshot.

        ``memory``: that of an earlier snapshot, used again if it fits; fresh pages cost several
        times what the copy costs.
        """
        copy, source = memory, self.tensor.detach()
        if copy is None or copy.shape != source.shape or copy.dtype != source.dtype:
            pinned = source.device.type == "cuda"
            copy = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)
        copy.copy_(source)
        return dataclasses.replace(self, tensor=copy)


def piece_of(tensor: torch.Tensor, rows: int | None = None) -> Piece | None:
    """The piece of a DTensor or plain tensor; None if this rank holds none of it.

    Args:
        tensor: DTensor sharded over any mesh, or a plain tensor (the whole).
        rows: stored size of dimension 0 when the live tensor is padded beyond it.
    """
    if isinstance(tensor, DTensor):
        chunks = tensor.__create_chunk_list__()
        if not chunks:
            return None
        local = tensor.to_local().detach()
        offsets = tuple(chunks[0].offsets)
        local = local.reshape(tuple(chunks[0].sizes))
    else:
        local = tensor.detach()
        offsets = (0,) * local.dim()
    size = tuple(tensor.shape)
    if rows is not None and size:
        size = (rows, *size[1:])
        held = max(0, min(local.shape[0], rows - offsets[0]))
        local = local.narrow(0, 0, held)
    if local.numel() == 0 and local.dim() > 0:
        return None
    return Piece(local, offsets, size)


def make_pieces(
    named: Iterable[tuple[str, torch.Tensor]], vocabulary_rows: Mapping[str, int]
) -> dict[str, Piece]:
    """Pieces by name; names whose last part is in ``vocabulary_rows`` lose their padding."""
    pieces = {}
    for name, tensor in named:
        rows = next((n for key, n in vocabulary_rows.items() if name.endswith(key)), None)
        piece = piece_of(tensor, rows)
        if piece is not None:
            pieces[name] = piece
    return pieces
