"""A schedule in one command gives what its stages give one by one, on any split of the ranks.

Three stages on 4 ranks, context parallel 1 -> 2 -> 4 while data parallel falls 4 -> 2 -> 1. All
in double precision; losses agree to 1e-9 (sums in another order on another split).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.datasets import IndexedDatasetBuilder
from megatron.core.dist_checkpointing import iteration_folder
from megatron.core.packed_batch import PackedBatch
from megatron.training.long_context_eval.checkpoint_model import load_model
from megatron.training.long_context_eval.rows import row_batch
from tests.utils.corpus import write_corpus
from tests.utils.jobs import TINY, JobResult, metrics_of, run_job, tensors_of

STAGES: list[dict[str, Any]] = [
    {"seq_length": 32, "train_iters": 3, "rotary_base": 1e4, "context_parallel": [1, 1],
     "global_batch_size": 8},
    {"seq_length": 128, "train_iters": 2, "rotary_base": 5e4, "context_parallel": [2, 1],
     "global_batch_size": 4},
    {"seq_length": 512, "train_iters": 2, "rotary_base": 5e5, "context_parallel": [2, 2],
     "global_batch_size": 2},
]  # fmt: skip
"""The acceptance schedule in small."""
TOTAL = 7
WITHOUT_STAGES = [
    flag
    for flag in TINY
    if not flag.startswith(
        ("--mock-data", "--seq-length", "--train-iters", "--global", "--micro", "--num-layers")
    )
] + ["--num-layers=2", "--params-dtype=float64"]


def write_schedule(path: Path, stages: list[dict[str, Any]]) -> str:
    """``stages`` as a schedule file (JSON is YAML); a flag that names it."""
    path.write_text(json.dumps({"stages": [{"micro_batch_size": 1} | s for s in stages]}))
    return f"--context-schedule={path}"


def corpus_flags(folder: Path) -> list[str]:
    """A corpus of documents of 1 to 700 tokens, made on first use."""
    corpus = folder / "corpus"
    if not corpus.with_suffix(".idx").exists():
        write_corpus(str(corpus), documents=120, vocab_size=97, longest=700)
    return [f"--data-path={corpus}", "--split=100,0,0"]


def run(folder: Path, name: str, *flags: str, load: str | None = None, ranks: int = 4) -> JobResult:
    """A job that saves in ``name``; metrics go beside it."""
    where = [f"--save={folder}/{name}", f"--metrics-file={folder}/{name}.jsonl"]
    where += [f"--load={folder}/{load}"] if load else []
    return run_job(ranks, [*WITHOUT_STAGES, *corpus_flags(folder), *where, *flags])


def losses(path: Path) -> dict[int, float]:
    """Iteration -> loss."""
    return {record["iteration"]: record["lm_loss"] for record in metrics_of(path)}


def assert_close(got: dict[int, float], expected: dict[int, float]) -> None:
    """The same iterations, losses equal to 1e-9."""
    assert got.keys() == expected.keys()
    for iteration, loss in expected.items():
        assert abs(got[iteration] - loss) <= 1e-9 * abs(loss), (iteration, got[iteration], loss)


def stage_flags(stage: dict[str, Any]) -> list[str]:
    """A stage as the flags of a run of its own."""
    ulysses, ring = stage["context_parallel"]
    return [
        f"--seq-length={stage['seq_length']}",
        f"--rotary-base={stage['rotary_base']}",
        f"--context-parallel-size={ulysses * ring}",
        "--hierarchical-context-parallel-sizes",
        str(ulysses),
        str(ring),
        f"--global-batch-size={stage['global_batch_size']}",
        "--micro-batch-size=1",
        "--lr-decay-style=constant",
    ]


CHANGED = "--allow-changed=seq_length,rotary_base,global_batch_size"


def check_three_launches(folder: Path, stages: list[dict[str, Any]], *flags: str) -> None:
    """One command = three launches joined by checkpoints = the same with a fixed split."""
    total = sum(stage["train_iters"] for stage in stages)
    constant = "--lr-decay-style=constant"
    run(folder, "one", write_schedule(folder / "s.yaml", stages), constant, *flags).check()
    expected = losses(folder / "one.jsonl")
    assert list(expected) == list(range(1, total + 1))

    joined: dict[int, float] = {}
    done, last = 0, None
    for number, stage in enumerate(stages):
        done += stage["train_iters"]
        result = run(
            folder,
            f"part{number}",
            *stage_flags(stage),
            f"--train-iters={done}",
            *([CHANGED] if last else []),
            *flags,
            load=last,
        ).check()
        if last:
            assert "allowed by --allow-changed: seq_length" in result.output[0]
        joined |= losses(folder / f"part{number}.jsonl")
        last = f"part{number}"
    assert_close(joined, expected)

    whole = tensors_of(iteration_folder(folder / "one", total))
    parts = tensors_of(iteration_folder(folder / str(last), total))
    for name, value in whole.items():
        if name.startswith("model."):
            assert torch.equal(parts[name], value), name

    fixed = [stage | {"context_parallel": [2, 2]} for stage in stages]
    run(folder, "fixed", write_schedule(folder / "f.yaml", fixed), constant, *flags).check()
    assert_close(losses(folder / "fixed.jsonl"), expected)


def test_three_stages_equal_three_launches_and_a_fixed_split(tmp_path: Path) -> None:
    check_three_launches(tmp_path, STAGES, "--use-distributed-optimizer")


def test_going_on_from_a_run_without_a_schedule(tmp_path: Path) -> None:
    """Continue-pretraining: the plain run's past is the schedule's first stage."""
    run(tmp_path, "one", write_schedule(tmp_path / "s.yaml", STAGES)).check()
    plain = stage_flags(STAGES[0])[:-1]
    run(tmp_path, "plain", *plain, "--train-iters=3", "--lr-decay-iters=7").check()
    go_on = f"--context-schedule={tmp_path}/s.yaml"
    run(tmp_path, "on", go_on, "--lr-decay-iters=7", load="plain").check()
    assert_close(
        losses(tmp_path / "plain.jsonl") | losses(tmp_path / "on.jsonl"),
        losses(tmp_path / "one.jsonl"),
    )
    # A schedule that starts longer than the plain run had has another past: say what to pass.
    later = write_schedule(tmp_path / "later.yaml", [STAGES[1] | {"train_iters": 9}, STAGES[2]])
    refused = run(tmp_path, "no", later, "--lr-decay-iters=7", load="plain").check(2)
    assert "--allow-changed global_batch_size,rotary_base,seq_length" in refused.errors[0]
    assert "Traceback" not in refused.text
    run(tmp_path, "yes", later, "--lr-decay-iters=7", CHANGED, load="plain").check()
    stages = [record["stage"] for record in metrics_of(tmp_path / "yes.jsonl")]
    assert stages == [1] * 6 + [2] * 2


def test_a_changed_later_part_is_said_and_a_changed_past_refused(tmp_path: Path) -> None:
    run(tmp_path, "run", write_schedule(tmp_path / "s.yaml", STAGES), "--exit-interval=4").check()
    longer = [STAGES[0], STAGES[1] | {"train_iters": 3}, STAGES[2] | {"rotary_base": 1e6}]
    said = run(tmp_path, "new", write_schedule(tmp_path / "n.yaml", longer), load="run").check()
    assert (
        "differs from the checkpoint's: 7 iterations in 3 stages then, 8 in 3 now"
        in (said.output[0])
    )
    assert [r["rotary_base"] for r in metrics_of(tmp_path / "new.jsonl")] == [5e4, 5e4, 1e6, 1e6]
    past = [STAGES[0] | {"rotary_base": 2e4}, *STAGES[1:]]
    refused = run(tmp_path, "no", write_schedule(tmp_path / "p.yaml", past), load="run").check(2)
    assert "rotary_base of the tokens from 0 on was 10000 (stage 1), now 20000" in refused.errors[0]
    assert "--allow-changed rotary_base" in refused.errors[0]


def test_theta_of_the_stage_beats_the_flag_and_the_flag_fills_in(tmp_path: Path) -> None:
    stages = [
        {key: value for key, value in STAGES[0].items() if key != "rotary_base"},
        STAGES[1],
    ]
    schedule = write_schedule(tmp_path / "s.yaml", stages)
    run(tmp_path, "run", schedule, "--rotary-base=777").check()
    assert [r["rotary_base"] for r in metrics_of(tmp_path / "run.jsonl")] == [777.0] * 3 + [5e4] * 2


@pytest.fixture(scope="module")
def saved_at_1e4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with theta 1e4."""
    folder = tmp_path_factory.mktemp("theta")
    plain = ["--seq-length=64", "--micro-batch-size=1", "--global-batch-size=2", "--train-iters=2"]
    run(folder, "old", *plain, "--rotary-base=1e4", ranks=1).check()
    return folder


def far_batch() -> PackedBatch:
    """8 tokens at positions 5000 to 5007."""
    tokens = torch.arange(9)[None] * 7 % 97
    batch = row_batch(tokens[:, :-1], tokens[:, 1:])
    batch.position_ids += 5000
    batch.position_ids[0, 0] = 0  # rotations are relative: the distance must be long too
    return batch


def test_a_new_theta_beats_the_saved_one(saved_at_1e4: Path) -> None:
    """Fault 12: saved at 1e4, loaded at 1e6: frequencies and logits are those of 1e6."""
    new = load_model(saved_at_1e4 / "old", rotary_base=1e6)
    assert new.note is not None and "--rotary-base 1e+06 is used" in new.note
    rotary = new.model.rotary
    assert rotary is not None
    exact = 1e6 ** -(torch.arange(4, dtype=torch.float64) / 4)
    torch.testing.assert_close(rotary.inv_freq, exact, rtol=1e-12, atol=0)
    fresh = load_model(saved_at_1e4 / "old").model
    old_logits = fresh.logits(far_batch())
    fresh.set_rope(1e6)
    assert torch.equal(new.model.logits(far_batch()), fresh.logits(far_batch()))
    assert not torch.allclose(new.model.logits(far_batch()), old_logits, atol=1e-6)


def test_a_run_that_loads_uses_its_own_theta(saved_at_1e4: Path) -> None:
    """The same through the trainer: refused in silence, allowed by name, the flag's theta used."""
    plain = ["--seq-length=64", "--micro-batch-size=1", "--global-batch-size=2", "--train-iters=3"]
    folder = saved_at_1e4
    refused = run(folder, "no", *plain, "--rotary-base=1e6", load="old", ranks=1).check(2)
    assert "--allow-changed rotary_base" in refused.errors[0]
    allow = "--allow-changed=rotary_base"
    run(folder, "new", *plain, "--rotary-base=1e6", allow, load="old", ranks=1).check()
    (record,) = metrics_of(folder / "new.jsonl")
    assert record["rotary_base"] == 1e6
    loaded = load_model(folder / "new")
    assert loaded.rotary_base == 1e6 and loaded.note is None


def fake_wandb(rank: int) -> None:
    """A job's hook: what goes to wandb is written to the file that WANDB_LOG names."""
    import os
    import sys
    import types

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            with open(os.environ["WANDB_LOG"], "a") as file:
                file.write(json.dumps({"step": step} | values) + "\n")

        def finish(self) -> None:
            pass

    def init(**settings: Any) -> Run:
        with open(os.environ["WANDB_LOG"] + ".inits", "a") as file:
            file.write(json.dumps({key: settings[key] for key in ("id", "resume")}) + "\n")
        return Run()

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    sys.modules["wandb"] = module


def test_stages_are_marked_in_metrics_tensorboard_and_wandb(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = [
        *WITHOUT_STAGES,
        *corpus_flags(tmp_path),
        write_schedule(tmp_path / "s.yaml", STAGES),
        f"--metrics-file={tmp_path}/m.jsonl",
        f"--tensorboard-dir={tmp_path}/tb",
        "--wandb-project=test",
    ]
    environ = {"WANDB_LOG": str(tmp_path / "wandb.jsonl")}
    result = run_job(4, flags, environ=environ, hook=fake_wandb).check()
    for number, stage in enumerate(STAGES, 1):
        length, cp = stage["seq_length"], stage["context_parallel"]
        line = f"stage {number}/3 'stage {number}': seq length {length}, theta"
        assert result.output[0].count(line) == 1
        assert f"ulysses {cp[0]} x ring {cp[1]} x data {4 // (cp[0] * cp[1])}" in result.output[0]
    expected = [
        (record["iteration"], record["stage"], record["seq_length"], record["rotary_base"])
        for record in metrics_of(tmp_path / "m.jsonl")
    ]
    assert [stage for _, stage, _, _ in expected] == [1, 1, 1, 2, 2, 3, 3]
    logged = [json.loads(line) for line in (tmp_path / "wandb.jsonl").read_text().splitlines()]
    keys = ("step", "stage", "seq_length", "rotary_base")
    assert [tuple(record[key] for key in keys) for record in logged] == expected
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    for place, key in enumerate(("stage", "seq_length", "rotary_base"), 1):
        points = [(event.step, event.value) for event in events.Scalars(key)]
        assert points == [(row[0], float(row[place])) for row in expected]


def test_a_requeued_job_goes_on_in_its_wandb_run(tmp_path: Path) -> None:
    flags = [*TINY, f"--save={tmp_path}/c", f"--load={tmp_path}/c", "--wandb-project=test"]
    environ = {"WANDB_LOG": str(tmp_path / "wandb.jsonl")}
    for more in (["--exit-interval=2"], []):
        run_job(2, [*flags, *more], environ=environ, hook=fake_wandb, timeout=60).check()
    inits = [json.loads(line) for line in (tmp_path / "wandb.jsonl.inits").read_text().splitlines()]
    assert len(inits) == 2  # the first rank's alone, once a start
    assert inits[0] == inits[1] and inits[0]["id"] and inits[0]["resume"] == "allow"
    logged = [json.loads(line) for line in (tmp_path / "wandb.jsonl").read_text().splitlines()]
    assert [record["step"] for record in logged] == [1, 2, 3, 4]


def real_text(folder: Path) -> None:
    """Sources of Python's own library, byte by byte, as the corpus of ``corpus_flags``."""
    import sysconfig

    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in library.glob("*.py") if file.stat().st_size > 20_000)[:30]
    with IndexedDatasetBuilder(str(folder / "corpus"), np.uint8) as builder:
        for file in files:
            builder.add_document(np.frombuffer(file.read_bytes(), np.uint8))


@pytest.mark.slow
def test_real_text_from_256_to_4096(tmp_path: Path) -> None:
    real_text(tmp_path)
    lengths = [(256, 16, 8), (1024, 8, 6), (4096, 2, 4)]
    stages = [
        stage | {"seq_length": length, "global_batch_size": rows, "train_iters": iterations}
        for stage, (length, rows, iterations) in zip(STAGES, lengths, strict=True)
    ]
    check_three_launches(tmp_path, stages, "--vocab-size=256", "--cp-layout=balanced")
