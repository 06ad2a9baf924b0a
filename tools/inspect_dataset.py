"""Look into pairs of token files: counts, document lengths, samples; check that they are sound.

  python tools/inspect_dataset.py --input out/books_text_document --png lengths.png
  python tools/inspect_dataset.py --input P --tokenizer-type SentencePieceTokenizer \\
      --tokenizer-model tokenizer.model --show 3

Opening checks both files against each other. With a tokenizer or --vocab-size every token is
read and must be below the vocabulary's size.

Exit codes: 0 sound; 1 files missing or damaged, or ids outside the vocabulary; 2 wrong
command line.
"""

import argparse
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing import inspection
from megatron.core.tokenizers import TOKENIZER_TYPES, Tokenizer, build_tokenizer
from tools.command import Parser, run, writable


def main() -> int:
    """Parse, open, show."""
    parser = _parser()
    args = parser.parse()
    parser.at_least(0, args, "show", "documents", "longer-than")
    parser.at_least(1, args, "max-tokens", "vocab-size")
    if args.png:
        writable("--png", args.png)
    tokenizer = None
    if args.tokenizer_type:
        tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    elif args.show or args.documents:
        raise ValueError(
            "--show and --documents need a tokenizer to decode with; give --tokenizer-type"
        )
    size = tokenizer.vocab_size if tokenizer else args.vocab_size
    lengths = {}
    for prefix in args.input:
        dataset = IndexedDataset(prefix.removesuffix(".idx").removesuffix(".bin"))
        print("\n".join(inspection.summary_lines(dataset)))
        each = lengths[os.path.basename(dataset.path_prefix)] = inspection.document_lengths(dataset)
        print("\n".join(["", *inspection.histogram_lines(inspection.length_histogram(each))]))
        rows = inspection.longer_than(each, args.longer_than)
        print("\n".join(["", *inspection.longer_lines(rows), ""]))
        if size is not None:
            _check_ids(dataset, size)
        if tokenizer is not None:
            _show(dataset, tokenizer, args)
    if args.png:
        from megatron.core.datasets.preprocessing.inspection_plot import plot_lengths

        plot_lengths(lengths, args.png)
        print(f"wrote {args.png}")
    return 0


def _check_ids(dataset: IndexedDataset, vocab_size: int) -> None:
    if dataset.dtype.kind not in "iu":
        raise ValueError(f"{dataset.path_prefix}.bin: holds {dataset.dtype}, not token ids")
    scan = inspection.scan_ids(dataset)
    if scan.smallest < 0 or scan.largest >= vocab_size:
        raise ValueError(
            f"{dataset.path_prefix}.bin: ids {scan.smallest}..{scan.largest} are not all inside "
            f"the vocabulary of {vocab_size}: the corpus was made with another tokenizer"
        )
    print(f"ids {scan.smallest}..{scan.largest}: all inside the vocabulary of {vocab_size:,}")


def _show(dataset: IndexedDataset, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    total = dataset.num_documents
    chosen = list(args.documents or ())
    if args.show:
        chosen += [total * place // args.show for place in range(min(args.show, total))]
    for number in sorted(set(chosen)):
        if not 0 <= number < total:
            raise ValueError(f"--documents {number} must be in 0..{total - 1}")
        tokens = dataset.get_document(number)
        text = tokenizer.detokenize(tokens[: args.max_tokens])
        cut = f", the first {args.max_tokens:,} shown" if len(tokens) > args.max_tokens else ""
        print(f"\n--- document {number}: {len(tokens):,} tokens{cut}\n{text}")


def _parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="P", help="Prefixes of pairs of files.")
    add("--png", metavar="FILE", help="Also draw the lengths.")
    add("--longer-than", nargs="+", type=int, metavar="L", help="Lengths of the second table.")
    add("--show", type=int, default=0, metavar="N", help="Decode N documents from all over.")
    add("--documents", nargs="+", type=int, metavar="I", help="Decode these documents.")
    add("--max-tokens", type=int, default=200, metavar="N", help="Tokens shown of a document.")
    add("--tokenizer-type", choices=TOKENIZER_TYPES)
    add("--tokenizer-model", metavar="FILE", help="Tokenizer file or folder.")
    add("--vocab-size", type=int, metavar="N", help="Ids must be below this.")
    return parser


if __name__ == "__main__":
    run(main)
