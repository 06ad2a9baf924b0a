"""The batch: what one rank reads for one micro-batch, and all it must know of the whole rows.

Several documents share a row. A rank of a context-parallel group holds ``s_local`` of a row's
``seq_length`` positions (those that the layout gives to its (ring, ulysses) coordinates, in
local order), with labels and positions that were fixed on the whole row before it was cut; the
document boundaries, ``cu_seqlens``, always speak of the whole row.

Legend: B rows of the micro-batch, s local sequence, S whole sequence.

Cost: 28 bytes a local token and 4 bytes a document. There is no mask of S x S.
"""

import dataclasses
from typing import Any

import torch

IGNORE_INDEX = -100
"""The label of a position that has no loss (PyTorch's default for cross-entropy)."""


@dataclasses.dataclass
class PackedBatch:
    """One micro-batch of one (ring, ulysses) rank.

    Padding at the end of a row is a document of its own in ``cu_seqlens`` without loss.
    """

    tokens: torch.Tensor
    """int64 [B, s]: input tokens."""
    labels: torch.Tensor
    """int64 [B, s]: the next token of the stream; ``IGNORE_INDEX`` where there is no loss."""
    loss_mask: torch.Tensor
    """float32 [B, s]: 1 where there is loss, else 0."""
    position_ids: torch.Tensor
    """int64 [B, s]: positions for the position embedding."""
    cu_seqlens: list[torch.Tensor]
    """B int32 CPU tensors, each from 0 to ``seq_length``: document boundaries of a whole row."""
    seq_length: int
    """S: tokens of a whole row."""
    layout: Any = None
    """Who holds which positions; has ``.positions(ring_rank, ulysses_rank)``."""
    attention_plan: Any = None
    """Filled once per micro-batch by whoever runs the model."""
    sample_ids: list[int] = dataclasses.field(default_factory=list)
    """Numbers of the rows, counted over the whole run (not over this rank's rows)."""
    row_hashes: list[int] = dataclasses.field(default_factory=list)
    """63-bit hash of what fills each whole row; equal on all ranks that share the row."""

    moved_from: Any = None
    """The ``PackedBatch`` on the CPU that ``to`` copied to a device, or None."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "PackedBatch":
        """A copy with the four [B, s] tensors on ``device``; ``cu_seqlens`` stay on the CPU."""
        moved = {
            name: getattr(self, name).to(device, non_blocking=non_blocking)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }
        leaves_cpu = self.tokens.is_cpu and torch.device(device).type != "cpu"
        return dataclasses.replace(
            self, **moved, moved_from=self if leaves_cpu else self.moved_from
        )

    @property
    def on_host(self) -> "PackedBatch":
        """The same on the CPU where it came from there: a look at it waits for no device."""
        return self if self.moved_from is None else self.moved_from

    @property
    def num_loss_tokens(self) -> torch.Tensor:
        """int64 scalar on the batch's device: how many of its positions have a loss."""
        return (self.labels != IGNORE_INDEX).sum()
