"""Packed ring attention here against JAX's ``ringattention`` (by Ring Attention's authors).

python compare_jax.py PYTHON_OF_JAX
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.context_parallel import context_parallel_attention, make_layout
from tests.peers.compare import differences, inputs, leaves, report, run_ranks

LENGTH, HEADS, DIM = 128, 4, 16
PACKINGS = {"one document": [0, LENGTH], "packed": [0, 5, 40, 41, 97, LENGTH]}


def compare(
    rank: int, world: int, bounds: list[int], theirs: dict[str, np.ndarray]
) -> dict[str, float]:
    """Ours on one rank against rows of the whole of theirs."""
    tensors = inputs(LENGTH, HEADS, HEADS, DIM)
    layout = make_layout("zigzag", LENGTH, world, 1, torch.tensor(bounds))
    at = layout.positions(rank)
    mine = leaves(tensors, at)
    out = context_parallel_attention(
        *mine,
        layout=layout,
        ring_group=dist.group.WORLD,
        cu_seqlens=torch.tensor(bounds),
        cp_comm_type="p2p",
    )
    grads = torch.autograd.grad(out, mine, tensors[3][:, at])
    wanted = [torch.from_numpy(theirs[name])[:, at] for name in ("out", "dq", "dk", "dv")]
    return differences([out.detach(), *grads], wanted)


def jax_results(python: str, bounds: list[int], ring: int) -> dict[str, np.ndarray]:
    """Run the peer in its environment."""
    q, k, v, grad_out = (x.numpy() for x in inputs(LENGTH, HEADS, HEADS, DIM))
    segments = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[None].astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "inputs.npz"), Path(folder, "outputs.npz")
        np.savez(source, q=q, k=k, v=v, grad_out=grad_out, segments=segments)
        script = Path(__file__).with_name("jax_attention.py")
        subprocess.run([python, script, source, target, str(ring)], check=True)
        return dict(np.load(target))


if __name__ == "__main__":
    report(
        {
            f"ring {ring}, {name}": run_ranks(
                ring, compare, bounds, jax_results(sys.argv[1], bounds, ring)
            )
            for ring in (2, 4)
            for name, bounds in PACKINGS.items()
        }
    )
