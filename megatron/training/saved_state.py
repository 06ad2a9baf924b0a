"""``state.json`` of a checkpoint, believed key by key: where the run stood and how it was set up.

A file that has a key too few or too many, a value of another kind, or speaks of another iteration
than its folder, is damaged like a file with a wrong checksum: the error names the file and the
key, and ``--load-fallback`` goes back past it. Whether the run that it describes fits this one is
asked later (``arguments/resume.py``).
"""

import dataclasses
import json
import re
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron.core.config.record import config_fields, field_type
from megatron.core.context_extension import Stage
from megatron.core.dist_checkpointing import CheckpointError, read_state
from megatron.core.dist_checkpointing.directory import STATE_FILE
from megatron.core.dist_checkpointing.errors import CheckpointMismatch
from megatron.training.arguments import RunRecord
from megatron.training.train_state import TrainState

FORMAT_VERSION = 1
_KEYS = ("format_version", "iteration", "world_size", "has_optimizer", "train_state", "config")
_MAY_LACK = {"began"}
"""Keys of the train state that came later than the first checkpoints."""
_POSITION = {
    "stream": dict[str, Any],
    "corpora": list[tuple[str, str]],
    "pieces": list[tuple[int, int, int, int, int]],
    "consumed_tokens": int,
    "padded_tokens": int,
    "consumed_samples": int,
}
_STREAM = {
    "seed": int,
    "documents": int,
    "drawn": dict[str, int],
    "tokens": list[int],
    "blend": list[tuple[str, float]],
}
_LARGEST = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class SavedState:
    """What a checkpoint holds beside tensors."""

    train_state: TrainState
    config: dict[str, Any]
    """JSON of its :class:`RunRecord`."""
    record: RunRecord
    world_size: int
    has_optimizer: bool


def read_saved_state(folder: Path) -> SavedState:
    """Read and check ``state.json`` of a checkpoint.

    Raises:
        CheckpointError: naming the file and the key, if it is missing or damaged.
        CheckpointMismatch: if another version of this code wrote it.
    """
    body = read_state(folder)
    try:
        return _saved_state(body, folder)
    except (ValueError, CheckpointError) as error:
        kind = CheckpointMismatch if isinstance(error, CheckpointMismatch) else CheckpointError
        raise kind(f"{folder / STATE_FILE}: {error}") from None


def _saved_state(body: dict[str, Any], folder: Path) -> SavedState:
    version = body.get("format_version")
    if _fits(version, int) and version != FORMAT_VERSION:
        raise CheckpointMismatch(
            f"it has format_version {version}; this code reads {FORMAT_VERSION}. Use the version "
            "that wrote it"
        )
    _check_keys(body, _KEYS, "")
    hints = {"format_version": int, "iteration": int, "world_size": int, "has_optimizer": bool}
    _check_values(body, hints, "")
    if body["world_size"] < 1:
        raise ValueError(f"world_size is {body['world_size']}")
    state, record = _train_state(body["train_state"]), _record(body["config"])
    for key, iteration in (
        ("iteration", body["iteration"]),
        ("train_state.iteration", state.iteration),
    ):
        if folder.name != f"iter_{iteration:07d}":
            raise ValueError(f"{key} is {iteration}, in the folder {folder.name}")
    if state.stage >= len(record.schedule.stages):
        raise ValueError(
            f"train_state.stage is {state.stage}, of {len(record.schedule.stages)} stages"
        )
    return SavedState(state, body["config"], record, body["world_size"], body["has_optimizer"])


def _train_state(values: Any) -> TrainState:
    hints = typing.get_type_hints(TrainState)
    _check_keys(values, hints, "train_state", may_lack=_MAY_LACK)
    _check_values(values, {key: hints[key] for key in values}, "train_state.")
    if not re.fullmatch(r"[0-9A-Za-z_-]{1,64}", values["run_id"]):
        raise ValueError(f"train_state.run_id is {values['run_id'][:100]!r}, no word")
    if values["data"] is not None:
        _check_position(values["data"], values)
    elif values["iteration"]:
        raise ValueError("train_state.data is None after a step")
    return TrainState.from_json(values)


def _check_position(position: Any, counters: dict[str, Any]) -> None:
    _check_keys(position, _POSITION, "train_state.data")
    _check_values(position, _POSITION, "train_state.data.")
    _check_keys(position["stream"], _STREAM, "train_state.data.stream")
    _check_values(position["stream"], _STREAM, "train_state.data.stream.")
    if any(piece[0] >= len(position["corpora"]) for piece in position["pieces"]):
        raise ValueError("train_state.data.pieces name a corpus that isn't listed")
    for key in ("consumed_samples", "consumed_tokens"):
        if position[key] != counters[key]:
            raise ValueError(
                f"train_state.{key} is {counters[key]}, train_state.data.{key} {position[key]}"
            )


def _record(document: Any) -> RunRecord:
    _check_keys(document, ("config", "stages"), "config")
    if type(document["stages"]) is not list or not document["stages"]:
        raise ValueError("config.stages lists no stage")
    sections = document["config"]
    if not _fits(sections, dict[str, dict[str, Any]]) or not sections:
        raise ValueError("config.config holds no sections of flags")
    for section, values in sections.items():
        for name, value in values.items():
            if name in config_fields():
                kind, optional = field_type(name)
                if not (_fits(value, kind) or (optional and value is None)):
                    raise ValueError(f"config.config.{section}.{name} is {_show(value)}")
    stages = typing.get_type_hints(Stage)
    for number, values in enumerate(document["stages"]):
        if type(values) is not dict:
            raise ValueError(f"config.stages[{number}] is {_show(values)}")
        lacking = [key for key in ("lr", "rope_scaling") if key not in values]
        if lacking:
            raise ValueError(f"config.stages[{number}] has no {lacking[0]}")
    try:
        record = RunRecord.from_json(json.dumps(document))
    except (AttributeError, RecursionError, ArithmeticError) as error:
        raise ValueError(f"config can't be read: {error}") from None
    for number, stage in enumerate(record.schedule.stages):
        for key, hint in stages.items():
            if not _fits(getattr(stage, key), hint):
                raise ValueError(f"config.stages[{number}].{key} is {_show(getattr(stage, key))}")
    return record


def _check_keys(
    values: Any, keys: Collection[str], what: str, may_lack: Collection[str] = ()
) -> None:
    if type(values) is not dict:
        raise ValueError(f"{what} is {_show(values)} instead of a mapping")
    where = f" in {what}" if what else ""
    for key in keys:
        if key not in values and key not in may_lack:
            raise ValueError(f"the key {key!r} is missing{where}")
    for key in values:
        if key not in keys:
            raise ValueError(f"the key {key[:100]!r}{where} is unknown")


def _check_values(values: dict[str, Any], hints: dict[str, Any], prefix: str) -> None:
    """Numbers are counters and shares, so none is negative, wherever it is."""
    for key, hint in hints.items():
        if not _fits(values[key], hint):
            raise ValueError(f"{prefix}{key} is {_show(values[key])}")
        rest = [values[key]]
        while rest:
            value = rest.pop()
            if isinstance(value, dict):
                rest += value.values()
            elif isinstance(value, list):
                rest += value
            elif isinstance(value, int | float) and not 0 <= value <= _LARGEST:
                raise ValueError(f"{prefix}{key} is or holds {_show(value)}")


def _show(value: Any) -> str:
    if isinstance(value, str | int | float | None):
        return repr(value)[:100]
    return f"a {type(value).__name__}"


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value that came from JSON is one that the type annotation ``hint`` allows."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, kind) for kind in arguments)
    if origin is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if hint is float:
        return type(value) in (int, float)
    if origin in (list, tuple):
        if type(value) not in (list, tuple):
            return False
        if origin is list or arguments[-1] is Ellipsis:
            return all(_fits(item, arguments[0]) for item in value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if origin in (dict, Mapping) or hint is dict:
        kinds = arguments or (Any, Any)
        return type(value) is dict and all(
            _fits(key, kinds[0]) and _fits(item, kinds[1]) for key, item in value.items()
        )
    if hint is types.NoneType or hint is None:
        return value is None
    if dataclasses.is_dataclass(hint) and type(value) is hint:
        hints = typing.get_type_hints(hint)
        return all(_fits(getattr(value, key), kind) for key, kind in hints.items())
    return type(value) is hint
