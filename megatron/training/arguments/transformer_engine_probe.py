"""Is Transformer Engine there? The one place that asks, without importing it."""

import importlib.util

INSTALL_HINT = (
    'install it with pip install --no-build-isolation "transformer-engine[pytorch]" on a machine '
    "with CUDA, or use --transformer-impl local"
)


def problem() -> str | None:
    """Why ``--transformer-impl transformer_engine`` can't be had; None when it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return f"Transformer Engine isn't installed; {INSTALL_HINT}"
    return (
        "Transformer Engine is installed, but its layers aren't wired to this model; use "
        "--transformer-impl local"
    )
