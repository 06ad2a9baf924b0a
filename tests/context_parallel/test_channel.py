"""How a wait for a transfer is measured on a GPU: by events of the stream, not by the host."""

from typing import Any

import pytest
import torch

from megatron.core.context_parallel.channel import CommStats, Pending


def test_a_gpus_wait_is_what_passes_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = 0

        def record(self) -> None:
            self.at = len(happened)
            happened.append("event")

        def synchronize(self) -> None:
            happened.append("read")

        def elapsed_time(self, end: "Event") -> float:
            assert end.at > self.at
            return 250.0  # milliseconds

    class Work:
        def wait(self) -> None:
            happened.append("wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    stats = CommStats()
    for _ in range(2):
        pending = Pending([Work(), Work()], stats, torch.device("cuda", 0))
        pending.wait()
        pending.wait()  # over already
    assert happened == ["event", "wait", "wait", "event"] * 2  # the host has waited for nothing
    assert stats.exposed_wait() == 0.5 and not stats.events
    assert stats.exposed_wait() == 0.5
    assert happened[8:] == ["read", "read"]
