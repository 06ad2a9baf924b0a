"""One record of a corpus: its texts, or what is wrong with it.

How characters are treated, everywhere:

* Text must be UTF-8. A byte order mark at the start of a file is dropped; elsewhere U+FEFF is
  text. UTF-16 is refused.
* Lone surrogates (``"\\ud800"`` in JSON is legal but no Unicode text) become U+FFFD, counted.
* NUL, CRLF, tabs and all other characters are text and stay. Only ``\\n`` ends a JSON line.
* A document without any character but whitespace is empty: skipped and counted.
"""

import dataclasses

BLANK_LINE = "blank line"
EMPTY = "empty document"
INVALID_JSON = "invalid JSON"
NOT_UTF8 = "not UTF-8"
NOT_OBJECT = "not a JSON object"
MISSING_KEY = "missing key"
NULL = "null"
NOT_TEXT = "not text"
REFUSED = "refused by the tokenizer"

HARMLESS = frozenset((BLANK_LINE, EMPTY))
"""Reasons that never stop a run."""

UTF8_BOM = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
UTF16_CURE = "starts with a UTF-16 byte order mark; convert it: iconv -f UTF-16 -t UTF-8"


class CorpusError(ValueError):
    """Input or output that can't be worked with; the message names it and says what to do."""


class WorkerDied(RuntimeError):
    """A worker process ended in the middle of its work."""


@dataclasses.dataclass(frozen=True)
class Record:
    """``texts[k]`` is the text of key k; with a ``reason`` there are none."""

    index: int
    """Counted inside its unit (lines of a block, rows of a batch, files of a folder)."""
    texts: tuple[str, ...] = ()
    reason: str = ""
    detail: str = ""


def decode_file(data: bytes) -> tuple[str, str]:
    """(text, "") of a whole file's bytes, or ("", what is wrong)."""
    if data.startswith(UTF16_MARKS):
        return "", UTF16_CURE
    try:
        return data.removeprefix(UTF8_BOM).decode("utf-8"), ""
    except UnicodeDecodeError as error:
        return "", f"byte {error.start} is 0x{data[error.start]:02x} ({error.reason})"


def without_lone_surrogates(text: str) -> tuple[str, int, bool]:
    """(text with U+FFFD for each lone surrogate, its UTF-8 size, whether any was there)."""
    if text.isascii():
        return text, len(text), False
    try:
        return text, len(text.encode("utf-8")), False
    except UnicodeEncodeError:
        fixed = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return fixed, len(fixed.encode("utf-8")), True
