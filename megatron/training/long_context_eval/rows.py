"""Whole documents as micro-batches of one process, grouped so that memory stays bounded."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from megatron.core.packed_batch import IGNORE_INDEX, PackedBatch

Tokens = npt.NDArray[np.integer]

TOKENS_AT_ONCE = 32768
"""Tokens of a micro-batch, unless one row is longer."""


def batches_of(
    documents: Sequence[Tokens], *, device: torch.device, tokens_at_once: int = TOKENS_AT_ONCE
) -> Iterator[PackedBatch]:
    """Equally long documents as rows: inputs are all tokens but the last, labels all but the first.

    Args:
        documents: each [S + 1].
    """
    if not documents:
        return
    seq_length = len(documents[0]) - 1
    rows = max(1, tokens_at_once // seq_length)
    for start in range(0, len(documents), rows):
        chosen = np.stack([np.asarray(d, np.int64) for d in documents[start : start + rows]])
        tokens = torch.from_numpy(chosen).to(device)
        yield row_batch(tokens[:, :-1], tokens[:, 1:])


def row_batch(tokens: torch.Tensor, labels: torch.Tensor) -> PackedBatch:
    """One document a row; ``tokens`` and ``labels`` int64 [B, S]."""
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device).expand(batch, length)
    return PackedBatch(
        tokens=tokens.contiguous(),
        labels=labels.contiguous(),
        loss_mask=(labels != IGNORE_INDEX).to(torch.float32),
        position_ids=positions.contiguous(),
        cu_seqlens=[torch.tensor([0, length], dtype=torch.int32) for _ in range(batch)],
        seq_length=length,
    )
