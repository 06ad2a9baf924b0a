"""LM head and vocab-parallel cross-entropy, a chunk of tokens at a time.

The plain way holds three [tokens, vocab] tensors (logits, log-probabilities, their gradient):
at 256K tokens and a vocabulary of 128K, 400 GB in fp32. Here one autograd.Function walks over
chunks of tokens; each chunk's logits live in two reused [chunk, vocab / tp] buffers. The
gradient of the SUM of losses does not depend on what follows (a scalar factor), so it is
formed at once, while the chunk's probabilities are at hand: three head matmuls in all, as in the
plain way, and none again in backward (compare Wijmans et al. 2024, "Cut Your Losses", which
pays a fourth). What is kept for backward is the finished gradient of hidden (its shape and
dtype) and of the weight (fp32 at least); backward only multiplies by the upstream scalar, in
place, so it can run once.

Softmax over tp: every rank takes softmax and log-sum-exp of its own columns, one all-gather of
two numbers a token (local lse, target logit) joins them: lse = logsumexp of the ranks' lse,
p = p_local * exp(lse_local - lse). The maximum is subtracted on both levels, so nothing
overflows, and it is one exchange where "all-reduce the maximum, then the sum" takes two.
Padding columns (index >= vocab_size) are left out of the matmul, which equals a logit of -inf.
Chunks without any loss (padding at a row's end) are skipped; which they are is read from the
labels on the host, with the range check.

Sequence parallelism: hidden comes as [s / tp, B, H] shards. Chunk i is made of the i-th part of
EVERY rank's shard, gathered just before use (the next one while this one computes); its
gradient is reduce-scattered straight back. The whole sequence [s, B, H] never exists, in
neither direction, for the same bytes on the wire as one big gather.

Cost: 6 * tokens * H * V / tp FLOPs; memory 8 (fp32) or at most 10 (bf16) bytes for each of
chunk * V / tp logits, plus fp32 V * H / tp for the weight gradient. bf16 partial gradients of
hidden are summed over tp in bf16, as in every other column-parallel layer.
It does not: label smoothing, z-loss, or a second backward.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.collectives import Group, group_rank, group_size
from megatron.core.packed_batch import IGNORE_INDEX
from megatron.core.tensor_parallel.embedding import check_ids
from megatron.core.tensor_parallel.parameters import local


@dataclasses.dataclass(frozen=True)
class _Head:
    """How the loss is computed; no tensors."""

    group: Group
    sequence_parallel: bool
    vocab_size: int
    chunk_size: int

    @property
    def tp(self) -> int:
        return group_size(self.group)

    @property
    def shards(self) -> int:
        """Number of sequence shards that a chunk is gathered from."""
        return self.tp if self.sequence_parallel else 1


def lm_head_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    host_labels: torch.Tensor | None = None,
    group: Group = None,
    sequence_parallel: bool = False,
    vocab_size: int,
    chunk_size: int,
) -> torch.Tensor:
    """Sum of the token losses -log softmax(hidden @ weight^T)[label], equal on all tp ranks.

    Args:
        hidden: [s, B, H] equal on all tp ranks, or with sequence parallelism [s / tp, B, H].
        weight: this tp rank's rows of the output layer [V / tp, H], or the parameter itself.
        labels: int64 [B, s], all of the sequence; ``IGNORE_INDEX``: no loss, exactly zero gradient.
        host_labels: the same on the CPU; without them the call waits for the device.
        vocab_size: real vocabulary; rows beyond it are padding.
        chunk_size: tokens per chunk; 0 = all at once.

    Returns:
        A scalar, fp32 (fp64 for fp64 input). The gradient of ``weight`` is accumulated in
        fp32 at least and rounded once to its dtype.

    Raises:
        ValueError: shapes do not fit, or a label lies outside the vocabulary.
        RuntimeError: backward runs twice through one result.
    """
    head = _Head(group, sequence_parallel, vocab_size, chunk_size)
    weight, host_labels = local(weight), (labels if host_labels is None else host_labels).cpu()
    _check(hidden, weight, host_labels, head)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _HeadLoss.apply(hidden, weight, labels, host_labels, head)
    return _Walk(hidden.detach(), weight.detach(), labels, host_labels, head).run().sum


def lm_head_token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    host_labels: torch.Tensor | None = None,
    group: Group = None,
    sequence_parallel: bool = False,
    vocab_size: int,
    chunk_size: int,
) -> torch.Tensor:
    """Loss of every token [B, s], zero where ignored; no gradient. Arguments as `lm_head_loss`."""
    head = _Head(group, sequence_parallel, vocab_size, chunk_size)
    weight, host_labels = local(weight), (labels if host_labels is None else host_labels).cpu()
    _check(hidden, weight, host_labels, head)
    with torch.no_grad():
        walk = _Walk(
            hidden.detach(), weight.detach(), labels, host_labels, head, keep_losses=True
        ).run()
    batch, length = labels.shape
    return walk.losses.reshape(length, batch).t().contiguous()


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        host_labels: torch.Tensor,
        head: _Head,
    ) -> torch.Tensor:
        walk = _Walk(
            hidden, weight, labels, host_labels, head, needs=ctx.needs_input_grad[:2]
        ).run()
        ctx.grads = (walk.dhidden, walk.dweight)
        ctx.like = (hidden.shape, weight.dtype)
        return walk.sum

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        if ctx.grads is None:
            raise RuntimeError("lm_head_loss keeps its gradients for one backward pass only")
        dhidden, dweight = ctx.grads
        ctx.grads = None
        shape, dtype = ctx.like
        if dhidden is not None:
            dhidden = dhidden.mul_(upstream).view(shape)
        if dweight is not None:
            dweight = dweight.mul_(upstream).to(dtype)
        return dhidden, dweight, None, None, None


class _Walk:
    """One pass over the chunks: the sum of losses and, where needed, both gradients."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        host_labels: torch.Tensor,
        head: _Head,
        *,
        needs: tuple[bool, ...] = (False, False),
        keep_losses: bool = False,
    ) -> None:
        self.head = head
        self.hidden = hidden.contiguous().view(-1, hidden.shape[-1])
        # Row i of shard r's hidden is token r * n + i of the sequence-first order.
        self.labels = labels.t().reshape(head.shards, -1)
        self.ignored = (host_labels == IGNORE_INDEX).t().reshape(head.shards, -1)
        rows = weight.shape[0]
        self.first = group_rank(head.group) * rows
        self.valid = min(max(head.vocab_size - self.first, 0), rows)
        self.weight = weight[: self.valid]
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        tokens = self.hidden.shape[0]
        chunk = -(-head.chunk_size // head.shards) if head.chunk_size else tokens
        self.chunk = max(1, min(chunk, tokens))
        size = (self.chunk * head.shards, self.valid)
        self.logits = hidden.new_empty(size)
        self.probs = hidden.new_empty(size, dtype=self.wide)
        self.sum = hidden.new_zeros((), dtype=torch.float64)
        kept = self.labels.shape if keep_losses else (0, 0)
        self.losses = hidden.new_zeros(kept, dtype=self.wide)
        self.dhidden = torch.empty_like(self.hidden) if needs[0] else None
        self.dweight = weight.new_zeros(weight.shape, dtype=self.wide) if needs[1] else None

    def run(self) -> "_Walk":
        """Walk over all chunks; the next one arrives while this one computes."""
        tokens = self.hidden.shape[0]
        ahead = self._fetch(0)
        for start in range(0, tokens, self.chunk):
            x, arriving = ahead
            if arriving is not None:
                arriving.wait()
            if start + self.chunk < tokens:
                ahead = self._fetch(start + self.chunk)
            piece = slice(start, start + self.chunk)
            ignored = self.ignored[:, piece].reshape(-1).nonzero().squeeze(1)
            if len(ignored) == len(x):
                if self.dhidden is not None:
                    self.dhidden[piece].zero_()
                continue
            ignored = ignored.to(x.device, non_blocking=True)
            losses, column, mine = self._softmax(x, self.labels[:, piece].reshape(-1))
            losses.index_fill_(0, ignored, 0.0)
            self.sum += losses.sum(dtype=torch.float64)
            if self.losses.numel():
                self.losses[:, piece] = losses.view(self.head.shards, -1)
            if self.dhidden is not None or self.dweight is not None:
                self._gradients(x, start, ignored, column, mine)
        self.sum = self.sum.to(self.wide)
        return self

    def _fetch(self, start: int) -> tuple[torch.Tensor, Any]:
        """Chunk of hidden from every shard [shards * c, H], and the handle to wait for."""
        piece = self.hidden[start : start + self.chunk]
        if self.head.shards == 1:
            return piece, None
        full = piece.new_empty(self.head.shards * piece.shape[0], piece.shape[1])
        return full, dist.all_gather_single(full, piece, group=self.head.group, async_op=True)

    def _softmax(
        self, x: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fill ``probs`` with this rank's columns of softmax; losses, label columns [c, 1], whose.

        The local log-sum-exp is read off the softmax at its maximum, p_max = exp(m - lse) in
        [1 / V, 1], which saves a pass over the chunk.
        """
        column = (labels - self.first).unsqueeze(1)
        mine = (column >= 0) & (column < self.valid)
        column = column.masked_fill(~mine, 0)
        if self.valid:
            logits = torch.mm(x, self.weight.t(), out=self.logits[: x.shape[0]])
            probs = torch.softmax(logits, 1, dtype=self.wide, out=self.probs[: x.shape[0]])
            lse = logits.amax(1).to(self.wide) - probs.amax(1).log_()
            target = logits.gather(1, column).masked_fill(~mine, 0.0).squeeze(1).to(self.wide)
        else:
            lse = x.new_full((x.shape[0],), -torch.inf, dtype=self.wide)
            target = torch.zeros_like(lse)
        if self.head.tp == 1:
            return lse - target, column, mine
        pair = torch.stack([lse, target])
        pairs = pair.new_empty(self.head.tp * 2, pair.shape[1])
        dist.all_gather_single(pairs, pair, group=self.head.group)
        whole = torch.logsumexp(pairs[0::2], 0)
        if self.valid and (self.dhidden is not None or self.dweight is not None):
            probs.mul_((lse - whole).exp_().unsqueeze(1))
        return whole - pairs[1::2].sum(0), column, mine

    def _gradients(
        self,
        x: torch.Tensor,
        start: int,
        ignored: torch.Tensor,
        column: torch.Tensor,
        mine: torch.Tensor,
    ) -> None:
        """(softmax - onehot) times weight and hidden; rows ``ignored`` are exactly zero."""
        count, handle = x.shape[0], None
        probs = self.probs[:count]
        if self.valid:
            probs.scatter_(1, column, probs.gather(1, column) - mine.to(self.wide))
            if len(ignored):
                probs.index_fill_(0, ignored, 0.0)
            if self.logits.dtype != self.wide:
                probs = self.logits[:count].copy_(probs)
        if self.dhidden is not None:
            home = self.dhidden[start : start + self.chunk]
            dx = home if self.head.shards == 1 else torch.empty_like(x)
            torch.mm(probs, self.weight, out=dx)
            if self.head.shards > 1:
                handle = dist.reduce_scatter_single(home, dx, group=self.head.group, async_op=True)
            elif self.head.tp > 1:
                handle = dist.all_reduce(dx, group=self.head.group, async_op=True)
        if self.dweight is not None and self.valid:
            if probs.dtype == self.wide:
                self.dweight[: self.valid].addmm_(probs.t(), x)
            else:
                self.dweight[: self.valid] += torch.mm(probs.t(), x)
        if handle is not None:
            handle.wait()


def _check(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, head: _Head) -> None:
    if hidden.dim() != 3 or weight.dim() != 2 or hidden.shape[2] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} must be [s, B, H] and weight {tuple(weight.shape)} "
            "[V / tp, H] with the same H"
        )
    expected = (hidden.shape[1], hidden.shape[0] * head.shards)
    if tuple(labels.shape) != expected:
        raise ValueError(f"labels {tuple(labels.shape)} must be [B, s] = {expected}")
    if not 1 <= head.vocab_size <= weight.shape[0] * head.tp:
        raise ValueError(
            f"--vocab-size {head.vocab_size} does not fit the output layer's "
            f"{weight.shape[0] * head.tp} rows"
        )
    if head.chunk_size < 0:
        raise ValueError(f"--loss-chunk-size {head.chunk_size} must be 0 (all at once) or more")
    check_ids(labels.masked_fill(labels == IGNORE_INDEX, 0), head.vocab_size, "label")
