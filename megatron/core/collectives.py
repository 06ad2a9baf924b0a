"""Autograd collectives: each one a forward collective and the backward that belongs to it.

A collective is differentiable only together with a statement of what the loss is. Two
statements occur in tensor parallelism, and every function here says which it assumes:

- *sharded*: the loss is the SUM of what the ranks compute from here on (each rank works on
  its own heads, features or tokens). A replicated tensor's gradient is then a sum over ranks.
- *replicated*: all ranks compute the same loss from here on, and it counts once. Each rank
  already holds the whole gradient; summing it would be wrong by the size of the group.

| function              | forward         | backward       | after it the loss is  |
|-----------------------|-----------------|----------------|-----------------------|
| `copy_to_region`      | identity        | all-reduce     | sharded               |
| `reduce_from_region`  | all-reduce      | identity       | replicated            |
| `gather_along`        | all-gather      | reduce-scatter | sharded               |
| `gather_along(..., replicated=True)` | all-gather | own piece | replicated           |
| `reduce_scatter_along`| reduce-scatter  | all-gather     | sharded               |
| `scatter_along`       | own piece       | all-gather     | sharded               |
| `all_to_all_along`    | all-to-all      | all-to-all     | sharded               |

"Piece" is the contiguous rank-th part of ``dim``. Dim 0 is the fast path: activations are
[s, B, H], so sequence pieces need no copy around the collective; another dim costs one copy
on the side of the full tensor. A group of None or of size 1 makes every function the identity.

Sums are taken in the tensor's dtype, so a bf16 sum rounds at every hop as Megatron-LM's does;
pass ``reduce_dtype=torch.float32`` where the sum must be rounded only once (twice the bytes).

It does not: overlap communication with compute (see `tensor_parallel.linear`), handle pieces
of unequal size, or look up groups.
"""

from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


def group_size(group: Group) -> int:
    """Number of ranks; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: Group) -> int:
    """This rank's place in the group; 0 for None."""
    return 0 if group is None else group.rank()


def pieces_of(length: int, parts: int, what: str) -> int:
    """``length // parts``.

    Raises:
        ValueError: ``length`` is not a multiple of ``parts``.
    """
    if length % parts:
        raise ValueError(f"{what} has size {length}, which {parts} ranks do not divide")
    return length // parts


def all_reduce(x: torch.Tensor, group: Group, reduce_dtype: torch.dtype | None = None) -> Any:
    """Sum over the group as a new tensor (no autograd); summed in ``reduce_dtype``."""
    if group_size(group) == 1:
        return x
    total = x.to(reduce_dtype or x.dtype, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.to(x.dtype)


def all_gather(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Concatenation of the ranks' tensors along ``dim`` (no autograd).

    Raises:
        ValueError: for a scalar.
    """
    parts = group_size(group)
    if parts == 1:
        return x
    x = x.contiguous()
    if x.dim() == 0:
        raise ValueError("a scalar has no dim to gather along")
    dim %= x.dim()
    shape = (parts * x.shape[0], *x.shape[1:])
    full = torch.empty(shape, dtype=x.dtype, device=x.device)
    dist.all_gather_single(full, x, group=group)
    if dim == 0:
        return full
    return _parts_to_dim(full.view(parts, *x.shape), dim)


def reduce_scatter(
    x: torch.Tensor, group: Group, dim: int = 0, reduce_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """This rank's piece along ``dim`` of the sum over the group (no autograd)."""
    parts = group_size(group)
    if parts == 1:
        return x
    dim %= x.dim()
    stacked = _dim_to_parts(x, parts, dim).to(reduce_dtype or x.dtype)
    piece = torch.empty(stacked.shape[1:], dtype=stacked.dtype, device=x.device)
    dist.reduce_scatter_single(piece, stacked.flatten(0, 1), group=group)
    return piece.to(x.dtype)


def own_piece(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """This rank's piece of a replicated tensor, contiguous (no autograd, no communication)."""
    parts = group_size(group)
    if parts == 1:
        return x
    length = pieces_of(x.shape[dim], parts, f"dim {dim} of {tuple(x.shape)}")
    # A copy, so that the piece does not keep the whole tensor alive.
    return x.narrow(dim, group_rank(group) * length, length).clone(
        memory_format=torch.contiguous_format
    )


def all_to_all(x: torch.Tensor, group: Group, scatter_dim: int, gather_dim: int) -> torch.Tensor:
    """Cut ``scatter_dim`` over the ranks, concatenate along ``gather_dim`` (no autograd)."""
    parts = group_size(group)
    if parts == 1:
        return x
    scatter_dim, gather_dim = scatter_dim % x.dim(), gather_dim % x.dim()
    send = _dim_to_parts(x, parts, scatter_dim)
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    return _parts_to_dim(received, gather_dim)


def _dim_to_parts(x: torch.Tensor, parts: int, dim: int) -> torch.Tensor:
    """[.., parts * n, ..] -> contiguous [parts, .., n, ..]."""
    length = pieces_of(x.shape[dim], parts, f"dim {dim} of {tuple(x.shape)}")
    return x.unflatten(dim, (parts, length)).movedim(dim, 0).contiguous()


def _parts_to_dim(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    """[parts, .., n, ..] -> contiguous [.., parts * n, ..]."""
    return stacked.movedim(0, dim).flatten(dim, dim + 1).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, reduce_dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.args = (group, reduce_dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_reduce(grad, *ctx.args), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, reduce_dtype: torch.dtype | None
    ) -> torch.Tensor:
        return all_reduce(x, group, reduce_dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        dim: int,
        replicated: bool,
        reduce_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.args = (group, dim, replicated, reduce_dtype)
        return all_gather(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        group, dim, replicated, reduce_dtype = ctx.args
        if replicated:
            piece = own_piece(grad, group, dim)
        else:
            piece = reduce_scatter(grad, group, dim, reduce_dtype)
        return piece, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, dim: int, reduce_dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.args = (group, dim)
        return reduce_scatter(x, group, dim, reduce_dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_gather(grad, *ctx.args), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
        ctx.args = (group, dim)
        return own_piece(x, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_gather(grad, *ctx.args), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, group: Group, scatter_dim: int, gather_dim: int
    ) -> torch.Tensor:
        ctx.args = (group, gather_dim, scatter_dim)
        return all_to_all(x, group, scatter_dim, gather_dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return all_to_all(grad, *ctx.args), None, None, None


def copy_to_region(
    x: torch.Tensor, group: Group, *, reduce_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Enter a sharded region with a replicated tensor: identity; the gradient is all-reduced."""
    if group_size(group) == 1:
        return x
    return _Copy.apply(x, group, reduce_dtype)


def reduce_from_region(
    x: torch.Tensor, group: Group, *, reduce_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Leave a sharded region: all-reduce of partial sums; the gradient passes unchanged."""
    if group_size(group) == 1:
        return x
    return _Reduce.apply(x, group, reduce_dtype)


def gather_along(
    x: torch.Tensor,
    group: Group,
    dim: int = 0,
    *,
    replicated: bool = False,
    reduce_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """All-gather along ``dim``; the gradient is reduce-scattered.

    With ``replicated`` (every rank goes on to compute the same loss) the gradient is this
    rank's piece instead, without communication.
    """
    if group_size(group) == 1:
        return x
    return _Gather.apply(x, group, dim, replicated, reduce_dtype)


def reduce_scatter_along(
    x: torch.Tensor, group: Group, dim: int = 0, *, reduce_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Sum over the group, keep this rank's piece of ``dim``; the gradient is all-gathered.

    Raises:
        ValueError: the group's size does not divide ``dim``.
    """
    if group_size(group) == 1:
        return x
    return _ReduceScatter.apply(x, group, dim, reduce_dtype)


def scatter_along(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Keep this rank's piece of a replicated tensor; the gradient is all-gathered.

    Raises:
        ValueError: the group's size does not divide ``dim``.
    """
    if group_size(group) == 1:
        return x
    return _Scatter.apply(x, group, dim)


def all_to_all_along(
    x: torch.Tensor, group: Group, scatter_dim: int, gather_dim: int
) -> torch.Tensor:
    """Cut ``scatter_dim`` over the ranks and concatenate along ``gather_dim``; self-inverse.

    Rank r receives the r-th piece of ``scatter_dim`` from every rank, in rank order along
    ``gather_dim``. The two dims must differ.

    Raises:
        ValueError: the group's size does not divide ``scatter_dim``.
    """
    if group_size(group) == 1:
        return x
    if scatter_dim % x.dim() == gather_dim % x.dim():
        raise ValueError(f"scatter_dim and gather_dim are both {scatter_dim}; they must differ")
    return _AllToAll.apply(x, group, scatter_dim, gather_dim)
