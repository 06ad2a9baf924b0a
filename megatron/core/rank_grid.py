"""Arithmetic of the rank grid: who sits where, and which ranks form which group.

World order, fastest axis first::

    rank = tp + T * (ulysses + U * (ring + R * (dp + D * pp)))

so tensor-parallel ranks are neighbours, Ulysses ranks are neighbours of those (inside a node),
ring ranks stride across nodes, and pipeline stages are farthest apart. ``cp`` is the plane
(ring, ulysses); ``dpcp`` is the plane (dp, ring, ulysses) over which weights are sharded or
replicated. A *split* (ulysses, ring) re-cuts ``dpcp`` without moving a weight: (pp, dpcp, tp) of a
rank are the same in every split.

Everything here is pure: no process group is needed, and a grid of 16,384 ranks costs
milliseconds. It doesn't create groups; ``parallel_state`` does.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

AXES = ("tp", "ulysses", "ring", "cp", "dp", "dpcp", "pp")
_ARRAY_AXES = ("pp", "dp", "ring", "ulysses", "tp")  # slowest first, as numpy stores them
_PLANES = {"cp": ("ring", "ulysses"), "dpcp": ("dp", "ring", "ulysses")}


@dataclasses.dataclass(frozen=True)
class Coordinate:
    """Place of one rank on every axis."""

    tp: int
    ulysses: int
    ring: int
    dp: int
    pp: int


@dataclasses.dataclass(frozen=True)
class RankGrid:
    """Sizes of the five axes; see the module docstring for the order.

    Raises:
        ValueError: for a size below 1.
    """

    tp: int = 1
    ulysses: int = 1
    ring: int = 1
    dp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in _ARRAY_AXES:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"size of the {name} axis is {getattr(self, name)}; it must be >= 1"
                )

    @property
    def cp(self) -> int:
        """Context-parallel size, ulysses x ring."""
        return self.ulysses * self.ring

    @property
    def dpcp(self) -> int:
        """Size of the flattened (dp, ring, ulysses) axis."""
        return self.dp * self.cp

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.dpcp * self.pp

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``, one of ``AXES``."""
        assert axis in AXES, axis
        return int(getattr(self, axis))

    def coordinate(self, rank: int) -> Coordinate:
        """Coordinate of global ``rank``; ValueError when it is outside the grid."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the grid of {self.world_size} ranks")
        rank, tp = divmod(rank, self.tp)
        rank, ulysses = divmod(rank, self.ulysses)
        rank, ring = divmod(rank, self.ring)
        pp, dp = divmod(rank, self.dp)
        return Coordinate(tp=tp, ulysses=ulysses, ring=ring, dp=dp, pp=pp)

    def rank(self, coordinate: Coordinate) -> int:
        """Global rank at ``coordinate``; the inverse of :meth:`coordinate`."""
        c = coordinate
        for name in _ARRAY_AXES:
            assert 0 <= getattr(c, name) < getattr(self, name), (name, c, self)
        return c.tp + self.tp * (
            c.ulysses + self.ulysses * (c.ring + self.ring * (c.dp + self.dp * c.pp))
        )

    def axis_rank(self, axis: str, rank: int) -> int:
        """Index of global ``rank`` in its group of ``axis``."""
        c = self.coordinate(rank)
        if axis == "cp":
            return c.ring * self.ulysses + c.ulysses
        if axis == "dpcp":
            return (c.dp * self.ring + c.ring) * self.ulysses + c.ulysses
        return int(getattr(c, axis))

    def groups(self, axis: str) -> npt.NDArray[np.int64]:
        """All groups of ``axis``: int64 [groups, size], in one order for every rank.

        Row order is by lowest rank; inside a row ranks ascend, which is also the order of the
        axis coordinate.
        """
        assert axis in AXES, axis
        shape = tuple(getattr(self, name) for name in _ARRAY_AXES)
        ranks = np.arange(self.world_size, dtype=np.int64).reshape(shape)
        members = _PLANES.get(axis, (axis,))
        places = [_ARRAY_AXES.index(name) for name in members]
        last = list(range(len(shape) - len(places), len(shape)))
        # The axes left in front keep their order, slowest first, so rows come by lowest rank.
        return np.moveaxis(ranks, places, last).reshape(-1, self.size(axis))

    def group_of(self, axis: str, rank: int) -> list[int]:
        """The group of ``axis`` that holds global ``rank``."""
        c = self.coordinate(rank)
        members = _PLANES.get(axis, (axis,))
        picked = [c]
        for name in members:
            picked = [
                dataclasses.replace(p, **{name: i}) for p in picked for i in range(self.size(name))
            ]
        return [self.rank(p) for p in picked]

    def embedding_groups(self) -> npt.NDArray[np.int64]:
        """First and last pipeline rank of each pipeline: int64 [pipelines, 2] (pp > 1)."""
        assert self.pp > 1
        return self.groups("pp")[:, [0, -1]]


def build_grid(
    world_size: int,
    *,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    ulysses_size: int = 1,
    ring_size: int = 1,
) -> RankGrid:
    """The grid of ``world_size`` ranks; the data-parallel size is what is left over.

    Raises:
        ValueError: when a size is below 1 or the product doesn't divide the world size.
    """
    sizes = {
        "--tensor-model-parallel-size": tensor_model_parallel_size,
        "--pipeline-model-parallel-size": pipeline_model_parallel_size,
        "ulysses size": ulysses_size,
        "ring size": ring_size,
    }
    product = 1
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} {size} must be >= 1")
        product *= size
    if world_size % product:
        text = " x ".join(f"{name} ({size})" for name, size in sizes.items())
        lower = world_size // product * product
        near = f"{lower} or {lower + product}" if lower else str(product)
        raise ValueError(
            f"world size {world_size} must be a multiple of {text} = {product}; "
            f"start {near} ranks or lower one of the sizes"
        )
    return RankGrid(
        tp=tensor_model_parallel_size,
        ulysses=ulysses_size,
        ring=ring_size,
        dp=world_size // product,
        pp=pipeline_model_parallel_size,
    )


def default_split(
    context_parallel_size: int,
    *,
    tensor_model_parallel_size: int,
    ranks_per_node: int,
    num_query_heads: int,
) -> tuple[int, int]:
    """(ulysses, ring) of a context-parallel size when the user gives none.

    Ulysses moves less data but needs fast links and enough heads, so it gets the largest divisor
    U of the context-parallel size C with ``tp * U <= ranks_per_node`` (it stays inside a node) and
    ``U <= num_query_heads / tp``; the ring gets C / U.

    Raises:
        ValueError: when a size is below 1.
    """
    for name, value in (
        ("--context-parallel-size", context_parallel_size),
        ("--tensor-model-parallel-size", tensor_model_parallel_size),
        ("ranks per node", ranks_per_node),
        ("--num-attention-heads", num_query_heads),
    ):
        if value < 1:
            raise ValueError(f"{name} {value} must be >= 1")
    bound = min(
        ranks_per_node // tensor_model_parallel_size,
        num_query_heads // tensor_model_parallel_size,
    )
    divisors = (u for u in range(1, context_parallel_size + 1) if context_parallel_size % u == 0)
    ulysses = max((u for u in divisors if u <= bound), default=1)
    return ulysses, context_parallel_size // ulysses
