"""Ring attention here against ``ring-attention-pytorch``: outputs and all gradients.

Version 0.5.20 returns wrong dk and dv: its ``ring_pass`` gives (received, sent), which backward
unpacks as (dk, dv), and autograd then silently sums the surplus dim away. Taking the received
tensor, as is meant, is the one thing changed here; its arithmetic is its own.
"""

from typing import Any

import torch
import torch.distributed as dist
from ring_attention_pytorch import ring_flash_attention

from megatron.core.context_parallel import context_parallel_attention, make_layout
from tests.peers.compare import differences, inputs, leaves, report, run_ranks

HEADS, DIM = 4, 16

_ring_pass = ring_flash_attention.ring_pass


def received(passes: int, x: torch.Tensor) -> torch.Tensor:
    """What came in from the left neighbour."""
    return _ring_pass(passes, x)[0]


ring_flash_attention.ring_pass = received


def compare(rank: int, world: int, length: int, causal: bool) -> dict[str, float]:
    """One case on one rank; contiguous shards, which both know."""
    tensors = inputs(length, HEADS, HEADS, DIM)
    layout = make_layout("contiguous", length, world)
    at = layout.positions(rank)
    grad_out = tensors[3][:, at]

    def run(attend: Any) -> list[torch.Tensor]:
        mine = leaves(tensors, at)
        out = attend(*mine)
        return [out.detach(), *torch.autograd.grad(out, mine, grad_out)]

    ours = run(
        lambda q, k, v: context_parallel_attention(
            q, k, v, layout=layout, ring_group=dist.group.WORLD, causal=causal, cp_comm_type="p2p"
        )
    )
    theirs = run(
        lambda q, k, v: ring_flash_attention.ring_flash_attn(
            q, k, v, causal=causal, bucket_size=16, ring_reduce_col=True, ring_size=world
        )
    )
    return differences(ours, theirs)


if __name__ == "__main__":
    report(
        {
            f"ring {world}, {length} tokens, causal {causal}": run_ranks(
                world, compare, length, causal
            )
            for world, length, causal in ((2, 128, True), (4, 256, True), (2, 128, False))
        }
    )
