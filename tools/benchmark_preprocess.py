"""How much of the tokenizer's own speed preprocess_data.py keeps.

  python tools/benchmark_preprocess.py --workers 2 --megabytes 50

In one run, on one corpus (default: Python sources of the standard library, repeated):
  single   one process that does nothing but call the tokenizer, document by document;
  ceiling  as many of those at once as there are workers, each on its share: what the machine gives;
  tool     preprocess_data.py from start to exit (reading, parsing, writing, start-up included).
Prints MB/s of text and the ratios tool / (workers x single) and tool / ceiling; then the CPU time
of all processes of the tool and of the plain loop, a ratio that a busy machine disturbs less.
Without --tokenizer-type it trains a SentencePiece BPE of 32,000 pieces on the corpus first.
"""

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.tokenizers import TOKENIZER_TYPES, build_tokenizer
from tools.command import Parser, run

TOOLS = Path(__file__).resolve().parent


def main() -> int:
    """Measure and print."""
    args = _parser().parse()
    if args.measure is not None:
        return _measure(args)
    with tempfile.TemporaryDirectory() as folder:
        corpus = args.input or _make_corpus(os.path.join(folder, "corpus.jsonl"), args.megabytes)
        if args.tokenizer_type is None:
            _train(args, corpus, folder)
        flags = ["--tokenizer-type", args.tokenizer_type]
        flags += ["--tokenizer-model", args.tokenizer_model] if args.tokenizer_model else []
        for number in range(args.repeat):
            single, loop_cpu = _with_cpu(functools.partial(_together, 1, corpus, flags))
            ceiling = _together(args.workers, corpus, flags)
            prefix = os.path.join(folder, f"out{number}")
            tool, tool_cpu = _with_cpu(
                functools.partial(_tool, corpus, flags, args.workers, prefix)
            )
            print(
                f"single {single:.2f} MB/s, {args.workers} at once {ceiling:.2f} MB/s, tool with "
                f"{args.workers} workers {tool:.2f} MB/s: {tool / (args.workers * single):.2f} of "
                f"workers x single, {tool / ceiling:.2f} of the ceiling; CPU time: loop "
                f"{loop_cpu:.2f} s, tool {tool_cpu:.2f} s",
                flush=True,
            )
    return 0


def _measure(args: argparse.Namespace) -> int:
    """The plain loop: share ``measure`` of the documents; prints bytes and seconds."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model)
    with open(args.input, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file][args.measure :: args.workers]
    size = sum(len(text.encode()) for text in texts)
    tokenizer.tokenize(texts[0][:1000])
    sys.stdin.readline()  # all start together
    start = time.perf_counter()
    for text in texts:
        tokenizer.tokenize(text)
    print(size, time.perf_counter() - start)
    return 0


def _together(count: int, corpus: str, flags: list[str]) -> float:
    """MB/s of ``count`` plain loops at once, each on its share."""
    command = [sys.executable, __file__, "--input", corpus, *flags, "--workers", str(count)]
    loops = [
        subprocess.Popen(
            [*command, "--measure", str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    time.sleep(2.0)
    for loop in loops:
        assert loop.stdin is not None
        loop.stdin.write("go\n")
        loop.stdin.flush()
    results = [loop.communicate()[0].split() for loop in loops]
    return sum(int(size) / 1e6 for size, _ in results) / max(float(took) for _, took in results)


def _with_cpu(measure: Callable[[], float]) -> tuple[float, float]:
    """(what it measures, CPU seconds of the child processes meanwhile)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = measure()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result, used


def _tool(corpus: str, flags: list[str], workers: int, prefix: str) -> float:
    """MB/s of text of the whole command."""
    with open(corpus, encoding="utf-8") as file:
        size = sum(len(json.loads(line)["text"].encode()) for line in file)
    tool = str(TOOLS / "preprocess_data.py")
    command = [sys.executable, tool, "--input", corpus, "--output-prefix", prefix, *flags]
    start = time.perf_counter()
    subprocess.run([*command, "--workers", str(workers)], check=True, stdout=subprocess.DEVNULL)
    return size / 1e6 / (time.perf_counter() - start)


def _make_corpus(path: str, megabytes: float) -> str:
    """A jsonl file of Python sources."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        while size < megabytes * 1e6:
            for source in sources:
                try:
                    text = source.read_text(encoding="utf-8")
                except ValueError:
                    continue
                if text.strip():
                    file.write(json.dumps({"text": text}) + "\n")
                    size += len(text.encode())
                if size >= megabytes * 1e6:
                    break
    return path


def _train(args: argparse.Namespace, corpus: str, folder: str) -> None:
    prefix = os.path.join(folder, "tokenizer")
    tool = str(TOOLS / "train_tokenizer.py")
    command = [sys.executable, tool, "--input", corpus, "--output-prefix", prefix]
    subprocess.run([*command, "--sample-bytes", "10000000"], check=True, stdout=subprocess.DEVNULL)
    args.tokenizer_type, args.tokenizer_model = "SentencePieceTokenizer", prefix + ".model"


def _parser() -> Parser:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--workers", type=int, default=2, metavar="N")
    add("--megabytes", type=float, default=50.0, metavar="MB", help="Text in the made corpus.")
    add("--repeat", type=int, default=1, metavar="N", help="Rounds.")
    add("--input", metavar="FILE", help="A jsonl file instead of the made corpus.")
    add("--tokenizer-type", choices=TOKENIZER_TYPES)
    add("--tokenizer-model", metavar="FILE")
    add("--measure", type=int, metavar="I", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    run(main)
