"""Megatron-style long-context pretraining."""
