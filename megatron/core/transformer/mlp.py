"""The MLP: SwiGLU or GELU, whole or in chunks of the sequence.

    SwiGLU  y = (silu(x Wg^T) * (x Wu^T)) W2^T      (Shazeer, arXiv 2002.05202)
    GELU    y = gelu(x W1^T) W2^T                   (exact erf form, as Megatron-LM)

**Layout of linear_fc1 with SwiGLU.** Its global weight [2 * ffn, H] interleaves the two halves
row by row: row 2j is gate j, row 2j + 1 is up j. A tensor-parallel rank's contiguous piece then
holds whole pairs, so the global tensor doesn't depend on tp (Megatron-LM's [gate_r; up_r] per
rank does). The two halves are strided views of the weight, which BLAS multiplies without a copy,
so gate and up come out contiguous. ``interleave_gate_up`` and ``split_gate_up`` convert.

**Chunks** (Blockwise Parallel Transformer, Liu & Abbeel, arXiv 2305.19370): the MLP has no
interaction between tokens, so with ``mlp_chunk_size`` norm and MLP run over one piece of the
sequence at a time, keep only the piece's input and run again in backward. The [tokens, ffn]
activations then never exist for more than a chunk. Under sequence parallelism chunk i is the i-th
piece of every rank's shard, gathered by itself.

Cost: saves per token x, and gate, up and their product (or two ffn) numbers, ffn / tp each; in
chunks or recomputed x alone, for a second forward. Inside ``full`` recompute chunks run forward a
third time.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.config import ModelConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    NormalInit,
    RowParallelLinear,
    TensorParallel,
)
from megatron.core.tensor_parallel.linear import column_parallel_weights, row_parallel_weights
from megatron.core.transformer.recompute import after_norm, checkpointed, recomputes

Norm = Callable[[torch.Tensor], torch.Tensor]


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[ffn, ...] twice -> the [2 * ffn, ...] that ``linear_fc1`` stores."""
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def split_gate_up(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of :func:`interleave_gate_up`; both are views."""
    gate, up = stored.unflatten(0, (-1, 2)).unbind(1)
    return gate, up


class MLP(nn.Module):
    """Norm and MLP on [s (/ tp), B, H].

    Args:
        config: sizes, activation, chunking, recompute.
        tp: tensor-parallel context.
        name: global name of the module.

    Raises:
        ValueError: tp does not divide the ffn size.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, *, name: str) -> None:
        super().__init__()
        assert config.hidden_size and config.num_layers
        hidden, ffn, bias = config.hidden_size, config.ffn_size, config.add_bias_linear
        if ffn % tp.size:
            raise ValueError(
                f"--ffn-hidden-size {ffn} must be a multiple of --tensor-model-parallel-size "
                f"{tp.size}"
            )
        std = config.init_method_std
        self.gated, self.chunk_size, self.tp = config.swiglu, config.mlp_chunk_size, tp
        self.recompute = recomputes(config, "mlp")
        self.discard_norm = recomputes(config, "layernorm")
        self.linear_fc1 = ColumnParallelLinear(
            hidden,
            2 * ffn if config.swiglu else ffn,
            tp,
            name=f"{name}.linear_fc1",
            init=NormalInit(std),
            bias=bias,
        )
        self.linear_fc2 = RowParallelLinear(
            ffn,
            hidden,
            tp,
            name=f"{name}.linear_fc2",
            init=NormalInit(std / (2 * config.num_layers) ** 0.5),
            bias=bias,
        )

    def forward(self, x: torch.Tensor, norm: Norm, *, checkpointed_outside: bool) -> torch.Tensor:
        """``mlp(norm(x))``; the norm belongs to each chunk, so that its output isn't kept.

        Args:
            x: [s (/ tp), B, H].
            norm: applied first.
            checkpointed_outside: a checkpoint around this call decides what is saved.
        """
        weights = (*self._fc1_weights(), *self.linear_fc2.local_parameters())
        chunks = x.split(self._chunk_rows(x))
        if len(chunks) == 1:
            if self.recompute and not checkpointed_outside:
                return checkpointed(self._run, norm, False, x, *weights)
            return self._run(norm, self.discard_norm and not checkpointed_outside, x, *weights)
        outputs = [checkpointed(self._run, norm, False, chunk, *weights) for chunk in chunks]
        return torch.cat(outputs)

    def _chunk_rows(self, x: torch.Tensor) -> int:
        """Rows of the local sequence in a chunk of ``mlp_chunk_size`` tokens."""
        shards = self.tp.size if self.tp.shards_sequence else 1
        rows = self.chunk_size // (x.shape[1] * shards) if self.chunk_size else x.shape[0]
        return max(1, rows)

    def _fc1_weights(self) -> tuple[torch.Tensor | None, ...]:
        """(weight, bias) of fc1, or of its gate and its up half."""
        weight, bias = self.linear_fc1.local_parameters()
        if not self.gated:
            return weight, bias
        gate, up = split_gate_up(weight)
        gate_bias, up_bias = (None, None) if bias is None else split_gate_up(bias)
        return gate, gate_bias, up, up_bias

    def _run(self, norm: Norm, discard: bool, x: torch.Tensor, *weights: Any) -> torch.Tensor:
        *first, weight, bias = weights
        pairs = list(zip(first[0::2], first[1::2], strict=True))
        hidden = after_norm(
            norm, x, lambda y: column_parallel_weights(y, self.tp, pairs), discard=discard
        )
        active = swiglu(*hidden) if self.gated else F.gelu(hidden[0])
        return row_parallel_weights(active, self.tp, weight, bias)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` that saves its two inputs alone."""
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        dgate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return dgate, F.silu(gate).mul_(grads[0])
