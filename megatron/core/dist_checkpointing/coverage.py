"""Do boxes cover a tensor, each element exactly once?

Dimension by dimension: the edges of the boxes cut dimension 0 into slabs; inside a slab the
boxes that reach through it must cover the remaining dimensions.

    dim 0   | a a | c c |        slab 0: a over b, slab 1: c alone
            | b b | c c |

Cost: sorting, for boxes cut along one dimension; for a grid, boxes times slabs of the first
dimension they are cut along. Beyond that many it is refused: no layout writes such a listing.
"""

import bisect
from collections.abc import Sequence

Box = tuple[Sequence[int], Sequence[int]]
"""(offsets, sizes)."""


def coverage_problem(size: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What is wrong with boxes that should make up a tensor of ``size``; None if nothing."""
    for offsets, sizes in boxes:
        if len(offsets) != len(size) or len(sizes) != len(size):
            return f"a piece of {len(sizes)} dimensions in a tensor of {len(size)}"
        for start, length, limit in zip(offsets, sizes, size, strict=True):
            if start < 0 or length < 0 or start + length > limit:
                return f"a piece of shape {_text(sizes)} at {_text(offsets)} lies outside of it"
    filled = [box for box in boxes if 0 not in box[1]]
    if 0 in size:
        return None
    if not filled:
        return "no piece of it is stored"
    return _problem(tuple(size), filled, 0)


def _text(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers)) or "()"


def _problem(size: tuple[int, ...], boxes: list[Box], dim: int) -> str | None:
    if dim == len(size):
        return None if len(boxes) == 1 else "a part of it is stored twice"
    if len(boxes) == 1 and all(boxes[0][1][d] == size[d] for d in range(dim, len(size))):
        return None
    edges = sorted({0, size[dim]} | {edge for o, s in boxes for edge in (o[dim], o[dim] + s[dim])})
    slabs: list[list[Box]] = [[] for _ in edges[1:]]
    work = 0
    for box in boxes:
        first = bisect.bisect_left(edges, box[0][dim])
        last = bisect.bisect_left(edges, box[0][dim] + box[1][dim])
        work += last - first
        if work > 64 * len(boxes) + 65536:
            return "its pieces are cut in a way that no layout of ranks writes"
        for slab in range(first, last):
            slabs[slab].append(box)
    for start, inside in zip(edges, slabs, strict=False):
        if not inside:
            return f"nothing of it is stored from {start} on in dimension {dim}"
        if problem := _problem(size, inside, dim + 1):
            return problem
    return None
