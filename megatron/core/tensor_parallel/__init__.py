"""Tensor parallelism: parameters, linear layers, embedding, LM head and loss, dropout."""

from megatron.core.tensor_parallel.cross_entropy import lm_head_loss, lm_head_token_losses
from megatron.core.tensor_parallel.embedding import (
    VocabParallelEmbedding,
    vocab_parallel_weight,
)
from megatron.core.tensor_parallel.initialization import ONES, ZEROS, ConstantInit, NormalInit
from megatron.core.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
    column_parallel_weights,
)
from megatron.core.tensor_parallel.parameters import (
    TensorParallel,
    local,
)
from megatron.core.tensor_parallel.random import DropoutKey, dropout

__all__ = [
    "ONES",
    "ZEROS",
    "ColumnParallelLinear",
    "ConstantInit",
    "DropoutKey",
    "NormalInit",
    "RowParallelLinear",
    "TensorParallel",
    "VocabParallelEmbedding",
    "column_parallel",
    "column_parallel_weights",
    "dropout",
    "lm_head_loss",
    "lm_head_token_losses",
    "local",
    "vocab_parallel_weight",
]
