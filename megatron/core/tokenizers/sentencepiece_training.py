"""Training a SentencePiece model on a stream of texts.

The defaults keep every text: no normalisation, spaces kept, bytes for what the vocabulary lacks,
no dummy prefix. Pieces don't cross words; runs of spaces (indentation) may be pieces. The end of
a document is a control piece: it never comes out of text that happens to spell it.

The trainer holds its whole input, and silently drops long sentences. So texts are cut into lines
of at most ``LINE_BYTES``, and a sample of at most ``sample_bytes`` is drawn in one pass: pieces of
about 16 KB get a random priority, and whenever the sample is over its size, the half with the
higher priorities goes. Same input, seed and threads: same model.
"""

import contextlib
import dataclasses
import io
import os
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import sentencepiece

from megatron.core.tokenizers.base import TokenizerError

LINE_BYTES = 16384
_PIECE = 1 << 14


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """What kind of model."""

    vocab_size: int = 32000
    model_type: str = "bpe"
    character_coverage: float = 0.9995
    normalization: str = "identity"
    add_dummy_prefix: bool = False
    byte_fallback: bool = True
    split_digits: bool = True
    eod_piece: str = "</s>"
    user_defined_symbols: tuple[str, ...] = ()
    sample_bytes: int = 200_000_000
    threads: int = 1
    seed: int = 1234

    def __post_init__(self) -> None:
        smallest = 3 + 256 * self.byte_fallback + len(self.user_defined_symbols)
        if self.vocab_size <= smallest:
            raise TokenizerError(
                f"--vocab-size {self.vocab_size} must be above {smallest}: 3 special pieces, "
                f"{256 * self.byte_fallback} bytes, {len(self.user_defined_symbols)} symbols"
            )
        if not 0.5 < self.character_coverage <= 1:
            raise TokenizerError(
                f"--character-coverage {self.character_coverage} must be above 0.5, at most 1"
            )
        for flag, value in (("--sample-bytes", self.sample_bytes), ("--workers", self.threads)):
            if value < 1:
                raise TokenizerError(f"{flag} {value} must be at least 1")
        if not self.eod_piece or self.eod_piece in ("<unk>", "<s>", *self.user_defined_symbols):
            raise TokenizerError(f"--eod-piece {self.eod_piece!r} must be a name of its own")


def draw_sample(texts: Iterable[str], sample_bytes: int, seed: int) -> list[str]:
    """A uniform sample of pieces of the texts, at most ``sample_bytes`` (in the texts' order)."""
    draw, limit, size = random.Random(seed).random, 1.0, 0
    kept: list[tuple[float, int, str]] = []
    for text in texts:
        for start in range(0, len(text), _PIECE):
            priority = draw()
            if priority >= limit:
                continue
            piece = text[start : start + _PIECE]
            weight = len(piece.encode("utf-8"))
            kept.append((priority, weight, piece))
            size += weight
            while size > sample_bytes and len(kept) > 1:
                limit /= 2
                kept = [entry for entry in kept if entry[0] < limit]
                size = sum(entry[1] for entry in kept)
    return [piece for _, _, piece in kept]


def lines_of(pieces: Iterable[str]) -> Iterator[str]:
    """What the trainer reads: lines without newline or NUL, none longer than ``LINE_BYTES``."""
    most = LINE_BYTES // 4
    for piece in pieces:
        for line in re.split(r"[\n\0]", piece):
            for start in range(0, len(line), most):
                yield line[start : start + most]


def train_sentencepiece(pieces: list[str], settings: TrainingSettings) -> bytes:
    """The serialized model.

    Raises:
        TokenizerError: if the text doesn't give such a vocabulary; says which size it gives.
    """
    if not any(line.strip() for line in lines_of(pieces)):
        raise TokenizerError("--input: no text to train on")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines_of(pieces), model_writer=model, **_options(settings)
        )
    except (RuntimeError, ValueError) as error:
        raise TokenizerError(_explain(str(error), settings)) from error
    return model.getvalue()


def _options(settings: TrainingSettings) -> dict[str, Any]:
    identity = settings.normalization == "identity"
    return {
        "model_type": settings.model_type,
        "vocab_size": settings.vocab_size,
        "character_coverage": settings.character_coverage,
        "normalization_rule_name": settings.normalization,
        "remove_extra_whitespaces": not identity,
        "add_dummy_prefix": settings.add_dummy_prefix,
        "byte_fallback": settings.byte_fallback,
        "split_digits": settings.split_digits,
        "allow_whitespace_only_pieces": identity,
        "user_defined_symbols": list(settings.user_defined_symbols),
        "unk_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "pad_id": -1,
        "eos_piece": settings.eod_piece,
        "max_sentence_length": LINE_BYTES,
        "num_threads": settings.threads,
        "minloglevel": 1,
    }


def _explain(message: str, settings: TrainingSettings) -> str:
    size = f"--vocab-size {settings.vocab_size}"
    if found := re.search(r"value <= (\d+)", message):
        return f"{size} is more than this text gives; use at most {found[1]}, or more text"
    if found := re.search(r"required_chars\D+(\d+) vs (\d+)", message):
        return (
            f"{size} is less than its {found[2]} characters, bytes and special pieces; use more, "
            f"or a lower --character-coverage"
        )
    return f"SentencePiece can't train ({size}): {message.strip()[-300:]}"


def write_model(model: bytes, path: str) -> None:
    """Write a file at once or not at all."""
    partial = path + ".partial"
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(partial, "wb") as file:
            file.write(model)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
