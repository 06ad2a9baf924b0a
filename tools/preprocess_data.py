"""Texts to token files: PREFIX_KEY_document.bin and .idx, ready for --data-path.

  python tools/preprocess_data.py --input 'data/*.jsonl.zst' --output-prefix out/books \\
      --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod

Inputs: JSON lines (.jsonl, .json; also .gz, .zst), parquet, dataset folders, text files and
folders of them (each file one document); patterns and several inputs are read in order. Output
order is input order, so equal input gives equal bytes, whatever --workers is.

Text must be UTF-8; a byte order mark at a file's start is dropped, lone surrogates become U+FFFD
(counted), NUL and CRLF stay. Documents without any character but whitespace are skipped and
counted. Any other bad record ends the run, naming file and line, unless --skip-bad-lines.

Exit codes: 0 done; 1 bad data, file or tokenizer, or no document left; 2 wrong command line;
143 SIGTERM, 130 Ctrl-C. Unless it is 0, no file was written or replaced under a final name.
"""

import functools
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.datasets.preprocessing.pipeline import PreprocessSettings, preprocess
from megatron.core.datasets.preprocessing.shares import Share
from megatron.core.tokenizers import TOKENIZER_TYPES, build_tokenizer
from tools.command import Parser, cores, run


def main() -> int:
    """Parse, preprocess, report."""
    args = _parser().parse()
    settings = PreprocessSettings(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        skip_bad_lines=args.skip_bad_lines,
        workers=cores() if args.workers is None else args.workers,
        share=Share(args.shard_index, args.num_shards),
    )
    factory = functools.partial(
        build_tokenizer, args.tokenizer_type, args.tokenizer_model, args.vocab_size
    )
    report = preprocess(settings, factory, log=lambda line: print(line, file=sys.stderr))
    print("\n".join(report.lines()))
    return 0


def _parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="Files, patterns or folders.")
    add("--output-prefix", required=True, metavar="P", help="Writes P_KEY_document.bin/.idx.")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="Keys or columns of text.")
    add("--tokenizer-type", required=True, choices=TOKENIZER_TYPES)
    add("--tokenizer-model", metavar="FILE", help="Tokenizer file or folder.")
    add("--vocab-size", type=int, metavar="N", help="NullTokenizer: exactly this many ids.")
    add("--append-eod", action="store_true", help="End each document with the tokenizer's token.")
    add("--workers", type=int, metavar="N", help="Processes (default: the cores it may use).")
    add("--shard-index", type=int, default=0, metavar="I", help="This task of --num-shards.")
    add("--num-shards", type=int, default=1, metavar="N", help="Tasks that share the input.")
    add("--skip-bad-lines", action="store_true", help="Leave bad records out and count them.")
    parser.refuse("--partitions", "use --shard-index and --num-shards, then merge_datasets.py")
    parser.refuse("--split-sentences", "documents are kept whole")
    parser.refuse("--keep-newlines", "newlines are always kept")
    parser.refuse("--lang", "documents are not split into sentences")
    parser.refuse("--vocab-file", "give --tokenizer-type and --tokenizer-model")
    parser.refuse("--merge-file", "give --tokenizer-type and --tokenizer-model")
    parser.refuse("--keep-sequential-samples", "order is always kept; leave the flag out")
    parser.refuse("--log-interval", "progress is shown by time; leave the flag out")
    return parser


if __name__ == "__main__":
    run(main)
