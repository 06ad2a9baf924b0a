"""Layouts: partition, order, inverse, multiples, keys, refusals."""

import math
import random

import numpy as np
import pytest
import torch

from megatron.core.config.parallel import CP_LAYOUTS, layout_multiple
from megatron.core.context_parallel import make_layout
from megatron.core.context_parallel.documents import normalize_cu_seqlens

GRIDS = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (2, 3), (8, 1), (1, 4), (5, 3)]


def lengths(kind, ring, ulysses, limit=96):
    multiple = layout_multiple(kind, ring, ulysses)
    return range(multiple, max(limit, multiple) + 1, multiple)


@pytest.mark.parametrize("kind", CP_LAYOUTS)
@pytest.mark.parametrize("ring,ulysses", GRIDS)
def test_positions_partition_the_row_in_order(kind, ring, ulysses):
    rng = random.Random(ring * 10 + ulysses)
    for seq_length in lengths(kind, ring, ulysses):
        cuts = sorted(rng.sample(range(1, seq_length), min(3, seq_length - 1)))
        cu_seqlens = torch.tensor([0, *cuts, seq_length], dtype=torch.int32)
        layout = make_layout(kind, seq_length, ring, ulysses, cu_seqlens)
        seen = []
        for r in range(ring):
            shard = layout.ring_positions(r)
            assert shard.dtype == torch.int64 and len(shard) == seq_length // ring
            assert (shard[1:] > shard[:-1]).all()
            pieces = [layout.positions(r, u) for u in range(ulysses)]
            assert all(len(piece) == seq_length // ring // ulysses for piece in pieces)
            assert torch.equal(torch.cat(pieces), shard)
            runs = layout.intervals(r)
            assert torch.equal(torch.cat([torch.arange(a, b) for a, b in runs]), shard)
            assert all(b < c for (_, b), (c, _) in zip(runs, runs[1:]))
            for u, piece in enumerate(pieces):
                ring_rank, ulysses_rank, local = layout.locate(piece)
                assert (ring_rank == r).all() and (ulysses_rank == u).all()
                assert np.array_equal(local, np.arange(len(piece)))
            at = np.arange(seq_length + 1)
            below = np.searchsorted(shard.numpy(), at)
            assert np.array_equal(layout.rows_below(r, at), below)
            assert np.array_equal(layout.rows_below_all(at)[r], below)
            seen.append(shard)
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(seq_length))


def test_the_textbook_layouts():
    def of(kind, ring):
        layout = make_layout(kind, 8, ring)
        return [layout.positions(r).tolist() for r in range(ring)]

    assert of("contiguous", 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert of("zigzag", 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert of("striped", 2) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert of("balanced", 2) == of("zigzag", 2)  # one document
    assert make_layout("zigzag", 16, 4).intervals(3) == [(6, 10)]  # its two chunks touch
    assert make_layout("zigzag", 16, 4).intervals(1) == [(2, 4), (12, 14)]


@pytest.mark.parametrize("kind", CP_LAYOUTS)
def test_every_length_is_served_or_refused_with_the_nearest_good_ones(kind):
    for ring, ulysses in GRIDS:
        multiple = math.lcm(2 * ring, ring * ulysses)
        if kind in ("contiguous", "striped"):
            multiple = ring * ulysses
        for seq_length in range(1, 65):
            if seq_length % multiple == 0:
                make_layout(kind, seq_length, ring, ulysses)
                continue
            with pytest.raises(ValueError) as error:
                make_layout(kind, seq_length, ring, ulysses)
            below = seq_length // multiple * multiple
            good = f"use {below} or {below + multiple}" if below else f"use {multiple}"
            assert str(error.value).endswith(good)
            assert f"--seq-length {seq_length} must be a multiple of {multiple}" in str(error.value)


def test_layouts_compare_by_where_they_put_tokens():
    one = make_layout("zigzag", 64, 4)
    assert one == make_layout("zigzag", 64, 4, cu_seqlens=[0, 10, 64])
    assert hash(one) == hash(make_layout("zigzag", 64, 4))
    different = [
        make_layout("zigzag", 64, 2),
        make_layout("zigzag", 64, 4, 2),
        make_layout("contiguous", 64, 4),
        make_layout("balanced", 64, 4, cu_seqlens=[0, 40, 44, 64]),
        make_layout("balanced", 64, 4, cu_seqlens=[0, 5, 64]),
    ]
    assert len({layout.key for layout in [one, *different]}) == 6
    cu_seqlens = torch.tensor([0, 40, 44, 64])
    assert make_layout("balanced", 64, 4, 1, cu_seqlens) == different[3]


def test_one_layout_for_a_batch_of_packings():
    a, b = torch.tensor([0, 100, 256]), torch.tensor([0, 7, 200, 201, 256])
    both = make_layout("balanced", 256, 4, 1, [a, b])
    assert both == make_layout("balanced", 256, 4, 1, (a, b))
    assert both.positions(0).numel() == 64
    assert make_layout("zigzag", 256, 4, 1, [a, b]) == make_layout("zigzag", 256, 4)


@pytest.mark.parametrize(
    "cu_seqlens,words",
    [
        ([1, 8], "must run from 0"),
        ([0, 9], "from 0 to the sequence length 8"),
        ([0, 5, 4, 8], "4 follows 5 at index 2"),
        ([0], "two boundaries"),
        ([[0, 4, 8], [0, 7]], "from 0 to 7"),
        (np.array([0.0, 8.0]), "integers"),
        (torch.tensor([[0, 8]]), "one-dimensional"),
        ([], "empty list"),
    ],
)
@pytest.mark.parametrize("kind", CP_LAYOUTS)
def test_bad_boundaries_are_refused(kind, cu_seqlens, words):
    with pytest.raises(ValueError, match=words):
        make_layout(kind, 8, 2, 1, cu_seqlens)


def test_other_refusals():
    with pytest.raises(ValueError, match="--cp-layout 'snake' must be one of"):
        make_layout("snake", 8, 2)
    with pytest.raises(ValueError, match="ring size 0"):
        make_layout("zigzag", 8, 0)
    with pytest.raises(ValueError, match="--seq-length 0"):
        make_layout("contiguous", 0, 2)
    layout = make_layout("zigzag", 8, 2)
    with pytest.raises(ValueError, match="ring 2"):
        layout.positions(2)
    with pytest.raises(ValueError, match="ulysses 1"):
        layout.positions(0, 1)
    with pytest.raises(ValueError, match="0..7"):
        layout.locate([8])


def test_empty_documents_change_nothing():
    assert normalize_cu_seqlens([0, 0, 40, 40, 40, 64, 64], 64).tolist() == [0, 40, 64]
    assert normalize_cu_seqlens(None, 64).tolist() == [0, 64]
    plain = make_layout("balanced", 64, 4, 1, [0, 40, 64])
    assert plain == make_layout("balanced", 64, 4, 1, [0, 0, 40, 40, 40, 64])


@pytest.mark.parametrize("kind", CP_LAYOUTS)
def test_a_thousand_ranks(kind):
    ring, ulysses = 128, 8
    layout = make_layout(kind, 1 << 20, ring, ulysses)
    ranks = [layout.positions(r, u) for r in range(ring) for u in range(ulysses)]
    assert torch.equal(torch.cat(ranks).sort().values, torch.arange(1 << 20))
    wide = make_layout(kind, 1 << 24, 1024)
    at = np.array([0, 5_000_000, (1 << 24) - 1])
    ring_rank, ulysses_rank, local = wide.locate(at)
    for i, r in enumerate(ring_rank):
        assert wide.positions(int(r))[local[i]] == at[i]
    assert (ulysses_rank == 0).all()
