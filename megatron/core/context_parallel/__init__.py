"""Context-parallel attention: layouts, tasks, kernels, communication."""

from megatron.core.context_parallel.attention import context_parallel_attention
from megatron.core.context_parallel.autograd import KeptAttention
from megatron.core.context_parallel.integrity import IntegrityError, check_same_batch
from megatron.core.context_parallel.layout import Layout, make_layout
from megatron.core.context_parallel.plan import AttentionPlan, prepare_attention
from megatron.core.context_parallel.planned import AttentionStats
from megatron.core.context_parallel.workspace import Workspace

__all__ = [
    "AttentionPlan",
    "AttentionStats",
    "IntegrityError",
    "KeptAttention",
    "Layout",
    "Workspace",
    "check_same_batch",
    "context_parallel_attention",
    "make_layout",
    "prepare_attention",
]
