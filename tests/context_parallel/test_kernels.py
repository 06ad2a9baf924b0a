"""Block kernels against dense attention of the same (query, key) pairs."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.core.context_parallel.calls import make_calls
from megatron.core.context_parallel.kernels import cpu_flash, cudnn
from megatron.core.context_parallel.kernels.base import BlockKernel, Dropout, Upstream
from megatron.core.context_parallel.kernels.cpu_flash import CpuFlashKernel
from megatron.core.context_parallel.kernels.cuda_flash import (
    CudaFlashKernel,
    VarlenCall,
    _library_backward,
    _library_forward,
)
from megatron.core.context_parallel.kernels.cudnn import CudnnKernel
from megatron.core.context_parallel.kernels.reference import ReferenceKernel
from megatron.core.context_parallel.kernels.select import select_kernel
from megatron.core.context_parallel.kernels.tiled import Band, MaskCache, TileCall, TileUpstream
from megatron.core.context_parallel.merge import row_delta

FAR = 1 << 40


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(out [N, h, D], lse [N, h]) of the visible pairs."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weight = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return torch.einsum("hij,jhd->ihd", weight, v), lse.t()


def task_mask(tasks: np.ndarray, rows: int, columns: int) -> Tensor:
    """bool [rows, columns]; every pair at most once."""
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
    for q0, q1, k0, k1, lo, hi in tasks.tolist():
        gap = (i - q0) - (j - k0)
        inside = (i >= q0) & (i < q1) & (j >= k0) & (j < k1)
        seen += inside & (gap >= lo) & (gap <= hi)
    assert seen.max() <= 1
    return seen.bool()


def random_tasks(rng: random.Random, rows: int, columns: int) -> np.ndarray:
    """Tasks of every kind that do not share a pair."""
    tasks: list[tuple[int, ...]] = []
    for _ in range(rng.randint(1, 14)):
        a, b = sorted(rng.sample(range(rows + 1), 2))
        c, d = sorted(rng.sample(range(columns + 1), 2))
        low = rng.choice((-FAR, 0, rng.randint(-20, 10)))
        high = rng.choice((FAR, low + rng.randint(0, 9)))
        if rng.random() < 0.4:
            d = min(columns, c + b - a)
            b, low, high = a + d - c, 0, FAR
        try:
            task_mask(np.array([*tasks, (a, b, c, d, low, high)]), rows, columns)
        except AssertionError:
            continue
        tasks.append((a, b, c, d, low, high))
    return np.array(tasks, dtype=np.int64).reshape(-1, 6)


def varlen_stand_in(q: Tensor, k: Tensor, call: VarlenCall) -> list[tuple[slice, slice, Tensor]]:
    """(query rows, key rows, mask) of each sequence, aligned bottom-right as the library does."""
    spans = []
    cu_q, cu_k = call.cu_q.tolist(), call.cu_k.tolist()
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q), itertools.pairwise(cu_k), strict=True):
        i = torch.arange(b - a)[:, None] + (d - c) - (b - a)
        j = torch.arange(d - c)[None]
        mask = torch.ones(b - a, d - c, dtype=torch.bool)
        mask &= (j >= i - call.left) if call.left >= 0 else True
        mask &= (j <= i + call.right) if call.right >= 0 else True
        assert b - a <= call.max_q and d - c <= call.max_k
        spans.append((slice(a, b), slice(c, d), mask))
    return spans


def stand_in_forward(
    q: Tensor, k: Tensor, v: Tensor, call: VarlenCall, scale: float
) -> tuple[Tensor, Tensor]:
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0])
    for rows, columns, mask in varlen_stand_in(q, k, call):
        part, part_lse = dense(q[rows], k[columns], v[columns], mask, scale)
        out[rows], lse[:, rows] = part, part_lse.t()
    return out, lse


def stand_in_backward(
    given: tuple[Tensor, Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, call: VarlenCall,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grad_out, out, lse = given
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    kernel = ReferenceKernel()
    for rows, columns, mask in varlen_stand_in(q, k, call):
        gaps = torch.arange(mask.shape[0])[:, None] - torch.arange(mask.shape[1])[None]
        band = (0, mask.shape[0], 0, mask.shape[1], int(gaps[mask].min()), int(gaps[mask].max()))
        up = Upstream(
            grad_out[rows], out[rows], lse[:, rows].t(), row_delta(grad_out[rows], out[rows])
        )
        part = kernel.attend_backward(
            up, q[rows], k[columns], v[columns], np.array([band]), scale=scale
        )
        dq[rows], dk[columns], dv[columns] = part
    return dq, dk, dv


KERNELS = {
    "reference": ReferenceKernel(),
    "flash": CpuFlashKernel(),
    "varlen": CudaFlashKernel(stand_in_forward, stand_in_backward),
}


def compare(kernel: BlockKernel, tasks: np.ndarray, rows: int, columns: int, heads: tuple) -> None:
    """Kernel against dense, forward and backward, float64."""
    h, kv = heads
    q, k, v = (
        torch.randn(n, c, 8, dtype=torch.float64, requires_grad=True)
        for n, c in ((rows, h), (columns, kv), (columns, kv))
    )
    mask = task_mask(tasks, rows, columns)
    want, want_lse = dense(q, k, v, mask, 0.3)
    grad_out = torch.randn_like(want)
    wanted = torch.autograd.grad((want * grad_out).sum(), (q, k, v), allow_unused=True)
    with torch.no_grad():
        out, lse = kernel.attend(q, k, v, tasks, scale=0.3)
        up = Upstream(grad_out, out, lse, row_delta(grad_out, out))
        grads = kernel.attend_backward(up, q, k, v, tasks, scale=0.3)
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    assert torch.allclose(out, want, atol=1e-12)
    assert torch.allclose(lse, want_lse, atol=1e-12)
    for got, right in zip(grads, wanted, strict=True):
        assert torch.allclose(got, right, atol=1e-11)


@pytest.mark.parametrize("name", KERNELS)
def test_random_tasks(name: str) -> None:
    rng = random.Random(11)
    torch.manual_seed(11)
    for _ in range(60):
        rows, columns = rng.choice((5, 40, 90)), rng.choice((6, 50, 100))
        heads = rng.choice(((2, 2), (4, 2), (3, 1)))
        compare(KERNELS[name], random_tasks(rng, rows, columns), rows, columns, heads)


def test_long_tiles_are_copied_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all tiles taken for long ones, and one tile that really is."""
    torch.manual_seed(12)
    compare(KERNELS["flash"], np.array([(0, 8, 0, 4200, -FAR, FAR)]), 8, 4200, (4, 2))
    monkeypatch.setattr(cpu_flash, "HEAD_MAJOR_ROWS", 1)
    rng = random.Random(12)
    for _ in range(30):
        compare(KERNELS["flash"], random_tasks(rng, 40, 50), 40, 50, (4, 2))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("lengths", [[1] * 50, [3] * 20, [1, 2, 3, 4, 5, 6, 7, 8, 9, 64, 65, 2]])
def test_many_short_documents(name: str, lengths: list[int]) -> None:
    bounds = np.cumsum([0, *lengths])
    tasks = np.array([(a, b, a, b, 0, b - a - 1) for a, b in itertools.pairwise(bounds.tolist())])
    compare(KERNELS[name], tasks, int(bounds[-1]), int(bounds[-1]), (4, 2))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("window", [1, 7, 40, 70, 300])
def test_bands_longer_than_tiles(name: str, window: int) -> None:
    tasks = np.array([(0, 300, 0, 300, 0, window - 1)])
    compare(KERNELS[name], tasks, 300, 300, (2, 1))


@pytest.mark.parametrize("name", KERNELS)
def test_causal_follows_global_positions(name: str) -> None:
    """Queries at positions 3 and 4, keys at 0..4: torch aligns top-left and gives [1, 0, ...]."""
    q, k = torch.zeros(2, 1, 8, dtype=torch.float64), torch.zeros(5, 1, 8, dtype=torch.float64)
    v = torch.eye(5, 8, dtype=torch.float64)[:, None]
    out, _ = KERNELS[name].attend(q, k, v, np.array([(0, 2, 0, 5, -3, FAR)]), scale=1.0)
    want = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0], [0.2] * 5], dtype=torch.float64)
    assert torch.allclose(out[:, 0, :5], want)


@pytest.mark.parametrize("name", KERNELS)
def test_row_without_keys_is_harmless(name: str) -> None:
    """4 x 4 causal with row 2 hidden; and a task list in which nothing is visible at all."""
    torch.manual_seed(0)
    tasks = np.array([(0, 2, 0, 2, 0, FAR), (3, 4, 0, 4, -FAR, FAR)])
    compare(KERNELS[name], tasks, 4, 4, (2, 2))
    compare(KERNELS[name], np.zeros((0, 6), dtype=np.int64), 4, 4, (2, 2))
    compare(KERNELS[name], np.array([(0, 4, 0, 4, 9, FAR)]), 4, 4, (2, 2))


@pytest.mark.parametrize("name", ["reference", "flash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_partials_are_float32(name: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(30, 2, 8).to(dtype) for _ in range(3))
    tasks = np.array([(0, 30, 0, 30, 0, 29)])
    out, lse = KERNELS[name].attend(q, k, v, tasks, scale=0.3)
    want, want_lse = dense(q.double(), k.double(), v.double(), task_mask(tasks, 30, 30), 0.3)
    up = Upstream(q, out, lse, row_delta(q, out))
    grads = KERNELS[name].attend_backward(up, q, k, v, tasks, scale=0.3)
    assert {out.dtype, lse.dtype, *(g.dtype for g in grads)} == {torch.float32}
    assert torch.allclose(out.double(), want, atol=1e-5)  # not rounded to the half type
    assert torch.allclose(lse.double(), want_lse, atol=1e-5)


def test_large_scores_stay_finite() -> None:
    """Scores of +-1e4: a merge that exponentiates a difference of lse overflows."""
    torch.manual_seed(1)
    for name in ("reference", "flash"):
        q, k, v = (torch.randn(64, 2, 8, dtype=torch.float64) * 60 for _ in range(3))
        cuts = [(0, 64, a, a + 8, -FAR, FAR) for a in range(0, 64, 8)]
        whole = np.array([(0, 64, 0, 64, -FAR, FAR)])
        out, lse = KERNELS[name].attend(q, k, v, np.array(cuts), scale=1.0)
        want, want_lse = KERNELS[name].attend(q, k, v, whole, scale=1.0)
        assert torch.allclose(out, want, atol=1e-9) and torch.allclose(lse, want_lse)
        up = Upstream(v, out, lse, row_delta(v, out))
        got = KERNELS[name].attend_backward(up, q, k, v, np.array(cuts), scale=1.0)
        right = KERNELS[name].attend_backward(up, q, k, v, whole, scale=1.0)
        for a, b in zip(got, right, strict=True):
            assert torch.isfinite(a).all() and torch.allclose(a, b, atol=1e-6)


def test_reference_never_holds_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.context_parallel.kernels import reference

    largest = 0
    plain = reference._scores

    def spy(*args: object) -> Tensor:
        nonlocal largest
        scores = plain(*args)
        largest = max(largest, scores.numel())
        return scores

    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 1 << 12)
    monkeypatch.setattr(reference, "_scores", spy)
    compare(ReferenceKernel(), np.array([(0, 300, 0, 300, 0, 299)]), 300, 300, (2, 1))
    assert 0 < largest <= 1 << 12


def test_dropout_is_a_function_of_global_ids() -> None:
    """Half the tasks on their own give the same mask as all; gradients follow the mask."""
    torch.manual_seed(2)
    kernel = ReferenceKernel()
    q, k, v = (torch.randn(24, 2, 8, dtype=torch.float64) for _ in range(3))
    ids = torch.randperm(1000)[:24]
    whole = np.array([(0, 24, 0, 24, 0, 23)])

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return kernel.attend(q, k, v, whole, scale=0.4, dropout=Dropout(0.3, 7, ids, ids))

    out, lse = attend(q, k, v)
    assert torch.allclose(lse, kernel.attend(q, k, v, whole, scale=0.4)[1])
    pieces = np.array([(0, 12, 0, 12, 0, 11), (12, 24, 12, 24, 0, 11), (12, 24, 0, 12, -FAR, FAR)])
    again, _ = kernel.attend(q, k, v, pieces, scale=0.4, dropout=Dropout(0.3, 7, ids, ids))
    assert torch.allclose(out, again, atol=1e-14)
    other, _ = kernel.attend(q, k, v, whole, scale=0.4, dropout=Dropout(0.3, 8, ids, ids))
    assert not torch.allclose(out, other)
    grad_out = torch.randn_like(out)
    up = Upstream(grad_out, out, lse, row_delta(grad_out, out))
    dropout = Dropout(0.3, 7, ids, ids)
    grads = kernel.attend_backward(up, q, k, v, whole, scale=0.4, dropout=dropout)
    for index, grad in enumerate(grads):
        step = torch.randn_like(grad) * 1e-6
        moved = [x + step if i == index else x for i, x in enumerate((q, k, v))]
        back = [x - step if i == index else x for i, x in enumerate((q, k, v))]
        slope = ((attend(*moved)[0] - attend(*back)[0]) * grad_out).sum() / 2
        assert slope.item() == pytest.approx((grad * step).sum().item(), rel=1e-5)


def test_dropout_rate_and_unbiased_mean() -> None:
    ids = torch.arange(400)
    one = torch.ones(400, 8, 8, dtype=torch.float64)
    dropout = Dropout(0.25, (1 << 63) + 5, ids, ids, first_head=3)  # seeds of any size
    tasks = np.array([(0, 400, 0, 400, -FAR, FAR)])
    out, _ = ReferenceKernel().attend(one, one, one, tasks, scale=0.1, dropout=dropout)
    assert out.mean().item() == pytest.approx(1.0, abs=5e-3)
    assert out[..., 0].std().item() == pytest.approx((0.25 / 0.75 / 400) ** 0.5, rel=0.1)


def test_short_documents_need_few_calls() -> None:
    lengths = np.array([1, 2, 3, 5, 7, 11, 13, 17, 19, 23] * 100)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    tasks = np.stack((starts, ends, starts, ends, 0 * ends, lengths - 1), axis=1)
    listed = make_calls(tasks, np.zeros(int(ends[-1]), dtype=bool))
    assert len(listed.calls) <= 12 and listed.tasks == 1000
    assert listed.pairs == int((lengths * (lengths + 1) // 2).sum())
    assert all(call.fresh for call in listed.calls)


def test_equal_documents_are_one_view() -> None:
    starts = np.arange(0, 1000, 100)
    tasks = np.stack((starts, starts + 100, starts, starts + 100, 0 * starts, 0 * starts + 99), 1)
    (call,) = make_calls(tasks, np.zeros(1000, dtype=bool)).calls
    assert call.q.count == 10 and call.q.index is None and call.is_causal


def test_masks_of_a_window_are_few() -> None:
    listed = make_calls(np.array([(0, 4096, 0, 4096, 0, 511)]), np.zeros(4096, dtype=bool))
    masked = {
        (call.q.length, call.k.length, call.lo, call.hi)
        for call in listed.calls
        if not call.is_full and not call.is_causal
    }
    assert len(masked) <= 4 and len(listed.calls) < 16


@pytest.mark.parametrize("name", ["reference", "flash", "varlen"])
def test_documents_do_not_touch(name: str) -> None:
    """Changing one short document leaves the bits of all others alone, padding or not."""
    torch.manual_seed(3)
    lengths = [1, 2, 5, 7, 3, 60, 33, 90, 4]
    bounds = np.cumsum([0, *lengths]).tolist()
    tasks = np.array([(a, b, a, b, 0, b - a - 1) for a, b in itertools.pairwise(bounds)])
    q, k, v = (torch.randn(bounds[-1], 2, 8, dtype=torch.float64) for _ in range(3))
    before = KERNELS[name].attend(q, k, v, tasks, scale=0.3)
    a, b = bounds[4], bounds[5]
    for x in (q, k, v):
        x[a:b] = 1e30 if x is not q else torch.randn(b - a, 2, 8, dtype=torch.float64)
    after = KERNELS[name].attend(q, k, v, tasks, scale=0.3)
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x[:a], y[:a]) and torch.equal(x[b:], y[b:])


def test_cuda_adapters_match_their_libraries_signatures() -> None:
    """On meta tensors the libraries' own shape rules run: arguments and shapes fit."""
    meta = torch.device("meta")
    q, k = (torch.empty(64, n, 64, dtype=torch.bfloat16, device=meta) for n in (8, 2))
    cu = torch.tensor([0, 24, 64], dtype=torch.int32, device=meta)
    call = VarlenCall(slice(None), slice(None), cu, cu, 40, 40, -1, 0, True)
    out, lse = _library_forward(q, k, k, call, 0.1)
    assert out.shape == q.shape and lse.shape == (8, 64)
    grads = _library_backward((out, out, lse), q, k, k, call, 0.1)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]

    kernel = CudnnKernel()
    q4, k4 = (torch.empty(3, n, 16, 64, dtype=torch.bfloat16, device=meta) for n in (8, 2))
    for band in (Band(16, 16, 0, 15), Band(16, 16, -15, 15), Band(16, 16, 0, 3)):
        tile = TileCall(band, 0.1, MaskCache(), None)
        out, lse = kernel.tile_forward(q4, k4, k4, tile)
        assert out.shape == q4.shape and lse.shape == (3, 8, 16)
        up = TileUpstream(out, out, lse, lse)
        dq, dk, dv = kernel.tile_backward(up, q4, k4, k4, tile)
        assert dq.shape == q4.shape and dk.shape == dv.shape == k4.shape


@pytest.mark.parametrize("dims", [3, 4])
def test_cudnn_gets_the_lse_in_the_form_it_gives(
    dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, ...]] = []

    def forward(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        lse = q.new_zeros(*q.shape[:3], 1, dtype=torch.float32)
        return torch.zeros_like(q), lse if dims == 4 else lse.squeeze(-1)

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given.append(tuple(args[5].shape))
        return args[1], args[2], args[3]

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", forward)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", backward)
    cudnn._lse_dims.cache_clear()
    q = torch.zeros(2, 4, 8, 16, dtype=torch.bfloat16)
    tile, kernel = TileCall(Band(8, 8, 0, 7), 0.1, MaskCache(), None), CudnnKernel()
    out, lse = kernel.tile_forward(q, q, q, tile)
    assert lse.shape == (2, 4, 8)
    kernel.tile_backward(TileUpstream(out, out, lse, lse), q, q, q, tile)
    cudnn._lse_dims.cache_clear()
    assert given == [(2, 4, 8, 1)[:dims]]


def test_one_call_over_all_rows_is_adopted_not_copied() -> None:
    """A dense row on a GPU: no pass over zeros for the output and each gradient."""
    made: list[Tensor] = []

    def noted(*given: Any) -> tuple[Tensor, ...]:
        results = (stand_in_forward if len(given) == 5 else stand_in_backward)(*given)
        made.extend(results)
        return results

    kernel = CudaFlashKernel(noted, noted)  # type: ignore[arg-type]
    q, k, v, grad = (torch.randn(6, 2, 8, dtype=torch.float64) for _ in range(4))
    causal = np.array([(0, 6, 0, 6, 0, FAR)])
    out, lse = kernel.attend(q, k, v, causal, scale=0.3)
    up = Upstream(grad, out, lse, row_delta(grad, out))
    grads = kernel.attend_backward(up, q, k, v, causal, scale=0.3)
    assert [x.data_ptr() for x in made] == [x.data_ptr() for x in (out, lse, *grads)]


def test_old_gpus_have_no_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, auto in (((7, 0), ReferenceKernel), ((8, 0), CudaFlashKernel)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        given: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cuda", 0)}
        kernel = select_kernel("auto", **given, head_dim=64, dropout_p=0.0)
        assert type(kernel) is auto
        if auto is ReferenceKernel:
            with pytest.raises(ValueError, match=r"capability 8.0 \(Ampere\) or more, not 7.0"):
                select_kernel("flash", **given, head_dim=64, dropout_p=0.0)


def test_selection() -> None:
    def choose(backend: str, device: str, dtype: torch.dtype, dim: int = 64, p: float = 0.0) -> str:
        kernel = select_kernel(
            backend, dtype=dtype, device=torch.device(device), head_dim=dim, dropout_p=p
        )
        return type(kernel).__name__

    assert choose("auto", "cpu", torch.float64, 7) == "CpuFlashKernel"
    assert choose("auto", "cpu", torch.bfloat16, 64, 0.1) == "ReferenceKernel"
    assert choose("auto", "cuda", torch.bfloat16) == "CudaFlashKernel"
    assert choose("auto", "cuda", torch.float32) == "ReferenceKernel"
    assert choose("cudnn", "cuda", torch.float16, 128) == "CudnnKernel"
    for backend, device, dtype, dim, p, word in (
        ("flash", "cpu", torch.float32, 64, 0.1, "dropout"),
        ("flash", "cuda", torch.float32, 64, 0.0, "float16 or bfloat16"),
        ("flash", "cuda", torch.bfloat16, 100, 0.0, "head dim"),
        ("cudnn", "cpu", torch.float32, 64, 0.0, "CUDA device"),
        ("quick", "cpu", torch.float32, 64, 0.0, "must be one of"),
    ):
        with pytest.raises(ValueError, match=word):
            choose(backend, device, dtype, dim, p)
