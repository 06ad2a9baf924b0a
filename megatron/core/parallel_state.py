"""Process groups of a run: one mesh (pp, dpcp, tp) and the groups of every context split.

The mesh is built once. Weights are sharded or replicated over ``dpcp``, the flattened
(dp, ring, ulysses) axis, so a stage of the context schedule may cut ``dpcp`` anew with
:meth:`ParallelState.set_split` while no weight moves. The ulysses, ring, cp and dp groups of all
splits are plain groups, created at start, by every rank, in one order (members-only creation can
hang or, worse, sum over the wrong ranks); a hash of the list is compared over ranks first.

Cost: one ``new_group`` call a distinct group on every rank, about 2 ms each with gloo for members.
On the fake backend a rank creates only the groups it is in, so a dry run of 16,384 ranks takes
about a second.

Code inside ``megatron.core`` gets groups as arguments. The Megatron-named functions at the end
serve outsiders: they read the one installed :class:`ParallelState`.
"""

import datetime
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.compat import group_device, is_fake, set_group_timeout
from megatron.core.rank_grid import RankGrid, build_grid

Split = tuple[int, int]
"""(ulysses size, ring size)."""

_SPLIT_AXES = ("ulysses", "ring", "cp", "dp")


class ParallelState:
    """Mesh, groups, ranks and sizes of this rank.

    Fixed: ``mesh`` (pp, dpcp, tp), ``tp_mesh`` (None when tp is 1), ``dpcp_mesh``, ``tp_group``,
    ``pp_group``, ``dpcp_group``, ``embedding_group`` (first and last pipeline rank; None on the
    others), ``world_group``. Of the current split: ``ulysses_group``, ``ring_group``, ``cp_group``,
    ``dp_group``. An axis of size 1 has a group that holds this rank alone, never None, so that no
    collective falls back to the world by accident. ``<axis>_rank`` and ``<axis>_size`` exist for
    tp, pp, dpcp, cp, dp, ulysses, ring.
    """

    def __init__(
        self,
        *,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        splits: Sequence[Split] = ((1, 1),),
        device_type: str = "cpu",
        timeout: datetime.timedelta | None = None,
    ) -> None:
        """Create all groups; ``torch.distributed`` must be initialized.

        Args:
            splits: (ulysses, ring) of every stage, in the same order on all ranks; the first is
                current afterwards.

        Raises:
            ValueError: when the sizes don't fit the world, or differ between ranks.
        """
        assert splits
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.splits: list[Split] = list(dict.fromkeys((int(u), int(r)) for u, r in splits))
        self.grids: dict[Split, RankGrid] = {
            split: build_grid(
                self.world_size,
                tensor_model_parallel_size=tensor_model_parallel_size,
                pipeline_model_parallel_size=pipeline_model_parallel_size,
                ulysses_size=split[0],
                ring_size=split[1],
            )
            for split in self.splits
        }
        self.grid = self.grids[self.splits[0]]
        sizes = {
            "tensor_model_parallel_size": tensor_model_parallel_size,
            "pipeline_model_parallel_size": pipeline_model_parallel_size,
            "splits (ulysses, ring)": self.splits,
        }
        assert_same_over_ranks(sizes)
        self._timeout = timeout
        self._build_mesh(device_type)
        self._create_plain_groups()
        self.set_split(*self.splits[0])

    def _build_mesh(self, device_type: str) -> None:
        grid = self.grid
        self.device_type = device_type
        self.mesh: DeviceMesh = init_device_mesh(
            device_type, (grid.pp, grid.dpcp, grid.tp), mesh_dim_names=("pp", "dpcp", "tp")
        )
        self.dpcp_mesh: DeviceMesh = self.mesh["dpcp"]
        self.tp_mesh: DeviceMesh | None = self.mesh["tp"] if grid.tp > 1 else None
        self.tp_group: dist.ProcessGroup = self.mesh.get_group("tp")
        self.pp_group: dist.ProcessGroup = self.mesh.get_group("pp")
        self.dpcp_group: dist.ProcessGroup = self.mesh.get_group("dpcp")
        world = dist.group.WORLD
        assert world is not None
        self.world_group: dist.ProcessGroup = world
        if self._timeout is not None and not is_fake():
            for group in (self.tp_group, self.pp_group, self.dpcp_group):
                if group is not world:
                    set_group_timeout(group, self._timeout)
        self.tp_size, self.pp_size, self.dpcp_size = grid.tp, grid.pp, grid.dpcp
        self.tp_rank = grid.axis_rank("tp", self.rank)
        self.pp_rank = grid.axis_rank("pp", self.rank)
        self.dpcp_rank = grid.axis_rank("dpcp", self.rank)

    def _planned_rows(self) -> Iterator[tuple[str, np.ndarray]]:
        """(name, ranks) of each plain group, the same sequence on every rank."""
        seen: set[bytes] = set()
        for split, grid in self.grids.items():
            for axis in _SPLIT_AXES:
                if grid.size(axis) == 1:
                    continue
                rows = grid.groups(axis)
                key = rows.tobytes() + str(rows.shape).encode()
                if key in seen:
                    continue
                seen.add(key)
                for row in rows:
                    yield f"{axis} of split {split}", row
        if self.grid.pp > 1:
            for row in self.grid.embedding_groups():
                yield "embedding", row

    def _create_plain_groups(self) -> None:
        planned = list(self._planned_rows())
        digest = hashlib.sha256()
        for name, row in planned:
            digest.update(name.encode() + row.tobytes())
        self.num_plain_groups = len(planned)
        self.groups_hash: str = digest.hexdigest()
        """Hash of the list of plain groups in the order of their creation."""
        # Before the first of them is created: ranks that create different lists hang.
        assert_same_over_ranks({"list of process groups": self.groups_hash})
        fake = is_fake()
        mine: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self.embedding_group: dist.ProcessGroup | None = None
        for name, row in planned:
            member = bool((row == self.rank).any())
            if fake and not member:
                continue
            ranks = tuple(row.tolist())
            group = dist.new_group(list(ranks), timeout=self._timeout, group_desc=name)
            if member:
                if name == "embedding":
                    self.embedding_group = group
                else:
                    mine[ranks] = group
        # Nobody else takes part in a group of one, so its creation can't be out of order.
        alone = dist.new_group([self.rank], use_local_synchronization=True, group_desc="self")
        mine[(self.rank,)] = alone
        self._mine = mine

    def set_split(self, ulysses: int, ring: int) -> None:
        """Switch the ulysses, ring, cp and dp groups to those of another split. Collective.

        Raises:
            ValueError: for a split whose groups were not created at start.
        """
        split = (int(ulysses), int(ring))
        if split not in self.grids:
            raise ValueError(
                f"split (ulysses {ulysses}, ring {ring}) was not announced at start; known splits: "
                f"{self.splits}. Pass every stage's split when groups are created"
            )
        grid = self.grid = self.grids[split]
        self.split: Split = split

        def group(axis: str) -> dist.ProcessGroup:
            return self._mine[tuple(grid.group_of(axis, self.rank))]

        self.ulysses_group, self.ring_group = group("ulysses"), group("ring")
        self.cp_group, self.dp_group = group("cp"), group("dp")
        if grid.ring > 1:
            make_communicator(self.ring_group)
        self.ulysses_size, self.ring_size = grid.ulysses, grid.ring
        self.cp_size, self.dp_size = grid.cp, grid.dp
        self.ulysses_rank = grid.axis_rank("ulysses", self.rank)
        self.ring_rank = grid.axis_rank("ring", self.rank)
        self.cp_rank = grid.axis_rank("cp", self.rank)
        self.dp_rank = grid.axis_rank("dp", self.rank)

    @property
    def is_pipeline_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_pipeline_last_stage(self) -> bool:
        """Whether this rank holds the output layer and computes the loss."""
        return self.pp_rank == self.pp_size - 1

    def describe(self) -> str:
        """Readable table of the grid and its groups, the same on every rank."""
        lines = [
            f"world {self.world_size} = tp {self.tp_size} x dpcp {self.dpcp_size} "
            f"x pp {self.pp_size}"
        ]
        for (ulysses, ring), grid in self.grids.items():
            lines.append(
                f"  split: ulysses {ulysses} x ring {ring} (cp {grid.cp}) x dp {grid.dp}; "
                + ", ".join(
                    f"{grid.world_size // grid.size(axis)} {axis} groups of {grid.size(axis)}"
                    for axis in _SPLIT_AXES
                )
            )
        return "\n".join(lines)


def make_communicator(group: dist.ProcessGroup) -> None:
    """Let NCCL make the communicator of ``group`` now; nothing on other backends. Collective.

    It is made at the first operation, and all ranks of the group must take part. A batch of sends
    and receives may involve some only: the first hop of a ring over packed documents would wait
    for ever for ranks that neither send nor receive in it.
    """
    device = group_device(group)
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def assert_same_over_ranks(
    name_to_value: Mapping[str, object], group: dist.ProcessGroup | None = None
) -> None:
    """Check that all ranks of ``group`` (default: the world) hold the same values.

    Values are compared by ``repr``. Agreement costs one all-reduce of 16 bytes; only a
    disagreement gathers the values themselves. On the fake backend nothing is compared.

    Raises:
        ValueError: on every rank, naming each key that differs and which rank has which value.
    """
    if is_fake(group) or dist.get_world_size(group) == 1:
        return
    values = {str(key): repr(value) for key, value in name_to_value.items()}
    text = "\0".join(f"{key}\1{values[key]}" for key in sorted(values))
    word = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True) >> 1
    extremes = torch.tensor([word, -word], dtype=torch.int64, device=group_device(group))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = extremes.tolist()
    if highest == -lowest:
        return
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, values, group=group)
    lines = []
    for key in sorted(set().union(*gathered)):
        by_value: dict[str, list[int]] = {}
        for index, other in enumerate(gathered):
            place = dist.get_global_rank(group, index) if group is not None else index
            by_value.setdefault(other.get(key, "(missing)"), []).append(place)
        if len(by_value) > 1:
            parts = [f"{value} on rank {_ranges(ranks)}" for value, ranks in by_value.items()]
            lines.append(f"{key}: " + "; ".join(parts))
    raise ValueError(
        "ranks were started with different settings; start all of them with the same command line "
        "and files:\n  " + "\n  ".join(lines)
    )


def _ranges(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2, 5``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


# Megatron-named functions for outsiders. Code of this package takes groups as arguments.

_installed: list[ParallelState] = []


def install(state: ParallelState) -> None:
    """Make ``state`` the one that the getters below read.

    Raises:
        ValueError: if there is one already.
    """
    if _installed:
        raise ValueError(
            "model parallel is already initialized; call destroy_model_parallel() first"
        )
    _installed.append(state)


def get_parallel_state() -> ParallelState:
    """The installed state; ValueError before ``initialize_model_parallel``."""
    if not _installed:
        raise ValueError(
            "model parallel is not initialized; call initialize_model_parallel() first"
        )
    return _installed[0]


def model_parallel_is_initialized() -> bool:
    """Whether a state is installed."""
    return bool(_installed)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    *,
    splits: Sequence[Split] | None = None,
    distributed_timeout_minutes: float | None = None,
    device_type: str | None = None,
) -> ParallelState:
    """Create all groups, install and return the state.

    Args:
        hierarchical_context_parallel_sizes: (ulysses, ring); their product is the context-parallel
            size. Default: all of it is ring.
        splits: further (ulysses, ring) splits that a context schedule will switch to.
        device_type: default ``cuda`` when the world's backend is NCCL, else ``cpu``.

    Raises:
        ValueError: when sizes contradict each other or the world size.
    """
    if hierarchical_context_parallel_sizes is None:
        first: Split = (1, context_parallel_size)
    else:
        sizes = tuple(hierarchical_context_parallel_sizes)
        if len(sizes) != 2 or sizes[0] * sizes[1] != context_parallel_size:
            raise ValueError(
                f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} must be two "
                f"sizes, ulysses and ring, whose product is --context-parallel-size "
                f"{context_parallel_size}"
            )
        first = (sizes[0], sizes[1])
    timeout = None
    if distributed_timeout_minutes is not None:
        timeout = datetime.timedelta(minutes=distributed_timeout_minutes)
    if _installed:
        raise ValueError(
            "model parallel is already initialized; call destroy_model_parallel() first"
        )
    state = ParallelState(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        splits=[first, *(splits or ())],
        device_type=device_type or group_device().type,
        timeout=timeout,
    )
    install(state)
    return state


def destroy_model_parallel() -> None:
    """Forget the installed state. Its groups go with ``dist.destroy_process_group()``."""
    _installed.clear()


def get_tensor_model_parallel_group() -> dist.ProcessGroup:
    """Group of the tensor-parallel ranks."""
    return get_parallel_state().tp_group


def get_tensor_model_parallel_world_size() -> int:
    """Tensor-parallel size."""
    return get_parallel_state().tp_size


def get_tensor_model_parallel_rank() -> int:
    """Tensor-parallel rank."""
    return get_parallel_state().tp_rank


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """Group of the pipeline ranks."""
    return get_parallel_state().pp_group


def get_pipeline_model_parallel_world_size() -> int:
    """Pipeline-parallel size."""
    return get_parallel_state().pp_size


def get_pipeline_model_parallel_rank() -> int:
    """Pipeline rank."""
    return get_parallel_state().pp_rank


def is_pipeline_first_stage() -> bool:
    """Whether this rank holds the first pipeline stage."""
    return get_parallel_state().is_pipeline_first_stage


def is_pipeline_last_stage() -> bool:
    """Whether this rank holds the last pipeline stage."""
    return get_parallel_state().is_pipeline_last_stage


def get_embedding_group() -> dist.ProcessGroup | None:
    """First and last pipeline rank of this rank's pipeline; None on the ranks between."""
    return get_parallel_state().embedding_group


def get_context_parallel_group() -> dist.ProcessGroup:
    """Group of the context-parallel ranks of the current split."""
    return get_parallel_state().cp_group


def get_context_parallel_world_size() -> int:
    """Context-parallel size of the current split."""
    return get_parallel_state().cp_size


def get_context_parallel_rank() -> int:
    """Context-parallel rank, ring-major: ``ring_rank * ulysses_size + ulysses_rank``."""
    return get_parallel_state().cp_rank


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of the context-parallel group."""
    return dist.get_process_group_ranks(get_parallel_state().cp_group)


def get_hierarchical_context_parallel_groups() -> list[dist.ProcessGroup]:
    """[ulysses group, ring group], inner first as in Megatron-LM."""
    state = get_parallel_state()
    return [state.ulysses_group, state.ring_group]


def get_data_parallel_group(with_context_parallel: bool = False) -> dist.ProcessGroup:
    """Group of the data-parallel ranks, or of all ranks that share weights with this one."""
    state = get_parallel_state()
    return state.dpcp_group if with_context_parallel else state.dp_group


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Size of :func:`get_data_parallel_group`."""
    state = get_parallel_state()
    return state.dpcp_size if with_context_parallel else state.dp_size


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """Rank in :func:`get_data_parallel_group`."""
    state = get_parallel_state()
    return state.dpcp_rank if with_context_parallel else state.dp_rank
