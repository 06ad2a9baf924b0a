"""From what is known of all ranks to who is at fault: pure, so that it is tested without ranks.

    a rank raised                 -> it is named with its error; ranks that only lost their
                                     connection to it are not
    a rank stopped beating        -> once others lost a connection, or after the limit: it died
    nobody makes progress         -> the ranks that don't wait in a communication, with stacks

A verdict is reached by one rank, the first, for all.
"""

import dataclasses
import re
from typing import Any

_LOST_PEER = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|gloo/|\[.*gloo.*\]|"
    r"timed? ?out wait|application timeout|nccl|remote process exited|failed to recv|socket",
    re.IGNORECASE,
)


def is_consequence(text: str) -> bool:
    """Whether an error only says that another rank didn't answer."""
    return bool(_LOST_PEER.search(text))


@dataclasses.dataclass
class Failure:
    """An exception that ended a rank's work."""

    text: str
    """One line."""
    code: int
    """Exit code that this error asks for."""
    consequence: bool
    """See ``is_consequence``."""


@dataclasses.dataclass
class Beat:
    """What a rank says of itself, about twice a second."""

    number: int = 0
    ticks: int = 0
    """Steps of its work; see ``Watchdog.tick``."""
    doing: str = "starting"
    limited: bool = False
    """Whether ticks must come within the limit now."""
    failure: Failure | None = None
    stack: str | None = None
    """The main thread's, when asked for."""
    waits: bool = False
    """Whether that stack stands in a communication."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Beat":
        """The inverse of ``to_json``."""
        failure = values.pop("failure")
        return cls(**values, failure=None if failure is None else Failure(**failure))


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why the run ends."""

    message: str
    code: int
    shared: bool = False
    """Every rank failed alike, so one message is enough."""


@dataclasses.dataclass
class _Watched:
    beat: Beat
    seen: float
    ticked: float


class Judge:
    """Collects beats; says when the run can't go on and who is at fault.

    Args:
        world_size: number of ranks.
        limit: seconds within which a limited rank must tick.
        patience: seconds without a beat after which a rank counts as dead, once another rank
            lost its connection.
        now: the clock at the start.
    """

    def __init__(self, world_size: int, *, limit: float, patience: float, now: float) -> None:
        self._limit = limit
        self._patience = patience
        self._ranks = [_Watched(Beat(), now, now) for _ in range(world_size)]
        self._trouble: float | None = None
        self.wants_stacks = False
        """Whether ranks should send their stacks with their next beats."""

    def hear(self, rank: int, beat: Beat, now: float) -> None:
        """Note a rank's latest beat."""
        watched = self._ranks[rank]
        if beat.number == watched.beat.number:
            return
        if beat.ticks != watched.beat.ticks or not beat.limited:
            watched.ticked = now
        watched.seen = now
        watched.beat = beat

    def decide(self, now: float) -> Verdict | None:
        """The verdict, once there is one."""
        failures = {r: w.beat.failure for r, w in enumerate(self._ranks) if w.beat.failure}
        if failures:
            return self._after_failures(failures, now)
        silent = [r for r, w in enumerate(self._ranks) if now - w.seen > self._limit]
        still = [
            r
            for r, w in enumerate(self._ranks)
            if w.beat.limited and now - w.ticked > self._limit and r not in silent
        ]
        if not silent and not still:
            self._trouble, self.wants_stacks = None, False
            return None
        return self._stalled(silent, now)

    def _since_trouble(self, now: float) -> float:
        if self._trouble is None:
            self._trouble = now
        return now - self._trouble

    def _after_failures(self, failures: dict[int, Failure], now: float) -> Verdict | None:
        waited = self._since_trouble(now)
        own = {rank: failure for rank, failure in failures.items() if not failure.consequence}
        texts = {failure.text for failure in own.values()}
        everyone = len(failures) == len(self._ranks)
        if everyone and len(own) == len(failures) and len(texts) == 1:
            return Verdict(texts.pop(), own[0].code, shared=True)
        if own:
            # What looks alike so far may yet be the same on all ranks, and then needs one message.
            if everyone or waited > self._patience * (2 if len(texts) == 1 else 0.5):
                return Verdict(_failed(own), max(failure.code for failure in own.values()))
            return None
        dead = [
            rank
            for rank, watched in enumerate(self._ranks)
            if rank not in failures and now - watched.seen > self._patience
        ]
        if dead:
            return Verdict(self._died(dead), 1)
        if waited < 4 * self._patience and len(failures) < len(self._ranks):
            self.wants_stacks = waited > self._patience
            return None
        left = [rank for rank in range(len(self._ranks)) if rank not in failures]
        lines = [self._stuck(rank) for rank in left if not self._ranks[rank].beat.waits]
        return Verdict("\n".join([_some(lines), _failed(failures)]).strip(), 1)

    def _stalled(self, silent: list[int], now: float) -> Verdict | None:
        self.wants_stacks = True
        if self._since_trouble(now) < self._patience:
            return None
        working = [
            rank
            for rank, watched in enumerate(self._ranks)
            if rank not in silent and watched.beat.stack and not watched.beat.waits
        ]
        lines = [f"{self._died([rank])}" for rank in silent]
        lines += [self._stuck(rank) for rank in working]
        if not lines:
            least = min(watched.beat.ticks for watched in self._ranks)
            behind = [r for r, w in enumerate(self._ranks) if w.beat.ticks == least]
            lines.append(
                f"no rank made progress for {self._limit:.0f} s and all wait for each other; "
                f"furthest behind: ranks {behind[:8]}"
            )
            lines += [self._stuck(rank) for rank in behind[:2]]
        return Verdict(_some(lines), 1)

    def _died(self, ranks: list[int]) -> str:
        what = "; ".join(f"rank {r}, last seen {self._ranks[r].beat.doing}" for r in ranks[:8])
        return (
            f"rank {', '.join(map(str, ranks[:8]))} no longer answers (killed, frozen, out of "
            f"memory, or its machine is gone): {what}"
        )

    def _stuck(self, rank: int) -> str:
        beat = self._ranks[rank].beat
        return (
            f"rank {rank} makes no progress at {beat.doing}; its stack, innermost call last:\n"
            f"{beat.stack or '(unknown)'}"
        )


def _failed(failures: dict[int, Failure]) -> str:
    """One line an error, with the ranks that had it."""
    ranks: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        ranks.setdefault(failure.text, []).append(rank)
    return _some(
        [
            f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who[:8]))}"
            f"{' and more' if len(who) > 8 else ''} failed: {text}"
            for text, who in ranks.items()
        ]
    )


def _some(lines: list[str], most: int = 8) -> str:
    left = len(lines) - most
    return "\n".join(lines[:most]) + (f"\n... and {left} more ranks" if left > 0 else "")
