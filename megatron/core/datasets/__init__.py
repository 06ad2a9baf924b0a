"""Corpora, the document stream, packing and batches."""

from megatron.core.datasets.index_format import DatasetError, merged_dtype, token_dtype
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder

__all__ = [
    "DatasetError",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "merged_dtype",
    "token_dtype",
]
