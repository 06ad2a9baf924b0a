"""Small corpora for tests: random documents of chosen lengths, seeded."""

import numpy as np

from megatron.core.datasets import IndexedDatasetBuilder


def write_corpus(
    prefix: str, *, documents: int, vocab_size: int, longest: int, seed: int = 0
) -> str:
    """Write ``documents`` documents of 1 to ``longest`` tokens below ``vocab_size``.

    Tokens follow a noisy successor rule, so that a model has something to learn.
    """
    rng = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(prefix, np.uint16)
    for _ in range(documents):
        length = int(rng.integers(1, longest + 1))
        steps = rng.integers(1, 4, size=length)
        builder.add_document((rng.integers(vocab_size) + np.cumsum(steps)) % vocab_size)
    builder.finalize()
    return prefix
