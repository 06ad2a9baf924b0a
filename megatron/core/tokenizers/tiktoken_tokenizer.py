"""tiktoken rank files and Mistral's tekken JSON; the only file that knows tiktoken's signatures.

A rank file (``base64 rank`` a line) says neither how text is split nor which special tokens
there are. Here: the split is cl100k's, and one special token, ``<|endoftext|>``, takes the id
after the last rank (as in GPT-2's and Qwen's files); it ends documents. A tekken file says all
of it: ids start with its special tokens, and ``</s>`` ends documents. A JSON list of ranks alone
(Megatron's own variant) doesn't name its split and is refused.
"""

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.tokenizers.base import Tokenizer, TokenizerError, Tokens

CL100K_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
END_OF_TEXT = "<|endoftext|>"
_TEKKEN_SPECIALS = ("<unk>", "<s>", "</s>")


class TikTokenizer(Tokenizer):
    """Byte-level BPE by ranks; every text comes back."""

    def __init__(self, model: str) -> None:
        tiktoken = _library()
        try:
            with open(model, "rb") as file:
                content = file.read()
        except OSError as error:
            raise TokenizerError(f"--tokenizer-model {model}: {error.strerror}") from error
        self._specials: list[str]
        if content[:1] in (b"{", b"["):
            ranks, pattern, self._specials, self.eod = _read_tekken(model, content)
            self._first = len(self._specials)
            self.vocab_size = self._first + max(ranks.values()) + 1
        else:
            ranks, pattern = _read_ranks(model, content), CL100K_PATTERN
            self._specials, self._first = [], 0
            self.eod = max(ranks.values()) + 1
            self.vocab_size = self.eod + 1
        self.name = f"TikTokenizer({model})"
        try:
            self._encoding = tiktoken.Encoding(
                self.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
            )
        except Exception as error:  # the library raises plain ValueError or a pattern's own error
            raise TokenizerError(f"--tokenizer-model {model}: {str(error)[:200]}") from error
        self._bytes = {rank + self._first: token for token, rank in ranks.items()}

    def tokenize(self, text: str) -> Tokens:
        """int64 [tokens]."""
        ids = np.array(self._encoding.encode_ordinary(text), dtype=np.int64)
        return ids + self._first if self._first else ids

    def detokenize(self, ids: Sequence[int] | Tokens) -> str:
        """The text, special tokens spelled out."""
        pieces = [self._bytes_of(int(i)) for i in np.asarray(ids)]
        return b"".join(pieces).decode("utf-8", "replace")

    def _bytes_of(self, token: int) -> bytes:
        piece = self._bytes.get(token)
        if piece is not None:
            return piece
        if token < len(self._specials):
            return self._specials[token].encode()
        if token == self.eod:
            return END_OF_TEXT.encode()
        raise TokenizerError(f"{self.name}: no token has id {token}")


def _library() -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise TokenizerError(
            "--tokenizer-type TikTokenizer needs the tiktoken package: pip install '.[tiktoken]'"
        ) from error
    return tiktoken


def _read_ranks(model: str, content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise TokenizerError(
                f"--tokenizer-model {model}:{number}: a rank file has 'BASE64 RANK' on each line, "
                f"not {line[:40]!r}"
            ) from error
    _check_ranks(model, ranks)
    return ranks


def _check_ranks(model: str, ranks: dict[bytes, int]) -> None:
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(
            f"--tokenizer-model {model}: {len(missing)} of the 256 single bytes have no rank "
            f"(the first is {missing[0]}): the file is cut short or not a rank file"
        )
    if len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        raise TokenizerError(f"--tokenizer-model {model}: ranks must be distinct and >= 0")


def _read_tekken(model: str, content: bytes) -> tuple[dict[bytes, int], str, list[str], int | None]:
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise TokenizerError(f"--tokenizer-model {model}: broken JSON: {error}") from error
    if not isinstance(settings, dict) or "config" not in settings or "vocab" not in settings:
        raise TokenizerError(
            f"--tokenizer-model {model}: this JSON is not a tekken file (config, vocab): it "
            f"doesn't say how text is split; give a rank file (.tiktoken) or a tekken file"
        )
    try:
        config = settings["config"]
        count = int(config["default_num_special_tokens"])
        size = int(config["default_vocab_size"])
        entries = settings["vocab"][: size - count]
        ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in entries}
        names = [str(entry["token_str"]) for entry in settings.get("special_tokens") or ()]
        pattern = str(config["pattern"])
    except (KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"--tokenizer-model {model}: not a tekken file: {error!r}") from error
    _check_ranks(model, ranks)
    names = names or list(_TEKKEN_SPECIALS)
    specials = (names + [f"<SPECIAL_{i}>" for i in range(len(names), count)])[:count]
    return ranks, pattern, specials, specials.index("</s>") if "</s>" in specials else None
