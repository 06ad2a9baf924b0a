"""The virtual shuffle: every epoch a permutation of its own, any draw alone or in blocks."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from megatron.core.datasets.shuffle import draw, stream_key

PINNED = [2, 5, 8, 9, 3, 1, 6, 4, 7, 0, 2, 0]
PINNED_KEY = 5937491334143899315


@pytest.mark.parametrize("size", [1, 2, 3, 15, 16, 17, 1000, 65537])
def test_every_epoch_is_a_permutation(size: int) -> None:
    for epoch in (0, 1, 7):
        assert np.array_equal(np.sort(draw(epoch * size, size, size, 5)), np.arange(size))


def test_blocks_do_not_matter() -> None:
    whole = draw(0, 1000, 37, 9)
    assert [int(draw(i, 1, 37, 9)[0]) for i in range(1000)] == whole.tolist()
    assert np.array_equal(draw(100, 900, 37, 9), whole[100:])


def test_epochs_and_keys_differ() -> None:
    orders = {tuple(draw(e * 100, 100, 100, key)) for e in range(20) for key in (1, 2)}
    assert len(orders) == 40
    assert len({stream_key("a", i) for i in range(1000)}) == 1000
    assert stream_key("order", 1, "x") != stream_key("order", 2, "x")


def test_the_order_is_fixed_for_ever() -> None:
    assert draw(0, 12, 10, 42).tolist() == PINNED
    assert stream_key("order", 1234, "x") == PINNED_KEY


def test_small_permutations_all_occur_about_equally() -> None:
    for size in (2, 3, 4, 5):
        epochs = 20_000
        orders = Counter(map(tuple, draw(0, epochs * size, size, 12345).reshape(epochs, size)))
        assert len(orders) == math.factorial(size)
        expected = epochs / math.factorial(size)
        for order in itertools.permutations(range(size)):
            assert abs(orders[order] - expected) < 0.05 * expected + 5 * math.sqrt(expected)


def test_places_and_neighbours_are_random() -> None:
    epochs, size = 2000, 500
    order = draw(0, epochs * size, size, 77).reshape(epochs, size)
    for place in (0, 1, size - 1):
        counts = np.bincount(order[:, place], minlength=size)
        chi2 = float(((counts - epochs / size) ** 2).sum() * size / epochs)
        assert abs(chi2 - size) < 6 * math.sqrt(2 * size)
    in_sequence = np.count_nonzero(np.diff(order, axis=1) == 1) / (epochs * (size - 1) / size)
    assert abs(in_sequence - 1) < 5 / math.sqrt(epochs)  # five standard deviations


def test_draws_beyond_32_bits() -> None:
    first = 2**40
    assert np.array_equal(draw(first, 50, 1 << 33, 3), draw(first - 10, 60, 1 << 33, 3)[10:])
    assert int(draw(first, 1000, 1 << 33, 3).max()) > 2**32
