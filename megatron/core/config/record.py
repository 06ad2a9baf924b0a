"""A configuration as data: JSON and back, single values by name, and the differences between two.

The JSON is saved with checkpoints. It is canonical (sorted keys, tuples as lists), so equal
configurations have equal texts. Field names are unique over all sections, so a name is enough
to say which value is meant.
"""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from typing import Any

from megatron.core.config.run import RunConfig
from megatron.core.config.values import suggestion


@functools.cache
def config_fields() -> Mapping[str, tuple[str, "dataclasses.Field[Any]"]]:
    """Field name -> (section, field), for all fields of all sections. Names are unique."""
    fields: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for section in dataclasses.fields(RunConfig):
        assert isinstance(section.default_factory, type)
        for field in dataclasses.fields(section.default_factory):
            assert field.name not in fields, f"two fields are named {field.name}"
            fields[field.name] = (section.name, field)
    return fields


def value_of(config: RunConfig, name: str) -> Any:
    """The value of the field ``name``, whatever its section."""
    section, _ = config_fields()[name]
    return getattr(getattr(config, section), name)


def replace_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """``config`` with the named fields changed, whatever their sections."""
    fields = config_fields()
    by_section: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        by_section.setdefault(fields[name][0], {})[name] = value
    return dataclasses.replace(
        config,
        **{
            section: dataclasses.replace(getattr(config, section), **changed)
            for section, changed in by_section.items()
        },
    )


def config_to_json(config: RunConfig) -> str:
    """``config`` as canonical JSON, one object a section."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True, indent=1)


def config_from_json(text: str) -> RunConfig:
    """The configuration that :func:`config_to_json` wrote; absent fields take their defaults.

    Raises:
        ValueError: for text that is no such JSON, or a field this version doesn't know.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the saved configuration is not JSON: {error}") from None
    if not isinstance(document, dict) or not all(isinstance(v, dict) for v in document.values()):
        raise ValueError("the saved configuration is not an object of sections")
    fields = config_fields()
    values: dict[str, Any] = {}
    for section in document.values():
        for name, value in section.items():
            if name not in fields:
                raise ValueError(
                    f"the saved configuration has the field {name}, which this version doesn't "
                    f"know{suggestion(name, fields)}"
                )
            values[name] = tuple(value) if isinstance(value, list) else value
    return replace_values(RunConfig(), values)


def diff(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Field name -> (old value, new value), for the fields that differ."""
    changed = {}
    for name in config_fields():
        before, after = value_of(old, name), value_of(new, name)
        if before != after:
            changed[name] = (before, after)
    return changed


@functools.cache
def field_type(name: str) -> tuple[Any, bool]:
    """(type of the field without None, whether None is allowed): ``int | None`` -> (int, True)."""
    section, _ = config_fields()[name]
    owner = type(getattr(RunConfig(), section))
    hint = typing.get_type_hints(owner)[name]
    if isinstance(hint, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        assert len(kinds) == 1, f"field {name} has an unusual type {hint}"
        return kinds[0], True
    return hint, False
