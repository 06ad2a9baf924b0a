"""Make a corpus of the synthetic passkey mix: documents in which a long context pays.

  python tools/make_passkey_data.py --output-prefix out/passkey --documents 20000 --lengths 256 1024

Writes out/passkey.bin and .idx, ready for --data-path with --tokenizer-type NullTokenizer and the
same --vocab-size. A document's length is drawn from --lengths. Each document tells facts and asks
for them again, between random words; see megatron/training/long_context_eval/passkey_mix.py.

Exit codes: 0 done; 1 files can't be written; 2 wrong command line.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

import numpy as np

from megatron.core.datasets import IndexedDatasetBuilder, token_dtype
from megatron.training.long_context_eval.passkey_mix import PasskeyMix
from tools.command import Parser, run


def main() -> int:
    """Parse, draw, write."""
    parser = _parser()
    args = parser.parse()
    parser.at_least(1, args, "documents", "lengths")
    parser.at_least(0, args, "seed")
    mix = PasskeyMix(args.vocab_size, args.facts, asked=args.asked)
    rng = np.random.default_rng(args.seed)
    total = 0
    with IndexedDatasetBuilder(args.output_prefix, token_dtype(mix.vocab_size)) as builder:
        for length in rng.choice(args.lengths, args.documents):
            builder.add_document(mix.document(rng, int(length)))
            total += int(length)
    print(
        f"wrote {args.output_prefix}.bin and .idx: {args.documents:,} documents, {total:,} tokens"
    )
    return 0


def _parser() -> Parser:
    parser = Parser(__doc__)
    add, mix = parser.add_argument, PasskeyMix()
    add("--output-prefix", required=True, metavar="P", help="Path without extension.")
    add("--documents", type=int, required=True, metavar="N")
    add("--lengths", type=int, nargs="+", required=True, metavar="L", help="Tokens; drawn evenly.")
    add("--vocab-size", type=int, default=mix.vocab_size)
    add("--facts", type=int, default=mix.facts, help="Facts that a document may tell.")
    add("--asked", type=float, default=mix.asked, help="Share of pieces that tell or ask a fact.")
    add("--seed", type=int, default=1234)
    return parser


if __name__ == "__main__":
    run(main)
