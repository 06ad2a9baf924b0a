"""Data parallelism and ZeRO over dpcp with FSDP2, and what happens to gradients afterwards."""

from megatron.core.distributed.clip import clip_gradients, gradient_norm
from megatron.core.distributed.finalize import finalize_gradients
from megatron.core.distributed.sharding import STRATEGIES, Sharding, shard_module

__all__ = [
    "STRATEGIES",
    "Sharding",
    "clip_gradients",
    "finalize_gradients",
    "gradient_norm",
    "shard_module",
]
