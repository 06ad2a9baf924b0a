"""A made-up language in which a long context pays: passkeys, and stretches that come again.

    words words <key> 7 1 9 0 4 words words [an earlier stretch again] words <key> 7 1 9 0 4 ...

Ids 0..9 are digits, 10 is the key mark, the rest are words. A document has one passkey, five
different digits, told first somewhere and asked for again at places of its own; between come
random words and copies of random earlier stretches. Random words can't be predicted, copies and
keys can, by a model that finds their first occurrence, however far back: loss falls with
position exactly as far as the model uses its context. The digits of a key differ, so each step
of an answer has one right continuation that a single induction head finds (Olsson et al., 2022,
arXiv 2209.11895); that is why two layers of width 64 learn it in minutes on a laptop.

Pure functions of a numpy generator; cost: about a microsecond a token.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

DIGITS = 10
KEY_MARK = 10
FIRST_WORD = 11


@dataclasses.dataclass(frozen=True)
class PasskeyMix:
    """How documents are made."""

    vocab_size: int = 256
    """Ids; those from ``FIRST_WORD`` on are words."""
    key_digits: int = 5
    """Digits of a passkey, all different."""
    asked: float = 0.15
    """Share of the pieces of a document that ask for its key."""
    copied: float = 0.45
    """Share of the pieces that copy an earlier stretch."""
    shortest: int = 4
    """Tokens of the shortest stretch of words or copy."""
    longest: int = 24
    """Tokens of the longest."""

    def __post_init__(self) -> None:
        if self.vocab_size < FIRST_WORD + 16:
            raise ValueError(
                f"--vocab-size {self.vocab_size} must be at least {FIRST_WORD + 16}: "
                f"{DIGITS} digits, the key mark and some words"
            )
        if not 1 <= self.key_digits <= DIGITS:
            raise ValueError(f"--key-digits {self.key_digits} must be 1 to {DIGITS}: they differ")

    def key(self, rng: np.random.Generator) -> Tokens:
        """A passkey: different digits, int64 [key_digits]."""
        return rng.permutation(DIGITS)[: self.key_digits].astype(np.int64)

    def words(self, rng: np.random.Generator, count: int) -> Tokens:
        """Random words, int64 [count]."""
        return rng.integers(FIRST_WORD, self.vocab_size, count)

    def statement(self, key: Tokens) -> Tokens:
        """The mark and the key: telling and, but for its digits, asking."""
        return np.concatenate(([KEY_MARK], key))

    def document(self, rng: np.random.Generator, length: int) -> Tokens:
        """A training document, int64 [length]."""
        statement = self.statement(self.key(rng))
        document = np.empty(length + self.longest + len(statement), np.int64)
        filled = 0
        while filled < length:
            kind = rng.random()
            count = int(rng.integers(self.shortest, self.longest + 1))
            if kind < self.asked:
                piece = statement
            elif kind < self.asked + self.copied and filled > count:
                start = int(rng.integers(filled - count))
                piece = document[start : start + count]
            else:
                piece = self.words(rng, count)
            document[filled : filled + len(piece)] = piece
            filled += len(piece)
        return document[:length].copy()
