"""A two-branch network of every tensor-parallel piece, small enough for exact comparisons.

embedding -> RMS norm -> (q, kv) columns -> a head-wise gate -> row -> residual -> norm ->
head and loss. Not a transformer: heads mix only through the layers under test.
"""

import torch
from torch import nn

from megatron.core.tensor_parallel import (
    ONES,
    ColumnParallelLinear,
    NormalInit,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    column_parallel,
    lm_head_loss,
    lm_head_token_losses,
    local,
    vocab_parallel_weight,
)

HIDDEN, HEADS, HEAD_DIM, VOCAB, PADDED = 12, 4, 3, 29, 32


class Norm(nn.Module):
    def __init__(self, tp: TensorParallel, name: str) -> None:
        super().__init__()
        self.tp = tp
        self.weight = tp.parameter(f"{name}.weight", (HIDDEN,), init=ONES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = local(self.weight, partial=self.tp.shards_sequence, dtype=wide)
        y = x.to(wide)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
        return y.to(x.dtype)


class Block(nn.Module):
    def __init__(self, tp: TensorParallel, kv_heads: int, bias: bool, name: str) -> None:
        super().__init__()
        self.kv_heads, self.tp = kv_heads, tp
        init = NormalInit(0.3)
        width = HEADS * HEAD_DIM
        self.norm = Norm(tp, f"{name}.norm")
        self.linear_q = ColumnParallelLinear(
            HIDDEN, width, tp, name=f"{name}.linear_q", init=init, bias=bias
        )
        self.linear_kv = ColumnParallelLinear(
            HIDDEN,
            2 * kv_heads * HEAD_DIM,
            tp,
            name=f"{name}.linear_kv",
            init=init,
            bias=bias,
            blocks=kv_heads,
        )
        # Used on head shards: its gradient is partial whether or not sequences are sharded.
        self.head_norm = tp.parameter(f"{name}.head_norm", (HEAD_DIM,), init=NormalInit(1.0))
        self.linear_proj = RowParallelLinear(
            width, HIDDEN, tp, name=f"{name}.linear_proj", init=init, bias=bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, kv = column_parallel(self.norm(x), self.linear_q, self.linear_kv)
        q = q.unflatten(-1, (-1, HEAD_DIM)) * local(self.head_norm, partial=True)
        k, v = kv.unflatten(-1, (-1, 2, HEAD_DIM)).unbind(-2)
        repeat = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        out = torch.sigmoid(q * k) * v
        return x + self.linear_proj(out.flatten(2))


class Tiny(nn.Module):
    def __init__(
        self,
        tp: TensorParallel,
        *,
        kv_heads: int = 2,
        bias: bool = True,
        tied: bool = False,
        shard_fn=None,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.embedding = VocabParallelEmbedding(
            VOCAB, PADDED, HIDDEN, tp, name="embedding", std=0.5
        )
        self.blocks = nn.ModuleList(Block(tp, kv_heads, bias, f"blocks.{i}") for i in range(2))
        if shard_fn is not None:
            for block in self.blocks:
                shard_fn(block)
        self.final_norm = Norm(tp, "final_norm")
        self.output = (
            self.embedding.weight
            if tied
            else vocab_parallel_weight(tp, "output", VOCAB, PADDED, HIDDEN, 0.5)
        )

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor, *, chunk_size: int = 5, tokens: bool = False
    ) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        fn = lm_head_token_losses if tokens else lm_head_loss
        return fn(
            self.final_norm(x),
            local(self.output),
            labels,
            group=self.tp.group,
            sequence_parallel=self.tp.shards_sequence,
            vocab_size=VOCAB,
            chunk_size=chunk_size,
        )


def batch(rows: int = 2, length: int = 8, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels [rows, length], about a quarter of the labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    labels = torch.randint(0, VOCAB, (rows, length), generator=generator)
    ignored = torch.rand(rows, length, generator=generator) < 0.25
    return ids, labels.masked_fill(ignored, -100)
