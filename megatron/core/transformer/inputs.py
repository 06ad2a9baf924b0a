"""What every layer needs to know of the micro-batch, made once for all of them."""

import dataclasses
from typing import Any

from megatron.core.tensor_parallel import DropoutKey
from megatron.core.transformer.rotary import RotaryTable


@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """Plan of attention, rotary table and dropout of one micro-batch.

    Not a pytree on purpose: FSDP2 casts the tensors that it finds in a module's arguments to its
    compute type, which would round the fp32 table to bf16.
    """

    plan: Any
    """``plan(q, k, v, layer_number=, dropout_seed=, kept=) -> (out, lse)``: see
    ``context_parallel.prepare_attention``; q [B, s, h, D], k and v [B, s, kv, D]."""
    rotary: RotaryTable | None = None
    """cos and sin of the local positions; None without RoPE."""
    dropout: DropoutKey | None = None
    """Where in the run and in the grid this micro-batch is; None = no dropout."""
