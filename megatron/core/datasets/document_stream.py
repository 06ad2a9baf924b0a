"""The blended, seeded, endless stream of documents: one order, the same for every layout.

A *component* is a set of documents of one corpus (a split, a length bucket) with a weight: its
share of the stream's tokens. Each component is an endless sequence of its own, reshuffled at
every epoch, so each of its documents comes exactly once per epoch. The components are merged
as in fair queueing (Demers, Keshav and Shenker, 1989): the document that covers tokens
``t .. t + n`` of a component of weight w is due at ``(t + n / 2) / w``, and documents come in
the order in which they are due. So after any number of tokens each component has its share,
give or take a document: weights are exact in tokens, however uneven the documents.

The position is, per component, how many documents and tokens have been drawn: a few numbers.
Epoch and place in it follow from them, resuming costs nothing, and none of it depends on
sequence length, batch or ranks. With another blend a component goes on where it stood.

Cost: about 0.3 us a document, in blocks; memory for a block per component.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.corpus import Corpus
from megatron.core.datasets.fragments import Fragments
from megatron.core.datasets.index_format import DatasetError, Int64Array
from megatron.core.datasets.shuffle import draw, stream_key

_FIRST_BLOCK = 1 << 9
_LARGEST_BLOCK = 1 << 15

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Component:
    """A share of the stream: some documents of one corpus."""

    name: str
    """Says which documents of which corpus by content; positions are kept under it."""
    corpus: Corpus
    corpus_number: int
    """Of the corpus in the source's table."""
    documents: range | Int64Array
    """Their numbers in the corpus."""
    num_tokens: int
    """Of all of them together; > 0."""
    weight: float
    """Share of the stream's tokens; > 0."""
    label: str = ""
    """For reports."""


class _Queue:
    """The coming documents of one component, with the time at which each is due."""

    def __init__(self, component: Component, seed: int, drawn: int, tokens: int) -> None:
        self.component = component
        self._key = stream_key("order", seed, component.name)
        self._drawn, self._tokens = drawn, tokens
        self._block = _FIRST_BLOCK
        self.clear()

    def clear(self) -> None:
        nothing = np.empty(0, dtype=np.int64)
        self.document, self.length, self.drawn = nothing, nothing, nothing
        self.due = np.empty(0, dtype=np.float64)

    @property
    def horizon(self) -> float:
        """No document beyond those in the queue is due earlier."""
        return self._tokens / self.component.weight

    def extend(self) -> None:
        """Draw another block; empty documents are drawn but not queued."""
        count, size = self._block, len(self.component.documents)
        self._block = min(2 * count, _LARGEST_BLOCK)
        places = draw(self._drawn, count, size, self._key)
        if isinstance(self.component.documents, range):
            document = places + self.component.documents.start
        else:
            document = self.component.documents[places]
        length = self.component.corpus.document_lengths[document].astype(np.int64)
        drawn = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.int64)
        if not length.all():
            kept = length > 0
            document, length, drawn = document[kept], length[kept], drawn[kept]
        ends = self._tokens + np.cumsum(length)
        due = (ends - length / 2) / self.component.weight
        self.document = np.concatenate((self.document, document))
        self.length = np.concatenate((self.length, length))
        self.drawn = np.concatenate((self.drawn, drawn))
        self.due = np.concatenate((self.due, due))
        self._drawn += count
        self._tokens = int(ends[-1]) if len(ends) else self._tokens

    def pop(self, count: int) -> tuple[npt.NDArray[Any], ...]:
        """Remove and return the first ``count`` as (due, document, length, drawn)."""
        popped = self.due[:count], self.document[:count], self.length[:count], self.drawn[:count]
        self.due, self.document = self.due[count:], self.document[count:]
        self.length, self.drawn = self.length[count:], self.drawn[count:]
        return popped


class StreamReader:
    """Reads the stream forward from a position: look at what comes, then advance past it."""

    def __init__(
        self, components: Sequence[Component], seed: int, state: dict[str, Any] | None = None
    ) -> None:
        self._components = list(components)
        self._seed = seed
        names = [component.name for component in components]
        stored = _checked(state, seed)
        self._blend = [[c.name, float(c.weight)] for c in components]
        drawn = [int(stored["drawn"].get(name, 0)) for name in names]
        # Shares hold from the point where this blend began.
        tokens = [0] * len(names)
        if stored["blend"] == self._blend:
            tokens = [int(count) for count in stored["tokens"]]
        elif stored["blend"]:
            _log_blend_change(stored["drawn"], components)
        self._retired = {n: int(k) for n, k in stored["drawn"].items() if n not in names}
        self._documents = int(stored["documents"])
        self._drawn = np.array(drawn, dtype=np.int64)
        self._tokens = np.array(tokens, dtype=np.int64)
        self._queues = [_Queue(c, seed, k, t) for c, k, t in zip(components, drawn, tokens)]
        self._corpus_numbers = np.array([c.corpus_number for c in components], dtype=np.int64)
        self._coming = tuple(np.empty(0, dtype=np.int64) for _ in range(4))

    def upcoming(self, count: int) -> Fragments:
        """The next ``count`` documents (none of them empty), without moving."""
        while len(self._coming[0]) < count:
            self._merge()
        component, document, length, _ = (field[:count] for field in self._coming)
        return Fragments(
            self._corpus_numbers[component],
            document,
            np.zeros_like(document),
            length,
            np.ones(count, dtype=np.bool_),
        )

    def advance(self, count: int) -> None:
        """Move past the next ``count`` documents."""
        if not count:
            return
        assert count <= len(self._coming[0])
        component, _, length, drawn = (field[:count] for field in self._coming)
        np.maximum.at(self._drawn, component, drawn)
        np.add.at(self._tokens, component, length)
        self._documents += count
        self._coming = tuple(field[count:] for field in self._coming)

    def position(self) -> "StreamPosition":
        """Where the reader stands (a snapshot)."""
        return StreamPosition(self, self._documents, self._drawn.copy(), self._tokens.copy())

    def state_of(self, position: "StreamPosition") -> dict[str, Any]:
        """JSON-able state of a position."""
        drawn = {c.name: int(k) for c, k in zip(self._components, position.drawn)}
        return {
            "seed": self._seed,
            "documents": position.documents,
            "drawn": {**self._retired, **drawn},
            "tokens": [int(count) for count in position.tokens],
            "blend": self._blend,
        }

    def _merge(self) -> None:
        """Add documents to ``_coming``: all that are due before anything not yet drawn."""
        first = min(self._queues, key=lambda queue: queue.horizon)
        first.extend()
        limit = min(queue.horizon for queue in self._queues)
        counts = [int(np.searchsorted(queue.due, limit, "left")) for queue in self._queues]
        popped = [queue.pop(count) for queue, count in zip(self._queues, counts)]
        due, document, length, drawn = (
            np.concatenate([fields[i] for fields in popped]) for i in range(4)
        )
        component = np.repeat(np.arange(len(counts)), counts)
        if len(self._queues) > 1:
            order = np.argsort(due, kind="stable")
            component, document = component[order], document[order]
            length, drawn = length[order], drawn[order]
        fresh = (component, document, length, drawn)
        self._coming = tuple(np.concatenate(pair) for pair in zip(self._coming, fresh))


@dataclasses.dataclass(frozen=True)
class StreamPosition:
    """A place in the stream; ``state()`` makes it JSON-able."""

    reader: StreamReader
    documents: int
    """Documents passed since the run began."""
    drawn: Int64Array
    tokens: Int64Array

    def state(self) -> dict[str, Any]:
        """What ``StreamReader`` accepts."""
        return self.reader.state_of(self)


def _checked(state: dict[str, Any] | None, seed: int) -> dict[str, Any]:
    if state is None:
        return {"documents": 0, "drawn": {}, "tokens": [], "blend": []}
    missing = {"seed", "documents", "drawn", "tokens", "blend"} - set(state)
    if missing:
        raise DatasetError(f"the saved position in the data lacks {sorted(missing)}")
    if state["seed"] != seed:
        raise DatasetError(
            f"the saved position in the data belongs to seed {state['seed']}, but --seed is "
            f"{seed}: the order of documents would be another; pass --seed {state['seed']}"
        )
    return state


def _log_blend_change(drawn: dict[str, Any], components: Sequence[Component]) -> None:
    going_on = [c.label or c.name for c in components if drawn.get(c.name)]
    anew = [c.label or c.name for c in components if not drawn.get(c.name)]
    logger.info(
        "the blend changed: going on in %s; starting %s",
        ", ".join(going_on) or "nothing",
        ", ".join(anew) or "nothing new",
    )
