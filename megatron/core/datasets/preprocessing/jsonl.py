"""JSON lines: one object a line, the text under a key.

A plain file is cut at byte offsets (a line belongs to where it starts); workers read their own
range. A compressed file is read by the main process, which hands out blocks of whole lines; a
task of an array that starts inside one first counts its lines (one more pass).
Line numbers are only counted when a message needs them. Cost of a 16 MB line: two reads.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

from megatron.core.datasets.preprocessing import compression, records
from megatron.core.datasets.preprocessing.records import CorpusError, Record
from megatron.core.datasets.preprocessing.shares import records_between
from megatron.core.datasets.preprocessing.units import UNIT_BYTES, Unit

_SCAN = 1 << 16
_MANY_LINES = (
    "a JSON document over several lines? Write one object a line: jq -c . (or jq -c '.[]')"
)


@dataclasses.dataclass(frozen=True)
class JsonlRange:
    """The lines that start in bytes ``[start, end)`` of a plain file; both are line starts."""

    path: str
    start: int
    end: int

    @property
    def weight(self) -> int:
        return self.end - self.start

    def records(self, keys: tuple[str, ...]) -> Iterator[Record]:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            data = file.read(self.end - self.start)
        if len(data) != self.end - self.start:
            raise CorpusError(f"{self.path}: became shorter while it was read")
        return parse_lines(data, keys, self.start == 0)

    def locate(self, index: int) -> str:
        line, left = index + 1, self.start
        with open(self.path, "rb") as file:
            while left and (block := file.read(min(left, 1 << 20))):
                line += block.count(b"\n")
                left -= len(block)
        return f"{self.path}:{line}"


@dataclasses.dataclass(frozen=True)
class JsonlBlock:
    """Some whole lines of a compressed file, in memory."""

    path: str
    data: bytes
    first_line: int
    weight: int

    def records(self, keys: tuple[str, ...]) -> Iterator[Record]:
        return parse_lines(self.data, keys, self.first_line == 1)

    def locate(self, index: int) -> str:
        return f"{self.path}:{self.first_line + index}"


class JsonlFile:
    """A plain file of JSON lines."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._bytes = os.path.getsize(path)
        self.size = max(self._bytes, 1)

    def units(self, start: int, end: int) -> Iterator[Unit]:
        """Ranges of whole lines."""
        with open(self.path, "rb") as file:
            position, stop = self._line_start(file, start), self._line_start(file, end)
            while position < stop:
                following = min(self._line_start(file, position + UNIT_BYTES), stop)
                yield JsonlRange(self.path, position, following)
                position = following

    def _line_start(self, file: Any, offset: int) -> int:
        """The first line start at or after ``offset``."""
        if offset <= 0:
            return 0
        if offset >= self._bytes:
            return self._bytes
        file.seek(offset - 1)
        position = offset - 1
        while block := file.read(_SCAN):
            found = block.find(b"\n")
            if found >= 0:
                return int(position + found + 1)
            position += len(block)
        return self._bytes


class CompressedJsonlFile:
    """A ``.gz`` or ``.zst`` file of JSON lines."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = max(os.path.getsize(path), 1)

    def units(self, start: int, end: int) -> Iterator[Unit]:
        """Blocks of whole lines."""
        first, last = 0, None
        if (start, end) != (0, self.size):
            first, last = records_between(start, end, self.size, self._count_lines())
        line, done = 0, 0
        for data, read in self._line_blocks():
            lines = data.count(b"\n") + (not data.endswith(b"\n"))
            weight, done = read - done, read
            low = max(first - line, 0)
            high = lines if last is None else min(last - line, lines)
            if low < high:
                part = data
                if (low, high) != (0, lines):
                    part = _cut(data, low, high)
                yield JsonlBlock(self.path, part, line + low + 1, weight)
            line += lines
            if last is not None and line >= last:
                return

    def _count_lines(self) -> int:
        return sum(
            data.count(b"\n") + (not data.endswith(b"\n")) for data, _ in self._line_blocks()
        )

    def _line_blocks(self) -> Iterator[tuple[bytes, int]]:
        """(whole lines, bytes of the file read so far); a line is never searched twice."""
        held: list[bytes] = []
        size = read = 0
        for data, read in compression.blocks(self.path):
            size += len(data)
            cut = data.rfind(b"\n") + 1 if size >= UNIT_BYTES else 0
            if cut:
                yield from ((part, read) for part in _split(b"".join((*held, data[:cut]))))
                held, size = [data[cut:]], len(data) - cut
            else:
                held.append(data)
        if size:
            yield from ((part, read) for part in _split(b"".join(held)))


def _split(data: bytes) -> Iterator[bytes]:
    """Whole lines in pieces of about ``UNIT_BYTES``."""
    start = 0
    while len(data) - start > 2 * UNIT_BYTES:
        end = data.find(b"\n", start + UNIT_BYTES) + 1 or len(data)
        yield data[start:end]
        start = end
    if start < len(data):
        yield data[start:]


def _cut(data: bytes, low: int, high: int) -> bytes:
    """Lines ``low`` to ``high`` (not included) of a block."""
    lines = data.split(b"\n", high)
    tail = b"\n" if len(lines) > high else b""
    return b"\n".join(lines[low:high]) + tail


def parse_lines(data: bytes, keys: tuple[str, ...], file_start: bool) -> Iterator[Record]:
    """The records of whole lines; ``file_start``: a byte order mark may come first."""
    if file_start:
        data = data.removeprefix(records.UTF8_BOM)
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    half_written = not data.endswith(b"\n")
    for index, line in enumerate(lines):
        record = _parse(index, line, keys)
        if record.reason == records.INVALID_JSON and half_written and index == len(lines) - 1:
            detail = f"{record.detail}; the last line, without a newline: half written?"
            record = Record(index, reason=records.INVALID_JSON, detail=detail)
        yield record


def _parse(index: int, line: bytes, keys: tuple[str, ...]) -> Record:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        detail = f"byte {error.start} of the line is 0x{line[error.start]:02x}"
        if line.startswith(records.UTF16_MARKS):
            detail = records.UTF16_CURE
        return Record(index, reason=records.NOT_UTF8, detail=detail)
    except (ValueError, RecursionError) as error:
        if not line.strip():
            return Record(index, reason=records.BLANK_LINE)
        return Record(index, reason=records.INVALID_JSON, detail=_json_detail(line, error))
    if not isinstance(value, dict):
        detail = f"it is a JSON {_json_type(value)}, not an object with key {keys[0]!r}"
        return Record(index, reason=records.NOT_OBJECT, detail=detail)
    texts = []
    for key in keys:
        text = value.get(key)
        if not isinstance(text, str):
            return _bad_value(index, key, value)
        texts.append(text)
    return Record(index, tuple(texts))


def _bad_value(index: int, key: str, value: dict[str, Any]) -> Record:
    if key not in value:
        there = ", ".join(map(repr, list(value)[:8])) or "none"
        detail = f"no key {key!r} (there: {there}); see --json-keys"
        return Record(index, reason=records.MISSING_KEY, detail=detail)
    if value[key] is None:
        return Record(index, reason=records.NULL, detail=f"{key!r} is null")
    detail = f"{key!r} is a JSON {_json_type(value[key])}, not a string"
    return Record(index, reason=records.NOT_TEXT, detail=detail)


def _json_detail(line: bytes, error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        detail = f"{error.msg} at column {error.colno}"
        if line.strip() in (b"[", b"{", b"[{"):
            detail += f"; {_MANY_LINES}"
        return detail
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", dict: "object", type(None): "null"}
    return names.get(type(value), "number")
