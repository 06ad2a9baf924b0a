"""The grid of context-parallel attention cases, and how one case runs on a rank."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.context_parallel import context_parallel_attention, make_layout
from tools.dense_attention import dense_with_grads

SPLITS = ((1, 1), (2, 1), (1, 2), (1, 3), (1, 4), (2, 2), (4, 1), (4, 2), (2, 4), (1, 8))
"""(ulysses, ring)"""
LAYOUTS = ("contiguous", "zigzag", "striped", "balanced")
HEADS = ((8, 8), (8, 2), (8, 1), (6, 3))
PACKINGS = ("none", "ones", "random", "edges", "beside_edges", "whole", "padding", "only_padding")
WINDOWS = (None, 1, 7, 40)
DTYPES = ("float64", "float32")
LONGEST = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One point of the grid."""

    ulysses: int
    ring: int
    layout: str
    comm: str
    heads: tuple[int, int]
    length: int
    packings: tuple[str, ...]
    """One per batch row."""
    window: int | None = None
    dtype: str = "float64"
    backend: str = "auto"
    causal: bool = True
    head_dim: int = 8
    seed: int = 0

    def bounds(self) -> list[list[int]]:
        """Document boundaries of each batch row."""
        rng = random.Random(self.seed)
        return [packing(name, self.length, self.ring, rng) for name in self.packings]


def packing(name: str, length: int, ring: int, rng: random.Random) -> list[int]:
    """Boundaries of one row."""
    chunk = max(1, length // (2 * ring))
    edges = list(range(chunk, length, chunk))
    if name in ("none", "whole"):
        inner: list[int] = []
    elif name == "ones":
        inner = list(range(1, length))
    elif name == "random":
        inner = (
            rng.sample(range(1, length), min(length - 1, rng.randint(1, 6))) if length > 1 else []
        )
    elif name == "edges":
        inner = edges
    elif name == "beside_edges":
        inner = [edge + rng.choice((-1, 1)) for edge in edges]
    elif name == "padding":
        inner = [length // 3, length - length // 4]
    else:  # one rank of a contiguous layout, and chunks of the others, hold nothing else
        inner = [length // ring if ring > 1 else length // 2]
    return [0, *sorted({edge for edge in inner if 0 < edge < length}), length]


def comm_types(ulysses: int, ring: int) -> tuple[str, ...]:
    """Communication types that a split admits."""
    if ring == 1:
        return ("auto", "a2a") if ulysses > 1 else ("auto", "p2p", "all_gather", "a2a")
    if ulysses == 1:
        return ("auto", "p2p", "all_gather", "a2a+p2p")
    return ("auto", "a2a+p2p", "a2a+all_gather")


def lengths(layout: str, ulysses: int, ring: int) -> list[int]:
    """Lengths up to 64 that a layout admits."""
    good = []
    for length in range(1, LONGEST + 1):
        try:
            make_layout(layout, length, ring, ulysses)
        except ValueError:
            continue
        good.append(length)
    return good


def sample_case(rng: random.Random, split: tuple[int, int] | None = None) -> Case:
    """A random point of the grid."""
    ulysses, ring = split or rng.choice(SPLITS)
    layout = rng.choice(LAYOUTS)
    heads = rng.choice(HEADS)
    batch = rng.choice((1, 2))
    first = rng.choice(PACKINGS)
    window = rng.choice((None, *WINDOWS))
    return Case(
        ulysses, ring, layout, rng.choice(comm_types(ulysses, ring)), heads,
        rng.choice(lengths(layout, ulysses, ring)),
        (first, *(rng.choice(PACKINGS) for _ in range(batch - 1))),
        window, rng.choice(DTYPES), rng.choice(("auto", "auto", "auto", "reference")),
        causal=window is not None or rng.random() < 0.9, seed=rng.randrange(1 << 30),
    )  # fmt: skip


def make_groups(ulysses: int, ring: int) -> tuple[Any, Any]:
    """(ring group, ulysses group) of this rank; Ulysses neighbours are adjacent ranks."""
    if ulysses * ring == 1:
        return None, None
    rank = dist.get_rank()
    ring_group = ulysses_group = None
    for u in range(ulysses):
        ranks = [r * ulysses + u for r in range(ring)]
        group = dist.new_group(ranks)
        ring_group = group if rank in ranks else ring_group
    for r in range(ring):
        ranks = [r * ulysses + u for u in range(ulysses)]
        group = dist.new_group(ranks)
        ulysses_group = group if rank in ranks else ulysses_group
    return (ring_group if ring > 1 else None), (ulysses_group if ulysses > 1 else None)


def case_tensors(case: Case) -> tuple[torch.Tensor, ...]:
    """Global q, k, v, grad_out of a case, equal on all ranks."""
    generator = torch.Generator().manual_seed(case.seed)
    batch, (heads, kv_heads) = len(case.packings), case.heads
    shapes = [heads, kv_heads, kv_heads, heads]
    kind = getattr(torch, case.dtype)
    return tuple(
        torch.randn(
            batch, case.length, count, case.head_dim, dtype=torch.float64, generator=generator
        ).to(kind)
        for count in shapes
    )


def run_case(case: Case, groups: tuple[Any, Any], **options: Any) -> tuple[torch.Tensor, ...]:
    """(out, lse, dq, dk, dv) of this rank's shard, [B, s, ...]; lse as [B, h, s]."""
    ring_group, ulysses_group = groups
    rank = dist.get_rank() if dist.is_initialized() else 0
    ring_rank, ulysses_rank = divmod(rank, case.ulysses)
    bounds = case.bounds()
    layout = make_layout(case.layout, case.length, case.ring, case.ulysses, bounds)
    at = layout.positions(ring_rank, ulysses_rank)
    q, k, v, grad_out = (x[:, at] for x in case_tensors(case))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    cu_seqlens: Any = [torch.tensor(b, dtype=torch.int32) for b in bounds]
    if set(case.packings) == {"none"}:
        cu_seqlens = None
    out, lse = context_parallel_attention(
        q, k, v, layout=layout, ring_group=ring_group, ulysses_group=ulysses_group,
        cu_seqlens=cu_seqlens, causal=case.causal, window=case.window, cp_comm_type=case.comm,
        backend=case.backend, return_lse=True, **options,
    )  # fmt: skip
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    return out.detach(), lse, *grads


def shard(case: Case, whole: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """This rank's part of (out, lse, dq, dk, dv)."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    layout = make_layout(case.layout, case.length, case.ring, case.ulysses, case.bounds())
    at = layout.positions(*divmod(rank, case.ulysses))
    out, lse, *grads = whole
    return out[:, at], lse[:, :, at], *(grad[:, at] for grad in grads)


def largest_error(got: torch.Tensor, want: torch.Tensor, scale: float) -> float:
    """Largest difference relative to a scale; infinities must agree exactly."""
    if not torch.equal(got == -torch.inf, want == -torch.inf):
        return float("inf")
    finite = want != -torch.inf
    difference = (got.double() - want.double())[finite].abs()
    if not bool(torch.isfinite(got[finite]).all()):
        return float("inf")
    return float(difference.max()) / scale if difference.numel() else 0.0


def case_errors(case: Case, groups: tuple[Any, Any]) -> dict[str, float]:
    """Largest error of out, lse, dq, dk, dv, relative to the whole tensor's largest magnitude.

    Where each token sees itself alone, dq and dk vanish; their error is then relative to dv.
    """
    q, k, v, grad_out = case_tensors(case)
    whole = dense_with_grads(
        q, k, v, grad_out, case.bounds(), causal=case.causal, window=case.window
    )
    got = run_case(case, groups)
    errors = {}
    largest_dv = float(whole[4].abs().max())
    for name, mine, part, full in zip(
        ("out", "lse", "dq", "dk", "dv"), got, shard(case, whole), whole, strict=True
    ):
        scale = float(full[full != -torch.inf].abs().max())
        vanishes = name in ("dq", "dk") and scale < 1e-9 * largest_dv
        errors[name] = largest_error(mine, part, largest_dv if vanishes else scale)
    return errors


def run_in_groups(cases: list[Case], groups: tuple[Any, Any]) -> list[str]:
    """A line for each case that is out of tolerance: float64 1e-10, float32 1e-5."""
    bad = []
    for case in cases:
        limit = 1e-10 if case.dtype == "float64" else 1e-5
        errors = case_errors(case, groups)
        if not all(error <= limit for error in errors.values()):
            bad.append(f"{case}: {errors}")
    return bad


def run_cases(rank: int, world: int, split: tuple[int, int], cases: list[Case]) -> list[str]:
    """Run cases of one split in a fresh world."""
    return run_in_groups(cases, make_groups(*split))


def full_grid(split: tuple[int, int]) -> Iterator[Case]:
    """The grid of one split: every combination of layout, communication, heads, packing and window,
    and every admitted length with every layout and communication; the rest takes turns.
    """
    ulysses, ring = split
    turn = itertools.count(1)
    for layout, comm in itertools.product(LAYOUTS, comm_types(ulysses, ring)):
        good = lengths(layout, ulysses, ring)
        axes = itertools.product(HEADS, PACKINGS, WINDOWS)
        points = [(good[(7 * i) % len(good)], *point) for i, point in enumerate(axes)]
        points += [
            (n, HEADS[i % 4], PACKINGS[(i // 4) % 8], WINDOWS[i % 3]) for i, n in enumerate(good)
        ]
        for length, heads, first, window in points:
            number = next(turn)
            second = (PACKINGS[(number * 5) % 8],) if number % 2 else ()
            yield Case(
                ulysses, ring, layout, comm, heads, length, (first, *second), window,
                DTYPES[number % 3 == 0], "reference" if number % 7 == 0 else "auto",
                causal=window is not None or number % 5 > 0, seed=number,
            )  # fmt: skip
