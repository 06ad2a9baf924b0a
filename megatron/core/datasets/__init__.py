"""Corpora, the document stream, packing and batches.

files -> IndexedDataset -> Component, StreamReader -> RowPlanner -> RowReader -> PackedBatch
         one corpus        blended, shuffled order    which pieces   this rank's
                                                      fill a row     share

Names are imported on first use: reading and writing corpora needs no torch, so that tools and
their worker processes start in a tenth of the time.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "BatchLoader": "batch_loader",
    "DatasetError": "index_format",
    "DocumentSource": "document_source",
    "IndexedDataset": "indexed_dataset",
    "IndexedDatasetBuilder": "indexed_dataset_builder",
    "MockCorpus": "corpus",
    "build_document_source": "document_source",
    "merged_dtype": "index_format",
    "parse_blend": "blend",
    "parse_split": "blend",
    "parse_upsampling": "blend",
    "source_from_config": "document_source",
    "token_dtype": "index_format",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
