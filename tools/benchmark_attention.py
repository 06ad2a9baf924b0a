"""Time context-parallel attention against one process with as many cores; measure memory; check.

    python tools/benchmark_attention.py                     the tables below
    python tools/benchmark_attention.py --cases dense-8k --rounds 9
    python tools/benchmark_attention.py --check             correctness, a sample of the grid
    python tools/benchmark_attention.py --check --full      the whole grid (long)

Speed: R ranks of one thread each against one process of R threads that runs torch's own attention
(``scaled_dot_product_attention``; packed rows: one call per document) and, for packed rows, this
package on one rank; the faster of the two counts. Runs alternate, and medians are compared:
1.00 means that splitting the sequence costs nothing. "cpu" is the same ratio of processor
time, which tells something on a busy machine too. PyTorch's private ring and
``ring-attention-pytorch`` (where installed: run this with the python that
``tests/peers/make_env.sh`` prints) run the same dense rows.

Memory: peak bytes of one rank, forward and backward, on a fixed row over rings of 1, 2, 4 and 8,
above what the process had before its inputs were made.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.rank_team import Team

HERE = "tools.benchmark_attention"
HEADS, HEAD_DIM = 8, 64


@dataclasses.dataclass(frozen=True)
class Row:
    """One row to time: its length and documents."""

    name: str
    length: int
    bounds: tuple[int, ...]
    layout: str
    floor: float
    """The ratio that is asked for."""

    @property
    def packed(self) -> bool:
        return len(self.bounds) > 2


def lognormal_documents(length: int, median: float, sigma: float, seed: int) -> tuple[int, ...]:
    """Boundaries of a row of log-normal documents, at least three of them."""
    rng = random.Random(seed)
    while True:
        bounds = [0]
        while bounds[-1] < length:
            size = max(1, round(rng.lognormvariate(0.0, sigma) * median))
            bounds.append(min(length, bounds[-1] + size))
        if len(bounds) > 3:
            return tuple(bounds)


def rows(seed: int) -> list[Row]:
    """The rows of the table."""
    dense = [
        Row("dense-8k", 8192, (0, 8192), "zigzag", 0.95),
        Row("dense-16k", 16384, (0, 16384), "zigzag", 0.95),
    ]
    packed = [
        Row(name, 16384, lognormal_documents(16384, median, sigma, seed), "balanced", 0.90)
        for name, median, sigma in (("packed-700", 700, 1.2), ("packed-5k", 5000, 1.0))
    ]
    return dense + packed


def set_up(jobs: dict[str, Any], rank: int, ranks: int, row: Row, kind: str, dtype: str) -> None:
    """Make inputs and plan of a job; ``jobs[kind]`` becomes a function (backward) -> None."""
    jobs.clear()
    jobs[kind] = JOBS[kind](row, rank, ranks, dtype)


def run(
    jobs: dict[str, Any], rank: int, ranks: int, kind: str, backward: bool
) -> tuple[float, float]:
    """(seconds, processor seconds) of one run of a job on this rank, started together."""
    import torch.distributed as dist

    if ranks > 1:
        dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    jobs[kind](backward)
    return time.perf_counter() - start, time.process_time() - busy


def _inputs(row: Row, dtype: str, positions: Any = None, heads_first: bool = False) -> Any:
    """q, k, v (leaves) and grad_out of a row or of some positions of it."""
    import torch

    generator = torch.Generator().manual_seed(1)
    result = []
    for _ in range(4):
        whole = torch.randn(1, row.length, HEADS, HEAD_DIM, generator=generator)
        mine = whole if positions is None else whole[:, positions]
        mine = mine.to(getattr(torch, dtype))
        result.append(mine.transpose(1, 2).contiguous() if heads_first else mine.contiguous())
    return [x.requires_grad_() for x in result[:3]] + [result[3]]


def _stock(row: Row, rank: int, ranks: int, dtype: str) -> Any:
    """torch's attention, one call per document."""
    import torch
    import torch.nn.functional as F

    q, k, v, grad_out = _inputs(row, dtype, heads_first=True)
    spans = list(zip(row.bounds, row.bounds[1:]))

    def job(backward: bool) -> None:
        parts = [
            F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True)
            for a, b in spans
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        if backward:
            torch.autograd.grad(out, (q, k, v), grad_out)

    return job


def _ours(row: Row, rank: int, ranks: int, dtype: str, comm: str = "auto") -> Any:
    """This package over the ranks of the team, or on one."""
    import torch
    import torch.distributed as dist

    from megatron.core.context_parallel import make_layout, prepare_attention

    bounds = torch.tensor(row.bounds, dtype=torch.int32) if row.packed else None
    layout = make_layout(row.layout, row.length, ranks, 1, bounds)
    q, k, v, grad_out = _inputs(row, dtype, layout.positions(rank))
    plan = prepare_attention(
        layout=layout,
        cu_seqlens=bounds,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        ring_group=dist.group.WORLD if ranks > 1 else None,
        ulysses_group=None,
        cp_comm_type=comm,
        dtype=q.dtype,
        device="cpu",
    )
    plan.compiled(1)

    def job(backward: bool) -> Any:
        out, _ = plan(q, k, v)
        if backward:
            torch.autograd.grad(out, (q, k, v), grad_out)
        return plan

    return job


def _ring_of_torch(row: Row, rank: int, ranks: int, dtype: str) -> Any:
    """PyTorch's private ring over zigzag shards."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.experimental._context_parallel import _attention

    from megatron.core.context_parallel import make_layout

    private: Any = _attention
    positions = make_layout("zigzag", row.length, ranks).positions(rank)
    q, k, v, grad_out = _inputs(row, dtype, positions, heads_first=True)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def job(backward: bool) -> None:
        with torch.no_grad():
            out, lse, *_ = private._templated_ring_attention(
                dist.group.WORLD, 2, forward, q, k, v, is_causal=True, dropout_p=0.0
            )
            if backward:
                private._templated_ring_attention_backward(
                    dist.group.WORLD,
                    2,
                    lambda **kwargs: backward_op(**kwargs),
                    grad_out,
                    "grad_out",
                    q,
                    k,
                    v,
                    out,
                    lse.contiguous(),
                    True,
                    dropout_p=0.0,
                )

    return job


def _ring_attention_pytorch(row: Row, rank: int, ranks: int, dtype: str) -> Any:
    """The package of that name, contiguous shards."""
    import torch

    ring_flash_attn = importlib.import_module(
        "ring_attention_pytorch.ring_flash_attention"
    ).ring_flash_attn

    size = row.length // ranks
    q, k, v, grad_out = _inputs(row, dtype, torch.arange(rank * size, (rank + 1) * size))

    def job(backward: bool) -> None:
        out = ring_flash_attn(
            q, k, v, causal=True, bucket_size=512, ring_reduce_col=True, ring_size=ranks
        )
        if backward:
            torch.autograd.grad(out, (q, k, v), grad_out)

    return job


JOBS = {
    "torch, one process": _stock,
    "this, one process": _ours,
    "this": _ours,
    "torch private ring": _ring_of_torch,
    "ring-attention-pytorch": _ring_attention_pytorch,
}


Timings = dict[str, list[tuple[float, float]]]


def _time(
    teams: Sequence[tuple[str, Team]], row: Row, rounds: int, dtype: str, backward: bool
) -> Timings:
    """(seconds, processor seconds of all ranks) of each round of each competitor, alternating."""
    for kind, team in teams:
        team.call("set_up", row, kind, dtype)
        team.call("run", kind, backward)
    timings: Timings = {kind: [] for kind, _ in teams}
    for number in range(rounds):
        for kind, team in teams if number % 2 == 0 else list(reversed(teams)):
            took = team.call("run", kind, backward)
            timings[kind].append((max(t for t, _ in took), sum(busy for _, busy in took)))
    return timings


def has_peer() -> bool:
    """Whether ring-attention-pytorch can be imported."""
    return importlib.util.find_spec("ring_attention_pytorch") is not None


def speed(args: argparse.Namespace) -> bool:
    """Print the table of ratios; True if every floor is met."""
    ranks = args.ranks
    chosen = [row for row in rows(args.seed) if not args.cases or row.name in args.cases]
    print(
        f"{ranks} ranks x 1 thread against 1 process x {ranks} threads, {HEADS} heads x "
        f"{HEAD_DIM}, {args.dtype}, median of {args.rounds} alternated runs, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(
        f"{'row':<12}{'pass':<8}{'competitor':<26}{'median s':>9}{'ratio':>7}{'least':>7}"
        f"{'most':>7}{'cpu':>7}"
    )
    met = True
    for row in chosen:
        kinds = [("torch, one process", 1), ("this", ranks)]
        if row.packed:
            kinds.insert(1, ("this, one process", 1))
        elif not args.no_peers:
            kinds.append(("torch private ring", ranks))
            if has_peer():
                kinds.append(("ring-attention-pytorch", ranks))
        teams = [(kind, Team(HERE, count, 1 if count > 1 else ranks)) for kind, count in kinds]
        for backward in (False, True):
            timings = _time(teams, row, args.rounds, args.dtype, backward)
            met &= _print_row(row, "fwd+bwd" if backward else "fwd", timings)
        for _, team in teams:
            team.close()
    return met


def _print_row(row: Row, label: str, timings: Timings) -> bool:
    """Lines of one row and pass."""
    medians = {kind: statistics.median(t for t, _ in runs) for kind, runs in timings.items()}
    busy = {kind: statistics.median(b for _, b in runs) for kind, runs in timings.items()}
    base = min((k for k in medians if k.endswith("one process")), key=lambda k: medians[k])
    for kind, runs in timings.items():
        ratios = sorted(b[0] / t[0] for b, t in zip(timings[base], runs))
        print(
            f"{row.name:<12}{label:<8}{kind:<26}{medians[kind]:>9.3f}"
            f"{medians[base] / medians[kind]:>7.2f}{ratios[0]:>7.2f}{ratios[-1]:>7.2f}"
            f"{busy[base] / busy[kind]:>7.2f}",
            flush=True,
        )
    ratio = medians[base] / medians["this"]
    if ratio < row.floor:
        print(f"{row.name:<12}{label:<8}below {row.floor:.2f}: {ratio:.3f}")
    return ratio >= row.floor


def peak_memory(jobs: dict[str, Any], rank: int, ranks: int, length: int) -> int:
    """Bytes of one forward and backward at its peak, above the process before."""
    import torch

    warm = Row("warm", 1024, (0, 1024), "zigzag", 0.0)
    _ours(warm, rank, ranks, "float32", "p2p")(True)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    row = Row("memory", length, (0, length), "zigzag", 0.0)
    job = _memory_job(row, rank, ranks)
    job(True)
    assert torch.get_num_threads() == 1
    return _status("VmHWM") - before


def _memory_job(row: Row, rank: int, ranks: int) -> Any:
    """Like ``_ours``, but no rank ever holds the whole row."""
    import torch
    import torch.distributed as dist

    from megatron.core.context_parallel import make_layout, prepare_attention

    layout = make_layout(row.layout, row.length, ranks)
    q, k, v, grad_out = (
        torch.randn(1, layout.local_length, HEADS, HEAD_DIM).requires_grad_() for _ in range(4)
    )
    plan = prepare_attention(
        layout=layout,
        cu_seqlens=None,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        ring_group=dist.group.WORLD if ranks > 1 else None,
        ulysses_group=None,
        cp_comm_type="p2p",
        dtype=torch.float32,
        device="cpu",
    )

    def job(backward: bool) -> None:
        out, _ = plan(q, k, v)
        torch.autograd.grad(out, (q, k, v), grad_out.detach())

    return job


def _status(field: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def memory(args: argparse.Namespace) -> None:
    """Print peak bytes per rank over ring sizes."""
    length = args.memory_length
    print(f"\npeak memory of a rank, ring (p2p), {length} tokens, {HEADS} x {HEAD_DIM}, float32")
    print(f"{'ring':>5}{'MiB':>9}{'x ring':>9}")
    for ring in (1, 2, 4, 8):
        team = Team(HERE, ring, 1)
        peak = max(team.call("peak_memory", length)) / 2**20
        team.close()
        print(f"{ring:>5}{peak:>9.1f}{peak * ring:>9.1f}", flush=True)


def check(args: argparse.Namespace) -> bool:
    """Run a sample of the grid, or all of it; True if all is within tolerance."""
    from tools.attention_grid import SPLITS, full_grid, sample_case

    rng = random.Random(args.seed)
    print(f"grid of context-parallel attention, seed {args.seed}")
    total, bad = 0, 0
    for split in SPLITS:
        cases = list(full_grid(split)) if args.full else [
            sample_case(rng, split) for _ in range(args.check_cases)
        ]  # fmt: skip
        start = time.monotonic()
        team = Team(HERE, split[0] * split[1], 1)
        lines: list[str] = []
        for at in range(0, len(cases), 200):
            answers = team.call("check_cases", split, cases[at : at + 200])
            lines += sorted({line for answer in answers for line in answer})
        team.close()
        total, bad = total + len(cases), bad + len(lines)
        seconds = time.monotonic() - start
        name = f"ulysses {split[0]} ring {split[1]}"
        print(f"{name}: {len(cases)} cases, {len(lines)} bad, {seconds:.0f} s")
        for line in lines[:20]:
            print("  " + line)
        sys.stdout.flush()
    print(f"{total} cases, {bad} bad")
    return bad == 0


def check_cases(
    jobs: dict[str, Any], rank: int, ranks: int, split: tuple[int, int], cases: list[Any]
) -> list[str]:
    """Cases of one split on this rank."""
    from tools.attention_grid import make_groups, run_in_groups

    if "groups" not in jobs:
        jobs["groups"] = make_groups(*split)
    return run_in_groups(cases, jobs["groups"])


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 if everything asked for was met."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="check correctness, time nothing")
    parser.add_argument("--full", action="store_true", help="with --check: the whole grid")
    parser.add_argument("--check-cases", type=int, default=40, help="cases per split")
    names = [row.name for row in rows(1)]
    parser.add_argument("--cases", nargs="+", choices=names, help="rows to time (default: all)")
    parser.add_argument("--no-speed", action="store_true", help="leave the timings out")
    parser.add_argument("--rounds", type=int, default=7, help="alternated runs per median")
    parser.add_argument("--ranks", type=int, default=2, help="ring size, and cores used")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "float64"), help="of q, k, v"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the packings and of the sample")
    parser.add_argument("--no-peers", action="store_true", help="time no other rings")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory table out")
    parser.add_argument("--memory-length", type=int, default=16384, help="tokens of that table")
    args = parser.parse_args(argv)
    if args.check:
        return 0 if check(args) else 1
    met = args.no_speed or speed(args)
    if not args.no_memory:
        memory(args)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
