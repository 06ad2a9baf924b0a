"""Documents of a packed row as intervals of global positions.

A row of ``seq_length`` tokens holds documents back to back; ``cu_seqlens = [0, e_0, e_1, ...,
seq_length]`` lists their ends. Attention never crosses a document. Trailing padding is simply the
last document: its rows attend among themselves, which is harmless since they carry no loss.

Everything here is numpy on document boundaries: the cost is the number of documents, never the
number of tokens. Empty documents (two equal boundaries) are accepted and dropped.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


def normalize_cu_seqlens(cu_seqlens: Any, seq_length: int) -> IntArray:
    """Check document boundaries and return them strictly increasing, as int64.

    Args:
        cu_seqlens: integers [documents + 1] (tensor, array or sequence), or None for one document.
        seq_length: tokens of the whole row.

    Raises:
        ValueError: unless the boundaries start at 0, never decrease and end at ``seq_length``.
    """
    if cu_seqlens is None:
        return np.array([0, seq_length], dtype=np.int64)
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.is_meta:
            raise ValueError("cu_seqlens on the meta device holds no numbers; put it on the CPU")
        cu_seqlens = cu_seqlens.detach().cpu().numpy()
    bounds = np.asarray(cu_seqlens)
    if bounds.ndim != 1 or bounds.size < 2:
        raise ValueError(
            f"cu_seqlens of shape {list(bounds.shape)} must be one-dimensional with at least two "
            f"boundaries; one document is [0, {seq_length}]"
        )
    if not np.issubdtype(bounds.dtype, np.integer):
        raise ValueError(f"cu_seqlens of type {bounds.dtype} must hold integers; use int32")
    bounds = bounds.astype(np.int64)
    if bounds[0] != 0 or bounds[-1] != seq_length:
        raise ValueError(
            f"cu_seqlens runs from {bounds[0]} to {bounds[-1]} but must run from 0 to the sequence "
            f"length {seq_length} of the whole row (trailing padding is a document of its own)"
        )
    steps = np.diff(bounds)
    if (steps < 0).any():
        at = int(np.argmax(steps < 0))
        raise ValueError(
            f"cu_seqlens must not decrease, but {bounds[at + 1]} follows {bounds[at]} "
            f"at index {at + 1}"
        )
    return np.ascontiguousarray(bounds[np.concatenate(([True], steps > 0))])


def normalize_packings(cu_seqlens: Any, seq_length: int) -> list[IntArray]:
    """Boundaries of one packing or of a list of packings (one per batch row), checked.

    A list or tuple whose items are integers is one packing; otherwise each item is one.

    Raises:
        ValueError: for an empty list, and as :func:`normalize_cu_seqlens`.
    """
    if isinstance(cu_seqlens, Sequence) and not isinstance(cu_seqlens, (str, bytes)):
        if len(cu_seqlens) == 0:
            raise ValueError("cu_seqlens is an empty list; give one packing per batch row, or None")
        if not all(isinstance(item, (int, np.integer)) for item in cu_seqlens):
            return [normalize_cu_seqlens(item, seq_length) for item in cu_seqlens]
    return [normalize_cu_seqlens(cu_seqlens, seq_length)]


def document_bounds(bounds: IntArray, positions: IntArray) -> tuple[IntArray, IntArray]:
    """Start and end of the document that holds each global position."""
    index = np.searchsorted(bounds, positions, side="right") - 1
    return bounds[index], bounds[index + 1]
