"""Column- and row-parallel linear layers with Megatron's semantics on [s, B, H] activations.

Column: the output features are cut over tp. Row: the input features are. A column layer
followed by a row layer needs one communication at each end (Shoeybi et al. 2019, fig. 3);
with sequence parallelism the all-reduces become all-gather in, reduce-scatter out (Korthikanti
et al. 2022, fig. 5): the same bytes, and activations between the two regions shrink by tp.

Memory: under sequence parallelism a column layer saves its input SHARD and gathers it again
in backward, so no [s, B, H] tensor of the full sequence outlives its matmul. Overlap: that
second gather runs under the input-gradient matmul, and the reduce-scatter (or all-reduce) of
the input gradient runs under the weight-gradient matmul.

Several column layers on one input (Q and KV; gate and up of SwiGLU) share one gather and one
reduction: `column_parallel(x, linear_q, linear_kv)`.

Fewer output blocks than ranks (KV heads < tp): the weight is replicated, each rank computes
the block that its query heads use, and the weight gradient is summed over tp.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.core.collectives import Group, all_gather, reduce_from_region, reduce_scatter_along
from megatron.core.tensor_parallel.initialization import ZEROS, Init
from megatron.core.tensor_parallel.parameters import TensorParallel, local


class ColumnParallelLinear(nn.Module):
    """Y = X W^T + b with the rows of W [out, in] cut over tp.

    Input [s / tp, B, in] with sequence parallelism, else [s, B, in] equal on all tp ranks;
    output [s, B, out / tp]. The loss after it is sharded (see `collectives`), which a
    `RowParallelLinear` ends.

    Args:
        name: the module's global name; parameters are ``name.weight`` and ``name.bias``.
        blocks: the output is this many equal blocks (KV heads) that are never cut. With
            blocks < tp each block is computed by tp / blocks neighbouring ranks, so the
            local output is [s, B, out / blocks].

    Raises:
        ValueError: tp does not divide the output features, or of tp and ``blocks`` neither
            divides the other.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        *,
        name: str,
        init: Init,
        bias: bool = True,
        blocks: int | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.tp = in_features, out_features, tp
        self.rows: slice | None = None
        shard_dim: int | None = 0
        if blocks is not None:
            _check_blocks(name, out_features, blocks, tp.size)
            if blocks < tp.size:
                rows = out_features // blocks
                start = tp.rank * blocks // tp.size * rows
                self.rows, shard_dim = slice(start, start + rows), None
        elif out_features % tp.size:
            raise ValueError(
                f"{name}: {out_features} output features are not a multiple of "
                f"--tensor-model-parallel-size {tp.size}"
            )
        shape = (out_features, in_features)
        self.weight = tp.parameter(f"{name}.weight", shape, init=init, shard_dim=shard_dim)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = tp.parameter(f"{name}.bias", shape[:1], init=ZEROS, shard_dim=shard_dim)

    @property
    def local_out_features(self) -> int:
        """Features of this rank's output."""
        if self.rows is not None:
            return self.rows.stop - self.rows.start
        return self.out_features // self.tp.size

    def local_parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's weight [local out, in] and bias [local out]."""
        if self.rows is None:
            return local(self.weight), None if self.bias is None else local(self.bias)
        weight = local(self.weight, partial=True)[self.rows]
        bias = None if self.bias is None else local(self.bias, partial=True)[self.rows]
        return weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s (/ tp), B, in] -> [s, B, local out]."""
        return column_parallel(x, self)[0]

    def extra_repr(self) -> str:
        """Global features and this rank's share."""
        return f"{self.in_features} -> {self.out_features} ({self.local_out_features} here)"


class RowParallelLinear(nn.Module):
    """Y = X W^T + b with the columns of W [out, in] cut over tp.

    Input [s, B, in / tp]; output [s / tp, B, out] with sequence parallelism, else [s, B, out]
    equal on all tp ranks. The bias is added once, after the sum. bf16 partial
    products are summed in bf16, as in Megatron-LM.

    Raises:
        ValueError: tp does not divide the input features, or (in forward, under sequence
            parallelism) the sequence.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        *,
        name: str,
        init: Init,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.tp = in_features, out_features, tp
        if in_features % tp.size:
            raise ValueError(
                f"{name}: {in_features} input features are not a multiple of "
                f"--tensor-model-parallel-size {tp.size}"
            )
        shape = (out_features, in_features)
        self.weight = tp.parameter(f"{name}.weight", shape, init=init, shard_dim=1)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = tp.parameter(f"{name}.bias", shape[:1], init=ZEROS)

    def local_parameters(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's weight [out, in / tp] and the bias [out]."""
        partial = self.tp.shards_sequence
        return local(self.weight), None if self.bias is None else local(self.bias, partial=partial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, B, in / tp] -> [s (/ tp), B, out]."""
        return row_parallel_weights(x, self.tp, *self.local_parameters())

    def extra_repr(self) -> str:
        """Global features and tp size."""
        return f"{self.in_features} (/ {self.tp.size}) -> {self.out_features}"


def row_parallel_weights(
    x: torch.Tensor, tp: TensorParallel, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`RowParallelLinear` on local parameters (for several chunks of one input)."""
    if tp.group is None:
        return F.linear(x, weight, bias)
    y = F.linear(x, weight)
    if tp.shards_sequence:
        y = reduce_scatter_along(y, tp.group, 0)
    else:
        y = reduce_from_region(y, tp.group)
    return y if bias is None else y + bias


def column_parallel(x: torch.Tensor, *layers: ColumnParallelLinear) -> tuple[torch.Tensor, ...]:
    """Apply column layers to one input with one gather forward and one reduction backward.

    Args:
        x: [s (/ tp), B, in], as for `ColumnParallelLinear`.
        layers: with the same input features and the same `TensorParallel`.

    Returns:
        The outputs [s, B, local out of each].
    """
    return column_parallel_weights(x, layers[0].tp, [layer.local_parameters() for layer in layers])


def column_parallel_weights(
    x: torch.Tensor,
    tp: TensorParallel,
    parameters: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
) -> tuple[torch.Tensor, ...]:
    """`column_parallel` for local (weight, bias) pairs, such as parts of one parameter."""
    if tp.group is None:
        return tuple(F.linear(x, weight, bias) for weight, bias in parameters)
    flat = [tensor for pair in parameters for tensor in pair]
    return _ColumnParallel.apply(x, tp.group, tp.shards_sequence, *flat)


class _ColumnParallel(torch.autograd.Function):
    """Outputs of several linears of one (gathered) input; see the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, gather: bool, *parameters: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = parameters[0::2], parameters[1::2]
        ctx.group, ctx.gather = group, gather
        ctx.save_for_backward(x, *weights)
        full = all_gather(x, group) if gather else x
        return tuple(
            F.linear(full, weight, bias) for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        group, needs = ctx.group, ctx.needs_input_grad
        x = x.contiguous()
        full, gathering = x, None
        if ctx.gather and any(needs[3::2]):
            full = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
            gathering = dist.all_gather_single(full, x, group=group, async_op=True)

        flat_grads = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        dx, reducing = None, None
        if needs[0]:
            dx_full = flat_grads[0] @ weights[0]
            for grad, weight in zip(flat_grads[1:], weights[1:], strict=True):
                dx_full.addmm_(grad, weight)
        if gathering is not None:
            gathering.wait()
        if needs[0] and ctx.gather:
            dx = torch.empty_like(x)
            reducing = dist.reduce_scatter_single(
                dx.view(-1, x.shape[-1]), dx_full, group=group, async_op=True
            )
        elif needs[0]:
            dx = dx_full.view(x.shape)
            reducing = dist.all_reduce(dx, group=group, async_op=True)

        flat = full.view(-1, full.shape[-1])
        dparameters: list[torch.Tensor | None] = []
        for index, grad in enumerate(flat_grads):
            dparameters.append(grad.t() @ flat if needs[3 + 2 * index] else None)
            dparameters.append(grad.sum(0) if needs[4 + 2 * index] else None)
        if reducing is not None:
            reducing.wait()
        return dx, None, None, *dparameters


def _check_blocks(name: str, out_features: int, blocks: int, tp_size: int) -> None:
    if out_features % blocks:
        raise ValueError(f"{name}: {blocks} blocks do not divide {out_features} output features")
    if blocks % tp_size and tp_size % blocks:
        raise ValueError(
            f"{name}: {blocks} key/value heads and --tensor-model-parallel-size {tp_size}: one "
            f"must be a multiple of the other; change --num-query-groups or the tensor-parallel "
            f"size"
        )
