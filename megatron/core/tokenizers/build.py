"""From ``--tokenizer-type`` and ``--tokenizer-model`` to a tokenizer.

Libraries are imported by the adapter that needs them, when it is asked for.
"""

import os

from megatron.core.tokenizers.base import Tokenizer, TokenizerError

TOKENIZER_TYPES = (
    "SentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "TikTokenizer",
    "ByteTokenizer",
    "NullTokenizer",
)
_WITHOUT_FILE = ("ByteTokenizer", "NullTokenizer")


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
) -> Tokenizer:
    """The tokenizer of a command line.

    Args:
        tokenizer_type: one of ``TOKENIZER_TYPES``.
        tokenizer_model: its file or folder (not for ``ByteTokenizer`` and ``NullTokenizer``).
        vocab_size: with ``NullTokenizer`` its exact size; for others a model's vocabulary, which
            the tokenizer must fit.

    Raises:
        TokenizerError: naming the flag, the value, the rule and the cure.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        raise TokenizerError(
            f"--tokenizer-type {tokenizer_type} is none of {', '.join(TOKENIZER_TYPES)}"
        )
    model = None if tokenizer_model is None else os.fspath(tokenizer_model)
    _check_model(tokenizer_type, model)
    if vocab_size is not None and vocab_size < 1:
        raise TokenizerError(f"--vocab-size {vocab_size} must be at least 1")
    tokenizer = _build(tokenizer_type, model, vocab_size)
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"--vocab-size {vocab_size} is smaller than the {tokenizer.vocab_size} ids of "
            f"{tokenizer.name}; leave it out or give at least {tokenizer.vocab_size}"
        )
    return tokenizer


def _check_model(tokenizer_type: str, model: str | None) -> None:
    if tokenizer_type in _WITHOUT_FILE:
        if model is not None:
            raise TokenizerError(
                f"--tokenizer-model {model}: {tokenizer_type} has no file; leave the flag out"
            )
        return
    if not model:
        raise TokenizerError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model FILE")
    if not os.path.exists(model):
        raise TokenizerError(f"--tokenizer-model {model}: no such file or folder")


def _build(tokenizer_type: str, model: str | None, vocab_size: int | None) -> Tokenizer:
    if tokenizer_type == "ByteTokenizer":
        from megatron.core.tokenizers.byte_tokenizer import ByteTokenizer

        return ByteTokenizer()
    if tokenizer_type == "NullTokenizer":
        from megatron.core.tokenizers.null_tokenizer import NullTokenizer

        if vocab_size is None:
            raise TokenizerError("--tokenizer-type NullTokenizer needs --vocab-size N (exactly)")
        return NullTokenizer(vocab_size)
    assert model is not None
    if tokenizer_type == "SentencePieceTokenizer":
        from megatron.core.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

        return SentencePieceTokenizer(model)
    if tokenizer_type == "HuggingFaceTokenizer":
        from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer

        return HuggingFaceTokenizer(model)
    from megatron.core.tokenizers.tiktoken_tokenizer import TikTokenizer

    return TikTokenizer(model)
