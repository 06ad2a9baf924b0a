"""The job scripts of examples/slurm on a real Slurm: two "nodes" of two CPU ranks.

A job is told to stop by USR1, saves, is requeued, resumes and finishes; an array preprocesses
shards and a dependent job merges them into the bytes of a single run.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.training.metrics_file import read_metrics
from tests.slurm.cluster import Cluster, running_cluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
ITERATIONS = 40
SHAPE = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1")
MODEL = f"""--num-layers 2 --hidden-size 32 --num-attention-heads 4 --normalization RMSNorm
  --swiglu --disable-bias-linear --position-embedding-type rope --attention-dropout 0
  --hidden-dropout 0 --seq-length 128 --micro-batch-size 1 --global-batch-size 4
  --train-iters {ITERATIONS} --lr 1e-3 --log-interval 1 --eval-iters 0
  --distributed-timeout-minutes 2"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This repository's tools as jsonl and as data, and a SentencePiece model of them."""
    folder = tmp_path_factory.mktemp("corpus")
    with (folder / "text.jsonl").open("w") as file:
        for source in sorted((ROOT / "tools").glob("*.py")):
            file.write(json.dumps({"text": source.read_text()}) + "\n")
    tool(
        "train_tokenizer.py",
        f"--input={folder}/text.jsonl",
        f"--output-prefix={folder}/tokenizer",
        "--vocab-size=400",
    )
    tool(
        "preprocess_data.py",
        f"--input={folder}/text.jsonl",
        f"--output-prefix={folder}/data",
        "--append-eod",
        "--tokenizer-type=SentencePieceTokenizer",
        f"--tokenizer-model={folder}/tokenizer.model",
    )
    return folder


def tool(name: str, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, f"tools/{name}", *args], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def submit(cluster: Cluster, script: str, options: list[str], **environ: str) -> int:
    command = ["--parsable", f"--chdir={ROOT}", "--time=10", *options, f"examples/slurm/{script}"]
    return cluster.submit(*command, PYTHON=sys.executable, **environ)


def lines(path: Path) -> list[int]:
    return [r["iteration"] for r in read_metrics(str(path))] if path.exists() else []


def test_training_is_requeued_and_resumes(cluster: Cluster, corpus: Path, tmp_path: Path) -> None:
    job = submit(
        cluster,
        "pretrain.sbatch",
        [*SHAPE, f"--output={tmp_path}/job.out"],
        DATA=f"{corpus}/data_text_document",
        TOKENIZER=f"{corpus}/tokenizer.model",
        OUTPUT=f"{tmp_path}/run",
        CP="4",
        MODEL_FLAGS=MODEL,
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    output = tmp_path / "job.out"
    deadline = time.monotonic() + 180
    while not lines(metrics):
        assert time.monotonic() < deadline, output.read_text() if output.exists() else "no output"
        assert cluster.state(job) in ("PENDING", "RUNNING", "CONFIGURING"), output.read_text()
        time.sleep(0.1)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    state = cluster.wait(job, {"COMPLETED", "FAILED", "CANCELLED"}, 300, hurry=True)
    text = output.read_text()
    assert state == "COMPLETED", f"{cluster.run('scontrol', 'show', 'job', str(job))}\n{text}"
    assert cluster.restarts(job) == 1, text
    assert "a signal came: leaving after iteration" in text
    assert f"requeueing job {job}" in text
    assert "going on after iteration" in text
    assert lines(metrics) == list(range(1, ITERATIONS + 1))
    # The same run without a stop, on this machine alone, gives the same losses.
    alone = tmp_path / "alone.jsonl"
    done = subprocess.run(
        [
            sys.executable,
            "pretrain_gpt.py",
            *MODEL.split(),
            f"--data-path={corpus}/data_text_document",
            "--tokenizer-type=SentencePieceTokenizer",
            f"--tokenizer-model={corpus}/tokenizer.model",
            f"--metrics-file={alone}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # fp32 sums of four ranks come in another order; Adam makes steps of the difference.
    for here, there in zip(read_metrics(str(metrics)), read_metrics(str(alone)), strict=True):
        assert here["lm_loss"] == pytest.approx(there["lm_loss"], rel=1e-4)
        assert here["consumed_tokens"] == there["consumed_tokens"]


def test_layouts_are_tried_before_a_long_run(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    job = submit(
        cluster,
        "pretrain.sbatch",
        [*SHAPE, f"--output={tmp_path}/job.out"],
        MODE="layouts",
        TRIAL_FLAGS="--steps 1 --rounds 1 --layouts balanced",
        DATA=f"{corpus}/data_text_document",
        TOKENIZER=f"{corpus}/tokenizer.model",
        OUTPUT=f"{tmp_path}/run",
        CP="4",
        MODEL_FLAGS=MODEL,
    )
    state = cluster.wait(job, {"COMPLETED", "FAILED", "CANCELLED"}, 300)
    text = (tmp_path / "job.out").read_text()
    assert state == "COMPLETED", text
    assert "fastest: --cp-layout" in text and "<- baseline" in text
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"layouts.png"}


def test_array_preprocessing_equals_a_single_run(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    common = {
        "INPUT": f"{corpus}/text.jsonl",
        "TOKENIZER_TYPE": "SentencePieceTokenizer",
        "TOKENIZER": f"{corpus}/tokenizer.model",
    }
    array = submit(
        cluster,
        "preprocess_array.sbatch",
        ["--array=0-2", f"--output={tmp_path}/array-%a.out", "--cpus-per-task=1", "--mem=1G"],
        OUTPUT=f"{tmp_path}/array",
        **common,
    )
    merge = submit(
        cluster,
        "preprocess_merge.sbatch",
        [f"--dependency=afterok:{array}", f"--output={tmp_path}/merge.out"],
        OUTPUT=f"{tmp_path}/array",
        **common,
    )
    cluster.wait(merge, {"COMPLETED"}, 240)
    tool(
        "preprocess_data.py",
        f"--input={corpus}/text.jsonl",
        f"--output-prefix={tmp_path}/single",
        "--append-eod",
        "--tokenizer-type=SentencePieceTokenizer",
        f"--tokenizer-model={corpus}/tokenizer.model",
    )
    for ending in ("bin", "idx"):
        merged = tmp_path / f"array_text_document.{ending}"
        single = tmp_path / f"single_text_document.{ending}"
        assert merged.read_bytes() == single.read_bytes()
