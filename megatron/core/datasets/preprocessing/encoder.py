"""What a worker does with a unit: read, check, tokenize, and hand back arrays.

The tokenizer comes in as a factory, so that this room needs to know no tokenizer; a ``Tokenizer``
here is whatever has ``name``, ``vocab_size``, ``eod``, ``losses``, ``tokenize_batch`` and
``restores``. One document of each unit (the first of at most 64 KB) is decoded again and compared
with its text: a tokenizer that loses something is found in practice, at about 1 % of the time.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.index_format import token_dtype
from megatron.core.datasets.preprocessing import records
from megatron.core.datasets.preprocessing.records import Record, without_lone_surrogates
from megatron.core.datasets.preprocessing.units import Unit

Array = npt.NDArray[Any]
_CHECKED_CHARACTERS = 1 << 16


class Tokenizer(Protocol):
    """What is needed of a tokenizer."""

    name: str
    vocab_size: int
    eod: int | None

    @property
    def losses(self) -> tuple[str, ...]:
        """What it changes in texts."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[Array]:
        """Token ids of each text."""

    def restores(self, text: str, ids: Array) -> bool:
        """Whether decoding ``ids`` gives ``text``."""


TokenizerFactory = Callable[[], Tokenizer]


@dataclasses.dataclass(frozen=True)
class TokenizerFacts:
    """What the main process must know of the tokenizer that its workers use."""

    name: str
    vocab_size: int
    eod: int | None
    losses: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class EncoderSettings:
    """How documents are made of texts."""

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    skip_bad_lines: bool = False


@dataclasses.dataclass
class Encoded:
    """A unit's documents, per key, and what didn't become one."""

    tokens: list[Array]
    """Per key: all tokens, one document after another."""
    lengths: list[Array]
    """Per key: int64 [documents]."""
    documents: int = 0
    """Records that became a document for at least one key."""
    text_bytes: int = 0
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    """By reason."""
    examples: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    """By reason: the first record, and what was wrong with it."""
    replaced: int = 0
    """Documents in which lone surrogates became U+FFFD."""
    changed: int | None = None
    """A record that did not come back from its tokens."""
    failure: Record | None = None
    """Strict reading: the record that ends the run; nothing after it was read."""


class Encoder:
    """``encoder(unit) -> Encoded`` for one tokenizer.

    Raises:
        ValueError: if ``append_eod`` asks for a token that the tokenizer doesn't have.
    """

    def __init__(self, factory: TokenizerFactory, settings: EncoderSettings) -> None:
        self._tokenizer = tokenizer = factory()
        self._settings = settings
        if settings.append_eod and tokenizer.eod is None:
            raise ValueError(
                f"--append-eod: {tokenizer.name} has no end-of-document token; leave the flag out "
                f"(the index marks document ends), or give a tokenizer that names one"
            )
        self._eod = np.array([tokenizer.eod] if settings.append_eod else [], dtype=np.int64)
        self.facts = TokenizerFacts(
            tokenizer.name, tokenizer.vocab_size, tokenizer.eod, tokenizer.losses
        )
        self._dtype = token_dtype(tokenizer.vocab_size - 1)

    def __call__(self, unit: Unit) -> Encoded:
        """Read and tokenize all of it (strict: up to the first bad record)."""
        keys = self._settings.keys
        result = Encoded([], [])
        kept = self._read(unit, result)
        attempts = [self._tokenize([texts[k] for _, texts in kept]) for k in range(len(keys))]
        kept, columns = self._without_refused(kept, attempts, result)
        alive = np.zeros(len(kept), dtype=bool)
        for k, key in enumerate(keys):
            full = np.array([len(ids) > 0 for ids in columns[k]], dtype=bool)
            reason = records.EMPTY if len(keys) == 1 else f"{records.EMPTY} ({key})"
            for place in np.flatnonzero(~full):
                self._skip(result, reason, kept[place][0], "")
            self._append(result, [ids for ids, some in zip(columns[k], full) if some])
            alive |= full
        result.documents = int(alive.sum())
        self._check_round_trip(kept, columns, result)
        return result

    def _read(self, unit: Unit, result: Encoded) -> list[tuple[int, tuple[str, ...]]]:
        """(record, texts) of what can be tokenized; the texts of empty documents are ''."""
        kept = []
        for record in unit.records(self._settings.keys):
            if record.reason:
                if not self._reject(record, result):
                    break
                continue
            texts = []
            replaced = False
            for text in record.texts:
                text, size, lone = without_lone_surrogates(text)
                replaced |= lone
                result.text_bytes += size
                texts.append("" if text.isspace() else text)
            result.replaced += replaced
            kept.append((record.index, tuple(texts)))
        return kept

    def _reject(self, record: Record, result: Encoded) -> bool:
        """Count a record that is no document; False if it ends the run."""
        if record.reason not in records.HARMLESS and not self._settings.skip_bad_lines:
            if result.failure is None or record.index < result.failure.index:
                result.failure = record
            return False
        self._skip(result, record.reason, record.index, record.detail)
        return True

    def _skip(self, result: Encoded, reason: str, index: int, detail: str) -> None:
        result.skipped[reason] = result.skipped.get(reason, 0) + 1
        result.examples.setdefault(reason, (index, detail))

    def _tokenize(self, texts: list[str]) -> list[Array | str]:
        """Token ids of each text, or why the tokenizer refuses it."""
        try:
            return list(self._tokenizer.tokenize_batch(texts))
        except ValueError:
            pass
        one_by_one: list[Array | str] = []
        for text in texts:
            try:
                one_by_one.append(self._tokenizer.tokenize_batch([text])[0])
            except ValueError as error:
                one_by_one.append(str(error) or repr(error))
        return one_by_one

    def _without_refused(
        self,
        kept: list[tuple[int, tuple[str, ...]]],
        columns: list[list[Array | str]],
        result: Encoded,
    ) -> tuple[list[tuple[int, tuple[str, ...]]], list[list[Any]]]:
        refused: dict[int, str] = {}
        for column in columns:
            for place, ids in enumerate(column):
                if isinstance(ids, str):
                    refused.setdefault(place, ids)
        for place in sorted(refused):
            self._reject(Record(kept[place][0], (), records.REFUSED, refused[place]), result)
        left = [place for place in range(len(kept)) if place not in refused]
        return [kept[p] for p in left], [[column[p] for p in left] for column in columns]

    def _append(self, result: Encoded, documents: list[Array]) -> None:
        """One key's documents as one array of the file's type."""
        extra = len(self._eod)
        lengths = np.array([len(ids) + extra for ids in documents], dtype=np.int64)
        parts = [part for ids in documents for part in ((ids, self._eod) if extra else (ids,))]
        tokens = np.concatenate(parts) if parts else np.empty(0, self._dtype)
        low, high = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
        if low < 0 or high >= self.facts.vocab_size:
            raise ValueError(
                f"{self.facts.name} gave id {low if low < 0 else high}, outside its vocabulary of "
                f"{self.facts.vocab_size}: its file is not what it says; give a whole one"
            )
        result.tokens.append(tokens.astype(self._dtype))
        result.lengths.append(lengths)

    def _check_round_trip(
        self, kept: list[tuple[int, tuple[str, ...]]], columns: list[list[Any]], result: Encoded
    ) -> None:
        if self.facts.losses:
            return
        for place, (index, texts) in enumerate(kept):
            for k, text in enumerate(texts):
                if 0 < len(text) <= _CHECKED_CHARACTERS:
                    if not self._tokenizer.restores(text, columns[k][place]):
                        result.changed = index
                    return
