"""Corpora, packing and the tokenizer."""

import dataclasses

from megatron.core.config.flags import flag


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read and how documents become rows."""

    data_path: tuple[str, ...] | None = flag(
        None, "Prefix, or weight prefix weight prefix ...", nargs="*"
    )
    train_data_path: tuple[str, ...] | None = flag(None, "Training data alone.", nargs="*")
    valid_data_path: tuple[str, ...] | None = flag(None, "Validation data alone.", nargs="*")
    test_data_path: tuple[str, ...] | None = flag(None, "Test data alone.", nargs="*")
    split: str = flag(
        "969,30,1", "Shares of documents for train, validation, test from --data-path."
    )
    packing: str = flag(
        "concat",
        "How documents fill rows: cut at row ends, or best-fit without cutting.",
        choices=("concat", "best-fit"),
    )
    long_document_upsampling: tuple[str, ...] | None = flag(
        None,
        "Weights by document length: MIN_TOKENS:WEIGHT ... (e.g. 16384:2 65536:4).",
        nargs="+",
    )
    reset_position_ids: bool = flag(True, "Positions start at 0 in each document.")
    reset_attention_mask: bool = flag(True, "Documents of a row don't see each other.")
    eod_mask_loss: bool = flag(False, "No loss where the input is the end-of-document token.")
    data_cache_path: str | None = flag(
        None, "Accepted for Megatron's scripts; there is no index to cache.", metavar="DIR"
    )
    num_workers: int = flag(2, "Background readers per rank (0: read in the step).")
    mock_data: bool = flag(False, "Made-up documents instead of --data-path.")


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """How text becomes tokens; training needs its size and end-of-document id."""

    tokenizer_type: str | None = flag(
        None,
        "Tokenizer.",
        choices=(
            "SentencePieceTokenizer",
            "HuggingFaceTokenizer",
            "TikTokenizer",
            "ByteTokenizer",
            "NullTokenizer",
        ),
    )
    tokenizer_model: str | None = flag(None, "Tokenizer file or folder.", metavar="FILE")
