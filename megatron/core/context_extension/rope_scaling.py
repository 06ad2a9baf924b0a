"""Reading a ``rope_scaling`` mapping: which rule, with which keys, in which types.

The keys are Hugging Face's, so the ``rope_scaling`` of a published ``config.json`` can be
pasted in. What can't be right is refused: an unknown rule or key, a key that the rule doesn't
use, a missing one, a theta that contradicts the one given beside the mapping. ``None`` counts
as absent. No torch here: the check of a schedule must not wait for it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.config.values import read_bool, read_float, read_int, suggestion, unknown_keys

RULES: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "ntk": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset()),
    "yarn": (
        frozenset(),
        frozenset(
            {
                "factor",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            }
        ),
    ),
    "llama3": (frozenset({"factor"}), frozenset({"low_freq_factor", "high_freq_factor"})),
    "longrope": (
        frozenset({"short_factor", "long_factor"}),
        frozenset({"factor", "attention_factor"}),
    ),
}
"""rope_type: (keys it needs, keys it also understands)."""

ALIASES = {"su": "longrope", "none": "default", "pi": "linear", "ntk-aware": "ntk"}
COMMON_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "max_position_embeddings",
    }
)
_LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")
_NEEDS_LENGTH = ("dynamic", "yarn", "llama3", "longrope")


def _read_factors(value: Any) -> tuple[float, ...]:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise ValueError(f"{value!r} is not a list of numbers")
    return tuple(read_float(item) for item in value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "truncate": read_bool,
    "short_factor": _read_factors,
    "long_factor": _read_factors,
    "original_max_position_embeddings": read_int,
    "max_position_embeddings": read_int,
}


def _rope_type(scaling: Mapping[str, Any]) -> str:
    kinds = {str(scaling[key]) for key in ("rope_type", "type") if scaling.get(key) is not None}
    if not kinds:
        raise ValueError(
            f"rope_scaling has no rope_type; add one of {', '.join(RULES)} (keys given: "
            f"{', '.join(map(str, scaling)) or 'none'})"
        )
    if len(kinds) > 1:
        raise ValueError(f"rope_scaling has two rules, {' and '.join(sorted(kinds))}; keep one")
    kind = kinds.pop()
    kind = ALIASES.get(kind, kind)
    if kind not in RULES:
        raise ValueError(
            f"rope_type {kind} is unknown{suggestion(kind, RULES)} (known: {', '.join(RULES)})"
        )
    return kind


def read_scaling(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """``scaling`` with its rule resolved, its values typed and its absent keys left out.

    Args:
        scaling: Hugging Face's mapping (``rope_type`` or the older ``type``), or None.

    Returns:
        A new dict; ``rope_type`` is always there (``default`` for None).

    Raises:
        ValueError: all that is wrong with the mapping, in one text.
    """
    if scaling is None:
        return {"rope_type": "default"}
    if not isinstance(scaling, Mapping):
        raise ValueError(
            f"rope_scaling {scaling!r} is not a mapping; write {{rope_type: yarn, factor: 8.0}}"
        )
    kind = _rope_type(scaling)
    needed, optional = RULES[kind]
    every_key = COMMON_KEYS.union(*(need | also for need, also in RULES.values()))
    errors = unknown_keys(scaling, every_key)
    read: dict[str, Any] = {"rope_type": kind}
    for key, value in scaling.items():
        if key in ("rope_type", "type") or key not in every_key or value is None:
            continue
        if key not in needed | optional | COMMON_KEYS:
            errors.append(f"{key} has no meaning for rope_type {kind}; remove it")
            continue
        try:
            read[key] = _READERS.get(key, read_float)(value)
        except ValueError as error:
            errors.append(f"{key}: {error}")
    errors += [
        f"rope_type {kind} needs {key}; add it" for key in sorted(needed) if key not in scaling
    ]
    errors += _range_errors(read)
    if errors:
        raise ValueError("rope_scaling: " + "; ".join(errors))
    return read


def _range_errors(read: Mapping[str, Any]) -> list[str]:
    kind, errors = read["rope_type"], []
    if kind in _NEEDS_LENGTH and not any(key in read for key in _LENGTHS):
        errors.append(
            f"rope_type {kind} needs original_max_position_embeddings (the context length "
            "before the extension); add it"
        )
    if kind == "yarn" and "factor" not in read and not all(key in read for key in _LENGTHS):
        errors.append("rope_type yarn needs factor, or both position lengths to derive it; add it")
    positive = ("factor", "attention_factor", "beta_fast", "beta_slow", "rope_theta", *_LENGTHS)
    for key in (*positive, "low_freq_factor", "high_freq_factor"):
        if key in read and not read[key] > 0:
            errors.append(f"{key} {read[key]} must be greater than 0")
    if "factor" in read and 0 < read["factor"] < 1:
        errors.append(f"factor {read['factor']} must be at least 1: it is new length / old length")
    if not 0 < read.get("partial_rotary_factor", 1.0) <= 1:
        errors.append(f"partial_rotary_factor {read['partial_rotary_factor']} must be in (0, 1]")
    if kind == "llama3":
        low, high = read.get("low_freq_factor", 1.0), read.get("high_freq_factor", 4.0)
        if not low < high:
            errors.append(f"low_freq_factor {low} must be less than high_freq_factor {high}")
    if kind == "yarn":
        fast, slow = read.get("beta_fast", 32.0), read.get("beta_slow", 1.0)
        if not fast > slow:
            errors.append(f"beta_fast {fast} must be greater than beta_slow {slow}")
    if kind == "longrope":
        original = read.get(_LENGTHS[0], read.get(_LENGTHS[1], 2))
        if not original > 1:
            errors.append(f"original_max_position_embeddings {original} must be greater than 1")
    for key in ("short_factor", "long_factor"):
        if any(not factor > 0 for factor in read.get(key, ())):
            errors.append(f"{key} must have factors greater than 0 only")
    return errors
