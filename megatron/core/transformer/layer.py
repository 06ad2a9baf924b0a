"""One transformer layer: pre-norm attention and pre-norm MLP on a residual stream.

    x = x + dropout(attention(input_layernorm(x)))
    x = x + dropout(mlp(pre_mlp_layernorm(x)))

Dropout's key says where its mask belongs; with sequence parallelism each tensor-parallel rank has
tokens of its own and draws its own mask, without it all of them hold the same activation and must
agree.
"""

import torch
from torch import nn

from megatron.core.config import ModelConfig
from megatron.core.context_parallel import KeptAttention
from megatron.core.tensor_parallel import DropoutKey, TensorParallel, dropout
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import make_norm


def hidden_dropout(
    x: torch.Tensor, p: float, key: DropoutKey | None, tp: TensorParallel, *, layer: int, site: str
) -> torch.Tensor:
    """Dropout on the residual stream [s (/ tp), B, H]; none without a key."""
    if key is None or p == 0.0:
        return x
    rank = tp.rank if tp.shards_sequence else 0
    return dropout(x, p, key.at(layer=layer, site=site, tp=rank))


class TransformerLayer(nn.Module):
    """Layer ``layer_number`` (global, from 0) on [s (/ tp), B, H].

    Args:
        config: the model.
        tp: tensor-parallel context.
        layer_number: global index of the layer, from 0.
        name: global name of the module.
    """

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, *, layer_number: int, name: str
    ) -> None:
        super().__init__()
        assert config.hidden_size
        self.layer_number, self.tp, self.p = layer_number, tp, config.hidden_dropout
        size, partial = config.hidden_size, tp.shards_sequence
        self.input_layernorm = make_norm(
            config, tp, name=f"{name}.input_layernorm", size=size, partial=partial
        )
        self.self_attention = SelfAttention(
            config, tp, layer_number=layer_number, name=f"{name}.self_attention"
        )
        self.pre_mlp_layernorm = make_norm(
            config, tp, name=f"{name}.pre_mlp_layernorm", size=size, partial=partial
        )
        self.mlp = MLP(config, tp, name=f"{name}.mlp")

    def forward(
        self,
        x: torch.Tensor,
        inputs: LayerInputs,
        kept: KeptAttention | None = None,
        checkpointed_outside: bool = False,
    ) -> torch.Tensor:
        """[s (/ tp), B, H] -> the same.

        Args:
            x: the residual stream.
            inputs: what the layers share of this micro-batch.
            kept: where full recompute keeps attention's out and lse.
            checkpointed_outside: a checkpoint around this call decides what is saved.
        """
        attended = self.self_attention(
            x,
            self.input_layernorm,
            inputs,
            kept=kept,
            checkpointed_outside=checkpointed_outside,
        )
        x = x + self._dropout(attended, inputs, "attention_output")
        transformed = self.mlp(x, self.pre_mlp_layernorm, checkpointed_outside=checkpointed_outside)
        return x + self._dropout(transformed, inputs, "mlp_output")

    def _dropout(self, x: torch.Tensor, inputs: LayerInputs, site: str) -> torch.Tensor:
        key = inputs.dropout
        return hidden_dropout(x, self.p, key, self.tp, layer=self.layer_number, site=site)
