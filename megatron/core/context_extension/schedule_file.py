"""Reading a schedule file: safe YAML, values typed by field, every fault named at once.

Values are read by the type that the key wants (YAML 1.1 reads ``5e6`` as text and ``16384:2``
as a number in base 60; here the first is a number and the second is text). A fault says stage
number, key and cure, and reading goes on, so that one run of the check shows them all.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.core.config.values import read_float, read_int, suggestion
from megatron.core.context_extension.rope_scaling import read_scaling
from megatron.core.context_extension.stage import (
    LENGTH_KEYS,
    LearningRateRule,
    Stage,
    StageDefaults,
)

PACKINGS = ("concat", "best-fit")
LR_RULES = ("continue", "rewarm", "constant")
LR_DECAY_STYLES = ("constant", "linear", "cosine")
SYNONYMS = {
    "theta": "rotary_base",
    "rope_theta": "rotary_base",
    "rope_base": "rotary_base",
    "sequence_length": "seq_length",
    "context_length": "seq_length",
    "iterations": "train_iters",
    "steps": "train_iters",
    "samples": "train_samples",
    "tokens": "train_tokens",
    "cp": "context_parallel",
    "context_parallel_size": "context_parallel",
    "batch_size": "global_batch_size",
    "data": "data_path",
    "learning_rate": "lr",
}


_RESOLVERS = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9][0-9_]*$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$",
        "-+.0123456789",
    ),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("merge", r"^(?:<<)$", "<"),
)
_MERGE = "tag:yaml.org,2002:merge"


class _RepeatedKey(ValueError):
    pass


def _loader() -> Any:
    """PyYAML's safe loader, strict about repeated keys, numbers by the rules of YAML 1.2."""
    import yaml

    class Loader(yaml.SafeLoader):
        """SafeLoader without base-60 and octal numbers and yes/no bools."""

        yaml_implicit_resolvers: dict = {}

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if (key.tag, key.value) in seen:
                        line = node.start_mark.line + 1
                        raise _RepeatedKey(
                            f"key {key.value} is given twice in the mapping that starts at line "
                            f"{line}; keep one"
                        )
                    seen.add((key.tag, key.value))
            return node

        def flatten_mapping(self, node: Any) -> None:
            """Replace ``<<`` by what it names; PyYAML's own lets a later mapping win."""
            own = [pair for pair in node.value if pair[0].tag != _MERGE]
            node.value, named = own, [value for key, value in node.value if key.tag == _MERGE]
            for value in named:
                parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for part in parts:
                    if not isinstance(part, yaml.MappingNode):
                        raise ValueError(
                            f"<< in line {node.start_mark.line + 1} must name a mapping or a list "
                            "of mappings"
                        )
                    self.flatten_mapping(part)
                    node.value = part.value + own
                    own = node.value

    for tag, pattern, first in _RESOLVERS:
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))
    Loader.add_constructor("tag:yaml.org,2002:int", _decimal)
    Loader.add_constructor("tag:yaml.org,2002:float", _float)
    return Loader


def _decimal(loader: Any, node: Any) -> int:
    """PyYAML's own constructor reads 0400 as 256."""
    return int(loader.construct_scalar(node))


def _float(loader: Any, node: Any) -> float:
    return float(loader.construct_scalar(node))


def load_yaml(path: str | Path) -> Any:
    """The document of a YAML file, loaded safely, by the number rules of YAML 1.2.

    Raises:
        ValueError: if the file is missing, isn't YAML, or gives a key twice.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--context-schedule {path} can't be read ({error.strerror}); give the path of a "
            "YAML file"
        ) from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--context-schedule {path} is not UTF-8 (byte {error.start} is "
            f"0x{error.object[error.start]:02x}); save it as UTF-8"
        ) from None
    try:
        return yaml.load(text, _loader())
    except _RepeatedKey as error:
        raise ValueError(f"{path}: {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is not a schedule: nested too deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        # PyYAML lets Python's own errors through where a tag contradicts its value (!!int abc).
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None


def _positive(value: Any) -> int:
    number = read_int(value)
    if number < 1:
        raise ValueError(f"{number} must be at least 1")
    return number


def _theta(value: Any) -> float:
    number = read_float(value)
    if not number > 1:
        raise ValueError(f"{number:g} must be greater than 1; usual is 1e4 to 5e7")
    return number


def _text(value: Any) -> str:
    if isinstance(value, Mapping | list):
        raise ValueError(f"{value!r} is not a text")
    return str(value)


def _packing(value: Any) -> str:
    if value not in PACKINGS:
        raise ValueError(
            f"{value} is unknown{suggestion(str(value), PACKINGS)} (known: {', '.join(PACKINGS)})"
        )
    return str(value)


def _context_parallel(value: Any) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(
            f"{value!r} is not a pair; write [ulysses size, ring size], e.g. [1, {value}]"
            if isinstance(value, int)
            else f"{value!r} is not a pair; write [ulysses size, ring size], e.g. [2, 4]"
        )
    return _positive(value[0]), _positive(value[1])


def read_data_path(value: Any) -> tuple[str, ...]:
    """``a``, ``0.3 a 0.7 b`` or a list of these parts, as the flag takes them.

    Raises:
        ValueError: for an empty list or a part that is no text or number.
    """
    if isinstance(value, str):
        parts = value.split()
        blend = len(parts) > 1 and all(_is_number(weight) for weight in parts[::2])
        return tuple(parts) if blend else (value,)
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{value!r} is neither a path nor a list; write [0.3, a, 0.7, b]")
    return tuple(_text(part) for part in value)


def _is_number(text: str) -> bool:
    try:
        read_float(text)
    except ValueError:
        return False
    return True


def read_upsampling(value: Any) -> tuple[str, ...]:
    """``MIN_TOKENS:WEIGHT`` texts, from a list of them or a mapping, checked.

    Raises:
        ValueError: for a part that isn't a length >= 1 and a weight > 0, or a length twice.
    """
    if isinstance(value, Mapping):
        value = [f"{length}:{weight}" for length, weight in value.items()]
    if isinstance(value, str):
        value = value.split()
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{value!r} must be a list such as [16384:2, 65536:4]")
    seen: set[int] = set()
    for part in value:
        length, colon, weight = str(part).partition(":")
        if not colon or not _is_number(weight) or read_float(weight) <= 0:
            raise ValueError(f"{part} must be MIN_TOKENS:WEIGHT with a weight > 0, e.g. 16384:2")
        tokens = _positive(length)
        if tokens in seen:
            raise ValueError(f"{part}: this length is given twice; keep one")
        seen.add(tokens)
    return tuple(str(part) for part in value)


def _choice(name: str, choices: tuple[str, ...]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(
                f"{value} is an unknown {name}{suggestion(str(value), choices)} "
                f"(known: {', '.join(choices)})"
            )
        return str(value)

    return read


def _not_negative(value: Any) -> float:
    number = read_float(value)
    if number < 0:
        raise ValueError(f"{number:g} must be at least 0")
    return number


def _count(value: Any) -> int:
    number = read_int(value)
    if number < 0:
        raise ValueError(f"{number} must be at least 0")
    return number


_LR_READERS: dict[str, Callable[[Any], Any]] = {
    "rule": _choice("rule", LR_RULES),
    "peak": _not_negative,
    "min": _not_negative,
    "warmup_iters": _count,
    "decay_style": _choice("style", LR_DECAY_STYLES),
}


def _read_lr(value: Any) -> LearningRateRule:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r} is not a mapping; write {{rule: constant, peak: {value}}}")
    read, errors = _read_keys(value, _LR_READERS, {})
    rule = read.get("rule", "continue")
    if rule != "rewarm":
        errors += [
            f"{key} has a meaning with rule rewarm only; remove it or write rule: rewarm"
            for key in ("warmup_iters", "decay_style")
            if key in read
        ]
    if rule == "constant" and "min" in read:
        errors.append("min has no meaning with rule constant; write peak only")
    if "peak" in read and "min" in read and read["min"] > read["peak"]:
        errors.append(f"min {read['min']:g} must not be greater than peak {read['peak']:g}")
    if errors:
        raise ValueError("; ".join(errors))
    return LearningRateRule(**read)


_READERS: dict[str, Callable[[Any], Any]] = {
    "name": _text,
    "seq_length": _positive,
    "train_iters": _positive,
    "train_samples": _positive,
    "train_tokens": _positive,
    "rotary_base": _theta,
    "rope_scaling": read_scaling,
    "context_parallel": _context_parallel,
    "micro_batch_size": _positive,
    "global_batch_size": _positive,
    "lr": _read_lr,
    "data_path": read_data_path,
    "long_document_upsampling": read_upsampling,
    "packing": _packing,
}
STAGE_KEYS = tuple(_READERS)


def _read_keys(
    mapping: Mapping[Any, Any],
    readers: Mapping[str, Callable[[Any], Any]],
    synonyms: Mapping[str, str],
) -> tuple[dict[str, Any], list[str]]:
    """The typed values of the known keys, and what is wrong with the others."""
    read, errors = {}, []
    for key, value in mapping.items():
        if key not in readers:
            meant = synonyms.get(str(key).lower())
            hint = f"; did you mean {meant}?" if meant else suggestion(str(key), readers)
            errors.append(f"unknown key {key}{hint} (known: {', '.join(readers)})")
        elif value is not None:
            try:
                read[key] = readers[key](value)
            except ValueError as error:
                errors.append(f"{key}: {error}")
    return read, errors


def _length(read: dict[str, Any], defaults: StageDefaults) -> tuple[dict[str, int], list[str]]:
    """The stage's one length, its own or the flags', and what is wrong with it."""
    own = {key: read[key] for key in LENGTH_KEYS if key in read}
    flags = {key: getattr(defaults, key) for key in LENGTH_KEYS}
    flags = {key: value for key, value in flags.items() if value is not None}
    chosen = own or flags
    if len(chosen) > 1:
        names = " and ".join(chosen if own else (f"--{key.replace('_', '-')}" for key in chosen))
        return chosen, [f"{names} are both given; keep exactly one train length"]
    if not chosen:
        return chosen, [
            "the train length is missing; add one of train_iters, train_samples, train_tokens "
            "(or pass --train-iters, --train-samples or --train-tokens)"
        ]
    return chosen, []


def _read_stage(
    index: int, mapping: Mapping[Any, Any], defaults: StageDefaults
) -> tuple[Stage | None, list[str]]:
    read, errors = _read_keys(mapping, _READERS, SYNONYMS)
    present = [key for key in mapping if mapping[key] is not None]
    length: dict[str, int] = {}
    if not any(key in present and key not in read for key in LENGTH_KEYS):
        length, length_errors = _length(read, defaults)
        errors += length_errors
    if "seq_length" not in present and defaults.seq_length is None:
        errors.append("seq_length is missing; add it to the stage or pass --seq-length")
    warmup = read.get("lr", LearningRateRule()).warmup_iters
    if "train_iters" in length and warmup > length["train_iters"]:
        errors.append(
            f"lr: warmup_iters {warmup} must not be more than the stage's {length['train_iters']} "
            "iterations; lower it"
        )
    if errors:
        return None, errors

    def value(key: str) -> Any:
        return read.get(key, getattr(defaults, key))

    scaling = value("rope_scaling")
    plain = scaling is None or set(scaling.items()) == {("rope_type", "default")}
    return (
        Stage(
            index=index,
            name=read.get("name", f"stage {index + 1}"),
            seq_length=value("seq_length"),
            rotary_base=value("rotary_base"),
            rope_scaling=None if plain else scaling,
            context_parallel=value("context_parallel"),
            micro_batch_size=value("micro_batch_size"),
            global_batch_size=value("global_batch_size"),
            data_path=value("data_path"),
            long_document_upsampling=value("long_document_upsampling"),
            packing=value("packing"),
            lr=read.get("lr", LearningRateRule()),
            **length,
        ),
        [],
    )


def _meant_stages(key: Any) -> bool:
    return str(key).lower() in ("schedule", "phases") or bool(
        suggestion(str(key).lower(), ["stages"])
    )


def _beside_stages(key: Any) -> str:
    """What is wrong with a key at the top of the file that isn't ``stages``."""
    start = f"unknown key {key} beside stages"
    if key in _READERS:
        return f"{start}; put it into the stages it is for, or pass it as a flag"
    if _meant_stages(key):
        return f"{start}; did you mean stages? keep one list of that name"
    meant = SYNONYMS.get(str(key).lower())
    hint = f"; did you mean {meant}?" if meant else suggestion(str(key), _READERS)
    return f"{start}{hint}; put it into the stages it is for, or remove it"


def read_stages(document: Any, defaults: StageDefaults) -> tuple[list[Stage], list[str]]:
    """The stages of a schedule document, unplaced, and all that is wrong with it.

    Args:
        document: what the YAML file holds.
        defaults: what stages take from the flags.

    Returns:
        (stages, problems); with problems, the stages are incomplete.
    """
    if not isinstance(document, Mapping) or "stages" not in document:
        keys = document if isinstance(document, Mapping) else ()
        near = (key for key in keys if _meant_stages(key))
        hint = next((f"; did you mean stages? (the file has {key})" for key in near), "")
        return [], [f"the key stages is missing{hint}; write stages: followed by a list of stages"]
    problems = [_beside_stages(key) for key in document if key != "stages"]
    listed = document["stages"]
    if not isinstance(listed, list) or not listed:
        return [], [
            *problems,
            "stages must be a list with at least one stage; add - seq_length: 4096 ...",
        ]
    stages = []
    for index, mapping in enumerate(listed):
        if not isinstance(mapping, Mapping):
            problems.append(
                f"stage {index + 1}: {mapping!r} is not a mapping; write key: value lines"
            )
            continue
        stage, errors = _read_stage(index, mapping, defaults)
        problems += [f"stage {index + 1}: {error}" for error in errors]
        if stage is not None:
            stages.append(stage)
    return stages, problems
