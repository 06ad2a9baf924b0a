"""The GPT model, the preparation of its batches and its FLOPs."""

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.prepare import prepare_batch

__all__ = ["GPTModel", "prepare_batch"]
