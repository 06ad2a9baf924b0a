"""What a training script hands to ``pretrain``: the model, the data and the loss's scale.

``pretrain_gpt.py`` passes the functions of this module's types for a GPT; another model with
the same calling convention takes other functions and the rest stays.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.config import ModelConfig, RunConfig
from megatron.core.datasets import DocumentSource


class ModelProvider(Protocol):
    """Builds one pipeline chunk of the model."""

    def __call__(
        self,
        config: ModelConfig,
        *,
        tp_mesh: DeviceMesh | None,
        sequence_parallel: bool,
        layer_ids: Sequence[int],
        pre_process: bool,
        post_process: bool,
        seed: int,
        shard_fn: Callable[[nn.Module], object] | None,
        device: torch.device | str,
    ) -> nn.Module:
        """A module called as ``chunk(x, batch, dropout_key=key)``.

        It returns hidden states, or with ``post_process`` the SUM of the token losses. Its
        parameter names are global, it calls ``shard_fn`` on each finished layer, and it has
        ``set_rope`` if its positions are rotary.
        """
        ...


class DataProvider(Protocol):
    """Opens the documents of one part (``train``, ``valid``, ``test``) of a run or stage."""

    def __call__(
        self,
        config: RunConfig,
        part: str,
        *,
        eod_token: int | None,
        data_path: tuple[str, ...] | None,
        long_document_upsampling: tuple[str, ...] | None,
    ) -> DocumentSource | None:
        """The source, or None if the flags give this part no data."""
        ...


LossProvider = Callable[[int], float]
"""From the loss tokens of a global batch to the factor on its sum of token losses."""


Say = Callable[[str], None]
"""Writes lines to the log on rank 0."""

Record = dict[str, Any]
