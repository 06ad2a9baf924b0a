"""What comes out: order, bytes, types, ends of documents, what is skipped, odd characters."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets import IndexedDataset
from megatron.core.datasets.preprocessing import pipeline
from megatron.core.datasets.preprocessing.encoder import Encoder, EncoderSettings
from megatron.core.datasets.preprocessing.records import CorpusError, Record
from tests.preprocessing.corpora import (
    BYTES,
    documents,
    null,
    pair_bytes,
    read_texts,
    run_preprocess,
    run_tool,
    write_jsonl,
)
from tests.tokenizers.models import hugging_face_file, sentencepiece_model, sources


def test_bytes_do_not_depend_on_the_workers(tmp_path: Path) -> None:
    texts = documents(500, seed=5, longest=1000) * 8
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    for workers in (1, 3):
        run_preprocess(path, tmp_path / f"out{workers}", workers=workers, append_eod=True)
    assert pair_bytes(tmp_path / "out1_text_document") == pair_bytes(
        tmp_path / "out3_text_document"
    )
    dataset = IndexedDataset(tmp_path / "out3_text_document")
    for number, text in enumerate(texts):
        assert dataset[number].tolist() == [*text.encode(), 256]


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("SentencePieceTokenizer", sentencepiece_model),
        ("HuggingFaceTokenizer", hugging_face_file),
    ],
)
def test_real_text_comes_back(kind: str, model: object, tmp_path: Path) -> None:
    from megatron.core.tokenizers import build_tokenizer

    texts = sources(0.3)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    model_path = model()  # type: ignore[operator]
    done = run_tool(
        "preprocess_data.py", "--input", path, "--output-prefix", tmp_path / "out", "--workers", 2,
        "--tokenizer-type", kind, "--tokenizer-model", model_path, "--append-eod",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "warning" not in done.err
    assert "skipped: 0" in done.out
    tokenizer = build_tokenizer(kind, model_path)
    dataset = IndexedDataset(tmp_path / "out_text_document", vocab_size=tokenizer.vocab_size)
    assert len(dataset) == len(texts)
    for tokens, text in zip(dataset[:], texts):
        assert tokens[-1] == tokenizer.eod
        assert tokenizer.detokenize(tokens[:-1]) == text


def test_a_normaliser_is_said_once(tmp_path: Path) -> None:
    from tests.tokenizers.models import raw_sentencepiece_model

    path = write_jsonl(tmp_path / "a.jsonl", ["two  spaces"] * 3000)
    done = run_tool(
        "preprocess_data.py", "--input", path, "--output-prefix", tmp_path / "out",
        "--tokenizer-type", "SentencePieceTokenizer", "--workers", 2,
        "--tokenizer-model", raw_sentencepiece_model("bpe"),
    )  # fmt: skip
    assert done.code == 0
    assert done.err.count("does not keep") == 1
    assert "runs of spaces" in done.err


def test_a_text_that_does_not_come_back_is_said_once(tmp_path: Path) -> None:
    import functools

    from megatron.core.tokenizers import build_tokenizer

    factory = functools.partial(
        build_tokenizer, "SentencePieceTokenizer", sentencepiece_model("bpe")
    )
    path = write_jsonl(tmp_path / "a.jsonl", ["a\u2581b" * 1000] * 300)
    _, warnings = run_preprocess(path, tmp_path / "out", factory, workers=2)
    assert len(warnings) == 1
    assert "a.jsonl:1" in warnings[0]
    assert "does not give the text back" in warnings[0]


def test_several_keys(tmp_path: Path) -> None:
    texts, titles = documents(50, 1), documents(50, 2)
    titles[7] = " "
    path = write_jsonl(tmp_path / "a.jsonl", texts, title=titles)
    report, _ = run_preprocess(path, tmp_path / "out", keys=("title", "text"))
    assert read_texts(tmp_path / "out_text_document") == texts
    assert read_texts(tmp_path / "out_title_document") == titles[:7] + titles[8:]
    assert report.documents == [49, 50]
    assert report.skipped == {"empty document (title)": 1}


def test_empty_documents_are_counted(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", "x", "   ", ""])
    report, _ = run_preprocess(path, tmp_path / "out", append_eod=True)
    assert report.documents == [1]
    assert report.skipped == {"empty document": 3}
    assert report.examples["empty document"].endswith("a.jsonl:1")
    assert IndexedDataset(tmp_path / "out_text_document")[0].tolist() == [ord("x"), 256]


def test_blank_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "x"}\r\n  \n\r\n{"text": "y"}')
    report, _ = run_preprocess(path, tmp_path / "out")
    assert report.skipped == {"blank line": 3}
    assert read_texts(tmp_path / "out_text_document") == ["x", "y"]


@pytest.mark.parametrize("texts", [["", " \n\t "], []])
def test_nothing_left_is_an_error(texts: list[str], tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    folder = tmp_path / "out"
    with pytest.raises(CorpusError, match="no document is left"):
        run_preprocess(path, folder / "out")
    assert list(folder.iterdir()) == []


def test_one_empty_key_of_two_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"], title=[""])
    with pytest.raises(CorpusError, match="no document is left for key title"):
        run_preprocess(path, tmp_path / "out" / "o", keys=("text", "title"))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("size", "dtype"), [(65536, "uint16"), (65537, "int32")])
def test_type_from_the_largest_possible_id(size: int, dtype: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["1 2 3", f"{size - 1}"])
    report, _ = run_preprocess(path, tmp_path / "out", null(size))
    dataset = IndexedDataset(tmp_path / "out_text_document")
    assert (report.dtype, dataset.dtype) == (dtype, np.dtype(dtype))
    assert [list(ids) for ids in dataset[:]] == [[1, 2, 3], [size - 1]]


class Overflowing:
    """A tokenizer whose ids don't keep to its vocabulary."""

    name, vocab_size, eod, losses = "Overflowing", 70, None, ("no text comes back",)

    def tokenize_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array([int(word) for word in text.split()]) for text in texts]


class Given:
    """A unit of texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def records(self, keys: tuple[str, ...]) -> Iterator[Record]:
        for index, text in enumerate(self.texts):
            yield Record(index, (text,))


@pytest.mark.parametrize(("text", "bad"), [("3 70", "70"), ("3 -2 5", "-2"), ("-1 99", "-1")])
def test_ids_beyond_the_vocabulary_are_never_written(text: str, bad: str) -> None:
    encoder = Encoder(Overflowing, EncoderSettings())
    assert encoder(Given("0 69", "5")).tokens[0].tolist() == [0, 69, 5]
    with pytest.raises(ValueError, match=f"gave id {bad}, outside its vocabulary of 70"):
        encoder(Given("1", text))


def test_odd_characters(tmp_path: Path) -> None:
    """Lone surrogates become U+FFFD; NUL, CRLF and inner U+FEFF stay; a BOM at the start goes."""
    rows = [
        r'{"text": "pair \ud83d\ude00, lone \ud83d and \ude00"}',
        r'{"text": "nul \u0000 crlf \r\n bom \ufeff"}',
        '{"text": "\u2028 \x85 separators"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    report, _ = run_preprocess(path, tmp_path / "out")
    assert read_texts(tmp_path / "out_text_document") == [
        "pair \U0001f600, lone \ufffd and \ufffd",
        "nul \x00 crlf \r\n bom \ufeff",
        "\u2028 \x85 separators",
    ]
    assert report.replaced == 1
    assert report.skipped == {}
    assert any("U+FFFD in 1 documents" in line for line in report.lines())
    text = tmp_path / "a.txt"
    text.write_bytes(b"\xef\xbb\xbfone\r\n\x00two\xef\xbb\xbf\r\n")
    run_preprocess(text, tmp_path / "text")
    assert read_texts(tmp_path / "text_text_document") == ["one\r\n\x00two\ufeff\r\n"]


BAD_ROWS = {
    "invalid JSON": b'{"text": "cut off',
    "missing key": b'{"txt": "x"}',
    "null": b'{"text": null}',
    "not text": b'{"text": 5}',
    "not a JSON object": b'["text"]',
    "not UTF-8": b'{"text": "\xff"}',
}


@pytest.mark.parametrize("reason", list(BAD_ROWS))
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_bad_line_ends_a_strict_run(reason: str, suffix: str, tmp_path: Path) -> None:
    from tests.preprocessing.corpora import compressed

    good = [json.dumps({"text": text}).encode() for text in documents(500) * 20]
    place = random.Random(reason).randrange(5000, 9999)
    data = b"\n".join([*good[:place], BAD_ROWS[reason], *good[place:], BAD_ROWS["null"]])
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compressed(path, data))
    with pytest.raises(
        CorpusError, match=rf"a\.jsonl\S*:{place + 1}: {reason}: .*--skip-bad-lines"
    ):
        run_preprocess(path, tmp_path / "out" / "o", workers=2)
    assert list((tmp_path / "out").iterdir()) == []


def test_bad_lines_are_skipped_by_reason(tmp_path: Path) -> None:
    good = [json.dumps({"text": text}).encode() for text in ("one", "two", "three")]
    rows = [good[0], *BAD_ROWS.values(), good[1], *BAD_ROWS.values(), good[2]]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(rows) + b'\n{"text": "half writ')
    report, _ = run_preprocess(path, tmp_path / "out", skip_bad_lines=True)
    assert report.skipped == {reason: 2 + (reason == "invalid JSON") for reason in BAD_ROWS}
    assert read_texts(tmp_path / "out_text_document") == ["one", "two", "three"]
    assert "a.jsonl:3" in report.examples["missing key"]
    text = "\n".join(report.lines())
    assert "skipped: 13:" in text
    assert "3 invalid JSON; the first:" in text


def test_half_written_last_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": "half writ')
    with pytest.raises(CorpusError, match=r"a\.jsonl:2: invalid JSON: .*half written\?"):
        run_preprocess(path, tmp_path / "out")


def test_a_pretty_printed_file_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "x"}], indent=1))
    with pytest.raises(CorpusError, match="one object a line: jq"):
        run_preprocess(path, tmp_path / "out")


def test_refused_by_the_tokenizer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["1 2", "3 x", "4", "9"])
    with pytest.raises(CorpusError, match=r"a\.jsonl:2: refused by the tokenizer: 'x' is not"):
        run_preprocess(path, tmp_path / "out", null(9))
    report, _ = run_preprocess(path, tmp_path / "out", null(9), skip_bad_lines=True)
    assert report.skipped == {"refused by the tokenizer": 2}
    assert report.tokens == [3]


def test_the_first_bad_record_is_the_one_named(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["1", "x", None, "y"])
    with pytest.raises(CorpusError, match=r":2: refused"):
        run_preprocess(path, tmp_path / "out", null(9))
    path = write_jsonl(tmp_path / "a.jsonl", ["1", None, "x"])
    with pytest.raises(CorpusError, match=r":2: null"):
        run_preprocess(path, tmp_path / "out", null(9))


def test_old_output_survives_a_failed_run(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", ["x"])
    bad = write_jsonl(tmp_path / "bad.jsonl", ["x", None])
    run_preprocess(good, tmp_path / "out")
    before = pair_bytes(tmp_path / "out_text_document")
    with pytest.raises(CorpusError):
        run_preprocess(bad, tmp_path / "out")
    assert pair_bytes(tmp_path / "out_text_document") == before
    assert {path.name for path in tmp_path.iterdir()} == {
        "good.jsonl", "bad.jsonl", "out_text_document.bin", "out_text_document.idx",
    }  # fmt: skip


def test_an_input_named_twice_is_read_twice_and_said(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x", "y"])
    _, warnings = run_preprocess([path, path], tmp_path / "out")
    assert read_texts(tmp_path / "out_text_document") == ["x", "y", "x", "y"]
    assert any("more than once" in warning for warning in warnings)


def test_append_eod_needs_a_token(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["1"])
    with pytest.raises(CorpusError, match=r"--append-eod: NullTokenizer\(9\) has no end"):
        run_preprocess(path, tmp_path / "out", null(9), append_eod=True)


def test_report_counts(tmp_path: Path) -> None:
    texts = documents(500, 9)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    report, _ = run_preprocess(path, tmp_path / "out", BYTES, append_eod=True)
    sizes = [len(text.encode()) for text in texts]
    assert report.documents == [500]
    assert report.text_bytes == sum(sizes)
    assert report.tokens == [sum(sizes) + 500]
    assert report.longest == max(sizes) + 1


def test_a_worker_that_can_not_start_its_tokenizer(tmp_path: Path) -> None:
    import functools

    from megatron.core.tokenizers import build_tokenizer

    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    factory = functools.partial(build_tokenizer, "SentencePieceTokenizer", str(path))
    with pytest.raises(CorpusError, match="not a SentencePiece model"):
        run_preprocess(path, tmp_path / "out", factory, workers=2)


def test_the_module_needs_no_torch() -> None:
    """Workers start in a tenth of a second because nothing heavy is imported."""
    import subprocess
    import sys

    code = (
        "import sys, tools.preprocess_data, tools.merge_datasets, tools.train_tokenizer, "
        "tools.inspect_dataset; from megatron.core.datasets.preprocessing import worker; "
        "print([name for name in ('torch', 'pyarrow', 'datasets', 'matplotlib', 'tokenizers') "
        "if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=_root(), check=True
    )
    assert done.stdout.strip() == "[]"


def _root() -> Path:
    return Path(pipeline.__file__).resolve().parents[4]
