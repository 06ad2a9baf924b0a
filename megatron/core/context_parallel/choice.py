"""Which communication to use: names, contradictions, and the log line of ``auto``.

    none            one rank, or nothing to exchange
    p2p             ring: constant memory, neighbours only; best for one document per row
    all_gather      exchange of needed rows: best for packed documents
    a2a             Ulysses: heads are divided, every rank sees the whole row
    a2a+p2p, a2a+all_gather   Ulysses inside, ring or exchange between

``auto`` asks the cost model, which knows fixed rules first and computes the same on every rank.
"""

import functools
import logging
from collections.abc import Sequence

from megatron.core.context_parallel.cost_model import AttentionShape, choose_comm_type
from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.layout import Layout

logger = logging.getLogger(__name__)

COMM_TYPES = ("auto", "p2p", "a2a", "a2a+p2p", "all_gather", "a2a+all_gather")


def outer_communication(
    cp_comm_type: str,
    layout: Layout,
    packings: Sequence[IntArray],
    window: int | None,
    causal: bool,
    shape: AttentionShape,
) -> str:
    """How ring ranks exchange keys: "none", "p2p" or "all_gather".

    Raises:
        ValueError: for an unknown name, or one that contradicts the layout's sizes.
    """
    ring, ulysses = layout.ring_size, layout.ulysses_size
    if cp_comm_type not in COMM_TYPES:
        raise ValueError(f"--cp-comm-type {cp_comm_type} must be one of {', '.join(COMM_TYPES)}")
    if cp_comm_type in ("p2p", "all_gather") and ulysses > 1:
        raise ValueError(
            f"--cp-comm-type {cp_comm_type} divides no heads, but the layout has ulysses size "
            f"{ulysses}; use a2a+{cp_comm_type}, or ulysses size 1"
        )
    if cp_comm_type == "a2a" and ring > 1:
        raise ValueError(
            f"--cp-comm-type a2a exchanges no keys, but the layout has ring size {ring}; "
            "use a2a+p2p or a2a+all_gather, or ring size 1"
        )
    if ring == 1:
        return "none"
    if cp_comm_type == "auto":
        cp_comm_type = choose_comm_type(
            layout, list(packings), window=window, causal=causal, shape=shape
        )
        packed = any(len(bounds) > 2 for bounds in packings)
        _log_choice(cp_comm_type, layout.kind, ring, ulysses, packed, window)
    return cp_comm_type.removeprefix("a2a+")


@functools.lru_cache(maxsize=64)
def _log_choice(
    chosen: str, kind: str, ring: int, ulysses: int, packed: bool, window: int | None
) -> None:
    """One log line per distinct choice."""
    rows = "packed documents" if packed else "one document per row"
    limit = "" if window is None else f", window {window}"
    logger.info(
        "cp-comm-type auto -> %s (%s layout, ulysses %d, ring %d, %s%s)",
        chosen,
        kind,
        ulysses,
        ring,
        rows,
        limit,
    )
