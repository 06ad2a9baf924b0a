"""A made-up language in which a long context pays: facts that are told once and asked for later.

    w w w <fact 3?> 7 w w w w w <fact 9?> 0 <fact 3?> 7 w w w <fact 5?> 2 w w ...

A document gives each of ``facts`` facts a digit. Between random words it tells facts and asks for
facts, both in the same form: the fact's question id, then its digit. The digit after the first
question can only be guessed; after any later one it can be known, by a model that finds the last
time that it was told, however far back. So loss falls with position exactly as far as the model
uses its context. A passkey is the first ``key_digits`` facts told in a row.

A digit has an id of its own for each fact (as a tokenizer's piece "room: 7" would), so one
attention hop finds it: a model of two layers and width 128 learns it within minutes on a CPU.
Digits without such ids need an induction head of two hops, which takes far longer to form.

    ids   0 .. F - 1           questions of the F facts
          F .. 11 F - 1        the ten digits of fact 0, of fact 1, ...
          11 F .. vocab - 1    words

Pure functions of a numpy generator; cost: about two microseconds a token.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

DIGITS = 10
FEWEST_WORDS = 8


@dataclasses.dataclass(frozen=True)
class PasskeyMix:
    """How documents are made."""

    vocab_size: int = 128
    facts: int = 10
    key_digits: int = 5
    """Facts that make up a passkey."""
    asked: float = 0.6
    """Share of the pieces of a document that tell or ask a fact; the others are words."""
    longest: int = 15
    """Words of the longest stretch; the shortest has one."""

    def __post_init__(self) -> None:
        if self.facts < 1:
            raise ValueError(f"--facts {self.facts} must be at least 1")
        needed = self.facts * (DIGITS + 1) + FEWEST_WORDS
        if self.vocab_size < needed:
            raise ValueError(
                f"--vocab-size {self.vocab_size} must be at least {needed}: 11 ids for each of "
                f"{self.facts} facts, and {FEWEST_WORDS} words"
            )
        if not 1 <= self.key_digits <= self.facts:
            raise ValueError(
                f"--facts {self.facts} must be at least the digits of a passkey, {self.key_digits}"
            )
        if not 0 < self.asked <= 1:
            raise ValueError(f"--asked {self.asked:g} must be in (0, 1]")

    def digits(self, rng: np.random.Generator) -> Tokens:
        """A digit for each fact, int64 [facts]."""
        return rng.integers(0, DIGITS, self.facts)

    def told(self, fact: int, digit: int) -> tuple[int, int]:
        """The two ids that tell (or ask and answer) a fact."""
        return fact, self.facts + fact * DIGITS + int(digit)

    def key(self, digits: Tokens) -> Tokens:
        """The passkey told: int64 [2 * key_digits]."""
        pairs = [self.told(fact, digits[fact]) for fact in range(self.key_digits)]
        return np.array(pairs, np.int64).reshape(-1)

    def document(self, rng: np.random.Generator, length: int, *, first_fact: int = 0) -> Tokens:
        """A document, int64 [length]; facts below ``first_fact`` don't occur in it."""
        digits = self.digits(rng)
        first_word = self.facts * (DIGITS + 1)
        tokens: list[int] = []
        while len(tokens) < length:
            if first_fact < self.facts and rng.random() < self.asked:
                fact = int(rng.integers(first_fact, self.facts))
                tokens += self.told(fact, digits[fact])
            else:
                count = int(rng.integers(1, self.longest + 1))
                tokens += rng.integers(first_word, self.vocab_size, count).tolist()
        return np.array(tokens[:length], np.int64)
