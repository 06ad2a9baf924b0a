"""Text to token ids and back, behind one small interface."""

from megatron.core.tokenizers.base import Tokenizer, TokenizerError
from megatron.core.tokenizers.build import TOKENIZER_TYPES, build_tokenizer

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "TokenizerError", "build_tokenizer"]
