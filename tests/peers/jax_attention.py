"""Outputs and gradients of JAX's ``ringattention`` as an .npz file; runs in JAX's environment.

python jax_attention.py INPUTS.npz OUTPUTS.npz RING
"""

import os
import sys

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[3]}"

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.shard_map import shard_map
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ringattention import ringattention


def main(source: str, target: str, ring: int) -> None:
    """Run the ring of the package's authors over ``ring`` host devices."""
    given = np.load(source)
    mesh = Mesh(np.array(jax.devices()[:ring]), ("sp",))
    chunk = int(given["q"].shape[1]) // ring // 2
    attend = functools.partial(
        ringattention,
        axis_name="sp",
        float32_logits=True,
        cache_idx=None,
        blockwise_kwargs={
            "causal_block_size": 1,
            "deterministic": True,
            "dropout_rng": None,
            "attn_pdrop": 0.0,
            "query_chunk_size": chunk,
            "key_chunk_size": chunk,
            "dtype": jnp.float32,
            "policy": jax.checkpoint_policies.nothing_saveable,
            "precision": jax.lax.Precision.HIGHEST,
            "prevent_cse": True,
        },
    )
    rows = P(None, "sp", None, None)
    sharded = shard_map(
        attend,
        mesh=mesh,
        in_specs=(rows, rows, rows, P(None, None, None, None), P(None, None)),
        out_specs=rows,
        check_rep=False,
    )
    length = given["q"].shape[1]
    bias = jnp.zeros((1, 1, 1, length), dtype=jnp.float32)
    segments = jnp.asarray(given["segments"])

    def value(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return sharded(q, k, v, bias, segments)

    out, pull = jax.vjp(value, *(jnp.asarray(given[name]) for name in ("q", "k", "v")))
    grads = pull(jnp.asarray(given["grad_out"]))
    names = ("out", "dq", "dk", "dv")
    np.savez(target, **{n: np.asarray(x) for n, x in zip(names, (out, *grads), strict=True)})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
