"""The command line: flags generated from the config dataclasses, read into a ``RunConfig``.

Megatron's habits hold (``--hidden-size 4096``, the last of a repeated flag wins) with three
differences: a flag can't be abbreviated, every switch can be turned off (``--no-x``), and all that
is wrong with a command line is said at once. argparse knows the flags and prints ``--help``; types
and choices are read here, so that one bad value doesn't hide the next. No torch.
"""

import argparse
import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.core.config import RunConfig
from megatron.core.config.flags import FlagInfo, flag_info, flag_name, off_names
from megatron.core.config.record import config_fields, field_type, replace_values
from megatron.core.config.values import read_float, read_int, suggestion
from megatron.training.arguments import known_flags

GROUPS = {
    "model": "model",
    "parallel": "parallelism",
    "training": "length of training and batches",
    "optimizer": "optimizer and learning rate",
    "data": "data",
    "tokenizer": "tokenizer",
    "checkpoint": "checkpoints",
    "logging": "logging",
}
_MAY_BE_EMPTY = {"allow_changed"}


@dataclasses.dataclass(frozen=True)
class ParsedArguments:
    """A command line, read as far as it can be."""

    config: RunConfig
    """Fields that couldn't be read have their defaults."""
    problems: tuple[str, ...]
    """What is wrong, one text each."""
    notes: tuple[str, ...]
    """What should be said once in the log."""
    unread: frozenset[str]
    """Flags of fields that couldn't be read: errors that follow from them are no news."""


class _CommandLineError(Exception):
    pass


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise _CommandLineError(message)

    def option_names(self) -> list[str]:
        """Every spelling of every flag."""
        return [option for action in self._actions for option in action.option_strings]


class _Toggle(argparse.Action):
    """``--x`` stores "true"; the flags in ``off`` store "false"."""

    def __init__(self, option_strings: Sequence[str], dest: str, off: Sequence[str], **kw: Any):
        super().__init__([*option_strings, *off], dest, nargs=0, **kw)
        self.off = frozenset(off)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, "false" if option in self.off else "true")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)


def _shown_default(value: Any) -> str:
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, bool):
        return " [on]" if value else " [off]"
    if isinstance(value, tuple):
        value = " ".join(map(str, value))
    return f" [{value}]"


def build_parser() -> "_Parser":
    """The argparse parser: one group a concern, one flag a field, values left as text."""
    parser = _Parser(
        prog="pretrain_gpt.py",
        usage="pretrain_gpt.py [flags]",
        description="Pretrain a GPT with tensor, context, pipeline and data parallelism. "
        "The default of a flag is in brackets.",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    for name, (section, field) in config_fields().items():
        info = flag_info(field)
        if info is None:
            continue
        shown = (info.help + _shown_default(field.default)).replace("%", "%%")
        kind, _ = field_type(name)
        if kind is bool:
            groups[section].add_argument(
                flag_name(name), dest=name, action=_Toggle, off=off_names(name, info), help=shown
            )
        else:
            groups[section].add_argument(
                flag_name(name),
                dest=name,
                nargs=info.nargs,
                metavar=info.metavar or _metavar(kind, info),
                help=shown,
            )
    return parser


def _metavar(kind: Any, info: FlagInfo) -> str:
    if info.choices:
        return "{" + ",".join(info.choices) + "}"
    item = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
    return {int: "N", float: "X", str: "TEXT"}[item]


def _read(name: str, info: FlagInfo, value: Any) -> Any:
    """The typed value of a flag from its text or texts."""
    kind, _ = field_type(name)
    if kind is bool:
        return value == "true"
    item = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise ValueError("has no value; give one or leave the flag out")
    read = tuple(_read_item(item, text, info, name) for text in texts)
    return read if isinstance(value, list) else read[0]


def _read_item(kind: type, text: str, info: FlagInfo, name: str) -> Any:
    if kind is int:
        return read_int(text)
    if kind is float:
        return read_float(text)
    if info.choices and text not in info.choices:
        renamed = known_flags.RENAMED_VALUES.get((flag_name(name), text))
        hint = f"; use {renamed}" if renamed else suggestion(text, info.choices)
        raise ValueError(f"{text!r} is not a choice{hint} (choices: {', '.join(info.choices)})")
    if not text and name not in _MAY_BE_EMPTY:
        raise ValueError("is empty; give a value or leave the flag out")
    return text


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_flag(word: str) -> bool:
    if len(word) < 2 or word[0] != "-" or word[1] in "0123456789.":  # -1e-3, or a list: -1,0
        return False
    return not _is_number(word)


class _Sorter:
    """Sorts the words of a command line into ours, always-on, unsupported and unknown."""

    def __init__(self, known: Iterable[str]) -> None:
        self.known = frozenset(known)
        self.kept: list[list[str]] = []
        self.problems: list[str] = []
        self.notes: list[str] = []

    def sort(self, words: Sequence[str]) -> None:
        at = 0
        while at < len(words):
            end = at + 1
            while end < len(words) and not _is_flag(words[end]):
                end += 1
            self._sort_one(words[at], list(words[at + 1 : end]))
            at = end

    def _sort_one(self, word: str, values: list[str]) -> None:
        flag, equals, value = word.partition("=")
        if not _is_flag(word):
            values, flag = [word, *values], ""
        if flag == "--window-size" and not equals and len(values) == 2:
            values = [",".join(values)]
        if flag in self.known:
            if not equals and len(values) == 1 and values[0].startswith("-"):
                self.kept.append([f"{flag}={values[0]}"])  # argparse takes -1e-3 for a flag
            else:
                self.kept.append([word, *values])
            return
        given = [value, *values] if equals else values
        if flag in known_flags.ALWAYS_ON:
            self._always_on(flag, given)
            return
        advice = known_flags.unsupported(flag)
        if advice is not None:
            self.problems.append(f"{flag} is a Megatron-LM flag that isn't supported: {advice}")
        elif flag:
            names = [*self.known, *known_flags.UNSUPPORTED, *known_flags.ALWAYS_ON]
            hint = suggestion(flag.replace("_", "-"), names)
            self.problems.append(f"{flag} is an unknown flag{hint or '; see --help'}")
        else:
            self.stray(values)

    def _always_on(self, flag: str, values: list[str]) -> None:
        wanted = known_flags.REQUIRED_VALUES.get(flag)
        if wanted and values[:1] != [wanted]:
            given = values[0] if values else "without a value"
            self.problems.append(
                f"{flag} {given} isn't supported: {known_flags.ALWAYS_ON[flag]}; use {wanted} or "
                "remove the flag"
            )
            return
        self.notes.append(f"{flag} accepted: {known_flags.ALWAYS_ON[flag]}")
        extra = values[1:] if flag in known_flags.TAKES_VALUE else values
        if extra:
            self.stray(extra)

    def stray(self, values: Sequence[str]) -> None:
        words = " ".join(values)
        self.problems.append(f"{words!r} belongs to no flag; put a flag before it or remove it")


def parse_command_line(argv: Sequence[str]) -> ParsedArguments:
    """Read ``argv`` (without the program's name) as far as possible; raises nothing.

    ``--help`` prints and exits with 0.
    """
    parser = build_parser()
    sorter = _Sorter(parser.option_names())
    sorter.sort(list(argv))
    problems, unread = sorter.problems, set[str]()
    given: dict[str, Any] = {}
    for words in sorter.kept:
        # One flag at a time, so that a flag without its value hides no other.
        try:
            namespace, stray = parser.parse_known_args(words)
        except _CommandLineError as error:
            flag = words[0].partition("=")[0]
            problems.append(_argparse_text(flag, str(error)))
            unread.add(flag)
            continue
        given |= vars(namespace)
        if stray:
            sorter.stray(stray)
    fields, values = config_fields(), {}
    for name, value in given.items():
        info = flag_info(fields[name][1])
        assert info is not None
        try:
            if name == "window_size":
                value, note = known_flags.window_size(value)
                sorter.notes += [note] if note else []
            values[name] = _read(name, info, value)
        except ValueError as error:
            problems.append(f"{flag_name(name)}: {error}")
            unread.add(flag_name(name))
    return ParsedArguments(
        replace_values(RunConfig(), values),
        tuple(problems),
        tuple(dict.fromkeys(sorter.notes)),
        frozenset(unread),
    )


def _argparse_text(flag: str, message: str) -> str:
    """argparse's ``argument --lr: expected one argument`` in our words."""
    _, _, rest = message.partition(": ")
    if rest.startswith("ignored explicit argument"):
        return f"{flag} takes no value; write the flag alone, or its --no- form to turn it off"
    return f"{flag} {rest.replace('argument', 'value')}; give it after the flag"


def parse_args(argv: Sequence[str]) -> RunConfig:
    """The configuration of a command line, without any cross-check.

    Args:
        argv: the words after the program's name.

    Raises:
        ValueError: all that can't be read: unknown or unsupported flags, bad values.
    """
    parsed = parse_command_line(argv)
    if parsed.problems:
        raise ValueError("\n".join(parsed.problems))
    return parsed.config
