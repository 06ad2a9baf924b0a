"""Input of the model: word embedding, learned positions, dropout.

Positions come from the batch (they were fixed on the whole row before it was sharded). Under
sequence parallelism each tensor-parallel rank makes its own piece of the sequence only: the word
embedding ends in a reduce-scatter, the position table (replicated) is looked up for that piece,
and its gradient is summed over tp.
"""

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.config import ModelConfig
from megatron.core.packed_batch import PackedBatch
from megatron.core.tensor_parallel import (
    DropoutKey,
    NormalInit,
    TensorParallel,
    VocabParallelEmbedding,
    local,
)
from megatron.core.transformer.layer import hidden_dropout


class PositionEmbedding(nn.Module):
    """A learned vector per position.

    Args:
        length: ``--max-position-embeddings``.
        hidden_size: H.
        tp: tensor-parallel context.
        name: global name; the parameter is ``name.weight``.
        std: of the initial values.
    """

    def __init__(
        self, length: int, hidden_size: int, tp: TensorParallel, *, name: str, std: float
    ) -> None:
        super().__init__()
        self.length, self.tp = length, tp
        self.weight = tp.parameter(f"{name}.weight", (length, hidden_size), init=NormalInit(std))

    def forward(
        self, position_ids: torch.Tensor, host_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, s] -> [s (/ tp), B, H]; ``host_ids``: the same on the CPU, to be checked there.

        Raises:
            ValueError: for a position beyond the table.
        """
        self._check(position_ids if host_ids is None else host_ids)
        ids = position_ids.t()
        if self.tp.shards_sequence:
            ids = ids.chunk(self.tp.size)[self.tp.rank]
        return F.embedding(ids, local(self.weight, partial=self.tp.shards_sequence))

    def _check(self, position_ids: torch.Tensor) -> None:
        if position_ids.numel() == 0 or position_ids.is_meta:
            return
        last = int(position_ids.max())
        if last >= self.length:
            raise ValueError(
                f"--max-position-embeddings {self.length} must be greater than every position; the "
                f"batch has position {last}; raise it to at least {last + 1}"
            )


class GPTEmbedding(nn.Module):
    """``word_embeddings`` and, for learned positions, ``position_embeddings``."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, *, name: str) -> None:
        super().__init__()
        assert config.vocab_size and config.hidden_size
        std = config.init_method_std
        self.tp, self.p = tp, config.hidden_dropout
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.padded_vocab_size,
            config.hidden_size,
            tp,
            name=f"{name}.word_embeddings",
            std=std,
        )
        self.position_embeddings: PositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            if config.max_position_embeddings is None:
                raise ValueError(
                    "--position-embedding-type learned_absolute needs --max-position-embeddings; "
                    "give it, at least --seq-length"
                )
            self.position_embeddings = PositionEmbedding(
                config.max_position_embeddings,
                config.hidden_size,
                tp,
                name=f"{name}.position_embeddings",
                std=std,
            )

    def forward(self, batch: PackedBatch, dropout_key: DropoutKey | None) -> torch.Tensor:
        """The batch's tokens and position_ids [B, s] -> [s (/ tp), B, H]."""
        host = batch.on_host
        x = self.word_embeddings(batch.tokens, host.tokens)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(batch.position_ids, host.position_ids)
        return hidden_dropout(x, self.p, dropout_key, self.tp, layer=-1, site="embedding")
