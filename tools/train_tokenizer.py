"""Train a SentencePiece model on a corpus: P.model.

  python tools/train_tokenizer.py --input 'data/*.jsonl.zst' --output-prefix out/tokenizer \\
      --vocab-size 32000

Reads what preprocess_data.py reads. The defaults keep every text as it is (decode gives it back):
no normalisation, bytes for unknown characters, all spaces kept. The one exception of every
SentencePiece model is U+2581, its own sign for the space.

Exit codes: 0 done; 1 bad data or no such vocabulary; 2 wrong command line.
"""

import os
import signal
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.datasets.preprocessing.texts import read_texts
from megatron.core.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron.core.tokenizers.sentencepiece_training import (
    TrainingSettings,
    draw_sample,
    train_sentencepiece,
    write_model,
)
from tools.command import Parser, cores, handle_signals, run


def main() -> int:
    """Parse, read, train, report."""
    args = _parser().parse()
    settings = TrainingSettings(
        vocab_size=args.vocab_size,
        model_type=args.model_type,
        character_coverage=args.character_coverage,
        normalization=args.normalization,
        add_dummy_prefix=args.add_dummy_prefix,
        byte_fallback=args.byte_fallback,
        split_digits=args.split_digits,
        eod_piece=args.eod_piece,
        user_defined_symbols=tuple(args.user_defined_symbols),
        sample_bytes=args.sample_bytes,
        threads=cores() if args.workers is None else args.workers,
        seed=args.seed,
    )
    texts = read_texts(args.input, tuple(args.json_keys), args.skip_bad_lines, _log)
    pieces = draw_sample(texts, settings.sample_bytes, settings.seed)
    _log(f"training on {sum(map(len, pieces)) / 1e6:,.2f} M characters")
    handle_signals(signal.SIG_DFL)  # nothing is half written, and the library can't be stopped
    model = train_sentencepiece(pieces, settings)
    path = args.output_prefix + ".model"
    write_model(model, path)
    _report(path, pieces)
    return 0


def _report(path: str, pieces: list[str]) -> None:
    tokenizer = SentencePieceTokenizer(path)
    sample = pieces[:: max(len(pieces) // 20, 1)]
    tokens = sum(len(tokenizer.tokenize(piece)) for piece in sample)
    size = sum(len(piece.encode()) for piece in sample)
    print(f"{path}: {tokenizer.vocab_size:,} pieces, end of document {tokenizer.eod}")
    print(f"{size / max(tokens, 1):.2f} bytes a token on its own sample")
    print("keeps every text" if tokenizer.is_lossless else f"changes {'; '.join(tokenizer.losses)}")


def _log(line: str) -> None:
    print(line, file=sys.stderr)


def _parser() -> Parser:
    parser = Parser(__doc__)
    add, default = parser.add_argument, TrainingSettings()
    add("--input", nargs="+", required=True, metavar="PATH", help="Files, patterns or folders.")
    add("--output-prefix", required=True, metavar="P", help="Writes P.model.")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="Keys or columns of text.")
    add("--vocab-size", type=int, default=default.vocab_size, metavar="N", help="Pieces in all.")
    add("--model-type", choices=("bpe", "unigram"), default=default.model_type)
    add("--character-coverage", type=float, default=default.character_coverage, metavar="SHARE")
    add(
        "--normalization",
        choices=("identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"),
        default=default.normalization,
        help="Anything but identity changes texts.",
    )
    add("--add-dummy-prefix", action="store_true", help="A space before each text, as Llama's.")
    add("--no-byte-fallback", dest="byte_fallback", action="store_false", help="Unknowns are lost.")
    add(
        "--no-split-digits",
        dest="split_digits",
        action="store_false",
        help="Pieces with numbers.",
    )
    add("--eod-piece", default=default.eod_piece, metavar="NAME", help="End of a document.")
    add("--user-defined-symbols", nargs="+", default=[], metavar="TEXT", help="Always one piece.")
    add("--sample-bytes", type=int, default=default.sample_bytes, metavar="N", help="Text at most.")
    add("--workers", type=int, metavar="N", help="Threads (default: the cores it may use).")
    add("--seed", type=int, default=default.seed, help="Of the sample.")
    add("--skip-bad-lines", action="store_true", help="Leave bad records out and count them.")
    return parser


if __name__ == "__main__":
    run(main)
