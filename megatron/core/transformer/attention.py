"""Self-attention: projections, QK-norm, RoPE, the plan of context-parallel attention, projection.

Multi-head, grouped-query (arXiv 2305.13245) and multi-query attention are one code:
``num_kv_heads`` of 1 to the number of query heads. Tensor parallelism gives each rank whole
heads. With fewer KV heads than tp ranks, the KV projection is replicated, each rank computes the
one head its queries use, and its gradient is summed over tp
(``ColumnParallelLinear(blocks=...)``).

Names and layouts do not depend on tp: ``linear_q`` [heads * D, H]; ``linear_kv`` [kv * 2 * D, H],
rows of KV head i being [k_i; v_i], so that contiguous pieces hold whole heads. One fused QKV
tensor cannot be cut over more ranks than KV heads, which is why there are two; they share one
all-gather forward and one reduction backward.

Legend: s local sequence, B batch, H hidden, D head dim, h / kv local query / KV heads.
Cost: saves x (a shard of it under sequence parallelism), and q, k, v, out, lse in the plan.
It knows no group and no mask: who holds which keys is the plan's business.
"""

import torch
from torch import nn

from megatron.core.config import ModelConfig
from megatron.core.context_parallel import KeptAttention
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    NormalInit,
    RowParallelLinear,
    TensorParallel,
    column_parallel,
)
from megatron.core.transformer.heads import place_heads, place_key_value
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.recompute import after_norm, recomputes


def local_heads(config: ModelConfig, tp_size: int) -> tuple[int, int]:
    """(query heads, KV heads) of one tensor-parallel rank.

    Raises:
        ValueError: tp does not divide the query heads, or tp and the KV heads don't divide
            one another.
    """
    assert config.num_attention_heads
    heads, kv_heads = config.num_attention_heads, config.num_kv_heads
    if heads % tp_size:
        raise ValueError(
            f"--num-attention-heads {heads} must be a multiple of --tensor-model-parallel-size "
            f"{tp_size}"
        )
    if heads % kv_heads:
        raise ValueError(f"--num-query-groups {kv_heads} must divide --num-attention-heads {heads}")
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ValueError(
            f"--num-query-groups {kv_heads} and --tensor-model-parallel-size {tp_size}: one must "
            "be a multiple of the other"
        )
    return heads // tp_size, max(1, kv_heads // tp_size)


class SelfAttention(nn.Module):
    """Norm and causal self-attention on [s (/ tp), B, H].

    Args:
        config: heads, biases, QK-norm, dropout.
        tp: tensor-parallel context.
        layer_number: global index of the layer, from 0.
        name: global name of the module.

    Raises:
        ValueError: see :func:`local_heads`.
    """

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, *, layer_number: int, name: str
    ) -> None:
        super().__init__()
        assert config.hidden_size and config.num_attention_heads and config.num_layers
        self.heads, self.kv_heads = local_heads(config, tp.size)
        self.head_dim, self.layer_number, self.tp = config.head_dim, layer_number, tp
        self.dropout = config.attention_dropout
        self.discard_norm = recomputes(config, "layernorm")
        hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
        init = NormalInit(config.init_method_std)
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.linear_q = ColumnParallelLinear(
            hidden, width, tp, name=f"{name}.linear_q", init=init, bias=qkv_bias
        )
        self.linear_kv = ColumnParallelLinear(
            hidden,
            2 * config.num_kv_heads * self.head_dim,
            tp,
            name=f"{name}.linear_kv",
            init=init,
            bias=qkv_bias,
            blocks=config.num_kv_heads,
        )
        self.linear_proj = RowParallelLinear(
            width,
            hidden,
            tp,
            name=f"{name}.linear_proj",
            init=NormalInit(config.init_method_std / (2 * config.num_layers) ** 0.5),
            bias=config.add_bias_linear,
        )
        self.q_layernorm: nn.Module | None = None
        self.k_layernorm: nn.Module | None = None
        if config.qk_layernorm:  # each rank norms its own heads: the weight gradient is a part
            self.q_layernorm, self.k_layernorm = (
                make_norm(config, tp, name=f"{name}.{which}", size=self.head_dim, partial=True)
                for which in ("q_layernorm", "k_layernorm")
            )

    def forward(
        self,
        x: torch.Tensor,
        norm: nn.Module,
        inputs: LayerInputs,
        *,
        kept: KeptAttention | None,
        checkpointed_outside: bool,
    ) -> torch.Tensor:
        """``attention(norm(x))``.

        Args:
            x: [s (/ tp), B, H].
            norm: applied first.
            inputs: the micro-batch's plan, table and dropout.
            kept: cell of attention's out and lse, for full recompute.
            checkpointed_outside: a checkpoint around this call decides what is saved.
        """
        query, key_value = after_norm(
            norm,
            x,
            lambda y: column_parallel(y, self.linear_q, self.linear_kv),
            discard=self.discard_norm and not checkpointed_outside,
        )
        length, batch = query.shape[:2]
        q = query.view(length, batch, self.heads, self.head_dim)
        kv = key_value.view(length, batch, self.kv_heads, 2, self.head_dim)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            key, value = kv.unbind(3)
            q = place_heads(self.q_layernorm(q), inputs.rotary)
            k, v = place_heads(self.k_layernorm(key), inputs.rotary), place_heads(value, None)
        else:
            q = place_heads(q, inputs.rotary)
            k, v = place_key_value(kv, inputs.rotary)
        out, _ = inputs.plan(
            q,
            k,
            v,
            layer_number=self.layer_number,
            dropout_seed=self._dropout_seed(inputs),
            kept=kept,
        )
        return self.linear_proj(out.transpose(0, 1).reshape(length, batch, -1))

    def _dropout_seed(self, inputs: LayerInputs) -> int | None:
        """A seed that the context-parallel ranks share: the mask is made from global positions."""
        if inputs.dropout is None or self.dropout == 0.0:
            return None
        key = inputs.dropout.at(layer=self.layer_number, site="attention", cp=0, tp=self.tp.rank)
        return key.to_seed()
