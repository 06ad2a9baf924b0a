"""SentencePiece models (``.model``); the only file that knows the library's signatures.

The end-of-document id is the model's ``eos``, else a piece named ``</s>``, ``<eod>`` or
``<|endoftext|>``. One character can't be kept by any SentencePiece model: U+2581, which the
library uses for the space and decodes to one. Long texts: see ``sentencepiece_cuts``.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import sentencepiece

from megatron.core.tokenizers.base import Tokenizer, TokenizerError, Tokens, as_ids
from megatron.core.tokenizers.sentencepiece_cuts import BPE_PART, Cutter

_EOD_PIECES = ("</s>", "<eod>", "<EOD>", "<|endoftext|>")


class SentencePieceTokenizer(Tokenizer):
    """A trained model.

    Args:
        model: path of the ``.model`` file.
    """

    def __init__(self, model: str) -> None:
        try:
            with open(model, "rb") as file:
                self._model = file.read()
            self._processor = _processor(self._model)
        except (OSError, RuntimeError, ValueError) as error:
            raise TokenizerError(
                f"--tokenizer-model {model} is not a SentencePiece model: {_short(error)}"
            ) from error
        self.name = f"SentencePieceTokenizer({model})"
        self.vocab_size = int(self._processor.vocab_size())
        self.eod = self._find_eod()
        self._encode = getattr(self._processor, "encode_as_numpy", self._processor.encode_as_ids)

    def _find_eod(self) -> int | None:
        eos = int(self._processor.eos_id())
        if eos >= 0:
            return eos
        unknown = int(self._processor.unk_id())
        for piece in _EOD_PIECES:
            found = int(self._processor.piece_to_id(piece))
            if found != unknown:
                return found
        return None

    def tokenize(self, text: str) -> Tokens:
        """int32 [tokens]: what the library gives for the whole text."""
        if len(text) < 2 * BPE_PART:
            return np.asarray(self._encode(text), dtype=np.int32)
        parts = self._cutter.cut(text)
        arrays = [self._encode(parts[0])]
        arrays += [self._encode_continuation(part) for part in parts[1:]]
        return np.concatenate([np.asarray(array, dtype=np.int32) for array in arrays])

    def detokenize(self, ids: Sequence[int] | Tokens) -> str:
        """The text; control pieces such as the end of a document give nothing."""
        return str(self._processor.decode(as_ids(ids)))

    @functools.cached_property
    def _cutter(self) -> Cutter:
        return Cutter(self._model)

    @functools.cached_property
    def _encode_continuation(self) -> Any:
        if self._cutter.continuation is None:
            return self._encode
        processor = _processor(self._cutter.continuation)
        return getattr(processor, "encode_as_numpy", processor.encode_as_ids)


def _processor(model: bytes) -> Any:
    processor = sentencepiece.SentencePieceProcessor()
    if not model or not processor.LoadFromSerializedProto(model):
        raise ValueError("not a serialized model" if model else "the file is empty")
    return processor


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:200] if str(error).strip() else repr(error)
