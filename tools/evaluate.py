"""Evaluate checkpoints on long contexts: loss by position, and passkey retrieval.

  python tools/evaluate.py --load runs/first/checkpoints --output runs/first/evaluation
  python tools/evaluate.py --load short=runs/a/ck long=runs/b/ck --length 4096 \\
      --data-path data/books_text_document --passkey-lengths 1024 4096 --output out

The model's flags, its tokenizer and theta come from the checkpoint. Several checkpoints make one
table and one picture of each kind. Loss by position runs on held-out documents longer than
--length: those of --data-path, else the validation part of the (first) run's own data. Passkeys
are asked in English, or in the synthetic language of make_passkey_data for a NullTokenizer.

Writes position_loss.png, passkey.png, evaluation.txt and evaluation.json into --output.

Exit codes: 0 done; 1 checkpoint, data or sizes can't be used; 2 wrong command line.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

import torch

from megatron.core.datasets import DocumentSource, build_document_source, source_from_config
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.training.long_context_eval import position_loss, report, retrieval
from megatron.training.long_context_eval.checkpoint_model import LoadedModel, load_model
from megatron.training.long_context_eval.passkey_mix import PasskeyMix
from tools.command import Parser, run, writable
from tools.evaluation_pictures import draw_grids, draw_position_losses


def main() -> int:
    """Parse, load each model in turn, measure, write."""
    parser = _parser()
    args = parser.parse()
    _check(args, parser)
    named = _named(args.load, parser)
    writable("--output", os.path.join(args.output, "evaluation.txt"))
    losses: dict[str, position_loss.PositionLoss] = {}
    grids: dict[str, retrieval.RetrievalGrid] = {}
    trained: dict[str, int] = {}
    documents: list[Any] = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, folder in named.items():
        try:
            loaded = load_model(
                folder, iteration=args.ckpt_step, rotary_base=args.rotary_base, device=device
            )
        except CheckpointError as error:
            raise ValueError(str(error)) from None
        _say(name, loaded)
        trained[name] = loaded.stage.seq_length
        length = args.length or loaded.stage.seq_length
        if not args.no_position_loss:
            documents = documents or _documents(loaded, length, args)
            edges = position_loss.bucket_edges(len(documents[0]) - 1, args.buckets)
            losses[name] = position_loss.loss_by_position(loaded, documents, edges)
        if not args.no_passkey:
            grids[name] = retrieval.passkey_grid(
                loaded,
                _task(loaded),
                lengths=args.passkey_lengths or [loaded.stage.seq_length],
                depths=args.passkey_depths,
                trials=args.passkey_trials,
                seed=args.seed,
            )
    _write(losses, grids, trained, Path(args.output), args.title)
    return 0


def _check(args: argparse.Namespace, parser: Parser) -> None:
    counts = ("ckpt-step", "length", "documents", "buckets", "passkey-lengths", "passkey-trials")
    parser.at_least(1, args, *counts)
    parser.at_least(0, args, "seed")
    for depth in args.passkey_depths:
        if not 0 <= depth <= 1:
            parser.error(f"--passkey-depths {depth:g} must be between 0 (start) and 1 (end)")
    if args.no_position_loss and args.no_passkey:
        parser.error("--no-position-loss and --no-passkey leave nothing to do; remove one")


def _say(name: str, loaded: LoadedModel) -> None:
    print(
        f"{name}: {loaded.folder}, stage {loaded.stage.number} '{loaded.stage.name}', sequence "
        f"length {loaded.stage.seq_length}, theta {loaded.rotary_base:g}"
    )
    if loaded.note:
        print(f"{name}: {loaded.note}")


def _named(words: list[str], parser: Parser) -> dict[str, Path]:
    named: dict[str, Path] = {}
    for word in words:
        name, equals, folder = word.partition("=")
        if not equals or "/" in name:
            name, folder = Path(word).name, word
        if name in named:
            parser.error(f"--load {word}: the name {name} is given twice; write NAME=DIR")
        named[name] = Path(folder)
    return named


def _tokenizer(loaded: LoadedModel) -> Tokenizer:
    flags = loaded.config.tokenizer
    return build_tokenizer(
        flags.tokenizer_type or "NullTokenizer",
        flags.tokenizer_model,
        loaded.config.model.vocab_size,
    )


def _task(loaded: LoadedModel) -> retrieval.PasskeyTask:
    if loaded.config.tokenizer.tokenizer_type in (None, "NullTokenizer"):
        assert loaded.config.model.vocab_size is not None
        return retrieval.TokenTask(PasskeyMix(loaded.config.model.vocab_size))
    return retrieval.TextTask(_tokenizer(loaded).tokenize)


def _documents(loaded: LoadedModel, length: int, args: argparse.Namespace) -> list[Any]:
    config = loaded.config
    assert config.model.vocab_size is not None
    source: DocumentSource | None
    if args.data_path:
        source = build_document_source(args.data_path, vocab_size=config.model.vocab_size)
    else:
        source = source_from_config(
            config.data,
            "valid",
            seed=config.training.seed,
            vocab_size=config.model.vocab_size,
            eod_token=_tokenizer(loaded).eod,
            data_path=loaded.stage.data_path,
        )
    if source is None:
        raise ValueError(
            "the run has no validation data to measure loss by position on; give --data-path"
        )
    return position_loss.long_documents(source, length, args.documents)


def _write(
    losses: dict[str, position_loss.PositionLoss],
    grids: dict[str, retrieval.RetrievalGrid],
    trained: dict[str, int],
    folder: Path,
    title: str,
) -> None:
    tables = [report.position_table(losses)] if losses else []
    tables += [report.grid_table(name, grid) for name, grid in grids.items()]
    text = "\n\n".join(tables)
    print("\n" + text)
    folder.mkdir(parents=True, exist_ok=True)
    if losses:
        heading = title or "Loss by position on held-out documents"
        draw_position_losses(losses, trained, folder / "position_loss.png", title=heading)
    if grids:
        draw_grids(grids, folder / "passkey.png", title=title or "Passkey retrieval")
    (folder / "evaluation.txt").write_text(text + "\n", encoding="utf-8")
    values = json.dumps(report.as_json(losses, grids), indent=1)
    (folder / "evaluation.json").write_text(values + "\n", encoding="utf-8")
    print(f"\nwrote {folder}/")


def _parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--load", nargs="+", required=True, metavar="[NAME=]DIR", help="Folders of --save.")
    add("--ckpt-step", type=int, metavar="N", help="Iteration. Default: the latest.")
    add("--output", required=True, metavar="DIR", help="Folder for tables and pictures.")
    add("--rotary-base", type=float, metavar="T", help="Theta instead of the checkpoint's.")
    add("--title", default="", help="Of the pictures.")
    add("--no-position-loss", action="store_true", help="Leave the loss by position out.")
    add("--data-path", nargs="+", metavar="P", help="Held-out documents; all of them.")
    add("--length", type=int, metavar="L", help="Positions. Default: the stage's length.")
    add("--documents", type=int, default=64, metavar="N", help="At most this many documents.")
    add("--buckets", type=int, default=16, metavar="N", help="Buckets of positions.")
    add("--no-passkey", action="store_true", help="Leave the passkeys out.")
    add("--passkey-lengths", type=int, nargs="+", metavar="L", help="Default: the stage's.")
    add(
        "--passkey-depths", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="D",
        help="Where in the text the key stands: 0 at its start, 1 at its end.",
    )  # fmt: skip
    add("--passkey-trials", type=int, default=20, metavar="N", help="Trials of a cell.")
    add("--seed", type=int, default=0, help="Of the passkeys.")
    return parser


if __name__ == "__main__":
    run(main)
