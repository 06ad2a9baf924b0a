"""UTF-8 bytes as tokens: ids 0-255 are the bytes, 256 ends a document. Keeps every text."""

from collections.abc import Sequence

import numpy as np

from megatron.core.tokenizers.base import Tokenizer, Tokens


class ByteTokenizer(Tokenizer):
    """A vocabulary of 257; no file, no training, about 4 times the tokens of a real one."""

    def __init__(self) -> None:
        self.name = "ByteTokenizer"
        self.vocab_size = 257
        self.eod = 256

    def tokenize(self, text: str) -> Tokens:
        """int32 [bytes of the text in UTF-8]."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def detokenize(self, ids: Sequence[int] | Tokens) -> str:
        """The text; ends of documents are left out, broken UTF-8 becomes U+FFFD."""
        values = np.asarray(ids, dtype=np.int64)
        return values[values < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")
