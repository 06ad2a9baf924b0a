"""Training SentencePiece models: settings that keep texts, samples, clear refusals."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.core.tokenizers import TokenizerError, build_tokenizer
from megatron.core.tokenizers.sentencepiece_training import (
    LINE_BYTES,
    TrainingSettings,
    draw_sample,
    lines_of,
    train_sentencepiece,
    write_model,
)
from tests.tokenizers.models import sentencepiece_model, sources

ROOT = Path(__file__).resolve().parents[2]


def test_sample_is_bounded_uniform_and_repeatable() -> None:
    texts = [f"{i:05d}" * 200 for i in range(2000)]  # 1,000 bytes each
    sample = draw_sample(texts, 100_000, seed=3)
    assert sample == draw_sample(iter(texts), 100_000, seed=3)
    assert 40_000 <= sum(map(len, sample)) <= 100_000
    assert sample == sorted(sample)  # in the order of the corpus
    assert sample != draw_sample(texts, 100_000, seed=4)
    numbers = [int(piece[:5]) for piece in sample]
    assert 850 < sum(numbers) / len(numbers) < 1150  # from all over
    assert draw_sample(texts, 10**9, seed=3) == texts
    assert "".join(draw_sample(["x" * 50_000], 10**9, seed=0)) == "x" * 50_000


def test_lines_are_what_the_trainer_takes() -> None:
    text = "one\ntwo\0three\n\n" + "\U0001f600" * 10_000
    lines = list(lines_of([text]))
    assert "".join(lines) == text.replace("\n", "").replace("\0", "")
    assert max(len(line.encode()) for line in lines) <= LINE_BYTES
    assert not any("\n" in line or "\0" in line for line in lines)


def test_same_input_same_model() -> None:
    settings = TrainingSettings(vocab_size=600)
    pieces = list(sources(0.05))
    assert train_sentencepiece(pieces, settings) == train_sentencepiece(pieces, settings)


def test_end_of_document_has_the_name_given() -> None:
    model = sentencepiece_model("bpe", eod_piece="<|endoftext|>")
    tokenizer = build_tokenizer("SentencePieceTokenizer", model)
    assert tokenizer.eod == 2
    assert 2 not in tokenizer.tokenize("a <|endoftext|> b")  # text stays text
    assert tokenizer.is_lossless


def test_indentation_becomes_pieces() -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", sentencepiece_model("bpe"))
    assert len(tokenizer.tokenize(" " * 8)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 259}, "--vocab-size 259 must be above 259"),
        ({"vocab_size": 260, "user_defined_symbols": ("a", "b")}, "must be above 261"),
        ({"character_coverage": 1.5}, "--character-coverage 1.5"),
        ({"sample_bytes": 0}, "--sample-bytes 0"),
        ({"eod_piece": "<s>"}, "--eod-piece '<s>'"),
    ],
)
def test_wrong_settings(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        TrainingSettings(**changes)  # type: ignore[arg-type]


def test_too_little_text_says_what_it_gives() -> None:
    with pytest.raises(TokenizerError, match=r"--vocab-size 5000 is more .* use at most \d+"):
        train_sentencepiece(["a few words only"], TrainingSettings(vocab_size=5000))


def test_too_small_a_vocabulary_says_so() -> None:
    chinese = "".join(chr(0x4E00 + i) for i in range(400))
    settings = TrainingSettings(vocab_size=300, character_coverage=1.0)
    with pytest.raises(TokenizerError, match="--vocab-size 300 is less than its"):
        train_sentencepiece([chinese], settings)


def test_no_text() -> None:
    with pytest.raises(TokenizerError, match="no text to train on"):
        train_sentencepiece([" \n\t"], TrainingSettings())


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    with pytest.raises(OSError):
        write_model(b"x", str(target))
    assert list(tmp_path.iterdir()) == [target]


def test_command(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, text in enumerate(sources(0.1)):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    tool = ROOT / "tools" / "train_tokenizer.py"
    prefix = tmp_path / "out" / "small"
    command = [sys.executable, str(tool), "--input", str(folder), "--output-prefix", str(prefix)]
    done = subprocess.run(
        [*command, "--vocab-size", "800", "--model-type", "unigram"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "800 pieces, end of document 2" in done.stdout
    assert "keeps every text" in done.stdout
    tokenizer = build_tokenizer("SentencePieceTokenizer", f"{prefix}.model")
    assert tokenizer.keeps("".join(sources(0.1)))
