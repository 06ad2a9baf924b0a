"""From what the user asks for (paths, weights, split, buckets) to a stream of documents.

    --data-path w1 p1 w2 p2     corpora and their shares of the stream's tokens
          | --split             a range of each corpus's documents, by their place in the file
          | --long-document-upsampling    each range cut by document length
    components                  what ``document_stream`` merges

Cost: opening the corpora, one pass over their document lengths where there are length buckets. No
token is read here, and no position kept.
"""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.config.data import DataConfig
from megatron.core.datasets.blend import (
    PARTS,
    LengthBucket,
    parse_blend,
    parse_split,
    parse_upsampling,
    split_range,
)
from megatron.core.datasets.corpus import Corpus, IndexedCorpus, MockCorpus
from megatron.core.datasets.document_stream import Component, StreamReader
from megatron.core.datasets.index_format import DatasetError, Int64Array

logger = logging.getLogger(__name__)


class DocumentSource:
    """The corpora of a run's train, valid or test part and how they are blended.

    Holds no position: ``reader(state)`` gives a reader that does. Safe to share.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        components: Sequence[Component],
        *,
        seed: int,
        vocab_size: int | None = None,
    ) -> None:
        if not components:
            raise DatasetError("the blend holds no documents")
        self.corpora = list(corpora)
        self.components = list(components)
        self.seed = seed
        self.vocab_size = vocab_size

    def reader(self, state: dict[str, Any] | None = None) -> StreamReader:
        """A reader of the endless stream from its start or a saved position."""
        return StreamReader(self.components, self.seed, state)

    @property
    def num_documents(self) -> int:
        """Documents of one pass over every component."""
        return sum(len(component.documents) for component in self.components)

    @property
    def num_tokens(self) -> int:
        """Tokens of one pass over every component."""
        return sum(component.num_tokens for component in self.components)

    def mix(self) -> list[dict[str, Any]]:
        """One entry a component: what it holds, its natural share, and its share as blended.

        ``passes`` is how often it is read while the whole stream reads ``num_tokens``.
        """
        total = self.num_tokens
        return [
            {
                "component": component.label,
                "documents": len(component.documents),
                "tokens": component.num_tokens,
                "natural_share": component.num_tokens / total,
                "share": component.weight,
                "passes": component.weight * total / component.num_tokens,
            }
            for component in self.components
        ]

    def describe(self) -> str:
        """The mix as a table."""
        lines = [f"{'documents':>12} {'tokens':>16} {'natural':>8} {'blend':>8} {'passes':>7}  of"]
        lines += [
            f"{row['documents']:>12,} {row['tokens']:>16,} {row['natural_share']:>8.2%} "
            f"{row['share']:>8.2%} {row['passes']:>7.2f}  {row['component']}"
            for row in self.mix()
        ]
        return "\n".join(lines)


def build_document_source(
    data_path: Sequence[str] | None,
    *,
    part: str = "train",
    split: str | None = None,
    seed: int = 1234,
    vocab_size: int | None = None,
    long_document_upsampling: Sequence[str] | None = None,
    corpora: Sequence[Corpus] | None = None,
) -> DocumentSource | None:
    """Open the corpora of a blend and cut out one part.

    Args:
        data_path: ``w1 p1 w2 p2 ...`` or ``p1 p2 ...``.
        part: ``train``, ``valid`` or ``test``.
        split: shares of documents (``969,30,1``); None: all documents belong to ``part``.
        seed: of the order.
        vocab_size: ids must be below it; checked where they are read.
        long_document_upsampling: ``MIN_TOKENS:WEIGHT`` rules.
        corpora: use these, equally blended by tokens, instead of ``data_path`` (mock data).

    Returns:
        None if the split gives this part a share of zero.

    Raises:
        DatasetError: on bad arguments, bad files, or a part that ends up with no document.
    """
    weights: list[float] | None = None
    if corpora is None:
        corpora, weights = _open_blend(data_path or ())
    shares = parse_split(split) if split is not None else None
    if shares is not None and shares[PARTS.index(part)] == 0:
        return None
    buckets = parse_upsampling(long_document_upsampling)
    components: list[Component] = []
    for number, corpus in enumerate(corpora):
        begin, end = 0, corpus.num_documents
        if shares is not None:
            begin, end = split_range(shares, part, corpus.num_documents)
        cut = _cut_by_length(corpus, number, range(begin, end), buckets)
        natural = sum(component.num_tokens for component in cut)
        weight = float(natural) if weights is None else weights[number]
        if not cut and (weights is None or weight):
            logger.warning("%s: no documents for the %s part; left out", corpus.name, part)
        if not weight or not cut:
            continue
        # Within a corpus a bucket weighs its tokens times its rule's weight.
        inside = sum(component.weight for component in cut)
        components += [
            dataclasses.replace(component, weight=weight * component.weight / inside)
            for component in cut
        ]
    if not components:
        if not any(corpus.num_tokens for corpus in corpora):
            names = ", ".join(corpus.name for corpus in corpora)
            raise DatasetError(f"{names}: no tokens at all; give a corpus that holds some")
        total = sum(corpus.num_documents for corpus in corpora)
        raise DatasetError(
            f"no documents for the {part} part: {total} documents in {len(corpora)} corpora"
            + (f", --split {split}; give {part} a larger share, or 0" if split else "")
        )
    return DocumentSource(corpora, _normalised(components), seed=seed, vocab_size=vocab_size)


def _open_blend(data_path: Sequence[str]) -> tuple[list[Corpus], list[float] | None]:
    """The corpora of ``--data-path``, one given twice opened once, and their weights."""
    prefixes, weights = parse_blend(data_path)
    opened: dict[str, Corpus] = {
        prefix: IndexedCorpus(prefix) for prefix in dict.fromkeys(prefixes)
    }
    return [opened[prefix] for prefix in prefixes], weights


def source_from_config(
    config: DataConfig,
    part: str,
    *,
    seed: int,
    vocab_size: int,
    eod_token: int | None = None,
    data_path: Sequence[str] | None = None,
) -> DocumentSource | None:
    """The source of one part as the flags (or a stage's ``data_path``) say.

    ``--train-data-path`` and its siblings go before ``--data-path`` with ``--split``; long
    documents are upsampled for training only.

    Returns:
        None if the flags give this part no data.

    Raises:
        DatasetError: as ``build_document_source``, or if there is no path at all.
    """
    own = {
        "train": config.train_data_path,
        "valid": config.valid_data_path,
        "test": config.test_data_path,
    }
    per_part = any(own.values())
    path: Sequence[str] | None = own[part] if per_part else config.data_path
    if data_path and (part == "train" or not per_part):
        path = data_path
    corpora: list[Corpus] | None = None
    if config.mock_data:
        corpora = [MockCorpus(seed=seed, vocab_size=vocab_size, eod_token=eod_token)]
        per_part = False
    elif not path:
        if per_part and part != "train":
            return None
        raise DatasetError(
            "no training data: give --data-path (or --train-data-path), or --mock-data"
        )
    return build_document_source(
        path,
        part=part,
        split=None if per_part else config.split,
        seed=seed,
        vocab_size=vocab_size,
        long_document_upsampling=config.long_document_upsampling if part == "train" else None,
        corpora=corpora,
    )


def _cut_by_length(
    corpus: Corpus, number: int, documents: range, buckets: Sequence[LengthBucket]
) -> list[Component]:
    """Components of a corpus, one a bucket that holds tokens; weights are relative inside it."""
    cut = []
    lengths = corpus.document_lengths[documents.start : documents.stop]
    where = f"{corpus.identity}:{documents.start}-{documents.stop}"
    for bucket in buckets:
        chosen: range | Int64Array = documents
        if len(buckets) == 1:
            tokens = int(lengths.sum(dtype=np.int64))
        else:
            inside = lengths >= bucket.low
            if bucket.high is not None:
                inside &= lengths < bucket.high
            chosen = np.flatnonzero(inside) + documents.start
            tokens = int(lengths[inside].sum(dtype=np.int64))
        if not tokens or not bucket.weight:
            continue
        name = where if len(buckets) == 1 else f"{where}:{bucket}"
        label = corpus.name if len(buckets) == 1 else f"{corpus.name} of {bucket} tokens"
        weight = tokens * bucket.weight
        cut.append(Component(name, corpus, number, chosen, tokens, weight, label))
    return cut


def _normalised(components: Sequence[Component]) -> list[Component]:
    """Weights that sum to 1, and names that differ even where a corpus is given twice."""
    total = sum(component.weight for component in components)
    seen: dict[str, int] = {}
    result = []
    for component in components:
        seen[component.name] = seen.get(component.name, 0) + 1
        again = seen[component.name]
        name = component.name if again == 1 else f"{component.name}#{again}"
        result.append(dataclasses.replace(component, name=name, weight=component.weight / total))
    return result
