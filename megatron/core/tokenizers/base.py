"""What every tokenizer offers, and the probe that says whether it keeps text as it is.

A tokenizer here is three facts (``vocab_size``, ``eod``, ``name``) and two functions
(``tokenize``, ``detokenize``). ``vocab_size`` is the largest id that can ever come out plus
one, added and special tokens included: it fixes the integer type of corpus files and the
size of the embedding, so it must never depend on the text seen.

Text is text: the spelling of a special token inside a document (``</s>``, ``<|endoftext|>``)
is split like any other characters, and no token is put before or after a document. Document
ends are added by whoever writes documents, from ``eod``.
"""

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[Any]

PROBES: tuple[tuple[str, str], ...] = (
    ("plain words", "The quick brown fox, 42 times."),
    ("a space at the start", " leading"),
    ("a space at the end", "trailing "),
    ("runs of spaces", "a  b   c    d"),
    ("tabs", "\tif x:\n\t\treturn"),
    ("newlines", "one\ntwo\n\nthree\n"),
    ("CRLF", "one\r\ntwo\r\n"),
    ("capitals", "MiXeD CASE"),
    ("accents, composed and decomposed", "caf\u00e9 cafe\u0301"),
    ("full-width letters and ligatures", "\uff21\uff22\uff11 \ufb01ne"),
    ("no-break spaces", "10\u00a0km\u202f"),
    ("typographic quotes", "\u201cyes\u201d \u2026 \u2013"),
    ("other scripts", "\u4e2d\u6587 \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0639\u0631\u0628"),
    ("emoji", "\U0001f600\U0001f44d\U0001f3fd"),
)
"""(what it shows, text): each must come back from ``detokenize(tokenize(text))``."""


class TokenizerError(ValueError):
    """A tokenizer that can't be built, or text that it can't take."""


class Tokenizer(abc.ABC):
    """The interface; one adapter file per library implements it."""

    name: str
    """Type and file, for logs."""
    vocab_size: int
    """Largest possible id + 1."""
    eod: int | None
    """The end-of-document id, or None where the tokenizer has none."""

    @abc.abstractmethod
    def tokenize(self, text: str) -> Tokens:
        """Token ids of ``text``: an integer array [tokens].

        Raises:
            TokenizerError: if the tokenizer can't represent the text.
        """

    @abc.abstractmethod
    def detokenize(self, ids: Sequence[int] | Tokens) -> str:
        """The text of ``ids``."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """``[tokenize(text) for text in texts]``; adapters whose library is faster so override."""
        return [self.tokenize(text) for text in texts]

    @property
    def losses(self) -> tuple[str, ...]:
        """What ``detokenize(tokenize(text))`` changes, in words; empty if nothing was found."""
        return tuple(what for what, text in PROBES if not self.keeps(text))

    @property
    def is_lossless(self) -> bool:
        """Whether every probe text came back unchanged (no normaliser, no unknown token)."""
        return not self.losses

    def keeps(self, text: str) -> bool:
        """Whether ``text`` comes back unchanged."""
        return self.restores(text, self.tokenize(text))

    def restores(self, text: str, ids: Sequence[int] | Tokens) -> bool:
        """Whether ``ids``, made of ``text``, decode to it."""
        return self.detokenize(ids) == text


def as_ids(ids: Sequence[int] | Tokens) -> list[int]:
    """``ids`` as a list of Python integers, which is what most libraries take."""
    ints: list[int] = np.asarray(ids).astype(np.int64).tolist()
    return ints
