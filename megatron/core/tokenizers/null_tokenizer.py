"""Ids written out as text: ``"5 17 3"`` is the tokens 5, 17, 3.

For corpora that were tokenized elsewhere. The vocabulary is exactly ``--vocab-size``; there
is no end-of-document id (the index marks document ends), so write one out where it is wanted.
"""

from collections.abc import Sequence

import numpy as np

from megatron.core.tokenizers.base import Tokenizer, TokenizerError, Tokens, as_ids


class NullTokenizer(Tokenizer):
    """Whitespace-separated decimal integers, each below ``vocab_size``."""

    def __init__(self, vocab_size: int) -> None:
        self.name = f"NullTokenizer({vocab_size})"
        self.vocab_size = vocab_size
        self.eod = None

    def tokenize(self, text: str) -> Tokens:
        """int64 [numbers in the text].

        Raises:
            TokenizerError: for anything but integers in 0..vocab_size - 1.
        """
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdecimal()):
                raise TokenizerError(f"{word[:40]!r} is not a token id (a decimal integer >= 0)")
            if len(word) > 18 or int(word) >= self.vocab_size:
                raise TokenizerError(
                    f"token id {word[:40]} is not below --vocab-size {self.vocab_size}"
                )
        return np.array([int(word) for word in words], dtype=np.int64)

    def detokenize(self, ids: Sequence[int] | Tokens) -> str:
        """The ids, separated by single spaces."""
        return " ".join(map(str, as_ids(ids)))

    @property
    def losses(self) -> tuple[str, ...]:
        """None: every id comes back (the width of the gaps between them does not)."""
        return ()

    def restores(self, text: str, ids: Sequence[int] | Tokens) -> bool:
        """Whether the numbers of ``text`` come back."""
        return as_ids(ids) == [int(word) for word in text.split()]
