"""Ulysses here against DeepSpeed's ``DistributedAttention``: outputs and all gradients."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron.core.context_parallel import context_parallel_attention, make_layout
from tests.peers.compare import differences, inputs, leaves, report, run_ranks

DIM = 16


def local_attention(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    """Dense causal attention of [B, S, heads, D], whatever KV heads arrive."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def compare(rank: int, world: int, heads: int, kv_heads: int, length: int) -> dict[str, float]:
    """One case on one rank."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    tensors = inputs(length, heads, kv_heads, DIM)
    layout = make_layout("contiguous", length, 1, world)
    at = layout.positions(0, rank)
    grad_out = tensors[3][:, at].contiguous()

    def run(attend: Any) -> list[torch.Tensor]:
        mine = leaves(tensors, at)
        out = attend(*mine)
        return [out.detach(), *torch.autograd.grad(out, mine, grad_out)]

    ours = run(
        lambda q, k, v: context_parallel_attention(
            q, k, v, layout=layout, ulysses_group=dist.group.WORLD, cp_comm_type="a2a"
        )
    )
    peer = DistributedAttention(local_attention, dist.group.WORLD, scatter_idx=2, gather_idx=1)
    theirs = run(lambda q, k, v: peer(q, k, v, batch_dim_idx=0))
    return differences(ours, theirs)


if __name__ == "__main__":
    report(
        {
            f"ulysses {world}, heads {heads}:{kv}, {length} tokens": run_ranks(
                world, compare, heads, kv, length
            )
            for world, heads, kv, length in ((2, 8, 8, 64), (4, 8, 8, 128), (2, 8, 2, 64))
        }
    )
