"""From what is known of all ranks to who is at fault: pure, so that it is tested without ranks.

    a rank raised                 -> it is named with its error; ranks that only lost their
                                     connection to it are not
    a rank stopped beating        -> once others lost a connection, or after the limit: it died
    a thread neither ticks nor waits for others within the limit -> it is stuck, with its stack
    all wait and none ticks       -> they wait for each other; the one furthest behind is shown

A rank has up to two threads with a strand of work each: the main one and, while a save goes on in
the background, its writer. A thread that waits, however long, is excused as long as any other
ticks. A verdict is reached by one rank, the first, for all.
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
class Strand:
    """The work of one thread of a rank."""

    ticks: int = 0
    """Steps of its work; see ``Watchdog.tick``."""
    doing: str = "starting"
    limited: bool = False
    """Whether ticks must come within the limit now."""
    stack: str | None = None
    """The thread's, when asked for."""
    waits: bool = False
    """Whether the thread stands in a communication."""


@dataclasses.dataclass
class Beat(Strand):
    """What a rank says of itself, about twice a second; its own strand is the main thread's."""

    number: int = 0
    failure: Failure | None = None
    writer: Strand = dataclasses.field(default_factory=Strand)
    """The thread that writes a checkpoint in the background; limited while there is one."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Beat":
        """The inverse of ``to_json``."""
        failure, writer = values.pop("failure"), values.pop("writer")
        return cls(
            **values,
            failure=None if failure is None else Failure(**failure),
            writer=Strand(**writer),
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why the run ends."""

    message: str
    code: int
    shared: bool = False
    """Every rank failed alike, so one message is enough."""


@dataclasses.dataclass
class _Progress:
    strand: Strand
    ticked: float
    free: float
    """When it last ticked or was seen waiting for others."""

    def hear(self, strand: Strand, now: float) -> None:
        begins = strand.limited and not self.strand.limited
        if begins or strand.ticks != self.strand.ticks:
            self.ticked = self.free = now
        if strand.waits:
            self.free = now
        self.strand = strand


class _Watched:
    """What the judge knows of a rank."""

    def __init__(self, now: float) -> None:
        self.beat = Beat()
        self.seen = now
        self.main = _Progress(self.beat, now, now)
        self.writer = _Progress(self.beat.writer, now, now)

    @property
    def strands(self) -> tuple[_Progress, _Progress]:
        return self.main, self.writer


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
        self._ranks = [_Watched(now) for _ in range(world_size)]
        self._trouble: float | None = None
        self.wants_stacks = False
        """Whether ranks should send their stacks with their next beats."""

    def hear(self, rank: int, beat: Beat, now: float) -> None:
        """Note a rank's latest beat."""
        watched = self._ranks[rank]
        if beat.number == watched.beat.number:
            return
        watched.main.hear(beat, now)
        watched.writer.hear(beat.writer, now)
        watched.seen = now
        watched.beat = beat

    def decide(self, now: float) -> Verdict | None:
        """The verdict, once there is one."""
        failures = {r: w.beat.failure for r, w in enumerate(self._ranks) if w.beat.failure}
        if failures:
            return self._after_failures(failures, now)
        silent = [r for r, w in enumerate(self._ranks) if now - w.seen > self._limit]
        if not silent and not self._stuck(now, limited=True) and not self._all_stand(now):
            self._trouble, self.wants_stacks = None, False
            return None
        return self._stalled(silent, now)

    def _stuck(self, now: float, *, limited: bool = False) -> list[tuple[int, Strand]]:
        """Strands that neither ticked nor waited within the limit."""
        return [
            (rank, progress.strand)
            for rank, watched in enumerate(self._ranks)
            for progress in watched.strands
            if now - progress.free > self._limit and (progress.strand.limited or not limited)
        ]

    def _all_stand(self, now: float) -> bool:
        """Whether no strand has got on within the limit, neither by a tick nor by work."""
        strands = [progress for watched in self._ranks for progress in watched.strands]
        return any(p.strand.limited for p in strands) and all(
            now - (p.ticked if p.strand.waits else p.free) > self._limit for p in strands
        )

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
        beats = [(rank, self._ranks[rank].beat) for rank in left]
        lines = [_no_progress(rank, beat) for rank, beat in beats if not beat.waits]
        return Verdict("\n".join([_some(lines), _failed(failures)]).strip(), 1)

    def _stalled(self, silent: list[int], now: float) -> Verdict | None:
        self.wants_stacks = True
        if self._since_trouble(now) < self._patience:
            return None
        lines = [f"{self._died([rank])}" for rank in silent]
        lines += [
            _no_progress(rank, strand)
            for rank, strand in self._stuck(now)
            if rank not in silent and strand.stack
        ]
        if not lines and self._all_stand(now):
            least = min(watched.beat.ticks for watched in self._ranks)
            behind = [r for r, w in enumerate(self._ranks) if w.beat.ticks == least]
            lines.append(
                f"no rank made progress for {self._limit:.0f} s and all wait for each other; "
                f"furthest behind: ranks {behind[:8]}"
            )
            lines += [_no_progress(rank, self._ranks[rank].beat) for rank in behind[:2]]
        return Verdict(_some(lines), 1) if lines else None

    def _died(self, ranks: list[int]) -> str:
        what = "; ".join(f"rank {r}, last seen {self._ranks[r].beat.doing}" for r in ranks[:8])
        return (
            f"rank {', '.join(map(str, ranks[:8]))} no longer answers (killed, frozen, out of "
            f"memory, or its machine is gone): {what}"
        )


def _no_progress(rank: int, strand: Strand) -> str:
    return (
        f"rank {rank} makes no progress at {strand.doing}; its stack, innermost call last:\n"
        f"{strand.stack or '(unknown)'}"
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
