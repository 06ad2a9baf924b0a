"""The chunked head loss against F.cross_entropy on full logits, and what it allocates."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.packed_batch import IGNORE_INDEX as IGNORE
from megatron.core.tensor_parallel import lm_head_loss, lm_head_token_losses
from tests.utils.ranks import run_ranks

# s, B, H, real and padded vocabulary; on 4 ranks the last one holds padding alone.
S, B, H, V, PADDED = 12, 2, 6, 23, 32
N = S * B


def _data(
    dtype: torch.dtype = torch.float64, ignore: str = "some", scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(S, B, H, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(PADDED, H, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(0, V, (B, S), generator=generator)
    labels[0, 0], labels[1, 0] = 0, V - 1
    if ignore == "some":
        # Positions 3..6 of both rows: a whole chunk of 7 tokens without any loss.
        labels[:, 3:8] = IGNORE
        labels[1, 10] = IGNORE
    elif ignore == "all":
        labels[:] = IGNORE
    return hidden.to(dtype), weight.to(dtype), labels


def _dense(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, upstream: float
) -> tuple[torch.Tensor, ...]:
    """Token losses [B, s] and gradients of hidden and weight, from full fp64 logits."""
    hidden = hidden.double().detach().requires_grad_()
    weight = weight.double().detach().requires_grad_()
    logits = (hidden @ weight[:V].t()).transpose(0, 1)
    losses = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="none"
    )
    dhidden, dweight = torch.autograd.grad(losses.sum() * upstream, [hidden, weight])
    return losses.detach().view(B, S), dhidden, dweight


def _ours(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, upstream: float, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = lm_head_loss(hidden, weight, labels, vocab_size=V, **kwargs)
    dhidden, dweight = torch.autograd.grad(loss * upstream, [hidden, weight])
    return loss.detach(), dhidden, dweight


def _close(found: torch.Tensor, right: torch.Tensor, bar: float = 1e-13) -> None:
    error = (found.double() - right).abs().max() / right.abs().max().clamp_min(1.0)
    assert error <= bar, float(error)


@pytest.mark.parametrize("ignore", ["none", "some", "all"])
@pytest.mark.parametrize("chunk_size", [0, 1, 7, N, N + 3])
def test_equals_full_logits(chunk_size: int, ignore: str) -> None:
    data = _data(ignore=ignore)
    losses, *grads = _dense(*data, upstream=0.37)
    loss, *found = _ours(*data, upstream=0.37, chunk_size=chunk_size)
    assert loss.dtype == torch.float64 and loss.shape == ()
    _close(loss, losses.sum())
    for mine, theirs in zip(found, grads, strict=True):
        _close(mine, theirs)
    ignored = data[2].t() == IGNORE
    assert torch.count_nonzero(found[0][ignored]) == 0
    assert torch.count_nonzero(found[1][V:]) == 0
    if ignore == "all":
        assert loss == 0 and torch.count_nonzero(found[1]) == 0
    hidden, weight, labels = data
    tokens = lm_head_token_losses(
        hidden.requires_grad_(), weight, labels, vocab_size=V, chunk_size=chunk_size
    )
    assert tokens.shape == (B, S) and not tokens.requires_grad
    _close(tokens, losses)
    assert torch.count_nonzero(tokens[labels == IGNORE]) == 0


def _over_tp(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for ignore, scale in (("some", 1.0), ("all", 1.0), ("none", 30.0)):
        hidden, weight, labels = _data(ignore=ignore, scale=scale)
        losses, *grads = _dense(hidden, weight, labels, upstream=0.37)
        rows = weight.chunk(world)[rank]
        for sequence_parallel in (False, True):
            local = hidden.chunk(world)[rank] if sequence_parallel else hidden
            right = grads[0].chunk(world)[rank] if sequence_parallel else grads[0]
            kwargs: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
            for chunk_size in (0, 1, 7, N, N + 3) if ignore == "some" else (7, N):
                kwargs["chunk_size"] = chunk_size
                loss, dhidden, dweight = _ours(local, rows, labels, 0.37, **kwargs)
                _close(loss, losses.sum())
                _close(dhidden, right)
                _close(dweight, grads[1].chunk(world)[rank])
                if ignore != "none":
                    start = rank * local.shape[0] if sequence_parallel else 0
                    ignored = labels.t()[start : start + local.shape[0]] == IGNORE
                    assert torch.count_nonzero(dhidden[ignored]) == 0
                tokens = lm_head_token_losses(local, rows, labels, vocab_size=V, **kwargs)
                _close(tokens, losses)
                every = [torch.empty_like(loss) for _ in range(world)]
                dist.all_gather(every, loss)
                assert all(torch.equal(other, loss) for other in every)


@pytest.mark.parametrize("world", [2, 4])
def test_vocabulary_cut_over_ranks(world: int) -> None:
    """With and without sequence parallelism; at scale 30 logits reach +-10,000."""
    run_ranks(world, _over_tp)


def test_huge_logits_stay_finite() -> None:
    hidden, weight, labels = _data(torch.float32, scale=100.0)
    losses, *grads = _dense(hidden, weight, labels, 1.0)
    loss, *found = _ours(hidden, weight, labels, 1.0, chunk_size=7)
    _close(loss, losses.sum(), 1e-5 * float(losses.sum()))
    for mine, theirs in zip(found, grads, strict=True):
        assert torch.isfinite(mine).all()
        _close(mine, theirs, 1e-5)


def test_bf16_keeps_fp32_losses_and_weight_gradient() -> None:
    """Weight gradients of many one-token chunks: summed in bf16 they would be off by far."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 1, H, generator=generator).to(torch.bfloat16)
    weight = torch.randn(PADDED, H, generator=generator).to(torch.bfloat16)
    labels = torch.randint(0, V, (1, 600), generator=generator)
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    right = F.cross_entropy((h @ w[:V].t()).squeeze(1), labels[0], reduction="sum")
    dh, dw = torch.autograd.grad(right, [h, w])
    for chunk_size in (1, 64, 0):
        loss, dhidden, dweight = _ours(hidden, weight, labels, 1.0, chunk_size=chunk_size)
        assert loss.dtype == torch.float32
        assert dhidden.dtype == torch.bfloat16 and dweight.dtype == torch.bfloat16
        assert abs(loss - right) / right < 1e-3
        for mine, theirs in ((dhidden, dh), (dweight, dw)):
            assert (mine.double() - theirs).norm() / theirs.norm() < 6e-3, chunk_size


def test_upstream_needs_and_single_use() -> None:
    hidden, weight, labels = _data()
    kwargs: dict[str, Any] = {"vocab_size": V, "chunk_size": 7}
    losses, dhidden, dweight = _dense(hidden, weight, labels, 1.0)
    frozen = weight.detach()
    x = hidden.detach().requires_grad_()
    lm_head_loss(x, frozen, labels, **kwargs).backward()
    assert x.grad is not None
    _close(x.grad, dhidden)
    w = weight.detach().requires_grad_()
    loss = lm_head_loss(hidden.detach(), w, labels, **kwargs)
    loss.backward(torch.tensor(-2.0, dtype=torch.float64), retain_graph=True)
    assert w.grad is not None
    _close(w.grad, -2.0 * dweight)
    with pytest.raises(RuntimeError, match="one backward pass only"):
        loss.backward()
    with torch.no_grad():
        plain = lm_head_loss(x, w, labels, **kwargs)
    assert not plain.requires_grad
    _close(plain, losses.sum())
    assert not lm_head_loss(hidden.detach(), frozen, labels, **kwargs).requires_grad


def test_not_contiguous_hidden_and_labels() -> None:
    hidden, weight, labels = _data()
    losses, *grads = _dense(hidden, weight, labels, 1.0)
    hidden = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    labels = labels.t().contiguous().t()
    assert not hidden.is_contiguous() and not labels.is_contiguous()
    loss, *found = _ours(hidden, weight.t().contiguous().t(), labels, 1.0, chunk_size=7)
    _close(loss, losses.sum())
    for mine, theirs in zip(found, grads, strict=True):
        _close(mine, theirs)


class _Shapes(TorchDispatchMode):
    """Records the number of elements of every tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []
        self.mms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.mms += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.sizes.append(tuple(leaf.shape))
        return result


@pytest.mark.parametrize("train", [True, False])
def test_no_tokens_by_vocabulary_tensor(train: bool) -> None:
    tokens, hidden_size, vocab, chunk = 512, 8, 320, 64
    hidden = torch.randn(tokens, 1, hidden_size, requires_grad=train)
    weight = torch.randn(vocab, hidden_size, requires_grad=train)
    labels = torch.randint(0, vocab, (1, tokens))
    with _Shapes() as seen:
        loss = lm_head_loss(hidden, weight, labels, vocab_size=vocab, chunk_size=chunk)
        if train:
            loss.backward()
    largest = max(torch.Size(shape).numel() for shape in seen.sizes)
    assert largest == chunk * vocab, "one chunk of logits is the largest tensor"
    assert seen.mms == (3 if train else 1) * tokens // chunk, "three head matmuls, not four"
    with _Shapes() as seen:
        F.cross_entropy((hidden @ weight.t()).squeeze(1), labels[0])
    assert (tokens, vocab) in seen.sizes, "the recorder sees full logits where there are any"


def _gathered_shapes(rank: int, world: int) -> None:
    """Sequence parallelism: no tensor of the full sequence's hidden either."""
    tokens, hidden_size, vocab, chunk = 256, 16, 32, 32
    hidden = torch.randn(tokens // world, 1, hidden_size, requires_grad=True)
    weight = torch.randn(vocab // world, hidden_size, requires_grad=True)
    labels = torch.randint(0, vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
    with _Shapes() as seen:
        lm_head_loss(
            hidden,
            weight,
            labels,
            group=dist.group.WORLD,
            sequence_parallel=True,
            vocab_size=vocab,
            chunk_size=chunk,
        ).backward()
    largest = max(torch.Size(shape).numel() for shape in seen.sizes)
    assert largest == tokens // world * hidden_size
    assert (chunk, hidden_size) in seen.sizes


def test_sequence_is_gathered_by_chunks() -> None:
    run_ranks(2, _gathered_shapes)


def test_refusals() -> None:
    hidden, weight, labels = _data()
    kwargs: dict[str, Any] = {"vocab_size": V, "chunk_size": 7}
    for bad in (V, -1, PADDED - 1, -101):
        wrong = labels.clone()
        wrong[1, 2] = bad
        with pytest.raises(ValueError, match=f"label {bad} is outside .* {V}"):
            lm_head_loss(hidden, weight, wrong, **kwargs)
    with pytest.raises(ValueError, match=r"labels \(12, 2\) must be \[B, s\] = \(2, 12\)"):
        lm_head_loss(hidden, weight, labels.t(), **kwargs)
    with pytest.raises(ValueError, match="same H"):
        lm_head_loss(hidden, weight[:, :-1], labels, **kwargs)
    with pytest.raises(ValueError, match="--vocab-size 33 does not fit"):
        lm_head_loss(hidden, weight, labels, vocab_size=33, chunk_size=7)
    with pytest.raises(ValueError, match="--loss-chunk-size -1"):
        lm_head_token_losses(hidden, weight, labels, vocab_size=V, chunk_size=-1)
