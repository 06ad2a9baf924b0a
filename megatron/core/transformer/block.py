"""The layers of one pipeline stage, and which of them are recomputed.

Layers are kept in a ``ModuleDict`` keyed by their global index, so parameter names are global and
checkpoints of any pipeline split fit any other. A layer's parameters get their values when it is
built, and ``shard_fn`` (FSDP) may shard it before the next one is: the peak is one whole layer.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from megatron.core.config import ModelConfig
from megatron.core.context_parallel import KeptAttention
from megatron.core.tensor_parallel import TensorParallel
from megatron.core.transformer.inputs import LayerInputs
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.recompute import checkpointed, recompute_spans


class TransformerBlock(nn.Module):
    """``layers`` and, on the last stage, ``final_layernorm``; [s (/ tp), B, H] -> the same.

    Args:
        config: the model.
        tp: tensor-parallel context.
        layer_ids: global indices of the layers of this stage, ascending.
        final_norm: whether the stage ends the model.
        name: global name of the module.
        shard_fn: called with each layer as soon as it is built.
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TensorParallel,
        *,
        layer_ids: Sequence[int],
        final_norm: bool,
        name: str,
        shard_fn: Callable[[nn.Module], object] | None = None,
    ) -> None:
        super().__init__()
        assert config.hidden_size
        self.spans = recompute_spans(len(layer_ids), config)
        self.keep_attention = not config.recompute_attention
        self.layers = nn.ModuleDict()
        for index in layer_ids:
            layer = TransformerLayer(config, tp, layer_number=index, name=f"{name}.layers.{index}")
            if shard_fn is not None:
                shard_fn(layer)
            self.layers[str(index)] = layer
        self.final_layernorm: nn.Module | None = None
        if final_norm:
            self.final_layernorm = make_norm(
                config,
                tp,
                name=f"{name}.final_layernorm",
                size=config.hidden_size,
                partial=tp.shards_sequence,
            )

    def forward(self, x: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        """Run the stage's layers on ``x``."""
        layers = list(self.layers.values())
        for span in self.spans:
            members = layers[span.start : span.stop]
            if span.recompute and torch.is_grad_enabled():
                x = self._recomputed(x, members, inputs)
            else:
                for layer in members:
                    x = layer(x, inputs)
        return x if self.final_layernorm is None else self.final_layernorm(x)

    def _recomputed(
        self, x: torch.Tensor, layers: Sequence[nn.Module], inputs: LayerInputs
    ) -> torch.Tensor:
        """A span that keeps its input, and attention's out and lse in cells of this call."""
        cells = [KeptAttention() if self.keep_attention else None for _ in layers]

        def run(x: torch.Tensor) -> torch.Tensor:
            for layer, kept in zip(layers, cells, strict=True):
                x = layer(x, inputs, kept, True)
            return x

        return checkpointed(run, x)
