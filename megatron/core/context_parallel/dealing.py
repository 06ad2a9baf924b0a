"""Dealing chunks to ring ranks (first version: snake order)."""

import numpy as np

from megatron.core.context_parallel.documents import IntArray


def deal_balanced(packings: list[IntArray], seq_length: int, ring_size: int) -> IntArray:
    """Owner of each of 2Rk chunks."""
    ranks = np.arange(ring_size, dtype=np.int64)
    k = next(k for k in (16, 8, 4, 2, 1) if seq_length % (2 * ring_size * k) == 0)
    return np.tile(np.concatenate((ranks, ranks[::-1])), k)
