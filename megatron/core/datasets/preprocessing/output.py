"""The pairs of files of a run, one per JSON key, and the note that marks a shard.

``PREFIX_KEY_document.bin/.idx`` get their final names together at the end (the ``.idx`` last);
before that there are only ``.partial`` files, removed on any error. One task of an array also
leaves ``PREFIX_KEY_document.shard.json``, which says which part of how many it is: merging orders
shards by it and refuses a set that is not complete, and a task won't overwrite another's output.
"""

import contextlib
import dataclasses
import json
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import numpy.typing as npt

from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.datasets.preprocessing.encoder import Array
from megatron.core.datasets.preprocessing.records import CorpusError
from megatron.core.datasets.preprocessing.shares import Share

NOTE_SUFFIX = ".shard.json"


@dataclasses.dataclass(frozen=True)
class ShardNote:
    """Which part of a corpus a pair of files is."""

    shard_index: int
    num_shards: int
    key: str
    vocab_size: int
    documents: int
    tokens: int

    def write(self, prefix: str) -> None:
        """Put it beside the pair, at once or not at all."""
        partial = prefix + NOTE_SUFFIX + ".partial"
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(self), file)
        os.replace(partial, prefix + NOTE_SUFFIX)


def read_note(prefix: str) -> ShardNote | None:
    """The note beside a pair, if there is one.

    Raises:
        CorpusError: if it can't be read.
    """
    path = prefix + NOTE_SUFFIX
    try:
        with open(path, encoding="utf-8") as file:
            return ShardNote(**json.load(file))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise CorpusError(f"{path}: not a shard note ({error}); write the shard again") from error


class CorpusWriter:
    """Writes one pair per key. A context manager: left by an error, it removes what it wrote."""

    def __init__(
        self, output_prefix: str, keys: tuple[str, ...], dtype: npt.DTypeLike, share: Share
    ) -> None:
        self.prefixes = [pair_prefix(output_prefix, key) for key in keys]
        self.tokens = [0] * len(keys)
        self.documents = [0] * len(keys)
        self.longest = 0
        self._keys, self._share = keys, share
        self._builders: list[IndexedDatasetBuilder] = []
        try:
            for prefix in self.prefixes:
                self._builders.append(IndexedDatasetBuilder(prefix, dtype))
        except BaseException:
            self._abort()
            raise

    def add(self, key: int, tokens: Array, lengths: Array) -> None:
        """Documents of key number ``key``, one after another in ``tokens``."""
        if not len(lengths):
            return
        self._builders[key].add_documents(tokens, lengths)
        self.tokens[key] += len(tokens)
        self.documents[key] += len(lengths)
        self.longest = max(self.longest, int(lengths.max()))

    def finish(self, vocab_size: int) -> None:
        """Give all files their final names; signals wait until it is done."""
        with signals_held():
            for k, (prefix, builder) in enumerate(zip(self.prefixes, self._builders)):
                if self._share.count > 1:
                    counts = (self.documents[k], self.tokens[k])
                    place = (self._share.index, self._share.count, self._keys[k], vocab_size)
                    ShardNote(*place, *counts).write(prefix)
                elif os.path.exists(prefix + NOTE_SUFFIX):
                    os.unlink(prefix + NOTE_SUFFIX)
                builder.finalize()
            self._builders = []

    def __enter__(self) -> "CorpusWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abort()

    def _abort(self) -> None:
        for builder in self._builders:
            with contextlib.suppress(OSError):  # a full disk must not hide the first error
                builder.abort()
        self._builders = []


def pair_prefix(output_prefix: str, key: str) -> str:
    """Megatron's name of a key's pair of files."""
    return f"{output_prefix}_{key}_document"


def check_output(output_prefix: str, keys: tuple[str, ...], share: Share) -> None:
    """That the pairs may be written: a usable name, a folder, no other shard's output.

    Raises:
        CorpusError: naming the flag and the cure.
    """
    folder, name = os.path.split(output_prefix)
    if not name:
        raise CorpusError(
            f"--output-prefix {output_prefix} ends in a folder; add a name: "
            f"{os.path.join(output_prefix, 'corpus')}"
        )
    for key in keys:
        if not key or os.sep in key:
            raise CorpusError(f"--json-keys {key!r} can't be part of a file name")
    try:
        os.makedirs(folder or ".", exist_ok=True)
    except OSError as error:
        raise CorpusError(f"--output-prefix {output_prefix}: {folder}: {error.strerror}") from error
    if not os.access(folder or ".", os.W_OK):
        raise CorpusError(f"--output-prefix {output_prefix}: no permission to write in {folder}")
    for key in keys:
        note = read_note(pair_prefix(output_prefix, key))
        if note is None or share.count == 1:
            continue
        if (note.shard_index, note.num_shards) != (share.index, share.count):
            raise CorpusError(
                f"--output-prefix {output_prefix} holds shard {note.shard_index} of "
                f"{note.num_shards}; this is shard {share.index} of {share.count}: give each shard "
                f"its own prefix, or remove the old files"
            )


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Hold back SIGTERM, SIGINT and SIGHUP inside, and deliver them at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before: dict[int, Any] = {number: signal.signal(number, hold) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in held:
            os.kill(os.getpid(), number)
