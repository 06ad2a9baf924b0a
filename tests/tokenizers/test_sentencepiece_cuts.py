"""Long texts are cut where it changes nothing: against the library's tokens of the whole text."""

import random

import pytest
import sentencepiece

from megatron.core.tokenizers import sentencepiece_cuts
from megatron.core.tokenizers.sentencepiece_cuts import Cutter
from megatron.core.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from tests.tokenizers.models import raw_sentencepiece_model, sentencepiece_model, sources

ALPHABETS = (
    "abcdefghij  \n",
    "ab ",
    "self.x = (1)\n\t",
    "\u4e2d\u6587\u5b57 \u3001a",
    "e\u0301\ufb01\uff21 \u00a0\u2581x",
    "0123456789,. \x00",
    "\U0001f600\U0001f44d\U0001f3fd z",
)


NAMES = (
    "ours",
    "dummy prefix",
    "no byte fallback",
    "symbols",
    "library defaults",
    "case folding",
    "identity, spaces removed",
    "whitespace suffix",
)


def _texts(seed: int, size: int) -> list[str]:
    """Real code, and random strings over small alphabets (many merges, many ties)."""
    draw = random.Random(seed)
    real = "".join(sources(0.3))
    texts = []
    for _ in range(12):
        start = draw.randrange(len(real) - size)
        texts.append(real[start : start + size])
        letters = draw.choice(ALPHABETS)
        texts.append("".join(draw.choice(letters) for _ in range(size)))
        texts.append(real[start : start + size].replace("\n", " "))
    return texts


def _model(name: str) -> str:
    return {
        "ours": lambda: sentencepiece_model("bpe"),
        "dummy prefix": lambda: sentencepiece_model("bpe", add_dummy_prefix=True),
        "no byte fallback": lambda: sentencepiece_model("bpe", byte_fallback=False),
        "symbols": lambda: sentencepiece_model("bpe", user_defined_symbols=("self.", "\n\n")),
        "library defaults": lambda: raw_sentencepiece_model("bpe"),
        "case folding": lambda: raw_sentencepiece_model(
            "bpe", normalization_rule_name="nmt_nfkc_cf"
        ),
        "identity, spaces removed": lambda: raw_sentencepiece_model(
            "bpe", normalization_rule_name="identity"
        ),
        "whitespace suffix": lambda: raw_sentencepiece_model(
            "bpe", treat_whitespace_as_suffix=True
        ),
    }[name]()


@pytest.mark.parametrize("name", NAMES)
def test_bpe_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    monkeypatch.setattr(sentencepiece_cuts, "BPE_PART", 50)
    monkeypatch.setattr("megatron.core.tokenizers.sentencepiece_tokenizer.BPE_PART", 50)
    model = _model(name)
    tokenizer = SentencePieceTokenizer(model)
    library = sentencepiece.SentencePieceProcessor(model_file=model)
    cuts = 0
    for text in _texts(seed, 3000):
        assert tokenizer.tokenize(text).tolist() == library.encode(text), (name, seed)
        cuts += len(tokenizer._cutter.cut(text)) - 1
    assert (cuts == 0) == (name == "whitespace suffix")
    if name == "ours":
        assert cuts > 500


def test_unigram_parts_are_best_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The joined parts are a best path of the whole: nothing but ties may differ.

    Tolerance: the library adds the scores up in float32 (here about -5,000: rounding 5e-4).
    """
    monkeypatch.setattr(sentencepiece_cuts, "UNIGRAM_PART", 200)
    model = sentencepiece_model("unigram")
    with open(model, "rb") as file:
        cutter = Cutter(file.read())
    library = sentencepiece.SentencePieceProcessor(model_file=model)
    real = "".join(sources(0.3))
    for start in range(0, 100_000, 10_000):
        text = real[start : start + 2000]
        parts = cutter.cut(text)
        assert len(parts) > 3
        assert "".join(parts) == text
        joined = [int(i) for part in parts for i in library.encode(part)]
        whole = library.encode(text)
        assert library.decode(joined) == text
        assert sum(map(library.get_score, joined)) >= sum(map(library.get_score, whole)) - 1e-2


def test_unigram_stays_whole_below_a_million() -> None:
    with open(sentencepiece_model("unigram"), "rb") as file:
        cutter = Cutter(file.read())
    assert cutter.part == 1 << 20
    text = "a b" * 400_000
    assert cutter.cut(text) == [text]


def test_no_place_to_cut_keeps_it_whole() -> None:
    with open(sentencepiece_model("bpe"), "rb") as file:
        cutter = Cutter(file.read())
    text = "  " * (1 << 16)
    assert cutter.cut(text) == [text]


@pytest.mark.parametrize("model_type", ["word", "char"])
def test_other_model_types_stay_whole(model_type: str) -> None:
    with open(raw_sentencepiece_model(model_type, hard_vocab_limit=False), "rb") as file:
        cutter = Cutter(file.read())
    text = "".join(sources(0.3))
    assert cutter.cut(text) == [text]
