"""Distributed checkpoints: any layout writes, any layout reads, nothing half-written counts."""

from megatron.core.dist_checkpointing.checkpoint_io import (
    SaveFolder,
    choose_checkpoint,
    read_listing,
    read_pieces,
    read_state,
    verify_checkpoint,
    write_checkpoint,
)
from megatron.core.dist_checkpointing.directory import iteration_folder, latest_iteration
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.pieces import Piece, make_pieces
from megatron.core.dist_checkpointing.saver import CheckpointSaver

__all__ = [
    "CheckpointError",
    "CheckpointSaver",
    "Piece",
    "SaveFolder",
    "choose_checkpoint",
    "iteration_folder",
    "latest_iteration",
    "make_pieces",
    "read_listing",
    "read_pieces",
    "read_state",
    "verify_checkpoint",
    "write_checkpoint",
]
