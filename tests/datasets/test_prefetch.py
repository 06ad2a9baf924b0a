"""Reading ahead changes nothing but the waiting."""

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets import BatchLoader
from megatron.core.datasets.prefetch import Prefetcher
from tests.datasets.corpora import source_of


def loader(folder: Path, state: Any = None, workers: int = 0) -> BatchLoader:
    source = source_of(folder, [5, 9, 30, 1, 2, 17])
    return BatchLoader(
        source,
        state,
        seq_length=16,
        micro_batch_size=2,
        global_batch_size=4,
        num_workers=workers,
    )


def threads() -> int:
    return sum(thread.name == "data" for thread in threading.enumerate())


def test_batches_and_states_are_those_without_a_thread(tmp_path: Path) -> None:
    plain = loader(tmp_path)
    for workers in (1, 3):
        plain.rewind()
        with loader(tmp_path, workers=workers) as ahead:
            assert ahead.state == plain.state
            for step in range(20):
                for mine, other in zip(ahead.next_step(), plain.next_step(), strict=True):
                    assert mine.tokens.tolist() == other.tokens.tolist()
                    assert mine.sample_ids == other.sample_ids
                if step % 5 == 0:
                    time.sleep(0.01)  # let it run ahead
                assert ahead.state == plain.state


def test_the_state_is_never_ahead_of_what_was_taken(tmp_path: Path) -> None:
    with loader(tmp_path, workers=4) as ahead:
        ahead.next_step()
        time.sleep(0.05)
        resumed = loader(tmp_path, ahead.state)
        expected = resumed.next_step()[0].tokens.tolist()
        assert ahead.next_step()[0].tokens.tolist() == expected


def test_close_and_rewind_stop_the_thread_and_keep_the_position(tmp_path: Path) -> None:
    before = threads()
    plain, ahead = loader(tmp_path), loader(tmp_path, workers=2)
    for _ in range(3):
        assert ahead.next_step()[0].tokens.tolist() == plain.next_step()[0].tokens.tolist()
        assert threads() == before + 1
        ahead.close()
        ahead.close()
        assert threads() == before
    ahead.rewind()
    plain.rewind()
    assert ahead.next_step()[0].tokens.tolist() == plain.next_step()[0].tokens.tolist()
    del ahead
    gc.collect()
    assert threads() == before


def test_errors_arrive_where_the_result_would_have() -> None:
    calls = iter(range(100))

    def produce() -> int:
        number = next(calls)
        if number == 2:
            raise KeyError("bad row")
        return number

    prefetcher = Prefetcher(produce, 4)
    assert [prefetcher.get(), prefetcher.get()] == [0, 1]
    for _ in range(2):
        with pytest.raises(KeyError, match="bad row"):
            prefetcher.get()
    prefetcher.close()


def test_closing_does_not_wait_for_a_full_queue() -> None:
    prefetcher = Prefetcher(lambda: 0, 1)
    time.sleep(0.05)
    start = time.monotonic()
    prefetcher.close()
    assert time.monotonic() - start < 10  # not a speed: it must not wait for ever


@pytest.mark.timeout(60)
def test_a_fork_goes_on_from_what_was_taken(tmp_path: Path) -> None:
    plain, ahead = loader(tmp_path), loader(tmp_path, workers=2)
    plain.next_step()
    ahead.next_step()
    time.sleep(0.05)
    expected = plain.next_step()[0].tokens.tolist()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        ok = ahead.next_step()[0].tokens.tolist() == expected
        ahead.close()
        os.write(writing, b"1" if ok else b"0")
        os._exit(0)
    assert os.read(reading, 1) == b"1"
    os.waitpid(child, 0)
    assert ahead.next_step()[0].tokens.tolist() == expected
    ahead.close()
