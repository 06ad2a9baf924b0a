"""From ``--input`` to sources, in an order that doesn't depend on the machine.

An input is a file, a pattern (``'data/*.jsonl'``) or a folder. Inputs are read in the order given;
what a pattern or folder holds, in natural order (``part2`` before ``part10``) of the path. What a
file is, its suffix says (a ``.gz`` or ``.zst`` on top is taken off first):

* ``.jsonl``, ``.json``, ``.ndjson``: one JSON object a line
* ``.parquet`` (not compressed again)
* a folder written by ``datasets``: its rows
* anything else: a text file, one document

Inside a folder, names that start with a dot are left out (as are Spark's ``_SUCCESS`` and
``_metadata``), and a mixture of data files and others is refused: a README beside parquet files
is no document, and a stray JSON file among texts no corpus.
"""

import glob
import os
import re
from collections.abc import Sequence

from megatron.core.datasets.preprocessing import compression
from megatron.core.datasets.preprocessing.dataset_folder import DatasetFolder, is_dataset_folder
from megatron.core.datasets.preprocessing.jsonl import CompressedJsonlFile, JsonlFile
from megatron.core.datasets.preprocessing.parquet import ParquetFile
from megatron.core.datasets.preprocessing.records import CorpusError
from megatron.core.datasets.preprocessing.text_files import TextFiles
from megatron.core.datasets.preprocessing.units import Source

_JSONL = (".jsonl", ".json", ".ndjson")
_PARQUET = (".parquet", ".pq")
_NO_DATA = frozenset(("_SUCCESS", "_metadata", "_common_metadata"))


def natural_key(text: str) -> list[tuple[int, int | str]]:
    """Sorts numbers inside names by value."""
    parts = re.split(r"([0-9]+)", text)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def find_inputs(inputs: Sequence[str]) -> list[str]:
    """The files and dataset folders of ``--input``, in reading order.

    Raises:
        CorpusError: for an input that isn't there, matches nothing, or can't be read.
    """
    found: list[str] = []
    for given in inputs:
        for path in _expand(given):
            found.extend(_folder(path) if os.path.isdir(path) else [path])
    for path in found:
        if not os.access(path, os.R_OK):
            raise CorpusError(f"--input {path}: no permission to read it")
        if not (os.path.isfile(path) or os.path.isdir(path)):
            raise CorpusError(f"--input {path}: not a regular file (pipes can't be read twice)")
    return found


def open_sources(paths: Sequence[str], keys: tuple[str, ...]) -> list[Source]:
    """One source a file (runs of text files share one), checked as far as is cheap.

    Raises:
        CorpusError: for a file whose kind or columns can't serve the keys.
    """
    sources: list[Source] = []
    texts: list[str] = []
    for path in paths:
        name = compression.inner_name(path).lower()
        if not _is_data(path):
            _check_text(path, keys)
            texts.append(path)
            continue
        if texts:
            sources.append(TextFiles(texts))
            texts = []
        sources.append(_open(path, name, keys))
    if texts:
        sources.append(TextFiles(texts))
    return sources


def _open(path: str, name: str, keys: tuple[str, ...]) -> Source:
    if os.path.isdir(path):
        return DatasetFolder(path, keys)
    if name.endswith(_PARQUET):
        if compression.is_compressed(path):
            raise CorpusError(f"{path}: parquet is compressed inside; decompress the file first")
        return ParquetFile(path, keys)
    return CompressedJsonlFile(path) if compression.is_compressed(path) else JsonlFile(path)


def _check_text(path: str, keys: tuple[str, ...]) -> None:
    if path.endswith((".bin", ".idx", ".arrow", ".partial")):
        raise CorpusError(
            f"--input {path}: not raw text; give jsonl, parquet, text files or a dataset folder"
        )
    name = compression.inner_name(path).lower()
    if name.endswith(compression.ARCHIVES):  # a tar of texts is UTF-8 from end to end
        raise CorpusError(f"--input {path}: an archive; unpack it and give the folder")
    if name.endswith(tuple(suffix.lower() for suffix in compression.OTHERS)):
        raise CorpusError(
            f"--input {path}: a compression that isn't read; decompress it, or compress it as "
            f"{' or '.join(compression.SUFFIXES)}"
        )
    if len(keys) > 1:
        raise CorpusError(
            f"{path}: a text file has one text, but --json-keys names {len(keys)} "
            f"({' '.join(keys)}); give one key"
        )


def _expand(given: str) -> list[str]:
    if os.path.exists(given):
        return [given]
    if glob.has_magic(given):
        matches = sorted(glob.glob(given, recursive=True), key=natural_key)
        if matches:
            return matches
        raise CorpusError(f"--input {given}: the pattern matches nothing")
    raise CorpusError(f"--input {given}: no such file or folder")


def _folder(path: str) -> list[str]:
    files = _files_under(path, ())
    if not files:
        raise CorpusError(f"--input {path}: the folder has no files")
    data = [file for file in files if _is_data(file)]
    if data and len(data) < len(files):
        other = next(file for file in files if not _is_data(file))
        suffix = os.path.splitext(compression.inner_name(data[0]))[1]
        raise CorpusError(
            f"--input {path}: the folder holds data files ({data[0]}) and others ({other}); say "
            f"what to read with a pattern: --input '{os.path.join(path, '**', '*' + suffix)}'"
        )
    return files


def _is_data(path: str) -> bool:
    name = compression.inner_name(path).lower()
    return os.path.isdir(path) or name.endswith(_JSONL + _PARQUET)


def _files_under(folder: str, above: tuple[str, ...]) -> list[str]:
    """Files and dataset folders, depth first, in natural order."""
    real = os.path.realpath(folder)
    if real in above:
        raise CorpusError(f"--input {folder}: a link leads back to a folder above it")
    if is_dataset_folder(folder):
        return [folder]
    found: list[str] = []
    for entry in sorted(os.scandir(folder), key=lambda entry: natural_key(entry.name)):
        if entry.name.startswith(".") or entry.name in _NO_DATA:
            continue
        if entry.is_dir():
            found.extend(_files_under(entry.path, (*above, real)))
        elif entry.is_file():
            found.append(entry.path)
    return found
