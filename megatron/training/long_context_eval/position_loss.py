"""Loss by position: does a token far into a document profit from all that came before it?

Each held-out document is run once, as one row; its token losses are averaged over documents,
position by position, then over buckets of positions. A model that was never extended gets worse
where its training length ends; a model that uses a long context goes on getting better.

Cost: one forward pass. Neither S x S scores nor S x vocabulary logits exist: attention is
blockwise, and the head walks over ``--loss-chunk-size`` tokens.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from megatron.core.datasets import DocumentSource
from megatron.training.long_context_eval.checkpoint_model import LoadedModel
from megatron.training.long_context_eval.rows import TOKENS_AT_ONCE, Tokens, batches_of

Float64 = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Mean loss of the positions ``low <= p < high``."""

    low: int
    high: int
    loss: float
    """Nats a token."""
    error: float
    """Standard error of the mean over documents; NaN for a single document."""


@dataclasses.dataclass(frozen=True)
class PositionLoss:
    """Loss by position of one model on some documents."""

    length: int
    documents: int
    buckets: tuple[Bucket, ...]

    def mean(self, low: int = 0, high: int | None = None) -> float:
        """Mean loss of the whole buckets inside ``low..high`` (NaN without any)."""
        inside = [b for b in self.buckets if b.low >= low and (high is None or b.high <= high)]
        tokens = sum(b.high - b.low for b in inside)
        if not tokens:
            return math.nan
        return sum(b.loss * (b.high - b.low) for b in inside) / tokens


def bucket_edges(length: int, count: int) -> list[int]:
    """``count`` buckets as equal as can be: edges from 0 to ``length``.

    Raises:
        ValueError: for fewer buckets than one, or more than positions.
    """
    if not 1 <= count <= length:
        raise ValueError(f"--buckets {count} must be 1 to the {length} positions of a document")
    return [length * i // count for i in range(count + 1)]


def long_documents(source: DocumentSource, length: int, most: int) -> list[Tokens]:
    """The first ``length`` + 1 tokens of up to ``most`` documents that are that long.

    In the order of the corpora, so that two evaluations read the same documents.

    Raises:
        ValueError: if no document is long enough.
    """
    found: list[Tokens] = []
    longest = 0
    for component in source.components:
        corpus = component.corpus
        numbers = np.asarray(component.documents, np.int64)
        lengths = np.asarray(corpus.document_lengths)[numbers]
        longest = max(longest, int(lengths.max(initial=0)))
        chosen = numbers[lengths > length][: most - len(found)]
        for start in corpus.document_starts(chosen).tolist():
            found.append(np.asarray(corpus.read(start, start + length + 1), np.int64))
    if not found:
        raise ValueError(
            f"no document has more than {length} tokens (the longest has {longest}); give a "
            f"smaller --length, e.g. {max(1, longest - 1)}, or longer documents (--data-path)"
        )
    return found


def token_losses(
    loaded: LoadedModel, documents: Sequence[Tokens], *, tokens_at_once: int = TOKENS_AT_ONCE
) -> Float64:
    """Loss of every token, [documents, S]; each document [S + 1]."""
    loaded.set_length(len(documents[0]) - 1)
    losses = [
        loaded.model.token_losses(batch).to(torch.float64).cpu().numpy()
        for batch in batches_of(documents, device=loaded.device, tokens_at_once=tokens_at_once)
    ]
    return np.concatenate(losses)


def loss_by_position(
    loaded: LoadedModel,
    documents: Sequence[Tokens],
    edges: Iterable[int],
    *,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> PositionLoss:
    """Mean loss of each bucket of positions over equally long documents.

    Args:
        documents: each [S + 1] token ids.
        edges: rising positions from 0 to S; bucket i holds ``edges[i] <= p < edges[i + 1]``.
    """
    losses = token_losses(loaded, documents, tokens_at_once=tokens_at_once)
    bounds = list(edges)
    buckets = []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
        means = losses[:, low:high].mean(axis=1)
        error = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan
        buckets.append(Bucket(low, high, float(means.mean()), error))
    return PositionLoss(losses.shape[1], len(documents), tuple(buckets))
