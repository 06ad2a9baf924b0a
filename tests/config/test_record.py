"""A configuration as data: JSON, values by name, differences."""

import dataclasses
import json

import pytest

from megatron.core.config import RunConfig
from megatron.core.config.record import (
    config_fields,
    config_from_json,
    config_to_json,
    diff,
    field_type,
    replace_values,
    value_of,
)

CHANGED = {
    "hidden_size": 64,
    "seq_length": 4096,
    "rotary_base": 5e7,
    "data_path": ("0.3", "a", "0.7", "b"),
    "hierarchical_context_parallel_sizes": (2, 4),
    "iterations_to_skip": (3,),
    "bf16": True,
}


def test_json_and_back_is_the_same_configuration():
    config = replace_values(RunConfig(), CHANGED)
    assert config_from_json(config_to_json(config)) == config
    assert config_from_json(json.dumps(json.loads(config_to_json(config)))) == config
    assert config_from_json("{}") == RunConfig()


def test_text_and_differences_see_every_field():
    base = RunConfig()
    assert config_to_json(base) == config_to_json(RunConfig()) and diff(base, RunConfig()) == {}
    for name in config_fields():
        kind, _ = field_type(name)
        old = value_of(base, name)
        new = not old if kind is bool else (("changed",) if isinstance(old, tuple) else "changed")
        changed = replace_values(base, {name: new})
        assert config_to_json(changed) != config_to_json(base)
        assert diff(base, changed) == {name: (old, new)}


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().model.hidden_size = 3


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("[1]", "is not an object of sections"),
        ('{"model": {"hidden_sise": 3}}', "hidden_sise, which this version doesn't know; did you"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(ValueError, match=message):
        config_from_json(text)
