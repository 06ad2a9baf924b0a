"""What users write about blends, splits and length buckets, and what they get."""

import logging
from pathlib import Path

import numpy as np
import pytest

from megatron.core.config.data import DataConfig
from megatron.core.datasets import (
    DatasetError,
    MockCorpus,
    build_document_source,
    parse_blend,
    parse_split,
    parse_upsampling,
    source_from_config,
)
from megatron.core.datasets.blend import split_range
from tests.datasets.corpora import documents_of, write_corpora, write_corpus


def test_blends_are_parsed() -> None:
    assert parse_blend(["0.3", "a", "0.7", "b"]) == (["a", "b"], [0.3, 0.7])
    assert parse_blend(["a"]) == (["a"], None)
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend(["a", "b", "c"]) == (["a", "b", "c"], None)
    assert parse_blend(["30", "a", "0", "b"]) == (["a", "b"], [30.0, 0.0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "is empty"),
        (["0.5", "a", "b"], "0.5 looks like a weight"),
        (["a", "0.5"], "0.5 looks like a weight"),
        (["0.5", "a", "x", "b"], "weight x must be a number"),
        (["-1", "a", "2", "b"], "weight -1"),
        (["nan", "a"], "weight nan"),
        (["inf", "a"], "weight inf"),
        (["0", "a", "0", "b"], "all weights are zero"),
    ],
)
def test_bad_blends_are_refused(values: list[str], message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        parse_blend(values)


def test_splits_are_parsed_and_partition_the_documents() -> None:
    assert parse_split("969,30,1") == (0.969, 0.03, 0.001)
    assert parse_split("100,0,0") == (1, 0, 0)
    assert parse_split("90,10") == (0.9, 0.1, 0)
    for bad in ("", "a,b", "-1,2,3", "0,0,0", "1,2,3,4", "nan,1,1"):
        with pytest.raises(DatasetError, match="--split"):
            parse_split(bad)
    for count in (0, 1, 5, 38, 1000, 12345):
        for split in ("969,30,1", "1,1,1", "100,0,0", "0,0,1", "80,20,0"):
            ranges = [split_range(parse_split(split), p, count) for p in ("train", "valid", "test")]
            assert ranges[0][0] == 0 and ranges[2][1] == count
            assert ranges[0][1] == ranges[1][0] and ranges[1][1] == ranges[2][0]
    assert split_range(parse_split("969,30,1"), "valid", 1000) == (969, 999)


def test_upsampling_rules_are_parsed() -> None:
    buckets = parse_upsampling(["65536:4", "16384:2"])
    assert [(b.low, b.high, b.weight) for b in buckets] == [
        (0, 16384, 1.0),
        (16384, 65536, 2.0),
        (65536, None, 4.0),
    ]
    assert [str(b) for b in buckets] == ["0-16384", "16384-65536", "65536+"]
    assert len(parse_upsampling(None)) == 1
    assert [bucket.low for bucket in parse_upsampling(["1e3:2"])] == [0, 1000]
    for bad in ("16384", "x:2", "16384:x", "-5:2", "16384:-2", "16384:inf", ":2"):
        with pytest.raises(DatasetError, match="--long-document-upsampling"):
            parse_upsampling([bad])
    with pytest.raises(DatasetError, match="given twice"):
        parse_upsampling(["8:2", "8:3"])
    with pytest.raises(DatasetError, match="nothing is left"):
        parse_upsampling(["0:0"])


def test_splits_share_no_document(tmp_path: Path) -> None:
    paths = write_corpora(tmp_path, [[3] * 50, [5] * 30])
    seen: dict[str, set[int]] = {}
    for part in ("train", "valid", "test"):
        source = build_document_source(paths, part=part, split="60,30,10")
        assert source is not None
        documents = documents_of(source, source.num_documents)
        seen[part] = {token for document in documents for token in document}
    assert sum(map(len, seen.values())) == 300
    assert set().union(*seen.values()) == set(range(300))


@pytest.mark.parametrize("corpora", [[[]], [[0, 0]], [[], [0]]])
def test_corpora_without_a_token_are_named_not_the_split(
    corpora: list[list[int]], tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match="c0.*: no tokens at all; give a corpus"):
        build_document_source(write_corpora(tmp_path, corpora), split="60,30,10")


def test_a_part_without_share_is_none_and_one_without_documents_an_error(tmp_path: Path) -> None:
    path = str(write_corpus(tmp_path / "d", [4] * 10))
    assert build_document_source([path], part="valid", split="100,0,0") is None
    with pytest.raises(DatasetError, match="no documents for the test part: 10 documents.*969,30"):
        build_document_source([path], part="test", split="969,30,1")


def test_a_corpus_without_documents_for_a_part_is_left_out_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write_corpora(tmp_path, [[4] * 2, [4] * 100])
    with caplog.at_level(logging.WARNING):
        source = build_document_source(paths, part="valid", split="90,10,0")
    assert source is not None and source.num_documents == 10
    assert "no documents for the valid part" in caplog.text


def test_a_weight_of_zero_leaves_a_corpus_out(tmp_path: Path) -> None:
    first, second = write_corpora(tmp_path, [[4] * 5, [4] * 5])
    source = build_document_source(["1", first, "0", second])
    assert source is not None and source.num_documents == 5


def test_upsampling_keeps_shares_between_corpora_and_reports_the_mix(tmp_path: Path) -> None:
    paths = write_corpora(tmp_path, [[10] * 300 + [100] * 10, [10] * 100 + [200] * 20])
    blend = ["0.25", paths[0], "0.75", paths[1]]
    source = build_document_source(blend, long_document_upsampling=["50:3"])
    assert source is not None
    mix = source.mix()
    # Corpus 0: 3000 short, 1000 long tokens -> 3000 : 3000. Corpus 1: 1000 : 4000 -> 1000 : 12000.
    expected = [0.25 * 0.5, 0.25 * 0.5, 0.75 / 13, 0.75 * 12 / 13]
    assert [row["share"] for row in mix] == pytest.approx(expected)
    assert [row["documents"] for row in mix] == [300, 10, 100, 20]
    assert [row["tokens"] for row in mix] == [3000, 1000, 1000, 4000]
    assert mix[1]["passes"] == pytest.approx(3 * mix[0]["passes"])
    assert mix[3]["passes"] == pytest.approx(3 * mix[2]["passes"])
    assert "c1 of 50+ tokens" in source.describe()
    # What the stream gives is what was reported.
    coming = source.reader().upcoming(20_000)
    short = coming.length < 50
    for row, chosen in zip(
        mix, [(c == coming.corpus) & (s == short) for c in (0, 1) for s in (True, False)]
    ):
        share = coming.length[chosen].sum() / coming.length.sum()
        assert share == pytest.approx(row["share"], abs=0.002)


def test_one_corpus_given_twice_is_shuffled_twice(tmp_path: Path) -> None:
    path = str(write_corpus(tmp_path / "d", [3] * 20))
    source = build_document_source(["1", path, "1", path])
    assert source is not None
    assert len({component.name for component in source.components}) == 2
    documents = documents_of(source, 40)
    assert sorted(documents) == sorted([[3 * i, 3 * i + 1, 3 * i + 2] for i in range(20)] * 2)
    assert documents[::2] != documents[1::2]


def test_flags_choose_the_source(tmp_path: Path) -> None:
    one, two, three = write_corpora(tmp_path, [[4] * 10, [4] * 20, [4] * 30])

    def count(config: DataConfig, part: str, **more: object) -> int | None:
        source = source_from_config(config, part, seed=1, vocab_size=1000, **more)  # type: ignore[arg-type]
        return source.num_documents if source else None

    common = DataConfig(data_path=(one,), split="50,50,0")
    assert [count(common, part) for part in ("train", "valid", "test")] == [5, 5, None]
    assert count(common, "train", data_path=[two]) == 10
    assert count(common, "valid", data_path=[two]) == 10
    own = DataConfig(train_data_path=(one,), valid_data_path=(two,))
    assert [count(own, part) for part in ("train", "valid", "test")] == [10, 20, None]
    assert count(own, "train", data_path=[three]) == 30
    assert count(own, "valid", data_path=[three]) == 20
    mock = DataConfig(mock_data=True)
    assert count(mock, "train") == 96_900
    assert count(mock, "valid") == 3_000
    with pytest.raises(DatasetError, match="give --data-path"):
        count(DataConfig(), "train")
    upsampled = DataConfig(data_path=(one,), split="50,50,0", long_document_upsampling=("2:3",))
    train = source_from_config(upsampled, "train", seed=1, vocab_size=1000)
    valid = source_from_config(upsampled, "valid", seed=1, vocab_size=1000)
    assert train is not None and "of 2+ tokens" in train.components[0].label
    assert valid is not None and "tokens" not in valid.components[0].label


def test_mock_documents_are_virtual_and_seeded() -> None:
    corpus = MockCorpus(1000, seed=3, vocab_size=50, eod_token=7)
    assert 400 < np.median(corpus.document_lengths) < 1000
    whole = corpus.read(0, corpus.num_tokens)
    assert whole.min() >= 0 and whole.max() == 49
    ends = np.cumsum(corpus.document_lengths) - 1
    assert np.array_equal(np.flatnonzero(whole == 7), ends)
    some = np.random.default_rng(0).integers(0, corpus.num_tokens, 5000)
    assert np.array_equal(corpus.take(some), whole[some])
    assert np.array_equal(corpus.read(100, 5000), whole[100:5000])
    assert corpus.identity == MockCorpus(1000, seed=3, vocab_size=50, eod_token=7).identity
    assert corpus.identity != MockCorpus(1000, seed=4, vocab_size=50, eod_token=7).identity
    for bad in ({"vocab_size": 1}, {"vocab_size": 5, "eod_token": 5}):
        with pytest.raises(DatasetError):
            MockCorpus(10, **bad)
