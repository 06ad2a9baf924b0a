"""A corpus of texts becomes token files.

::

    inputs -> sources -> units -> [worker: read, check, tokenize] -> in order -> .bin / .idx

The main process cuts the input into units and writes results; workers do the rest. Output order
is input order, whatever the number of workers, so the same input gives the same bytes. Memory
doesn't grow with the corpus (12 bytes a document for the index, and a window of units).
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterable

import numpy as np

from megatron.core.datasets.index_format import token_dtype
from megatron.core.datasets.preprocessing.encoder import (
    Encoded,
    EncoderSettings,
    TokenizerFactory,
    TokenizerFacts,
)
from megatron.core.datasets.preprocessing.inputs import find_inputs, open_sources
from megatron.core.datasets.preprocessing.output import CorpusWriter, check_output
from megatron.core.datasets.preprocessing.progress import Progress
from megatron.core.datasets.preprocessing.records import CorpusError
from megatron.core.datasets.preprocessing.shares import Share, parts_of, units_of
from megatron.core.datasets.preprocessing.units import Unit
from megatron.core.datasets.preprocessing.worker import WorkerPool


@dataclasses.dataclass(frozen=True)
class PreprocessSettings:
    """A run of preprocessing."""

    inputs: tuple[str, ...]
    output_prefix: str
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    skip_bad_lines: bool = False
    workers: int = 1
    share: Share = Share()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise CorpusError(f"--workers {self.workers} must be at least 1")
        repeated = [key for key in self.keys if self.keys.count(key) > 1]
        if repeated or not self.keys:
            raise CorpusError(f"--json-keys {' '.join(self.keys)}: each key once, at least one")


@dataclasses.dataclass
class Report:
    """What a run did."""

    prefixes: list[str]
    keys: tuple[str, ...]
    dtype: str
    documents: list[int]
    tokens: list[int]
    longest: int
    text_bytes: int
    skipped: dict[str, int]
    examples: dict[str, str]
    replaced: int
    seconds: float

    def lines(self) -> list[str]:
        """A summary for people."""
        megabytes, seconds = self.text_bytes / 1e6, max(self.seconds, 1e-9)
        lines = []
        for prefix, documents, tokens in zip(self.prefixes, self.documents, self.tokens):
            lines.append(
                f"{prefix}.bin/.idx: {documents:,} documents, {tokens:,} tokens ({self.dtype})"
            )
        lines.append(
            f"longest document {self.longest:,} tokens; {megabytes:,.2f} MB of text in "
            f"{seconds:,.1f} s: {megabytes / seconds:,.2f} MB/s, "
            f"{max(self.documents) / seconds:,.0f} documents/s"
        )
        total = sum(self.skipped.values())
        lines.append(f"skipped: {total:,}" + (":" if total else ""))
        for reason, count in sorted(self.skipped.items(), key=lambda item: (-item[1], item[0])):
            lines.append(f"  {count:,} {reason}; the first: {self.examples[reason]}")
        if self.replaced:
            lines.append(f"lone surrogates became U+FFFD in {self.replaced:,} documents")
        return lines


def preprocess(
    settings: PreprocessSettings,
    factory: TokenizerFactory,
    log: Callable[[str], None] = print,
) -> Report:
    """Tokenize the inputs and write ``PREFIX_KEY_document.bin/.idx`` for each key.

    Args:
        settings: what to read and write.
        factory: makes the tokenizer, in each worker; must be picklable.
        log: takes warnings, one a call.

    Raises:
        ValueError: for input, output or a tokenizer that can't be worked with, for a bad record
            unless ``skip_bad_lines``, and if no document is left (a shard of several may be empty).
        WorkerDied: if a worker process is gone.
    """
    start = time.monotonic()
    check_output(settings.output_prefix, settings.keys, settings.share)
    paths = find_inputs(settings.inputs)
    repeated = [path for path, times in collections.Counter(paths).items() if times > 1]
    if repeated:
        log(f"warning: read more than once, as --input says: {', '.join(repeated[:5])}")
    parts = parts_of(open_sources(paths, settings.keys), settings.share)
    encoding = EncoderSettings(settings.keys, settings.append_eod, settings.skip_bad_lines)
    with WorkerPool(settings.workers, factory, encoding) as pool:
        assert pool.facts is not None
        facts = pool.facts
        if facts.losses:
            log(f"warning: {facts.name} does not keep {'; '.join(facts.losses)}")
        dtype = token_dtype(facts.vocab_size - 1)
        with CorpusWriter(settings.output_prefix, settings.keys, dtype, settings.share) as writer:
            progress = Progress(sum(end - begin for _, begin, end in parts))
            try:
                totals = _write(pool.encode(units_of(parts)), writer, progress, facts, log)
            finally:
                progress.close()
            _check_not_empty(settings, writer, totals, log)
            writer.finish(facts.vocab_size)
    return dataclasses.replace(
        totals,
        prefixes=writer.prefixes,
        keys=settings.keys,
        dtype=str(np.dtype(dtype)),
        documents=writer.documents,
        tokens=writer.tokens,
        longest=writer.longest,
        seconds=time.monotonic() - start,
    )


def _write(
    results: Iterable[tuple[Unit, Encoded]],
    writer: CorpusWriter,
    progress: Progress,
    facts: TokenizerFacts,
    log: Callable[[str], None],
) -> Report:
    totals = Report([], (), "", [], [], 0, 0, {}, {}, 0, 0.0)
    warned = False
    for unit, result in results:
        if result.failure is not None:
            record = result.failure
            raise CorpusError(
                f"{unit.locate(record.index)}: {record.reason}: {record.detail} "
                f"(--skip-bad-lines leaves such records out and counts them)"
            )
        for key, (tokens, lengths) in enumerate(zip(result.tokens, result.lengths)):
            writer.add(key, tokens, lengths)
        for reason, count in result.skipped.items():
            totals.skipped[reason] = totals.skipped.get(reason, 0) + count
            if reason not in totals.examples:
                index, detail = result.examples[reason]
                totals.examples[reason] = f"{unit.locate(index)} {detail}".strip()
        totals.replaced += result.replaced
        totals.text_bytes += result.text_bytes
        if result.changed is not None and not warned:
            warned = True
            log(
                f"warning: {unit.locate(result.changed)}: decoding its tokens does not give the "
                f"text back ({facts.name}); said once"
            )
        progress.add(unit.weight, result.documents, sum(map(len, result.tokens)))
    return totals


def _check_not_empty(
    settings: PreprocessSettings, writer: CorpusWriter, totals: Report, log: Callable[[str], None]
) -> None:
    empty = [key for key, count in zip(settings.keys, writer.documents) if not count]
    if not empty:
        return
    skipped = ", ".join(f"{count} {reason}" for reason, count in totals.skipped.items())
    if settings.share.count == 1:
        raise CorpusError(
            f"--input {' '.join(settings.inputs)}: no document is left for key "
            f"{' '.join(empty)} (skipped: {skipped or 'nothing; the input is empty'}); "
            f"nothing was written"
        )
    log(f"warning: shard {settings.share.index} has no documents for key {' '.join(empty)}")
