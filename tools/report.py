"""One picture of a run from its metrics file: loss, learning rate, context, theta, speed.

    python tools/report.py --metrics runs/first/metrics.jsonl --output runs/first/report.png

Everything is drawn over consumed tokens; the stages of the context schedule are shaded. With
``--unigram-train`` and ``--unigram-valid`` (prefixes of .bin/.idx pairs) the loss of a unigram
model of the training data on the validation data is drawn and printed as a yardstick.

Exit codes: 0 drawn; 1 files that can't be read or written; 2 wrong command line.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.datasets import IndexedDataset
from megatron.training.metrics_file import read_metrics
from tools.command import Parser, run, writable

Record = dict[str, Any]
_NEEDED = ("consumed_tokens", "stage", "seq_length", "rotary_base")


def unigram_loss(train_prefix: str, valid_prefix: str) -> float:
    """Nats per token of a unigram model (add-one smoothed) of ``train`` on ``valid``."""

    def counts(prefix: str) -> np.ndarray:
        total = np.zeros(0, dtype=np.int64)
        dataset = IndexedDataset(prefix)
        for i in range(len(dataset)):
            part = np.bincount(np.asarray(dataset[i], dtype=np.int64))
            if len(part) > len(total):
                total, part = part.astype(np.int64), total
            total[: len(part)] += part
        return total

    train, valid = counts(train_prefix), counts(valid_prefix)
    size = max(len(train), len(valid))
    train = np.pad(train, (0, size - len(train))) + 1
    valid = np.pad(valid, (0, size - len(valid)))
    return float(-(valid * np.log(train / train.sum())).sum() / valid.sum())


def split_records(records: list[Record]) -> tuple[list[Record], list[Record]]:
    """(training records, evaluation records)."""
    train = [r for r in records if r.get("lm_loss") is not None]
    evaluations = [r for r in records if r.get("eval_lm_loss") is not None]
    return train, evaluations


def stage_spans(train: list[Record]) -> list[tuple[int, float, float]]:
    """(stage, first token, last token) of each run of equal stages."""
    spans: list[tuple[int, float, float]] = []
    start = 0.0
    for record in train:
        tokens = float(record["consumed_tokens"])
        if spans and spans[-1][0] == record["stage"]:
            spans[-1] = (spans[-1][0], spans[-1][1], tokens)
        else:
            spans.append((record["stage"], start, tokens))
        start = tokens
    return spans


def draw(records: list[Record], output: Path, *, unigram: float | None, title: str) -> None:
    """Draw the six panels and save them as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    train, evaluations = split_records(records)
    x = [r["consumed_tokens"] for r in train]
    figure, axes = plt.subplots(3, 2, figsize=(12, 10), sharex=True, layout="constrained")
    panels = [
        ("lm_loss", "loss (nats per token)", False),
        ("grad_norm", "gradient norm", True),
        ("learning_rate", "learning rate", False),
        ("seq_length", "sequence length (tokens)", True),
        ("rotary_base", "RoPE theta", True),
        ("tokens_per_second", "tokens per second", False),
    ]
    spans = stage_spans(train)
    for axis, (key, label, logarithmic) in zip(axes.flat, panels, strict=True):
        points = [(a, r[key]) for a, r in zip(x, train, strict=True) if r.get(key) is not None]
        axis.plot([a for a, _ in points], [b for _, b in points], linewidth=1.3, label="train")
        axis.set_title(label, fontsize=10)
        if logarithmic and points and min(b for _, b in points) > 0:
            axis.set_yscale("log")
        for index, (_, left, right) in enumerate(spans):
            axis.axvspan(left, right, alpha=0.10 if index % 2 else 0.03, color="tab:blue")
        axis.grid(alpha=0.3)
    loss_axis = axes.flat[0]
    if evaluations:
        loss_axis.plot(
            [r["consumed_tokens"] for r in evaluations],
            [r["eval_lm_loss"] for r in evaluations],
            "o-",
            markersize=4,
            label="held out",
        )
    if unigram is not None:
        loss_axis.axhline(unigram, color="gray", linestyle="--", label=f"unigram {unigram:.2f}")
    loss_axis.legend(fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("consumed tokens")
    figure.suptitle(title)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def summary(records: list[Record], unigram: float | None) -> str:
    """A few lines about the run."""
    train, evaluations = split_records(records)
    first, last = train[0], train[-1]
    # The last steps may have no line of their own (--log-interval), but an evaluation after them.
    end = max([last, *evaluations[-1:]], key=lambda record: record["iteration"])
    lines = [
        f"steps {end['iteration']}, tokens {end['consumed_tokens']:,}, "
        f"sequence length {first['seq_length']} -> {last['seq_length']}, "
        f"theta {first['rotary_base']:g} -> {last['rotary_base']:g}",
        f"training loss    {first['lm_loss']:.3f} -> {last['lm_loss']:.3f}",
    ]
    if evaluations:
        lines.append(
            f"held-out loss    {evaluations[0]['eval_lm_loss']:.3f} (iteration "
            f"{evaluations[0]['iteration']}) -> {evaluations[-1]['eval_lm_loss']:.3f} (iteration "
            f"{evaluations[-1]['iteration']})"
        )
    if unigram is not None:
        lines.append(f"unigram model    {unigram:.3f} on the held-out documents")
    speeds = [r["tokens_per_second"] for r in train if r.get("tokens_per_second")]
    if speeds:
        lines.append(f"median speed     {float(np.median(speeds)):,.0f} tokens/s")
    return "\n".join(lines)


def _check(path: Path, records: list[Record]) -> None:
    """Raises ValueError if these aren't the records of a run."""
    train, evaluations = split_records(records)
    if not train:
        raise ValueError(f"--metrics {path} has no training records yet")
    for record, needed in (
        *((record, ("lm_loss", *_NEEDED)) for record in train),
        *((record, ("eval_lm_loss", "consumed_tokens")) for record in evaluations),
    ):
        wrong = [key for key in needed if not isinstance(record.get(key), int | float)]
        if wrong:
            raise ValueError(
                f"--metrics {path}: the record of iteration {record['iteration']} has no number "
                f"{', '.join(wrong)}; give the file that --metrics-file wrote"
            )


def main() -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse()
    metrics = Path(args.metrics)
    if not metrics.is_file():
        raise ValueError(f"--metrics {metrics} is no file")
    if bool(args.unigram_train) != bool(args.unigram_valid):
        raise ValueError("give --unigram-train and --unigram-valid together")
    output = Path(args.output) if args.output else metrics.with_name("report.png")
    if output.suffix != ".png":
        raise ValueError(f"--output {output}: a picture is written as PNG; end the name in .png")
    writable("--output", str(output))
    records = read_metrics(str(metrics))
    _check(metrics, records)
    unigram = unigram_loss(args.unigram_train, args.unigram_valid) if args.unigram_train else None
    draw(records, output, unigram=unigram, title=args.title or str(metrics.parent))
    print(summary(records, unigram))
    print(f"picture          {output}")
    return 0


def _parser() -> Parser:
    parser = Parser(__doc__)
    parser.add_argument("--metrics", required=True, help="metrics file of a run")
    parser.add_argument("--output", help="PNG to write; default: report.png beside the metrics")
    parser.add_argument("--title", default="", help="title of the picture")
    parser.add_argument("--unigram-train", help="prefix of the training data")
    parser.add_argument("--unigram-valid", help="prefix of the validation data")
    return parser


if __name__ == "__main__":
    run(main)
