"""Corpora, the document stream, packing and batches.

files -> IndexedDataset -> Component, StreamReader -> RowPlanner -> RowReader -> PackedBatch
         one corpus        blended, shuffled order    which pieces   this rank's
                                                      fill a row     share
"""

from megatron.core.datasets.batch_loader import BatchLoader
from megatron.core.datasets.blend import parse_blend, parse_split, parse_upsampling
from megatron.core.datasets.corpus import MockCorpus
from megatron.core.datasets.document_source import (
    DocumentSource,
    build_document_source,
    source_from_config,
)
from megatron.core.datasets.index_format import DatasetError, merged_dtype, token_dtype
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder

__all__ = [
    "BatchLoader",
    "DatasetError",
    "DocumentSource",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "MockCorpus",
    "build_document_source",
    "merged_dtype",
    "parse_blend",
    "parse_split",
    "parse_upsampling",
    "source_from_config",
    "token_dtype",
]
