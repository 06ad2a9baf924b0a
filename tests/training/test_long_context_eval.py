"""Long-context evaluation: against dense arithmetic, step-by-step decoding, and rigged answers."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.config import ModelConfig, RunConfig
from megatron.core.context_extension import ContextSchedule, StageDefaults
from megatron.core.datasets import IndexedDataset, IndexedDatasetBuilder, build_document_source
from megatron.core.dist_checkpointing import CheckpointError, iteration_folder
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers import build_tokenizer
from megatron.training.long_context_eval.checkpoint_model import LoadedModel, load_model
from megatron.training.long_context_eval.passkey_mix import PasskeyMix
from megatron.training.long_context_eval.position_loss import (
    bucket_edges,
    long_documents,
    loss_by_position,
    token_losses,
)
from megatron.training.long_context_eval.report import grid_table, position_table
from megatron.training.long_context_eval.retrieval import (
    TextTask,
    TokenTask,
    Trial,
    answers,
    passkey_grid,
)
from megatron.training.long_context_eval.rows import row_batch
from tests.utils.jobs import TINY, metrics_of, run_job, tensors_of

ROOT = Path(__file__).resolve().parents[2]
MIX = PasskeyMix()


def tiny(vocab_size: int = 128, **changes: Any) -> LoadedModel:
    """An untrained model as if it came from a checkpoint."""
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "vocab_size": vocab_size,
        "position_embedding_type": "rope",
        "init_method_std": 0.5,
        "params_dtype": "float64",
        "loss_chunk_size": 7,
    }
    config = ModelConfig(**(sizes | changes))
    model = GPTModel(config, seed=3).eval().requires_grad_(False)
    defaults = StageDefaults(
        seq_length=32, train_iters=1, rotary_base=1e4, micro_batch_size=1, global_batch_size=1
    )
    stage = ContextSchedule.single(defaults).stages[0]
    return LoadedModel(model, RunConfig(model=config), stage, 1, 1e4, Path("nowhere"))


def documents(count: int, length: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [MIX.document(rng, length + 1) for _ in range(count)]


# --- the language


def test_a_document_says_of_each_fact_one_digit_only() -> None:
    tokens = MIX.document(np.random.default_rng(1), 4000)
    again = MIX.document(np.random.default_rng(1), 4000)
    assert np.array_equal(tokens, again) and tokens.dtype == np.int64 and len(tokens) == 4000
    asked = np.flatnonzero(tokens[:-1] < MIX.facts)
    for fact in range(MIX.facts):
        values = tokens[asked[tokens[asked] == fact] + 1]
        assert len(values) > 5 and len(set(values.tolist())) == 1
        assert 0 <= values[0] - MIX.facts - fact * 10 < 10
    words = tokens[tokens >= 11 * MIX.facts]
    assert 0.3 < len(words) / len(tokens) < 0.8
    assert words.max() < MIX.vocab_size


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": 100}, "--vocab-size 100 must be at least 118: 11 ids for each of 10"),
        ({"key_digits": 11}, "--facts 10 must be at least the digits of a passkey, 11"),
        ({"facts": 3}, "--facts 3 must be at least the digits of a passkey, 5"),
        ({"facts": 0}, "--facts 0 must be at least 1"),
        ({"asked": 0.0}, "--asked 0 must be in"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PasskeyMix(**changes)


@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_a_trial_tells_its_key_once_at_its_depth(depth: float) -> None:
    trial = TokenTask(MIX).trial(np.random.default_rng(5), 200, depth)
    assert len(trial.tokens) == 200 and trial.answers == (191, 193, 195, 197, 199)
    told = np.flatnonzero(trial.tokens == 0)  # the question of fact 0: told, then asked
    assert told.tolist() == [round(depth * 180), 190]
    key = trial.tokens[told[0] : told[0] + 10]
    assert np.array_equal(key, trial.tokens[190:])
    assert key[::2].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="--passkey-lengths 19 is too short"):
        TokenTask(MIX).trial(np.random.default_rng(5), 19, depth)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_trial_in_english(depth: float) -> None:
    tokenizer = build_tokenizer("ByteTokenizer")
    trial = TextTask(tokenizer.tokenize).trial(np.random.default_rng(2), 700, depth)
    text = tokenizer.detokenize(trial.tokens)
    answer = tokenizer.detokenize(trial.tokens[list(trial.answers)])
    assert len(trial.tokens) == 700 and trial.answers[-1] == 699
    assert answer.strip().isdecimal() and len(answer.strip()) == 5
    assert text.count(f"The pass key is {answer.strip()}. Remember it.") == 1
    assert text.endswith(f"What is the pass key? The pass key is {answer.strip()}")


# --- loss by position


def test_loss_by_position_equals_dense_log_softmax() -> None:
    loaded, docs = tiny(), documents(5, 33)
    edges = bucket_edges(33, 4)
    assert edges == [0, 8, 16, 24, 33]
    result = loss_by_position(loaded, docs, edges, tokens_at_once=70)  # batches of 2, 2, 1
    expected = []
    for document in docs:
        tokens = torch.from_numpy(document)[None]
        logits = loaded.model.logits(row_batch(tokens[:, :-1], tokens[:, 1:]))
        expected.append(F.cross_entropy(logits[0], tokens[0, 1:], reduction="none"))
    dense = torch.stack(expected)
    for bucket in result.buckets:
        part = dense[:, bucket.low : bucket.high].mean(1)
        assert bucket.loss == pytest.approx(part.mean().item(), abs=1e-12)
        assert bucket.error == pytest.approx((part.std() / 5**0.5).item(), abs=1e-12)
    assert result.mean() == pytest.approx(dense.mean().item(), abs=1e-12)
    assert result.mean(8, 24) == pytest.approx(dense[:, 8:24].mean().item(), abs=1e-12)
    assert "24..32" in position_table({"tiny": result})


def test_tables_follow_the_length() -> None:
    """Dynamic NTK depends on the row's length: evaluation uses the evaluated one."""
    loaded, docs = tiny(), documents(1, 64)
    plain = token_losses(loaded, docs)
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
    stage = dataclasses.replace(loaded.stage, rope_scaling=scaling)
    dynamic = dataclasses.replace(loaded, stage=stage)
    assert np.array_equal(token_losses(dynamic, docs), plain)
    longer = documents(1, 128)
    with_rule = token_losses(dynamic, longer)
    assert not np.allclose(with_rule, token_losses(loaded, longer))


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return out


def test_a_long_document_makes_neither_scores_nor_logits() -> None:
    length = 4096
    loaded = tiny(vocab_size=1000, loss_chunk_size=128, params_dtype="float32")
    with Largest() as largest:
        token_losses(loaded, documents(1, length))
        made = [TokenTask(MIX).trial(np.random.default_rng(0), length, 0.5)]
        answers(loaded.model, made, device=loaded.device, at_once=length)
    widest = 4 * 16  # of the MLP
    assert largest.elements == length * widest  # S x S is 16.8M, S x vocabulary 4.1M


def test_long_documents_are_chosen_and_cut(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "d"), np.uint16) as builder:
        for length in (10, 50, 30, 31, 49):
            builder.add_document(np.arange(length) + length)
    source = build_document_source([str(tmp_path / "d")])
    assert source is not None
    assert [d[0] for d in long_documents(source, 30, 9)] == [50, 31, 49]
    assert [d[0] for d in long_documents(source, 30, 2)] == [50, 31]
    assert {len(d) for d in long_documents(source, 30, 9)} == {31}
    with pytest.raises(ValueError, match="longest has 50.*smaller --length, e.g. 49"):
        long_documents(source, 50, 9)


# --- retrieval


def greedy(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    """Tokens one by one, each from a full forward pass."""
    tokens = list(prompt)
    for _ in range(count):
        row = torch.tensor([tokens])
        tokens.append(int(model.logits(row_batch(row, row))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_answers_are_those_of_greedy_decoding() -> None:
    loaded = tiny()
    trials, wanted = [], []
    for number in range(6):
        prompt = documents(1, 20, seed=number)[0].tolist()
        answer = greedy(loaded.model, prompt, 4)
        if number % 2:  # one wrong token anywhere makes it wrong
            answer[number // 2] = (answer[number // 2] + 1) % 128
        trials.append(Trial(np.array(prompt + answer), tuple(range(21, 25))))
        wanted.append(number % 2 == 0)
    assert answers(loaded.model, trials, device=loaded.device, at_once=50) == wanted


class Oracle:
    """Finds the fact in the prompt; wrong about documents longer than its reach."""

    vocab_size = 128

    def __init__(self, reach: int) -> None:
        self.reach = reach

    def output_weight(self) -> torch.Tensor:
        return torch.eye(128)

    def __call__(self, x: None, batch: Any, output: str) -> torch.Tensor:
        assert output == "hidden"
        rows, length = batch.tokens.shape
        hidden = torch.zeros(length, rows, 128)
        for row in range(rows):
            tokens = batch.tokens[row].tolist()
            for place, token in enumerate(tokens):
                before = [i for i in range(place) if tokens[i] == token]
                if before and place - before[-1] <= self.reach:
                    hidden[place, row, tokens[before[-1] + 1]] = 1
        return hidden


def test_the_grid_shows_how_far_a_model_reaches() -> None:
    loaded = dataclasses.replace(tiny(), model=Oracle(100))  # type: ignore[arg-type]
    loaded.set_length = lambda length: None  # type: ignore[method-assign, assignment]
    grid = passkey_grid(loaded, TokenTask(MIX), lengths=[60, 200], depths=[0.0, 0.5, 1.0], trials=4)
    assert grid.accuracy == ((1.0, 1.0, 1.0), (0.0, 1.0, 1.0))
    assert grid.mean(200) == pytest.approx(2 / 3)
    assert "66.7%" in grid_table("oracle", grid)


# --- checkpoints and commands


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 4 ranks (tensor 2, ring 2) with two stages, saved at iterations 1 and 2."""
    folder = tmp_path_factory.mktemp("run")
    with IndexedDatasetBuilder(str(folder / "data"), np.uint16) as builder:
        for document in documents(60, 150):
            builder.add_document(document)
    (folder / "s.yaml").write_text(
        "stages:\n"
        "  - {seq_length: 32, train_iters: 1, rotary_base: 1e3, context_parallel: [1, 1]}\n"
        "  - {name: long, seq_length: 128, train_iters: 1, rotary_base: 1e5,"
        " context_parallel: [1, 2]}\n"
    )
    flags = [
        flag for flag in TINY if not flag.startswith(("--mock", "--seq", "--train", "--vocab"))
    ]
    flags += ["--vocab-size=128", f"--data-path={folder}/data", "--split=80,20,0"]
    flags += ["--params-dtype=float64", "--tensor-model-parallel-size=2", "--sequence-parallel"]
    flags += [f"--context-schedule={folder}/s.yaml", f"--save={folder}/ck", "--save-interval=1"]
    flags += ["--eval-iters=1", "--eval-interval=1", f"--metrics-file={folder}/m.jsonl"]
    run_job(4, flags).check()
    return folder


def test_a_sharded_checkpoint_loads_whole_with_its_stage(run: Path) -> None:
    loaded = load_model(run / "ck")
    assert (loaded.iteration, loaded.stage.name, loaded.rotary_base) == (2, "long", 1e5)
    stored = tensors_of(iteration_folder(run / "ck", 2))
    for name, parameter in loaded.model.named_parameters():
        saved = stored[f"model.{name}"]
        assert torch.equal(parameter[: len(saved)], saved), name
    first = load_model(run / "ck", iteration=1)
    assert (first.stage.number, first.rotary_base) == (1, 1e3)
    with pytest.raises(CheckpointError, match="--ckpt-step 9 has no whole checkpoint"):
        load_model(run / "ck", iteration=9)
    with pytest.raises(CheckpointError, match="holds no whole checkpoint"):
        load_model(run / "nothing")


def call(script: str, *argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(ROOT / script), *argv],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_the_command_writes_tables_and_pictures(run: Path, tmp_path: Path) -> None:
    result = call(
        "tools/evaluate.py",
        f"--load=now={run}/ck",
        f"--output={tmp_path}",
        "--buckets=4",
        "--passkey-trials=2",
        "--passkey-lengths",
        "64",
        "128",
    )
    assert result.returncode == 0, result.stderr
    assert "now: " in result.stdout and "theta 100000" in result.stdout
    assert "96..127" in result.stdout
    for name in ("position_loss.png", "passkey.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    values = json.loads((tmp_path / "evaluation.json").read_text())
    assert values["passkey"]["now"]["lengths"] == [64, 128]
    assert values["loss_by_position"]["now"]["documents"] == 12  # a fifth of 60
    blocked = call("tools/evaluate.py", f"--load={tmp_path}/none", "--output=/proc/no")
    assert "--output /proc/no/evaluation.txt can't be written" in blocked.stderr
    missing = call("tools/evaluate.py", f"--load={tmp_path}/none", f"--output={tmp_path}")
    assert missing.returncode == 1 and "holds no whole checkpoint" in missing.stderr
    assert "Traceback" not in missing.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--length 0", "--length 0 must be at least 1"),
        ("--documents 0", "--documents 0 must be at least 1"),
        ("--passkey-lengths 64 -1", "--passkey-lengths -1 must be at least 1"),
        ("--passkey-depths 0 1.5", "--passkey-depths 1.5 must be between 0"),
        ("--seed -1", "--seed -1 must be at least 0"),
        ("--no-position-loss --no-passkey", "leave nothing to do; remove one"),
    ],
)
def test_numbers_out_of_range_are_refused_by_flag(words: str, message: str, tmp_path: Path) -> None:
    result = call("tools/evaluate.py", f"--load={tmp_path}", f"--output={tmp_path}", *words.split())
    assert result.returncode == 2 and message in result.stderr, result.stderr


def test_the_generator_writes_a_corpus(tmp_path: Path) -> None:
    argv = [f"--output-prefix={tmp_path}/p", "--documents=20", "--lengths", "30", "60"]
    assert call("tools/make_passkey_data.py", *argv).returncode == 0
    dataset = IndexedDataset(str(tmp_path / "p"))
    assert len(dataset) == 20 and set(dataset.sequence_lengths.tolist()) == {30, 60}
    seed = call("tools/make_passkey_data.py", *argv, "--seed=-1")
    assert seed.returncode == 2 and "--seed -1 must be at least 0" in seed.stderr
    bad = call("tools/make_passkey_data.py", *argv, "--vocab-size=100")
    assert bad.returncode == 1 and "--vocab-size 100 must be at least" in bad.stderr


def test_the_extension_demonstration_in_short(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    result = subprocess.run(
        ["bash", str(ROOT / "examples/extension_demo.sh")],
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"FORM": "short", "OUT": str(out), "PYTHON": sys.executable},
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    names = ("short", "extended", "same-theta")
    tokens = {n: [r["consumed_tokens"] for r in metrics_of(out / f"{n}.jsonl")] for n in names}
    assert {values[-1] for values in tokens.values()} == {tokens["short"][-1]}  # the same budget
    values = json.loads((out / "evaluation.json").read_text())
    assert set(values["passkey"]) == set(names)
    assert (out / "position_loss.png").exists() and (out / "passkey.png").exists()
    (out / ".extension_demo").unlink()  # a folder of someone else's is left alone
    again = subprocess.run(
        ["bash", str(ROOT / "examples/extension_demo.sh")],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"FORM": "short", "OUT": str(out), "PYTHON": sys.executable},
    )
    assert again.returncode == 1 and "is not a folder of mine" in again.stderr
    assert (out / "evaluation.json").exists()
