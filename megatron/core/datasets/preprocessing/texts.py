"""Reading a corpus as a plain stream of texts, in this process (to train a tokenizer)."""

from collections.abc import Callable, Iterator, Sequence

from megatron.core.datasets.preprocessing import records
from megatron.core.datasets.preprocessing.inputs import find_inputs, open_sources
from megatron.core.datasets.preprocessing.progress import Progress
from megatron.core.datasets.preprocessing.records import CorpusError, without_lone_surrogates
from megatron.core.datasets.preprocessing.shares import Share, parts_of, units_of


def read_texts(
    inputs: Sequence[str],
    keys: tuple[str, ...] = ("text",),
    skip_bad_lines: bool = False,
    log: Callable[[str], None] = print,
) -> Iterator[str]:
    """The texts of all keys of all records, in order, empty ones left out; shows progress.

    Raises:
        CorpusError: for input that can't be read, or a bad record unless ``skip_bad_lines``.
    """
    sources = open_sources(find_inputs(inputs), keys)
    progress = Progress(sum(source.size for source in sources), unit="characters")
    skipped = 0
    try:
        for unit in units_of(parts_of(sources, Share())):
            documents = characters = 0
            for record in unit.records(keys):
                if record.reason in records.HARMLESS:
                    continue
                if record.reason:
                    if not skip_bad_lines:
                        raise CorpusError(
                            f"{unit.locate(record.index)}: {record.reason}: {record.detail} "
                            f"(--skip-bad-lines leaves such records out and counts them)"
                        )
                    skipped += 1
                    continue
                documents += 1
                for text in record.texts:
                    if text and not text.isspace():
                        characters += len(text)
                        yield without_lone_surrogates(text)[0]
            progress.add(unit.weight, documents, characters)
    finally:
        progress.close()
    if skipped:
        log(f"skipped {skipped:,} bad records")
