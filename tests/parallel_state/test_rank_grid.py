"""Grid arithmetic, without processes: order of axes, groups, default split, refusals."""

import time

import numpy as np
import pytest

from megatron.core.rank_grid import AXES, Coordinate, RankGrid, build_grid, default_split


def test_world_order_is_tp_ulysses_ring_dp_pp():
    grid = RankGrid(tp=2, ulysses=2, ring=2, dp=2, pp=2)
    assert grid.rank(Coordinate(tp=1, ulysses=0, ring=0, dp=0, pp=0)) == 1
    assert grid.rank(Coordinate(tp=0, ulysses=1, ring=0, dp=0, pp=0)) == 2
    assert grid.rank(Coordinate(tp=0, ulysses=0, ring=1, dp=0, pp=0)) == 4
    assert grid.rank(Coordinate(tp=0, ulysses=0, ring=0, dp=1, pp=0)) == 8
    assert grid.rank(Coordinate(tp=0, ulysses=0, ring=0, dp=0, pp=1)) == 16
    assert grid.group_of("ring", 3) == [3, 7]
    assert grid.group_of("cp", 1) == [1, 3, 5, 7]
    assert grid.group_of("dpcp", 17) == [17, 19, 21, 23, 25, 27, 29, 31]
    assert grid.embedding_groups().tolist() == [[i, i + 16] for i in range(16)]


@pytest.mark.parametrize(
    "sizes", [(2, 3, 2, 1, 2), (1, 1, 1, 1, 1), (4, 2, 1, 3, 2), (1, 2, 4, 2, 3)]
)
def test_groups_partition_the_world_and_agree_with_coordinates(sizes):
    grid = RankGrid(*sizes)
    for axis in AXES:
        rows = grid.groups(axis)
        assert sorted(rows.ravel().tolist()) == list(range(grid.world_size))
        assert rows.shape[1] == grid.size(axis)
        assert (np.diff(rows[:, 0]) > 0).all(), "one order on every rank: by lowest rank"
        for row in rows.tolist():
            assert row == sorted(row)
            for index, rank in enumerate(row):
                assert grid.group_of(axis, rank) == row
                assert grid.axis_rank(axis, rank) == index
    for rank in range(grid.world_size):
        assert grid.rank(grid.coordinate(rank)) == rank


def test_16384_ranks_are_fast_and_dpcp_does_not_depend_on_the_split():
    start = time.process_time()
    grids = [
        build_grid(
            16384,
            tensor_model_parallel_size=8,
            pipeline_model_parallel_size=8,
            ulysses_size=u,
            ring_size=r,
        )
        for u, r in ((1, 1), (8, 4), (8, 32), (1, 256))
    ]
    for grid in grids:
        for axis in AXES:
            rows = grid.groups(axis)
            assert rows.size == 16384 and len(np.unique(rows)) == 16384
        np.testing.assert_array_equal(grid.groups("dpcp"), grids[0].groups("dpcp"))
        for rank in (0, 1, 4097, 16383):
            assert grid.axis_rank("dpcp", rank) == grids[0].axis_rank("dpcp", rank)
            assert grid.rank(grid.coordinate(rank)) == rank
    assert time.process_time() - start < 2.0


def test_ulysses_ranks_share_a_node_and_ring_ranks_stride_over_nodes():
    grid = build_grid(64, tensor_model_parallel_size=2, ulysses_size=4, ring_size=8)
    for row in grid.groups("ulysses").tolist():
        assert len({rank // 8 for rank in row}) == 1
    for row in grid.groups("ring").tolist():
        assert len({rank // 8 for rank in row}) == 8


@pytest.mark.parametrize(
    ("cp", "tp", "node", "heads", "split"),
    [
        (1, 1, 8, 32, (1, 1)),
        (8, 1, 8, 32, (8, 1)),
        (32, 1, 8, 32, (8, 4)),
        (32, 8, 8, 32, (1, 32)),
        (32, 2, 8, 32, (4, 8)),
        (12, 1, 8, 32, (6, 2)),
        (8, 1, 8, 4, (4, 2)),
        (8, 4, 8, 4, (1, 8)),
        (6, 1, 4, 5, (3, 2)),
        (7, 1, 4, 8, (1, 7)),
        (4, 4, 2, 8, (1, 4)),
    ],
)
def test_default_split(cp, tp, node, heads, split):
    found = default_split(
        cp, tensor_model_parallel_size=tp, ranks_per_node=node, num_query_heads=heads
    )
    assert found == split


def test_errors_name_flag_value_rule_and_cure():
    with pytest.raises(
        ValueError, match=r"world size 6 must be a multiple of .*parallel-size \(4\)"
    ):
        build_grid(6, tensor_model_parallel_size=4)
    with pytest.raises(ValueError, match="start 4 or 8 ranks"):
        build_grid(6, tensor_model_parallel_size=4)
    with pytest.raises(ValueError, match="start 16 ranks"):
        build_grid(6, pipeline_model_parallel_size=4, ring_size=4)
    with pytest.raises(ValueError, match="--tensor-model-parallel-size 0 must be >= 1"):
        build_grid(8, tensor_model_parallel_size=0)
    with pytest.raises(ValueError, match="ring axis is 0"):
        RankGrid(ring=0)
    with pytest.raises(ValueError, match="outside the grid of 4 ranks"):
        RankGrid(tp=4).coordinate(4)
    with pytest.raises(ValueError, match="ranks per node 0"):
        default_split(2, tensor_model_parallel_size=1, ranks_per_node=0, num_query_heads=2)
