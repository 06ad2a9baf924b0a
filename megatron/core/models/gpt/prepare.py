"""From a batch to one that the model can run: the attention plan of its micro-batch.

Who sees which keys, which tasks each kernel call gets and what travels between ranks depends on
the layout and on the documents of the rows alone, not on the layer: it is worked out once per
micro-batch and used by every layer and every recompute. Costs some milliseconds of host time.
"""

import torch
import torch.distributed as dist

from megatron.core.collectives import group_size
from megatron.core.config import ModelConfig
from megatron.core.context_parallel import Workspace, make_layout, prepare_attention
from megatron.core.packed_batch import PackedBatch
from megatron.core.transformer.attention import local_heads


def compute_dtype(config: ModelConfig) -> torch.dtype:
    """The type of activations: bf16 with ``--bf16``, else that of the parameters."""
    return torch.bfloat16 if config.bf16 else params_dtype(config)


def params_dtype(config: ModelConfig) -> torch.dtype:
    """The type that parameters are stored in."""
    names = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
    return names[config.params_dtype or "float32"]


def prepare_batch(
    batch: PackedBatch,
    config: ModelConfig,
    *,
    ring_group: dist.ProcessGroup | None = None,
    ulysses_group: dist.ProcessGroup | None = None,
    tp_size: int = 1,
    cp_comm_type: str = "auto",
    dtype: torch.dtype | None = None,
    training: bool = True,
    workspace: Workspace | None = None,
    check_iteration: int | None = None,
) -> PackedBatch:
    """Fill ``batch.attention_plan`` in place, for one micro-batch, and return the batch.

    Every rank of the two groups must call it, with the same rows.

    Args:
        batch: on the device it will run on; ``layout`` None means the whole row is here.
        config: heads, window, dropout, attention backend.
        ring_group: context-parallel ranks that split the sequence during attention; None (or
            one rank) for no communication on that axis.
        ulysses_group: ranks that trade sequence for heads; the same.
        tp_size: tensor-parallel size; the plan is for one rank's heads.
        cp_comm_type: ``--cp-comm-type``.
        dtype: type of q, k and v; None: :func:`compute_dtype`.
        training: False leaves attention dropout out.
        workspace: the process's one, so that buffers and equal plans are used again.
        check_iteration: the iteration's number, if its transfers are to be checked
            (``--cp-check-interval``).

    Raises:
        ValueError: the batch's length doesn't fit its layout and the groups, or the heads
            don't fit the parallel sizes.
    """
    layout = batch.layout
    if layout is None:
        layout = make_layout("contiguous", batch.seq_length, 1)
    _check_length(batch, ring_group, ulysses_group)
    heads, kv_heads = local_heads(config, tp_size)
    batch.attention_plan = prepare_attention(
        layout=layout,
        cu_seqlens=batch.cu_seqlens,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.head_dim,
        ring_group=ring_group,
        ulysses_group=ulysses_group,
        window=config.window_size,
        cp_comm_type=cp_comm_type,
        backend=config.attention_backend,
        dropout_p=config.attention_dropout if training else 0.0,
        dtype=dtype or compute_dtype(config),
        device=batch.tokens.device,
        workspace=workspace,
        check_iteration=check_iteration,
    )
    return batch


def _check_length(
    batch: PackedBatch,
    ring_group: dist.ProcessGroup | None,
    ulysses_group: dist.ProcessGroup | None,
) -> None:
    ring, ulysses = group_size(ring_group), group_size(ulysses_group)
    expected = batch.seq_length // (ring * ulysses)
    if batch.tokens.shape[1] != expected:
        raise ValueError(
            f"the batch has {batch.tokens.shape[1]} tokens a row; --seq-length "
            f"{batch.seq_length} over ring size {ring} and ulysses size {ulysses} makes "
            f"{expected}: pass the groups that the batch was cut for"
        )
