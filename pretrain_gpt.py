"""Pretrain a GPT over tensor, context, pipeline and data parallel ranks.

    python pretrain_gpt.py --help
    torchrun --nproc-per-node 8 pretrain_gpt.py ...      (one node; see examples/pretrain_gpt.sh)
    srun python pretrain_gpt.py ...                      (Slurm; see examples/slurm/)

This file says what is trained on what; how is in ``megatron.training``. Heavy packages are
imported inside the providers, after the command line was checked and signal handlers stand.
"""

from typing import Any

from megatron.training import pretrain
from megatron.training.leave import leave
from megatron.training.signals import ExitSignals


def model_provider(config: Any, **placement: Any) -> Any:
    """One pipeline chunk of a GPT.

    Args:
        config: ``ModelConfig``.
        placement: which layers, on which ranks and device; see ``ModelProvider``.
    """
    from megatron.core.models.gpt import GPTModel

    return GPTModel(config, **placement)


def data_provider(
    config: Any,
    part: str,
    *,
    eod_token: int | None,
    data_path: tuple[str, ...] | None,
    long_document_upsampling: tuple[str, ...] | None,
) -> Any:
    """The documents of one part (train, valid, test) as flags and stage say; None without.

    Args:
        config: ``RunConfig``.
        part: which part.
        eod_token: the tokenizer's end-of-document id.
        data_path: the stage's blend.
        long_document_upsampling: the stage's weights by document length.
    """
    import dataclasses

    from megatron.core.datasets import source_from_config

    data = dataclasses.replace(config.data, long_document_upsampling=long_document_upsampling)
    return source_from_config(
        data,
        part,
        seed=config.training.seed,
        vocab_size=config.model.vocab_size,
        eod_token=eod_token,
        data_path=data_path,
    )


def loss_provider(loss_tokens: int) -> float:
    """Factor on the sum of token losses of a global batch: the mean over its loss tokens."""
    return 1.0 / loss_tokens


if __name__ == "__main__":
    handler = ExitSignals().install()
    leave(pretrain(model_provider, data_provider, loss_provider, signals=handler))
