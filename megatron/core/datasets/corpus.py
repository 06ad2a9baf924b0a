"""A corpus as the stream sees it: documents with lengths, in one long array of tokens.

``IndexedCorpus`` is a pair of files, ``MockCorpus`` (for smoke tests and benchmarks of the
machine) is made up: log-normal documents, seeded, nothing stored but the lengths.

A corpus has an ``identity`` that depends on what is in the files, not on where they lie, so a
position in the data survives a move to another folder or cluster.
"""

import hashlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.core.datasets.index_format import DatasetError, Int64Array
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.shuffle import stream_key

_SAMPLE = 1 << 16


class Corpus(Protocol):
    """Documents laid one after another in one array of tokens, read by index in that array."""

    name: str
    """Where it comes from, for messages and to find it again."""
    identity: str
    """Equal for equal contents, wherever they lie."""
    num_documents: int
    num_tokens: int
    document_lengths: npt.NDArray[np.integer[Any]]
    """[documents]: tokens of each."""

    def document_starts(self, documents: Int64Array) -> Int64Array:
        """Index of the first token of each of these documents."""
        ...

    def read(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Tokens begin..end - 1 (a view, unchecked)."""
        ...

    def take(self, indices: Int64Array) -> npt.NDArray[Any]:
        """Tokens at these indices."""
        ...


class IndexedCorpus:
    """A Megatron ``.bin`` / ``.idx`` pair."""

    def __init__(self, path_prefix: str) -> None:
        self.dataset = IndexedDataset(path_prefix)
        if self.dataset.dtype.kind not in "iu":
            raise DatasetError(f"{path_prefix}.bin holds {self.dataset.dtype}, not token ids")
        self.name = path_prefix
        self.num_documents = self.dataset.num_documents
        self.num_tokens = self.dataset.num_tokens
        self.document_lengths = self.dataset.document_lengths
        self._tokens = self.dataset.all_tokens()
        self.identity = self._fingerprint()

    def __reduce__(self) -> tuple[type["IndexedCorpus"], tuple[str]]:
        return IndexedCorpus, (self.name,)  # opened again, not copied

    def _fingerprint(self) -> str:
        """Hash of the sizes and of samples from both ends of lengths and tokens."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(f"{self.dataset.dtype} {self.num_documents} {self.num_tokens}".encode())
        for values in (self.document_lengths, self._tokens):
            for sample in (values[:_SAMPLE], values[-_SAMPLE:]):
                digest.update(np.ascontiguousarray(sample).tobytes())
        return digest.hexdigest()

    def document_starts(self, documents: Int64Array) -> Int64Array:
        """See ``Corpus``."""
        return self.dataset.document_starts(documents)

    def read(self, begin: int, end: int) -> npt.NDArray[Any]:
        """See ``Corpus``."""
        return self._tokens[begin:end]

    def take(self, indices: Int64Array) -> npt.NDArray[Any]:
        """See ``Corpus``."""
        return self._tokens[indices]


class MockCorpus:
    """Made-up documents: log-normal lengths, tokens that count up (so a model can learn them).

    Args:
        num_documents: how many.
        seed: of the lengths.
        vocab_size: ids are below it.
        eod_token: if given, the last token of every document.
        median: of the lengths, in tokens.
        sigma: of the lengths' logarithm.
    """

    def __init__(
        self,
        num_documents: int = 100_000,
        *,
        seed: int = 0,
        vocab_size: int = 32000,
        eod_token: int | None = None,
        median: float = 665.0,
        sigma: float = 1.2,
    ) -> None:
        if vocab_size < 2:
            raise DatasetError(f"--vocab-size {vocab_size} must be at least 2 for mock data")
        if eod_token is not None and not 0 <= eod_token < vocab_size:
            raise DatasetError(f"end-of-document id {eod_token} is outside 0..{vocab_size - 1}")
        rng = np.random.default_rng(stream_key("mock lengths", seed))
        lengths = np.exp(np.log(median) + sigma * rng.standard_normal(num_documents))
        self.document_lengths = np.clip(lengths, 1, 2**20).astype(np.int64)
        self._ends = np.cumsum(self.document_lengths)
        self.num_documents = num_documents
        self.num_tokens = int(self._ends[-1])
        self.name = "mock data"
        shape = (num_documents, seed, vocab_size, eod_token, median, sigma)
        self.identity = f"{stream_key('mock', *shape):016x}"
        self._vocab_size, self._eod_token = vocab_size, eod_token

    def document_starts(self, documents: Int64Array) -> Int64Array:
        """See ``Corpus``."""
        return self._ends[documents] - self.document_lengths[documents]

    def read(self, begin: int, end: int) -> npt.NDArray[Any]:
        """See ``Corpus``."""
        tokens = self._counting(np.arange(begin, end, dtype=np.int64))
        if self._eod_token is not None:
            first, last = np.searchsorted(self._ends, (begin + 1, end + 1))
            tokens[self._ends[first:last] - 1 - begin] = self._eod_token
        return tokens

    def take(self, indices: Int64Array) -> npt.NDArray[Any]:
        """See ``Corpus``."""
        tokens = self._counting(indices)
        if self._eod_token is not None:
            at = np.searchsorted(self._ends, indices + 1)
            tokens[self._ends[at] == indices + 1] = self._eod_token
        return tokens

    def _counting(self, indices: Int64Array) -> Int64Array:
        """Ids that count up, all but ``eod_token``."""
        if self._eod_token is None:
            return indices % self._vocab_size
        tokens = indices % (self._vocab_size - 1)
        return tokens + (tokens >= self._eod_token)
