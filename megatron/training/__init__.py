"""The training room: ``pretrain`` and what it is made of.

Importing this package is light on purpose: flags are checked, and signal handlers stand,
before torch is imported.
"""

from typing import Any

__all__ = ["pretrain"]


def pretrain(*args: Any, **kwargs: Any) -> int:
    """Run a training job; see :func:`megatron.training.main_job.pretrain`."""
    from megatron.training.main_job import pretrain as run

    return run(*args, **kwargs)
