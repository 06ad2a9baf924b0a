"""Integrity mode: a corrupted or stale buffer, and ranks with different batches, stop the run."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel import (
    IntegrityError,
    check_same_batch,
    integrity,
    make_layout,
    prepare_attention,
)
from megatron.core.context_parallel.channel import Pending
from megatron.core.context_parallel.integrity import Audit, checksum, seal
from tests.utils.ranks import run_ranks
from tools.attention_grid import make_groups

CASES = [(1, 3, "p2p"), (1, 3, "all_gather"), (2, 1, "a2a"), (2, 2, "a2a+p2p")]


def attend(
    rank: int, world: int, split: tuple[int, int, str], fault: str, phase: str, layer: int
) -> tuple[list[str], int]:
    """Messages raised in three layers' forward and backward on this rank, and bytes sent."""
    ulysses, ring, comm = split
    ring_group, ulysses_group = make_groups(ulysses, ring)
    layout = make_layout("zigzag", 24, ring, ulysses)
    plan = prepare_attention(
        layout=layout, cu_seqlens=None, num_heads=2, num_kv_heads=2, head_dim=8,
        ring_group=ring_group, ulysses_group=ulysses_group, cp_comm_type=comm,
        dtype=torch.float32, device="cpu", check_iteration=None if fault == "unchecked" else 40,
    )  # fmt: skip
    plain = Pending.wait
    armed = False
    earlier: list[torch.Tensor] = []

    def wait(self: Any) -> None:
        nonlocal armed
        checks, self._checks = self._checks, ()
        plain(self)
        for payload, *_ in checks:
            if armed and payload.numel():
                if fault == "flip":
                    payload.view(-1)[payload.numel() // 2] += 1e-3
                elif fault == "stale" and earlier:
                    payload.copy_(earlier[0].view(-1)[: payload.numel()].view_as(payload))
                elif fault == "swapped":
                    payload.copy_(payload.flip(0))
                armed = False
            elif payload.numel() and not earlier:
                earlier.append(payload.clone())
        for payload, sealed, stamp, peer, what in checks:
            self._audit.compare(payload, sealed, stamp, peer, what)

    Pending.wait = wait  # type: ignore[method-assign]
    messages = []
    torch.manual_seed(rank)
    for number in range(3):
        q, k, v = (torch.randn(1, layout.local_length, 2, 8).requires_grad_() for _ in range(3))
        here = rank == 1 and number == layer and fault != "unchecked"
        try:
            armed = here and phase == "forward"
            out, _ = plan(q, k, v, layer_number=number)
            armed = here and phase == "backward"
            out.sum().backward()
        except IntegrityError as error:
            messages.append(str(error))
            break
    return messages, plan.stats.bytes_sent


@pytest.mark.parametrize("split", CASES)
@pytest.mark.parametrize("fault", ["flip", "stale", "swapped"])
def test_bad_buffer_stops_every_rank(split: tuple[int, int, str], fault: str) -> None:
    phase = "backward" if fault == "flip" else "forward"
    answers = run_ranks(split[0] * split[1], attend, split, fault, phase, 1, timeout=60)
    for rank, (messages, _) in enumerate(answers):
        assert len(messages) == 1, (rank, messages)
        assert f"iteration 40, layer 1, {phase}" in messages[0]
    seen = answers[1][0][0]
    assert re.search(r"rank 1 received .* from rank \d", seen)
    assert all(
        "rank 1 reported a bad transfer" in m[0] for r, (m, _) in enumerate(answers) if r != 1
    )


@pytest.mark.parametrize("split", CASES)
def test_good_buffers_pass_and_payload_is_unchanged(split: tuple[int, int, str]) -> None:
    world = split[0] * split[1]
    checked = run_ranks(world, attend, split, "none", "forward", 1)
    plain = run_ranks(world, attend, split, "unchecked", "forward", 1)
    assert [m for m, _ in checked] == [[]] * world
    assert [b for _, b in checked] == [b for _, b in plain]


def test_checksum_sees_changes_and_order() -> None:
    torch.manual_seed(0)
    for kind in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        for size in (1, 2, 3, 1023, 1024, 5000):
            x = (torch.randn(size) * 10).to(kind)
            base = checksum(x)
            assert torch.equal(base, checksum(x.clone()))
            for at in {0, size // 2, size - 1}:
                y = x.clone()
                y[at] = y[at] + 1
                assert not torch.equal(base, checksum(y))
                if size > 1 and x[at] != x[at - 1]:
                    y = x.clone()
                    y[at], y[at - 1] = x[at - 1], x[at]
                    assert not torch.equal(base, checksum(y))
    assert not torch.equal(seal(torch.ones(3), 1), seal(torch.ones(3), 2))


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_checksum_sees_many_signs_and_swaps(kind: torch.dtype) -> None:
    """Sign bits are the top bits of words: a plain sum of words loses pairs of them."""
    torch.manual_seed(1)
    x = (torch.randn(4096) + 3).to(kind)
    base = checksum(x)
    for step, first in ((1, 0), (2, 1), (4, 3), (8, 7), (16, 15)):
        y = x.clone()
        y[first::step] *= -1
        assert not torch.equal(base, checksum(y)), (step, first)
    for near in (1, 2, 4, 8, 512, 1024, 2048):
        y = x.clone()
        y[7], y[7 + near] = 1.5, -1.5
        z = x.clone()
        z[7], z[7 + near] = -1.5, 1.5
        assert not torch.equal(checksum(y), checksum(z)), near
        y = x.clone()
        y[[7, 7 + near]] *= -1
        assert not torch.equal(base, checksum(y)), near
    assert not torch.equal(base, checksum(-x))
    assert not torch.equal(base, checksum(x.roll(1024)))
    assert not torch.equal(checksum(x[1:]), base)
    assert torch.equal(checksum(x[1:]), checksum(x[1:].clone()))  # whatever the offset


def test_checksum_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000)
    whole = checksum(x)
    monkeypatch.setattr(integrity, "_BLOCK", 64)
    assert torch.equal(whole, checksum(x))


def batches(rank: int, world: int, differs: int | None) -> str:
    group = dist.group.WORLD
    rows = [3, 4, 5] if rank != differs else [3, 4, 6]
    fields = {
        "sample_ids": rows, "cu_seqlens": [torch.tensor([0, 5, 8], dtype=torch.int32)],
        "seq_length": 8, "stage": None,
    }  # fmt: skip
    try:
        check_same_batch(fields, group, iteration=12)
    except IntegrityError as error:
        return str(error)
    return ""


def test_different_batches_stop_every_rank() -> None:
    assert run_ranks(3, batches, None) == [""] * 3
    for message in run_ranks(3, batches, 2):
        assert "sample_ids of ranks [2] differs from that of rank 0" in message
        assert "iteration 12" in message
    check_same_batch({"x": 1}, None, iteration=1)


def test_a_stamp_says_when_where_and_which() -> None:
    """A buffer sent again from an earlier step has the same contents: its stamp tells."""
    audit = Audit(3, 1, "forward")
    stamps = [
        audit.stamp("keys", 1),
        audit.stamp("keys", 2),
        audit.stamp("gradients", 1),
        Audit(4, 1, "forward").stamp("keys", 1),
        Audit(3, 2, "forward").stamp("keys", 1),
        Audit(3, 1, "backward").stamp("keys", 1),
    ]
    assert len(set(stamps)) == 6
    assert Audit(3, 1, "forward").stamp("keys", 1) == stamps[0], "the same on both sides"
    assert [audit.next_number(), audit.next_number()] == [1, 2]
    payload = torch.arange(6.0)
    audit.compare(payload, seal(payload, stamps[0]), stamps[0], peer=5, what="keys")
    assert audit.faults == []
    audit.compare(payload, seal(payload, stamps[3]), stamps[0], peer=5, what="keys")
    assert audit.faults == [(5, "keys")]


def attend_alone() -> float:
    plan = prepare_attention(
        layout=make_layout("contiguous", 8, 1), cu_seqlens=None, num_heads=1, num_kv_heads=1,
        head_dim=4, ring_group=None, ulysses_group=None, dtype=torch.float32, device="cpu",
        check_iteration=3,
    )  # fmt: skip
    return float(plan(*(torch.ones(1, 8, 1, 4) for _ in range(3)))[0].sum())


def test_one_rank_without_process_groups_checks_nothing() -> None:
    assert attend_alone() == 32.0


def uneven(rank: int, world: int, dtype: torch.dtype, head_dim: int, with_lse: bool) -> bool:
    """A checked call whose messages start at odd places of their buffers."""
    _, group = make_groups(world, 1)
    layout = make_layout("contiguous", 5 * world, 1, world)
    plan = prepare_attention(
        layout=layout, cu_seqlens=None, num_heads=5, num_kv_heads=5, head_dim=head_dim,
        ring_group=None, ulysses_group=group, dtype=dtype, device="cpu", check_iteration=3,
    )  # fmt: skip
    q, k, v = (torch.randn(1, 5, 5, head_dim).to(dtype).requires_grad_() for _ in range(3))
    out, _ = plan(q, k, v, return_lse=with_lse)
    torch.autograd.grad(out.sum(), (q, k, v))
    return True


@pytest.mark.parametrize(
    ("dtype", "head_dim", "with_lse"),
    [(torch.float32, 16, True), (torch.float32, 5, False), (torch.bfloat16, 6, False)],
)
def test_messages_at_any_offset(dtype: torch.dtype, head_dim: int, with_lse: bool) -> None:
    assert run_ranks(2, uneven, dtype, head_dim, with_lse) == [True, True]
