"""Rules of data and tokenizer: sources that exist, shares that add up."""

from collections.abc import Iterator
from pathlib import Path

from megatron.core.config.flags import flag_name
from megatron.core.context_extension.schedule_file import read_upsampling
from megatron.core.datasets.blend import parse_blend, parse_split
from megatron.core.datasets.index_format import DatasetError, check_header
from megatron.training.arguments.rules.facts import Facts

_NEEDS_MODEL = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "TikTokenizer")


def one_source(facts: Facts) -> Iterator[str]:
    """Data comes from one place: a blend to split, separate sets, or made-up documents."""
    data = facts.config.data
    separate = [
        name
        for name in ("train_data_path", "valid_data_path", "test_data_path")
        if getattr(data, name)
    ]
    first = f"{flag_name(separate[0])}" if separate else ""
    default = data.train_data_path or data.data_path
    of_stage = [stage.number for stage in facts.stages if stage.data_path not in (None, default)]
    if data.mock_data and of_stage:
        yield f"stage {of_stage[0]}: data_path and --mock-data are both given; keep one"
    if data.mock_data and (data.data_path or separate):
        yield f"--mock-data and {first or '--data-path'} are both given; keep one"
    elif data.data_path and separate:
        yield f"--data-path and {first} are both given; keep --data-path, or use the separate three"
    elif data.mock_data or data.data_path or data.train_data_path:
        return
    elif separate:
        yield f"{first} is given without --train-data-path; add that flag"
    elif not facts.stages or any(stage.data_path is None for stage in facts.stages):
        where = "".join(
            f"stage {stage.number}: " for stage in facts.stages if stage.data_path is None
        )
        yield (
            f"{where if facts.from_file else ''}there is no data; give --data-path PREFIX (made by "
            "tools/preprocess_data.py), or --mock-data"
        )


def _sources(facts: Facts) -> dict[tuple[str, ...], str]:
    """Each different blend, and how a message names it."""
    sources: dict[tuple[str, ...], str] = {}
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        paths = getattr(facts.config.data, name)
        if paths:
            sources.setdefault(tuple(paths), flag_name(name))
    for stage in facts.stages:
        if stage.data_path:
            sources.setdefault(stage.data_path, f"stage {stage.number}: data_path")
    return sources


def blends(facts: Facts) -> Iterator[str]:
    """Blends alternate weights and prefixes, and every prefix has its two files."""
    if facts.config.data.mock_data:
        return
    sources = _sources(facts)
    if not sources:
        return
    for paths, name in sources.items():
        try:
            prefixes, _ = parse_blend(paths, name)
        except ValueError as error:
            yield str(error)
            continue
        for prefix in prefixes:
            yield from _corpus(name, prefix)


def _corpus(name: str, prefix: str) -> Iterator[str]:
    """Both files of a corpus exist, and the index has a header and the size it says."""
    for end in (".bin", ".idx"):
        if not Path(prefix + end).is_file():
            bare = prefix.removesuffix(".bin").removesuffix(".idx")
            cure = f" (use {bare})" if bare != prefix else ""
            yield (
                f"{name} {prefix}: the file {prefix}{end} doesn't exist; give the prefix that "
                f"tools/preprocess_data.py wrote, without .bin or .idx{cure}"
            )
            return
    try:
        check_header(prefix + ".idx")
    except DatasetError as error:
        yield f"{name} {prefix}: {error}; write it again with tools/preprocess_data.py"


def split_shares(facts: Facts) -> Iterator[str]:
    """--split holds up to three shares, and training gets some."""
    split = facts.config.data.split
    try:
        shares = parse_split(split)
    except ValueError as error:
        yield str(error)
        return
    if not shares[0] > 0 and facts.config.data.data_path:
        yield f"--split {split} leaves nothing to train on; use e.g. 969,30,1"


def readers(facts: Facts) -> Iterator[str]:
    """Readers and upsampling weights."""
    data = facts.config.data
    if data.num_workers < 0:
        yield f"--num-workers {data.num_workers} must be at least 0; use 0 to read in the step"
    if data.long_document_upsampling is not None:
        try:
            read_upsampling(data.long_document_upsampling)
        except ValueError as error:
            yield f"--long-document-upsampling: {error}"


def tokenizer_given(facts: Facts) -> Iterator[str]:
    """The size of the vocabulary is known: from a tokenizer or from --vocab-size."""
    kind, model = facts.config.tokenizer.tokenizer_type, facts.config.tokenizer.tokenizer_model
    size = facts.config.model.vocab_size
    if kind is None and size is None:
        yield (
            "--tokenizer-type is missing; give the tokenizer that the data was made with, or "
            "NullTokenizer with --vocab-size"
        )
    if kind == "NullTokenizer" and size is None:
        yield "--tokenizer-type NullTokenizer needs --vocab-size; give the number of token ids"
    if kind in _NEEDS_MODEL and model is None:
        yield f"--tokenizer-type {kind} needs --tokenizer-model; give its file or folder"
    if kind not in _NEEDS_MODEL and model is not None:
        yield (
            f"--tokenizer-model {model} has no effect with --tokenizer-type {kind}; give one of "
            f"{', '.join(_NEEDS_MODEL)}"
        )


def tokenizer_exists(facts: Facts) -> Iterator[str]:
    """The tokenizer's file or folder is there. (Hugging Face takes ``owner/name`` too.)"""
    kind, model = facts.config.tokenizer.tokenizer_type, facts.config.tokenizer.tokenizer_model
    if kind not in _NEEDS_MODEL or model is None or Path(model).exists():
        return
    if kind == "HuggingFaceTokenizer" and model.count("/") <= 1 and model[0] not in "./~":
        if Path(model).suffix != ".json":
            return
    yield f"--tokenizer-model {model} doesn't exist; give the tokenizer's file or folder"


def loss_mask(facts: Facts) -> Iterator[str]:
    """Masking the loss at document ends needs an end-of-document token."""
    kind = facts.config.tokenizer.tokenizer_type
    if facts.config.data.eod_mask_loss and kind in (None, "NullTokenizer"):
        yield (
            "--eod-mask-loss needs a tokenizer with an end-of-document token, and NullTokenizer "
            "has none; choose another --tokenizer-type or remove it"
        )


RULES = (
    one_source,
    blends,
    split_shares,
    readers,
    tokenizer_given,
    tokenizer_exists,
    loss_mask,
)
