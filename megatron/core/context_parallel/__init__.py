"""Context-parallel attention: layouts, tasks, kernels, communication."""

from megatron.core.context_parallel.layout import Layout, make_layout

__all__ = ["Layout", "make_layout"]
