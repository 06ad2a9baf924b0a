"""All pairs of token files in a folder become one: P.bin and P.idx.

  python tools/merge_datasets.py --input shards --output-prefix out/books_text_document

Shards written with preprocess_data.py --num-shards are put in the order of their index, and a
missing shard is an error; other pairs go in natural order of their names (part2 before part10).
With --json-keys a b, pairs named ..._a_document and ..._b_document are merged apart, into
P_a_document and P_b_document. The result is byte for byte that of a single run.

Exit codes: 0 done; 1 something missing, unfinished, damaged; 2 wrong command line.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.datasets.preprocessing.merging import merge
from tools.command import Parser, run


def main() -> int:
    """Parse, merge, report."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--input", required=True, metavar="DIR", help="Folder with the pairs.")
    add("--output-prefix", required=True, metavar="P", help="Writes P.bin and P.idx.")
    add("--json-keys", nargs="+", metavar="KEY", help="Merge each key's pairs apart.")
    args = parser.parse()
    for merged in merge(
        args.input, args.output_prefix, args.json_keys, lambda line: print(line, file=sys.stderr)
    ):
        print(
            f"{merged.prefix}.bin/.idx: {len(merged.parts)} parts, {merged.documents:,} documents, "
            f"{merged.tokens:,} tokens ({merged.dtype})"
        )
    return 0


if __name__ == "__main__":
    run(main)
