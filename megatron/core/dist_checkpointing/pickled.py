"""Reads the pickle of a tensor listing without unpickling it: nothing in it is called or imported.

A pickle is a program for a stack machine. This machine knows the few instructions that a listing
of dataclasses is written with, and makes inert records out of them, new ones for each read: the
name of a class becomes a :class:`Name`, an object of it a :class:`Record` that keeps its
arguments and its state. What they are worth is for the reader to check. Keys of a mapping are
texts or records (hashed by identity), so nothing walks a nested key.

Cost: about 0.3 us an instruction. Memory never exceeds a multiple of the file: a length it claims
is checked against the bytes that are there.
"""

from collections.abc import Callable
from typing import Any


class Name:
    """A class or function that the pickle names; never looked up."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Record:
    """An object that the pickle would make: of which class, from what; inert."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None


class PickleError(ValueError):
    """The bytes are no pickle of plain records."""


class _Machine:
    def __init__(self, data: bytes, allowed: Callable[[str], bool]) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: list[Any] = []
        self.marks: list[int] = []
        self._allowed = allowed
        self._names: dict[str, Name] = {}

    def run(self) -> None:
        """To the end; the instructions that most of a listing consists of are done in place."""
        data, stack, memo, marks = self.data, self.stack, self.memo, self.marks
        at = self.at
        while True:
            code = data[at]
            at += 1
            if code == 0x94:  # remember what is on top
                memo.append(stack[-1])
            elif code == 0x68:  # "h": recall, by one byte
                stack.append(memo[data[at]])
                at += 1
            elif code == 0x6A:  # "j": recall, by four
                stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif code == 0x4B:  # "K": a number of one byte
                stack.append(data[at])
                at += 1
            elif code == 0x28:  # "("
                marks.append(len(stack))
            elif code == 0x29:  # ")"
                stack.append(())
            elif code == 0x2E:  # ".": the end
                return
            else:
                self.at = at
                _INSTRUCTIONS[code](self)
                at = self.at

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise PickleError(f"it ends {end - len(self.data)} bytes too early")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def above_mark(self) -> list[Any]:
        stack = self.stack
        start = self.marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    def name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise PickleError("a class is named by something other than text")
        text = f"{module}.{name}"
        if text not in self._names:
            if not self._allowed(text):
                raise PickleError(
                    f"it asks for {text[:200]}, which a tensor listing never needs; it is refused "
                    "(a file from a stranger could run code that way)"
                )
            self._names[text] = Name(text)
        self.stack.append(self._names[text])

    def make(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if type(name) is not Name or type(arguments) is not tuple:
            raise PickleError("something other than a class is called; it is refused")
        self.stack.append(Record(name.text, arguments))

    def build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if type(record) is not Record or record.state is not None:
            raise PickleError("something other than a fresh object is given a state; refused")
        record.state = state

    def set_items(self, items: list[Any]) -> None:
        mapping = self.stack[-1]
        if type(mapping) is not dict or len(items) % 2:
            raise PickleError("items are set in something other than a mapping")
        keys = items[::2]
        for key in keys:
            if type(key) is not str and type(key) is not Record:
                raise PickleError(f"a mapping has a key of type {type(key).__name__}")
        before = len(mapping)
        mapping.update(zip(keys, items[1::2], strict=True))
        if len(mapping) != before + len(keys):
            raise PickleError("a mapping has a key twice")

    def append(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise PickleError("items are appended to something other than a list")
        self.stack[-1].extend(items)

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise PickleError("its stack is empty")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def remember(self, index: int) -> None:
        if index != len(self.memo):
            raise PickleError(f"it remembers number {index} after {len(self.memo)} others")
        self.memo.append(self.stack[-1])

    def text(self, size: int) -> None:
        self.stack.append(self.take(size).decode("utf-8"))

    def integer(self, size: int) -> None:
        if size > 8:
            raise PickleError("a number has more than 64 bits")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))


def _pop_pair(machine: _Machine) -> list[Any]:
    value, key = machine.stack.pop(), machine.stack.pop()
    return [key, value]


_INSTRUCTIONS: dict[int, Callable[[_Machine], None]] = {
    ord("M"): lambda m: m.stack.append(m.number(2)),
    ord("J"): lambda m: m.integer(4),
    0x8A: lambda m: m.integer(m.number(1)),
    ord("}"): lambda m: m.stack.append({}),
    ord("]"): lambda m: m.stack.append([]),
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("t"): lambda m: m.stack.append(tuple(m.above_mark())),
    ord("R"): _Machine.make,
    0x81: _Machine.make,
    ord("b"): _Machine.build,
    ord("u"): lambda m: m.set_items(m.above_mark()),
    ord("s"): lambda m: m.set_items(_pop_pair(m)),
    ord("e"): lambda m: m.append(m.above_mark()),
    ord("a"): lambda m: m.append([m.stack.pop()]),
    0x8C: lambda m: m.text(m.number(1)),
    ord("X"): lambda m: m.text(m.number(4)),
    0x93: _Machine.name,
    0x95: lambda m: None if m.take(8) else None,
    ord("q"): lambda m: m.remember(m.number(1)),
    ord("r"): lambda m: m.remember(m.number(4)),
}
"""By their byte, the rest of what Python's pickler writes for dataclasses from protocol 4 on."""


def read_records(data: bytes, allowed: Callable[[str], bool]) -> Any:
    """What a pickle describes, as plain values, :class:`Name` and :class:`Record`.

    Args:
        data: the whole file.
        allowed: says of "module.name" whether the reader knows it.

    Raises:
        PickleError: for anything but a pickle of plain records, or one that asks for more.
    """
    machine = _Machine(data, allowed)
    if data[:1] != b"\x80" or data[1:2] not in (b"\x04", b"\x05"):
        raise PickleError("it doesn't begin like a pickle of protocol 4")
    machine.at = 2
    try:
        machine.run()
        if len(machine.stack) != 1:
            raise PickleError(f"it leaves {len(machine.stack)} values instead of one")
        return machine.stack[0]
    except KeyError as error:
        raise PickleError(f"it has the instruction {error}, which a listing has not") from None
    except IndexError:
        raise PickleError("it is cut off, or takes what isn't there") from None
    except UnicodeDecodeError:
        raise PickleError("a text in it isn't UTF-8") from None
