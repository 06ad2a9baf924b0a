"""Groups on real ranks and on a fake world of 16,384."""

import datetime
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state as ps
from megatron.core.parallel_state import ParallelState, assert_same_over_ranks
from tests.utils.ranks import run_ranks

GROUPS = ("tp", "pp", "dpcp", "ulysses", "ring", "cp", "dp")


def _sum(value, group):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def _check_groups(state):
    """Each group's members, order and sum are those of the grid."""
    for axis in GROUPS:
        group = getattr(state, f"{axis}_group")
        expected = state.grid.group_of(axis, state.rank)
        assert dist.get_process_group_ranks(group) == expected, axis
        assert getattr(state, f"{axis}_size") == len(expected)
        assert expected[getattr(state, f"{axis}_rank")] == state.rank
        assert dist.get_rank(group) == getattr(state, f"{axis}_rank")
        assert _sum(state.rank, group) == sum(expected), axis


def _switch(rank, world):
    state = ParallelState(
        tensor_model_parallel_size=2, splits=[(1, 1), (2, 1), (1, 2), (2, 2), (2, 1)]
    )
    mesh_before = state.mesh
    hashes = {}
    for split in [(1, 1), (2, 1), (1, 2), (2, 2), (1, 1), (2, 2)]:
        state.set_split(*split)
        _check_groups(state)
        assert state.split == split and state.cp_size * state.dp_size == state.dpcp_size == 4
        hashes[split] = state.cp_rank
    assert state.mesh is mesh_before and state.embedding_group is None
    with pytest.raises(ValueError, match="was not announced at start"):
        state.set_split(4, 1)
    return state.groups_hash, state.dpcp_rank


def test_splits_switch_without_touching_the_mesh():
    results = run_ranks(8, _switch)
    assert len({digest for digest, _ in results}) == 1
    assert [dpcp for _, dpcp in results] == [0, 0, 1, 1, 2, 2, 3, 3]


def _pipeline(rank, world):
    state = ParallelState(pipeline_model_parallel_size=4, splits=[(2, 1)])
    _check_groups(state)
    first, last = state.is_pipeline_first_stage, state.is_pipeline_last_stage
    assert (first, last) == (rank < 2, rank >= 6)
    if first or last:
        assert dist.get_process_group_ranks(state.embedding_group) == [rank % 2, rank % 2 + 6]
        assert _sum(rank, state.embedding_group) == 2 * (rank % 2) + 6
    else:
        assert state.embedding_group is None
    assert state.tp_mesh is None and state.dpcp_mesh.size() == 2


def test_pipeline_and_embedding_groups():
    run_ranks(8, _pipeline)


def _getters(rank, world):
    state = ps.initialize_model_parallel(
        2, 1, 4, hierarchical_context_parallel_sizes=[2, 2], distributed_timeout_minutes=1
    )
    assert ps.get_parallel_state() is state and ps.model_parallel_is_initialized()
    assert ps.get_tensor_model_parallel_world_size() == 2
    assert ps.get_tensor_model_parallel_rank() == rank % 2
    assert ps.get_tensor_model_parallel_group() is state.tp_group
    assert ps.get_pipeline_model_parallel_world_size() == 1
    assert ps.get_pipeline_model_parallel_rank() == 0
    assert dist.get_world_size(ps.get_pipeline_model_parallel_group()) == 1
    assert ps.is_pipeline_first_stage() and ps.is_pipeline_last_stage()
    assert ps.get_embedding_group() is None
    assert ps.get_context_parallel_world_size() == 4
    assert ps.get_context_parallel_rank() == rank // 2
    assert ps.get_context_parallel_global_ranks() == [rank % 2 + 2 * i for i in range(4)]
    ulysses, ring = ps.get_hierarchical_context_parallel_groups()
    assert dist.get_process_group_ranks(ulysses) == [rank // 4 * 4 + rank % 2 + i for i in (0, 2)]
    assert dist.get_process_group_ranks(ring) == [rank % 4, rank % 4 + 4]
    assert ps.get_data_parallel_world_size() == 1 and ps.get_data_parallel_rank() == 0
    assert ps.get_data_parallel_world_size(with_context_parallel=True) == 4
    assert ps.get_data_parallel_rank(with_context_parallel=True) == rank // 2
    # A group of size 1 holds this rank alone; None would mean the whole world.
    assert _sum(rank, ps.get_data_parallel_group()) == rank
    assert _sum(1, ps.get_data_parallel_group(with_context_parallel=True)) == 4
    assert _sum(1, ps.get_context_parallel_group()) == 4
    with pytest.raises(ValueError, match="already initialized"):
        ps.initialize_model_parallel()
    ps.destroy_model_parallel()
    with pytest.raises(ValueError, match="not initialized"):
        ps.get_data_parallel_group()
    for wrong in ([2, 1], [2, 2, 1]):
        with pytest.raises(ValueError, match="whose product is --context-parallel-size 4"):
            ps.initialize_model_parallel(2, 1, 4, wrong)
    with pytest.raises(ValueError, match="world size 8 must be a multiple"):
        ps.initialize_model_parallel(3)


def test_megatron_named_getters():
    run_ranks(8, _getters)


def _differing(rank, world):
    assert_same_over_ranks({"seq_length": 4096, "names": ("a", "b")})
    message = ""
    try:
        assert_same_over_ranks({"lr": 0.1, "seq_length": 8192 if rank == 1 else 4096})
    except ValueError as error:
        message = str(error)
    half = dist.new_group([0, 2]), dist.new_group([1, 3])
    try:
        assert_same_over_ranks({"only_odd": rank} if rank % 2 else {"x": 1}, half[rank % 2])
        failed = False
    except ValueError as error:
        failed = "only_odd: 1 on rank 1; 3 on rank 3" in str(error)
    assert failed == bool(rank % 2)
    try:
        assert_same_over_ranks({"extra": 1} if rank == 3 else {})
    except ValueError as error:
        assert "extra: (missing) on rank 0-2; 1 on rank 3" in str(error)
    else:
        raise AssertionError("a key that one rank lacks must be found")
    return message


def test_differing_settings_are_named_on_every_rank():
    messages = run_ranks(4, _differing)
    assert len(set(messages)) == 1
    assert "seq_length: 4096 on rank 0, 2-3; 8192 on rank 1" in messages[0]
    assert "lr" not in messages[0]


def _other_sizes(rank, world):
    with pytest.raises(
        ValueError, match=r"splits .*\[\(1, 1\)\] on rank 0; \[\(2, 1\)\] on rank 1"
    ):
        ParallelState(splits=[(1, 1)] if rank == 0 else [(2, 1)])


def test_a_rank_with_other_sizes_stops_all_ranks_before_groups_are_made():
    run_ranks(2, _other_sizes)


class _Reordered(ParallelState):
    def _planned_rows(self):
        rows = list(super()._planned_rows())
        return iter(rows[::-1] if self.rank == 1 else rows)


def _other_order(rank, world):
    with pytest.raises(ValueError, match="list of process groups: '[0-9a-f]+' on rank 0, 2-3; "):
        _Reordered(splits=[(2, 1), (1, 1)])


def test_another_order_of_group_creation_stops_all_ranks():
    run_ranks(4, _other_order)


FAKE = """
import time
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron.core.parallel_state import ParallelState
hashes = set()
start = time.process_time()
for rank in (0, 5000, 16383):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=16384)
    state = ParallelState(
        tensor_model_parallel_size=8, pipeline_model_parallel_size=8,
        splits=[(1, 1), (8, 1), (8, 4), (8, 32)],
    )
    for split in state.splits:
        state.set_split(*split)
        for axis in ("tp", "pp", "dpcp", "ulysses", "ring", "cp", "dp"):
            ranks = dist.get_process_group_ranks(getattr(state, axis + "_group"))
            assert ranks == state.grid.group_of(axis, rank), (axis, split)
    hashes.add((state.groups_hash, state.num_plain_groups))
    assert state.dpcp_size == 256 and "world 16384 = tp 8 x dpcp 256 x pp 8" in state.describe()
    dist.destroy_process_group()
assert len(hashes) == 1
assert time.process_time() - start < 5.0
"""


def test_fake_world_of_16384_ranks():
    subprocess.run([sys.executable, "-c", FAKE], check=True, timeout=120)


def _nccl_rules(rank, world):
    """What matters with NCCL alone; the GPU's tensors are made on the meta device."""
    limit = datetime.timedelta(seconds=1234)
    state = ParallelState(tensor_model_parallel_size=2, splits=[(2, 1), (1, 2)], timeout=limit)
    for group in (state.tp_group, state.pp_group, state.dpcp_group, state.ring_group):
        if dist.get_world_size(group) > 1:  # a group of one waits for nobody
            assert group._get_backend(torch.device("cpu")).options._timeout == limit
    zeros, reduced = torch.zeros, []

    def note(tensor, group):
        reduced.append((tensor.device.type, dist.get_process_group_ranks(group)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", note)
        state.set_split(1, 2)
        assert not reduced  # gloo needs nothing
        patch.setattr(ps, "group_device", lambda group: torch.device("cuda", 0))
        patch.setattr(torch, "zeros", lambda size, device: zeros(size, device="meta"))
        state.set_split(2, 1)
        assert not reduced  # no ring
        state.set_split(1, 2)
    ring = state.grid.group_of("ring", rank)
    assert len(ring) == 2 and reduced == [("meta", ring)]


def test_rings_get_their_communicators_and_mesh_groups_the_time_limit():
    run_ranks(4, _nccl_rules)
