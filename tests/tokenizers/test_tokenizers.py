"""Every tokenizer behind the one interface: ids, sizes, ends of documents, round trips, errors."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as RustTokenizer

from megatron.core.tokenizers import TOKENIZER_TYPES, Tokenizer, TokenizerError, build_tokenizer
from tests.tokenizers.models import (
    hugging_face_file,
    raw_sentencepiece_model,
    sentencepiece_model,
    sources,
    tekken_file,
    tiktoken_file,
)

STRANGE = (
    "",
    "a\x00b\x00",
    "\x00",
    "one\r\ntwo\r",
    "\ufeffstarts with a BOM, and \ufeff again",
    "  leading, trailing  ",
    "\t\n \n\n\t",
    "e\u0301\u0301\u0301 \U0001f469\u200d\U0001f467",
    "\u2028\u2029\x0b\x0c\x85 line ends of Unicode",
    "</s> <s> <unk> <|endoftext|> <|tool|> <0x41>",
    "\ufffd \U0010ffff \ue000",
)


def make(kind: str) -> Tokenizer:
    """One tokenizer of each kind."""
    return {
        "bpe": lambda: build_tokenizer("SentencePieceTokenizer", sentencepiece_model("bpe")),
        "unigram": lambda: build_tokenizer(
            "SentencePieceTokenizer", sentencepiece_model("unigram")
        ),
        "hf": lambda: build_tokenizer("HuggingFaceTokenizer", hugging_face_file()),
        "tiktoken": lambda: build_tokenizer("TikTokenizer", tiktoken_file()),
        "tekken": lambda: build_tokenizer("TikTokenizer", tekken_file()),
        "bytes": lambda: build_tokenizer("ByteTokenizer"),
    }[kind]()


KINDS = ("bpe", "unigram", "hf", "tiktoken", "tekken", "bytes")


@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back(kind: str) -> None:
    tokenizer = make(kind)
    assert tokenizer.losses == ()
    assert tokenizer.is_lossless
    for text in (*sources(0.1), *STRANGE):
        ids = tokenizer.tokenize(text)
        assert tokenizer.detokenize(ids) == text
        assert np.issubdtype(ids.dtype, np.integer)
        assert ids.ndim == 1
        assert len(ids) == 0 or 0 <= ids.min() <= ids.max() < tokenizer.vocab_size
        if text:
            assert tokenizer.eod not in ids  # text never spells the end of a document


@pytest.mark.parametrize("kind", KINDS)
def test_batch_equals_one_by_one(kind: str) -> None:
    tokenizer = make(kind)
    texts = [*sources(0.05), *STRANGE]
    for ids, text in zip(tokenizer.tokenize_batch(texts), texts):
        assert np.array_equal(ids, tokenizer.tokenize(text))
    assert tokenizer.tokenize_batch([]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_end_of_document_decodes(kind: str) -> None:
    tokenizer = make(kind)
    assert tokenizer.eod is not None
    assert 0 <= tokenizer.eod < tokenizer.vocab_size
    text = tokenizer.detokenize([*tokenizer.tokenize("x = 1\n"), tokenizer.eod])
    assert text.startswith("x = 1\n")


def test_sizes_and_ends() -> None:
    facts = {kind: (make(kind).vocab_size, make(kind).eod) for kind in KINDS}
    ranks = len(Path(tiktoken_file()).read_text().split("\n")) - 1
    assert facts == {
        "bpe": (1500, 2),
        "unigram": (1500, 2),
        "hf": (2000, 0),  # the added token's id, not the number of tokens, decides
        "tiktoken": (ranks + 1, ranks),
        "tekken": (ranks + 10 - 50, 2),
        "bytes": (257, 256),
    }


def test_sentencepiece_equals_the_library() -> None:
    tokenizer = make("bpe")
    library = sentencepiece.SentencePieceProcessor(model_file=sentencepiece_model("bpe"))
    for text in sources(0.1):
        assert tokenizer.tokenize(text).tolist() == library.encode(text)


def test_hugging_face_equals_the_library() -> None:
    tokenizer = make("hf")
    library = RustTokenizer.from_file(hugging_face_file())
    for text in sources(0.1):
        assert tokenizer.tokenize(text).tolist() == library.encode(text).ids


def test_tiktoken_has_the_same_tokens_as_tekken() -> None:
    plain, tekken = make("tiktoken"), make("tekken")
    text = "def f(x): return x"
    shifted = tekken.tokenize(text) - 10
    assert [plain.detokenize([i]) for i in shifted] == [
        tekken.detokenize([i]) for i in tekken.tokenize(text)
    ]


def test_normaliser_is_found() -> None:
    model = raw_sentencepiece_model("bpe")  # nmt_nfkc, extra spaces removed, no byte fallback
    tokenizer = build_tokenizer("SentencePieceTokenizer", model)
    assert not tokenizer.is_lossless
    assert "runs of spaces" in tokenizer.losses
    assert "full-width letters and ligatures" in tokenizer.losses
    assert "plain words" not in tokenizer.losses


def test_the_one_character_of_sentencepiece() -> None:
    tokenizer = make("bpe")
    assert tokenizer.detokenize(tokenizer.tokenize("a\u2581b")) == "a b"


def test_null_tokenizer() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=70000)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.is_lossless) == (70000, None, True)
    ids = tokenizer.tokenize(" 5 0\n69999\t007 ")
    assert ids.tolist() == [5, 0, 69999, 7]
    assert tokenizer.detokenize(ids) == "5 0 69999 7"
    assert tokenizer.restores(" 5 0\n69999\t007 ", ids)
    for text in ("70000", "-1", "1.5", "x", "1 2 3a", "\u0663", "9" * 5000):
        with pytest.raises(TokenizerError, match="token id"):
            tokenizer.tokenize(text)


def test_hugging_face_folder_names_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(Path(hugging_face_file()).read_text())
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<|tool|>"}}))
    assert build_tokenizer("HuggingFaceTokenizer", folder).eod == 1999
    config.write_text(json.dumps({"eos_token": "<|tool|>"}))
    assert build_tokenizer("HuggingFaceTokenizer", folder).eod == 1999
    config.write_text(json.dumps({"eos_token": "<nowhere>"}))
    with pytest.raises(TokenizerError, match="'<nowhere>'.*not in the vocabulary"):
        build_tokenizer("HuggingFaceTokenizer", folder)
    config.write_text("[broken")
    with pytest.raises(TokenizerError, match="not a JSON object"):
        build_tokenizer("HuggingFaceTokenizer", folder)


def test_hugging_face_adds_no_beginning(tmp_path: Path) -> None:
    settings = json.loads(Path(hugging_face_file()).read_text())
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|tool|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|tool|>": {"id": "<|tool|>", "ids": [1999], "tokens": ["<|tool|>"]}},
    }
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(settings))
    ids = build_tokenizer("HuggingFaceTokenizer", path).tokenize("import os, sys, re, json")
    assert ids.tolist() == make("hf").tokenize("import os, sys, re, json").tolist()
    assert len(ids) > 4


def test_unknown_end_is_none(tmp_path: Path) -> None:
    settings = json.loads(Path(hugging_face_file()).read_text())
    text = json.dumps(settings).replace("<|endoftext|>", "<|something|>")
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    assert build_tokenizer("HuggingFaceTokenizer", path).eod is None


def _tekken_without(key: str) -> str:
    settings = json.loads(Path(tekken_file()).read_text())
    del settings["config"][key]
    return json.dumps(settings)


def _broken(name: str, folder: Path) -> str | None:
    """A path to something that is no tokenizer."""
    path = folder / "model"
    contents = {
        "empty": b"",
        "noise": b"\x00\x01\x02 not a model",
        "list": json.dumps([{"rank": 0, "token_bytes": "AA=="}]).encode(),
        "open brace": b"{",
        "bad rank": b"AA== 0\nnot base64!! 1\n",
        "half a rank": b"AA==\n",
        "few bytes": base64.b64encode(b"a") + b" 0\n",
        "no pattern": _tekken_without("pattern").encode(),
        "equal ranks": b"".join(base64.b64encode(bytes([b])) + b" 7\n" for b in range(256)),
    }
    if name == "missing":
        return str(path)
    if name == "folder":
        path.mkdir()
        return str(path)
    if name == "none":
        return None
    path.write_bytes(contents[name])
    return str(path)


@pytest.mark.parametrize(
    ("kind", "model", "vocab_size", "message"),
    [
        ("WordTokenizer", "none", None, "is none of SentencePieceTokenizer"),
        ("SentencePieceTokenizer", "none", None, "needs --tokenizer-model"),
        ("SentencePieceTokenizer", "missing", None, "no such file"),
        ("SentencePieceTokenizer", "empty", None, "not a SentencePiece model"),
        ("SentencePieceTokenizer", "noise", None, "not a SentencePiece model"),
        ("SentencePieceTokenizer", "folder", None, "not a SentencePiece model"),
        ("HuggingFaceTokenizer", "none", None, "needs --tokenizer-model"),
        ("HuggingFaceTokenizer", "folder", None, "no tokenizer.json"),
        ("HuggingFaceTokenizer", "noise", None, "not a tokenizer.json"),
        ("HuggingFaceTokenizer", "empty", None, "not a tokenizer.json"),
        ("TikTokenizer", "list", None, "doesn't say how text is split"),
        ("TikTokenizer", "open brace", None, "broken JSON"),
        ("TikTokenizer", "bad rank", None, "model:2: a rank file has"),
        ("TikTokenizer", "half a rank", None, "model:1: a rank file has"),
        ("TikTokenizer", "few bytes", None, "255 of the 256 single bytes"),
        ("TikTokenizer", "empty", None, "256 of the 256 single bytes"),
        ("TikTokenizer", "equal ranks", None, "distinct"),
        ("TikTokenizer", "no pattern", None, "not a tekken file"),
        ("TikTokenizer", "folder", None, "Is a directory"),
        ("ByteTokenizer", "noise", None, "has no file"),
        ("ByteTokenizer", "none", 256, "smaller than the 257 ids"),
        ("NullTokenizer", "none", None, "needs --vocab-size"),
        ("NullTokenizer", "none", 0, "must be at least 1"),
    ],
)
def test_errors(
    kind: str, model: str, vocab_size: int | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(kind, _broken(model, tmp_path), vocab_size)


def test_larger_vocabulary_of_a_model_is_fine() -> None:
    assert build_tokenizer("ByteTokenizer", vocab_size=512).vocab_size == 257


def test_missing_packages_name_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    with pytest.raises(TokenizerError, match=r"pip install '\.\[hf\]'"):
        build_tokenizer("HuggingFaceTokenizer", __file__)
    with pytest.raises(TokenizerError, match=r"pip install '\.\[tiktoken\]'"):
        build_tokenizer("TikTokenizer", __file__)


def test_types_are_those_of_the_command_line() -> None:
    from megatron.core.config import TokenizerConfig

    field = TokenizerConfig.__dataclass_fields__["tokenizer_type"]
    assert tuple(field.metadata["flag"].choices) == TOKENIZER_TYPES
