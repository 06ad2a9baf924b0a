"""GPT: embedding, transformer layers, output head; a whole model or one pipeline stage of it.

    tokens [B, s] -> embedding -> [s, B, H] -> decoder -> [s, B, H] -> head -> sum of token losses

s is this (ring, ulysses) rank's share of the row; with sequence parallelism hidden states are [s
/ tp, B, H]. The rotary table is made once per call from the batch's positions, the attention plan
once per micro-batch (``prepare_batch``); no layer makes its own.

Parameter names are global (layers by global index), and initial values depend on the seed and
that name: every (tp, cp, pp, dp) starts from the same model. With tied embeddings the last of
several stages holds a copy, ``output_layer.weight``, drawn under the name of the word embeddings;
whoever trains sums the gradients of the two.

The loss is a sum; dividing by the number of loss tokens of the global batch is the trainer's. It
does not: communicate between stages, own a process group besides tp, or know of FSDP
(``shard_fn``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.collectives import gather_along
from megatron.core.config import ModelConfig
from megatron.core.context_parallel import Workspace
from megatron.core.models.gpt.embedding import GPTEmbedding
from megatron.core.models.gpt.prepare import params_dtype, prepare_batch
from megatron.core.packed_batch import PackedBatch
from megatron.core.tensor_parallel import (
    DropoutKey,
    TensorParallel,
    lm_head_loss,
    lm_head_token_losses,
    local,
    vocab_parallel_weight,
)
from megatron.core.tensor_parallel.linear import column_parallel_weights
from megatron.core.transformer import LayerInputs, RotaryEmbedding, TransformerBlock

OUTPUTS = ("loss", "token_losses", "logits", "hidden")


class OutputLayer(nn.Module):
    """The output head's weight [padded vocabulary, H], rows cut over tp."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, *, name: str) -> None:
        super().__init__()
        assert config.vocab_size and config.hidden_size
        self.weight = vocab_parallel_weight(
            tp,
            f"{name}.weight",
            config.vocab_size,
            config.padded_vocab_size,
            config.hidden_size,
            config.init_method_std,
        )


class GPTModel(nn.Module):
    """A GPT or one pipeline stage of it.

    Args:
        config: the model; ``num_layers``, ``hidden_size``, ``num_attention_heads`` and
            ``vocab_size`` must be set.
        tp_mesh: 1-D mesh of the tensor-parallel ranks, or None.
        sequence_parallel: shard activations between tensor-parallel regions along the sequence.
        layer_ids: global indices of the layers here; None: all.
        pre_process: this stage has the embedding.
        post_process: this stage has the final norm and the head.
        seed: of the initial weights.
        shard_fn: called with each layer as soon as it is built and filled (FSDP).
        device: of the parameters; "meta" builds shapes without values.

    Raises:
        ValueError: sizes that tp does not divide, or a configuration that lacks a size.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp_mesh: DeviceMesh | None = None,
        sequence_parallel: bool = False,
        layer_ids: Sequence[int] | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        seed: int = 1234,
        shard_fn: Callable[[nn.Module], object] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(config)
        assert config.num_layers and config.vocab_size
        self.config, self.pre_process, self.post_process = config, pre_process, post_process
        self.vocab_size = config.vocab_size
        self.tp = TensorParallel(
            tp_mesh=tp_mesh,
            sequence_parallel=sequence_parallel,
            seed=seed,
            dtype=params_dtype(config),
            device=device or "cpu",
        )
        self.rotary = _rotary(config)
        self.workspace = Workspace()  # for batches that come without a plan
        self.embedding: GPTEmbedding | None = None
        if pre_process:
            self.embedding = GPTEmbedding(config, self.tp, name="embedding")
        self.decoder = TransformerBlock(
            config,
            self.tp,
            layer_ids=range(config.num_layers) if layer_ids is None else layer_ids,
            final_norm=post_process,
            name="decoder",
            shard_fn=shard_fn,
        )
        self.tied = not config.untie_embeddings_and_output_weights
        self.output_layer: OutputLayer | None = None
        if post_process and not (self.tied and pre_process):
            name = "embedding.word_embeddings" if self.tied else "output_layer"
            self.output_layer = OutputLayer(config, self.tp, name=name)

    def set_rope(
        self,
        rotary_base: float,
        scaling: Mapping[str, Any] | None = None,
        seq_length: int | None = None,
    ) -> None:
        """Change theta and scaling rule; the next micro-batch's table is made from them.

        Args:
            rotary_base: theta.
            scaling: the rule's mapping with Hugging Face's keys, or None.
            seq_length: length of the rows from now on, for rules that depend on it.

        Raises:
            ValueError: the model has no RoPE, or the rule is wrong.
        """
        if self.rotary is None:
            kind = self.config.position_embedding_type
            raise ValueError(
                f"--position-embedding-type {kind} has no RoPE to set; use rope, "
                "or remove the change"
            )
        self.rotary.set_rope(rotary_base, scaling, seq_length)

    def forward(
        self,
        x: torch.Tensor | None,
        batch: PackedBatch,
        *,
        dropout_key: DropoutKey | None = None,
        output: str = "loss",
    ) -> torch.Tensor:
        """Run the stage.

        Args:
            x: None on the first stage, else hidden states [s (/ tp), B, H].
            batch: with an attention plan, unless the whole row is here.
            dropout_key: where in the run and the grid (seed, iteration, micro-batch, dp, cp);
                needed in training mode with dropout, unused in evaluation mode.
            output: what the last stage returns: ``loss``, ``token_losses``, ``logits`` or
                ``hidden`` (what the head would get, to make logits at a few positions).

        Returns:
            Hidden states [s (/ tp), B, H]; with ``post_process`` the sum of the token losses, a
            scalar of at least fp32 equal on all tp ranks (or token_losses [B, s] without
            gradient, zero where there is no loss; or logits [B, s, vocabulary]; or hidden states).

        Raises:
            ValueError: a missing plan, key or x; token ids or positions out of range.
        """
        assert output in OUTPUTS, output
        if self.embedding is not None:
            dtype = self.embedding.word_embeddings.weight.dtype
        elif x is not None:
            dtype = x.dtype
        else:
            raise ValueError("a stage without pre_process needs the hidden states before it")
        dropping = self.training and output == "loss"
        inputs = self._layer_inputs(batch, dtype, dropout_key, dropping)
        if self.embedding is not None:
            x = self.embedding(batch, inputs.dropout)
        hidden = self.decoder(x, inputs)
        if not self.post_process or output == "hidden":
            return hidden
        return self._head(hidden, batch, output)

    def token_losses(self, batch: PackedBatch, x: torch.Tensor | None = None) -> torch.Tensor:
        """Loss of every token [B, s], 0 where it has none; no dropout, no gradient."""
        with torch.no_grad():
            return self(x, batch, output="token_losses")

    def logits(self, batch: PackedBatch, x: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, s, vocabulary], whole on every tp rank; no dropout. For small inputs."""
        return self(x, batch, output="logits")

    def output_weight(self) -> nn.Parameter:
        """The weight of the output head: its own, or the word embeddings'."""
        if self.output_layer is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight

    def _layer_inputs(
        self, batch: PackedBatch, dtype: torch.dtype, key: DropoutKey | None, dropping: bool
    ) -> LayerInputs:
        """What the layers share; checks that dropout has its key."""
        p = max(self.config.attention_dropout, self.config.hidden_dropout)
        if dropping and p > 0 and key is None:
            raise ValueError(
                "--hidden-dropout and --attention-dropout need a dropout_key in training; pass "
                "one, set both to 0, or call .eval()"
            )
        plan = batch.attention_plan
        if plan is None:
            if batch.tokens.shape[1] != batch.seq_length:
                raise ValueError(
                    "the batch holds a part of its row and has no attention plan; call "
                    "prepare_batch with the context-parallel groups first"
                )
            alone = PackedBatch(**{**vars(batch), "layout": None})
            plan = prepare_batch(
                alone,
                self.config,
                tp_size=self.tp.size,
                dtype=dtype,
                training=dropping,
                workspace=self.workspace,
            ).attention_plan
        table = None
        if self.rotary is not None:
            table = self.rotary.table(batch.position_ids, dtype)
        return LayerInputs(plan, table, key if dropping else None)

    def _head(self, hidden: torch.Tensor, batch: PackedBatch, output: str) -> torch.Tensor:
        weight, group = local(self.output_weight()), self.tp.group
        if output == "logits":
            (logits,) = column_parallel_weights(hidden, self.tp, [(weight, None)])
            whole = gather_along(logits, group, -1, replicated=True)
            return whole[..., : self.vocab_size].transpose(0, 1)
        head = lm_head_loss if output == "loss" else lm_head_token_losses
        return head(
            hidden,
            weight,
            batch.labels,
            host_labels=batch.on_host.labels,
            group=group,
            sequence_parallel=self.tp.shards_sequence,
            vocab_size=self.vocab_size,
            chunk_size=self.config.loss_chunk_size,
        )


def _rotary(config: ModelConfig) -> RotaryEmbedding | None:
    if config.position_embedding_type != "rope":
        return None
    return RotaryEmbedding(
        config.head_dim,
        rotary_percent=config.rotary_percent,
        rotary_base=config.rotary_base,
        scaling=config.rope_scaling,
    )


def _check_sizes(config: ModelConfig) -> None:
    for field in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        value = getattr(config, field)
        if value is None or value < 1:
            flag = "--" + field.replace("_", "-")
            raise ValueError(f"{flag} {value} must be at least 1; give it")
