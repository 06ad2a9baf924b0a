"""Which communication to use: names, contradictions, and the rule behind ``auto``.

none            one rank, or nothing to exchange
p2p             ring: constant memory, neighbours only; best for one document per row
all_gather      exchange of needed rows: best for packed documents
a2a             Ulysses: heads are divided, every rank sees the whole row
a2a+p2p, a2a+all_gather   Ulysses inside, ring or exchange between
"""

import functools
import logging
from collections.abc import Sequence

from megatron.core.context_parallel.documents import IntArray
from megatron.core.context_parallel.layout import Layout

logger = logging.getLogger(__name__)

COMM_TYPES = ("auto", "p2p", "a2a", "a2a+p2p", "all_gather", "a2a+all_gather")


def outer_communication(
    cp_comm_type: str, layout: Layout, packings: Sequence[IntArray], window: int | None
) -> str:
    """How ring ranks exchange keys: "none", "p2p" or "all_gather".

    ``auto``: rows of one document without a window take p2p, anything else all_gather.

    Raises:
        ValueError: for an unknown name, or one that contradicts the layout's ring and Ulysses sizes.
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
    if cp_comm_type != "auto":
        return "none" if ring == 1 else cp_comm_type.removeprefix("a2a+").replace("a2a", "none")
    packed = any(len(bounds) > 2 for bounds in packings) or window is not None
    outer = "none" if ring == 1 else ("all_gather" if packed else "p2p")
    _log_choice(outer, ring, ulysses, packed)
    return outer


@functools.lru_cache(maxsize=64)
def _log_choice(outer: str, ring: int, ulysses: int, packed: bool) -> None:
    """One log line per distinct choice."""
    inner = ["a2a"] if ulysses > 1 else []
    name = "+".join(inner + ([outer] if ring > 1 else [])) or "none"
    rows = "packed documents or a window" if packed else "one document per row"
    logger.info("cp-comm-type auto -> %s (ulysses %d, ring %d, %s)", name, ulysses, ring, rows)
