"""Small real tokenizers, trained here on Python's own sources."""

import base64
import functools
import json
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import sentencepiece

from megatron.core.tokenizers.sentencepiece_training import (
    TrainingSettings,
    train_sentencepiece,
)


@functools.cache
def sources(megabytes: float = 1.0) -> tuple[str, ...]:
    """Real documents: modules of the standard library, about so much of them."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if text.strip():
            texts.append(text)
            size += len(text)
        if size > megabytes * 1e6:
            break
    return tuple(texts)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def sentencepiece_model(model_type: str = "bpe", **changes: Any) -> str:
    """Path of a model with the framework's own defaults, 1,500 pieces."""
    settings = TrainingSettings(vocab_size=1500, model_type=model_type, **changes)
    name = "-".join([model_type, *(f"{key}={value}" for key, value in sorted(changes.items()))])
    path = Path(_folder().name) / f"{name}.model"
    path.write_bytes(train_sentencepiece(list(sources(0.3)), settings))
    return str(path)


@functools.cache
def raw_sentencepiece_model(model_type: str, **options: Any) -> str:
    """Path of a model with the library's own defaults, changed by ``options``."""
    name = "-".join([model_type, *(f"{key}={value}" for key, value in sorted(options.items()))])
    prefix = Path(_folder().name) / f"raw-{name}"
    lines = [line for text in sources(0.3) for line in text.split("\n") if line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(prefix),
        vocab_size=1000,
        model_type=model_type,
        minloglevel=2,
        **options,
    )
    return f"{prefix}.model"


@functools.cache
def hugging_face_file() -> str:
    """Path of a byte-level BPE tokenizer.json whose largest id lies beyond its size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sources(0.3), trainer)
    tokenizer.add_tokens([AddedToken("<|tool|>", special=True)])
    folder = Path(_folder().name) / "hf"
    folder.mkdir()
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    settings = json.loads(path.read_text())
    settings["model"]["vocab"]["<|tool|>"] = 1999  # a gap before it, as real files have
    settings["added_tokens"][-1]["id"] = 1999
    path.write_text(json.dumps(settings))
    return str(path)


@functools.cache
def tiktoken_file() -> str:
    """Path of a rank file with the ranks of ``hugging_face_file``."""
    vocabulary = json.loads(Path(hugging_face_file()).read_text())["model"]["vocab"]
    letters = _letters()
    tokens = sorted((i, piece) for piece, i in vocabulary.items() if not piece.startswith("<|"))
    path = Path(_folder().name) / "small.tiktoken"
    with path.open("w") as file:
        for rank, (_, piece) in enumerate(tokens):
            data = bytes(letters[letter] for letter in piece)
            file.write(f"{base64.b64encode(data).decode()} {rank}\n")
    return str(path)


@functools.cache
def tekken_file() -> str:
    """Path of a tekken JSON with the ranks of ``tiktoken_file``, 10 special tokens before them."""
    from megatron.core.tokenizers.tiktoken_tokenizer import CL100K_PATTERN

    lines = Path(tiktoken_file()).read_text().split("\n")[:-1]
    vocabulary = [
        {"rank": int(line.split()[1]), "token_bytes": line.split()[0], "token_str": None}
        for line in lines
    ]
    config = {
        "pattern": CL100K_PATTERN,
        "default_vocab_size": len(lines) + 10 - 50,  # the last 50 ranks are not part of it
        "default_num_special_tokens": 10,
    }
    path = Path(_folder().name) / "tekken.json"
    path.write_text(json.dumps({"config": config, "vocab": vocabulary}))
    return str(path)


def _letters() -> dict[str, int]:
    """GPT-2's letters for bytes (byte-level BPE)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    letters.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return letters
