"""Hugging Face ``tokenizer.json`` files; the only file that knows ``tokenizers``' signatures.

Loaded with the Rust library alone (no ``transformers``, no network). Special tokens spelled out
in a document are split as text, and the post-processor's BOS / CLS is not added. The
end-of-document id is ``eos_token`` of the ``tokenizer_config.json`` beside the file, else the
first of a few well-known names. The library's own thread pool stays off
(``TOKENIZERS_PARALLELISM=false`` is set for this process unless the user has set it): preprocessing
runs one process per core.

Long texts (over 512K characters) are cut before a space that stands between two ASCII letters,
if the file's normaliser and pre-tokenizer are of kinds that always split there, and a sample
agrees; else they stay whole. A whole text costs about 130 bytes of memory a byte.
"""

import functools
import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.tokenizers.base import Tokenizer, TokenizerError, Tokens, as_ids

_EOD_NAMES = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[EOD]",
)
_PART = 1 << 18
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}
_CUTTING_PRE_TOKENIZERS = {"ByteLevel", "Split", "Digits", "Whitespace", "WhitespaceSplit"}
_CUT_SAMPLE = (
    "It's one sample, don't cut It wrongly (see 3.14 or\n  so) for Two  words\t and\n\nmore"
)


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``, or the folder that holds one."""

    def __init__(self, model: str) -> None:
        path = _tokenizer_file(model)
        self._tokenizer = _load(path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        if getattr(self._tokenizer.model, "dropout", None) is not None:
            self._tokenizer.model.dropout = None  # the same text always gives the same tokens
        self.name = f"HuggingFaceTokenizer({path})"
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise TokenizerError(f"--tokenizer-model {path}: its vocabulary is empty")
        self.vocab_size = max(ids) + 1
        self.eod = self._find_eod(path)

    def _find_eod(self, path: str) -> int | None:
        named = _configured_eod(path)
        for name in _EOD_NAMES if named is None else (named,):
            found = self._tokenizer.token_to_id(name)
            if found is not None:
                return int(found)
        if named is not None:
            raise TokenizerError(
                f"{path}: eos_token {named!r} of its tokenizer_config.json is not in the vocabulary"
            )
        return None

    def tokenize(self, text: str) -> Tokens:
        """int64 [tokens]."""
        return self.tokenize_batch([text])[0]

    def tokenize_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """As ``tokenize`` for each, in one call to the library."""
        if max(map(len, texts), default=0) < 2 * _PART:
            return self._encode(list(texts))
        return [
            np.concatenate([self._encode([part])[0] for part in self._cut(text)]) for text in texts
        ]

    def _encode(self, texts: list[str]) -> list[Tokens]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def detokenize(self, ids: Sequence[int] | Tokens) -> str:
        """The text, special tokens spelled out."""
        return str(self._tokenizer.decode(as_ids(ids), skip_special_tokens=False))

    def _cut(self, text: str) -> list[str]:
        if len(text) < 2 * _PART or not self._may_cut:
            return [text]
        parts, start = [], 0
        while len(text) - start >= 2 * _PART:
            found = _CUT.search(text, start + _PART)
            end = len(text) if found is None else found.start()
            parts.append(text[start:end])
            start = end
        return [*parts, text[start:]] if start < len(text) else parts

    @functools.cached_property
    def _may_cut(self) -> bool:
        settings = json.loads(self._tokenizer.to_str())
        kinds = set(_kinds(settings.get("normalizer"), "normalizers"))
        if not kinds <= _LOCAL_NORMALIZERS:
            return False
        steps = _steps(settings.get("pre_tokenizer"), "pretokenizers")
        if not {step["type"] for step in steps} <= _CUTTING_PRE_TOKENIZERS:
            return False
        if not any(step["type"] != "Digits" and step.get("use_regex", True) for step in steps):
            return False  # nothing splits at spaces
        if any(step.get("add_prefix_space") for step in steps):
            return False
        for token in settings.get("added_tokens", ()):
            if token.get("lstrip") or token.get("rstrip") or _CUT.search(token["content"]):
                return False
        whole = self._encode([_CUT_SAMPLE])[0].tolist()
        for found in _CUT.finditer(_CUT_SAMPLE):
            left, right = _CUT_SAMPLE[: found.start()], _CUT_SAMPLE[found.start() :]
            if np.concatenate(self._encode([left, right])).tolist() != whole:
                return False
        return True


def _tokenizer_file(model: str) -> str:
    if not os.path.isdir(model):
        return model
    path = os.path.join(model, "tokenizer.json")
    if not os.path.exists(path):
        raise TokenizerError(
            f"--tokenizer-model {model}: the folder has no tokenizer.json; make one with "
            f"transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return path


def _load(path: str) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError(
            "--tokenizer-type HuggingFaceTokenizer needs the tokenizers package: "
            "pip install '.[hf]'"
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(
            f"--tokenizer-model {path} is not a tokenizer.json: {str(error)[:200]}"
        ) from error


def _configured_eod(path: str) -> str | None:
    config = os.path.join(os.path.dirname(path), "tokenizer_config.json")
    if not os.path.exists(config):
        return None
    try:
        with open(config, encoding="utf-8") as file:
            token = json.load(file).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise TokenizerError(f"{config}: not a JSON object: {error}") from error
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _steps(settings: Any, children: str) -> list[dict[str, Any]]:
    if settings is None:
        return []
    if settings["type"] == "Sequence":
        return [step for child in settings[children] for step in _steps(child, children)]
    return [settings]


def _kinds(settings: Any, children: str) -> list[str]:
    return [step["type"] for step in _steps(settings, children)]
