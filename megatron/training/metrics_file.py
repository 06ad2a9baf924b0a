"""The metrics file: one JSON object a line, each line one flushed write.

A run that is killed can leave a torn last line; the resumed run cuts it. Iterations that
run again are written again, so the last line of an iteration counts.
"""

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def cut_torn_line(path: Path) -> int:
    """Cut what follows the last newline of ``path``; returns the number of bytes cut."""
    if not path.exists():
        return 0
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        keep, block = size, 4096
        while keep > 0:
            start = max(0, keep - block)
            file.seek(start)
            end = file.read(keep - start).rfind(b"\n")
            if end >= 0:
                keep = start + end + 1
                break
            keep = start
        file.truncate(keep)
    return size - keep


class MetricsFile:
    """Appends JSON lines to a file; ``fresh`` starts it anew, else a torn line is cut."""

    def __init__(self, path: str, *, fresh: bool) -> None:
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if not fresh:
            cut_torn_line(file)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (os.O_TRUNC if fresh else 0)
        self._descriptor = os.open(file, flags, 0o644)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append ``record`` as one line by one write; NaN and infinity become null.

        Raises:
            OSError: if it can't be written whole; nothing of it is left in the file then.
        """
        clean = {key: _finite(value) for key, value in record.items()}
        line = (json.dumps(clean) + "\n").encode()
        written = os.write(self._descriptor, line)
        if written < len(line):  # a disk that is nearly full
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file; writing afterwards is an error."""
        os.close(self._descriptor)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not (-float("inf") < value < float("inf")):
        return None
    return value


def read_metrics(path: str) -> list[dict[str, Any]]:
    """Records of a metrics file in order, the last line of an iteration counting.

    Evaluation lines (``eval_lm_loss``) and training lines of one iteration are kept apart.

    Raises:
        ValueError: naming file and line, for a whole line that is no record of a run.
    """
    latest: dict[tuple[Any, str], dict[str, Any]] = {}
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            record = _record(line, f"{path}:{number}")
            kind = record.get("split", "valid") if "eval_lm_loss" in record else "train"
            latest[(record.get("iteration"), kind)] = record
    return sorted(latest.values(), key=lambda r: (r["iteration"], "eval_lm_loss" in r))


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not a line of a metrics file: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
        raise ValueError(f"{place}: not a line of a metrics file: no object with an iteration")
    return record
