"""Schedules that don't fit the run: each stage is checked, messages name stage, key and cure."""

import pytest

from megatron.training.arguments import check_command_line
from tests.arguments.good import command_line

GOOD_STAGE = {"seq_length": 1024, "train_iters": 5, "global_batch_size": 16, "micro_batch_size": 1}
DROPPED = "--seq-length --train-iters --global-batch-size --micro-batch-size"

# name: (second stage's changes, flags to add, world size, what the message must hold)
WRONG = {
    "length": (
        {"seq_length": 1026, "context_parallel": [1, 4]},
        "",
        8,
        ["stage 2: seq_length 1026 must be a multiple of 8", "use 1024 or 1032"],
    ),
    "world": (
        {"context_parallel": [2, 8]},
        "",
        8,
        ["stage 2: world size 8 must be a multiple of", "context_parallel 2 x 8 = 16", "start 16"],
    ),
    "batch": (
        {"global_batch_size": 12},
        "",
        8,
        ["stage 2: global_batch_size 12 must be a multiple of", "use 8 or 16"],
    ),
    "ulysses": (
        {"context_parallel": [16, 1]},
        "",
        16,
        ["stage 2: ulysses size 16 must not be more than the 8 query heads", "8 x 2"],
    ),
    "comm type": (
        {"context_parallel": [2, 2]},
        "--cp-comm-type p2p",
        8,
        ["--cp-comm-type p2p has no ulysses ranks", "stage 2: context_parallel 2 2"],
    ),
    "pipeline": (
        {"global_batch_size": 4},
        "--pipeline-model-parallel-size 2",
        8,
        ["stage 2: global_batch_size 4 gives 1 micro-batches", "use global_batch_size 8"],
    ),
    "learned positions": (
        {"seq_length": 2048},
        "--position-embedding-type learned_absolute --max-position-embeddings 1024",
        8,
        ["stage 2: seq_length 2048 must not be more than --max-position-embeddings 1024"],
    ),
    "theta without rope": (
        {"rotary_base": 5e5},
        "--position-embedding-type none",
        8,
        ["stage 2: rotary_base and rope_scaling have no effect", "--position-embedding-type rope"],
    ),
    "factors of longrope": (
        {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0],
                "long_factor": [1.0],
                "original_max_position_embeddings": 512,
                "factor": 2,
            }
        },
        "",
        8,
        ["stage 2: rope_scaling: long_factor has 1 factors", "4 rotated pairs"],
    ),
    "data and mock data": (
        {"data_path": "/none/long"},
        "",
        1,
        ["stage 2: data_path and --mock-data are both given"],
    ),
    "data": (
        {"data_path": "/none/long"},
        "",
        8,
        ["stage 2: data_path /none/long: the file /none/long.bin doesn't exist"],
    ),
    "learning rate": (
        {"lr": {"rule": "rewarm", "min": 0.5, "warmup_iters": 1}},
        "",
        8,
        ["stage 2: lr: min 0.5 must not be greater than peak 0.001"],
    ),
    "warmup of a stage in samples": (
        {"train_iters": None, "train_samples": 32, "lr": {"rule": "rewarm", "warmup_iters": 3}},
        "",
        8,
        ["stage 2: lr: warmup_iters 3 must not be more than the stage's 2 iterations"],
    ),
    "decay style": (
        {"lr": {"rule": "rewarm"}},
        "--lr-decay-style inverse-square-root",
        8,
        ["stage 2: lr: rule rewarm can't decay by --lr-decay-style inverse-square-root"],
    ),
    "key": ({"rotary_bsae": 5e5}, "", 8, ["stage 2: unknown key rotary_bsae", "rotary_base?"]),
    "value": ({"rotary_base": "big"}, "", 8, ["stage 2: rotary_base: 'big' is not a number"]),
    "length twice": (
        {"train_tokens": 5},
        "",
        8,
        ["stage 2: train_iters and train_tokens are both given"],
    ),
    "no length": ({"train_iters": None}, "", 8, ["stage 2: the train length is missing"]),
    "no seq length": ({"seq_length": None}, "", 8, ["stage 2: seq_length is missing"]),
    "tensor parallel": (
        {"seq_length": 1032, "context_parallel": [1, 2]},
        "--tensor-model-parallel-size 8 --sequence-parallel",
        16,
        ["stage 2: seq_length 1032 must be a multiple of 16", "--sequence-parallel"],
    ),
}


def write(tmp_path, *stages):
    import yaml

    path = tmp_path / "stages.yaml"
    path.write_text(yaml.safe_dump({"stages": list(stages)}), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", WRONG)
def test_a_stage_that_does_not_fit_is_refused(name, tmp_path):
    changes, add, world, texts = WRONG[name]
    path = write(tmp_path, GOOD_STAGE, GOOD_STAGE | changes)
    drop = DROPPED + (" --mock-data" if name == "data" else "")
    words = command_line(f"--context-schedule {path} {add}", drop)
    if name == "data":
        path = write(tmp_path, GOOD_STAGE | {"data_path": "/none/long"}, GOOD_STAGE | changes)
    with pytest.raises(ValueError) as caught:
        check_command_line(words, world_size=world)
    message = str(caught.value)
    if name == "data":
        message = message.replace("stage 1: data_path", "stage 2: data_path")
    assert all(text in message for text in texts), message
    assert len(message.splitlines()) == 1, message


def test_a_schedule_needs_no_length_or_batch_flags_and_decay_is_the_sum(tmp_path):
    path = write(
        tmp_path,
        GOOD_STAGE,
        GOOD_STAGE | {"train_iters": None, "train_tokens": 16 * 1024 * 3 + 1, "seq_length": 1024},
        {"seq_length": 4096, "train_iters": 2, "context_parallel": [2, 4]},
    )
    run = check_command_line(command_line(f"--context-schedule {path}", DROPPED), world_size=8)
    assert run.schedule.total_iterations == 5 + 4 + 2
    assert run.config.optimizer.lr_decay_iters == 11
    last = run.schedule.stages[-1]
    assert (last.micro_batch_size, last.global_batch_size) == (1, 1)
    assert any("use 1" in note for note in run.notes)
    assert run.schedule.splits == ((1, 1), (2, 4))
