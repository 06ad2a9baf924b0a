"""Dry runs: example schedules fit the clusters they name, and the bytes are those of a model."""

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.models.gpt import GPTModel
from megatron.training.arguments import check_command_line
from megatron.training.dry_run import dry_run
from tests.arguments.good import command_line

ROOT = Path(__file__).parents[2]
SCHEDULES = sorted((ROOT / "examples" / "schedules").glob("*.yaml"))
LLAMA3_8B = shlex.split(
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --lr 3e-4 --bf16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128256 --sequence-parallel "
    "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"
)


def run(argv, world):
    lines = []
    argv = [*argv, "--dry-run", "--dry-run-world-size", str(world)]
    assert dry_run(check_command_line(argv, world_size=1), lines.append) == 0
    assert not dist.is_initialized()
    return "\n".join(lines)


@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: path.stem)
def test_an_example_schedule_passes_on_the_cluster_it_names(path):
    cluster = re.search(
        r"# Cluster: (\d+) ranks .*--tensor-model-parallel-size (\d+)", path.read_text("utf-8")
    )
    assert cluster, f"{path.name} must name its cluster"
    world, tensor = cluster.groups()
    flags = ["--tensor-model-parallel-size", tensor, "--context-schedule", str(path)]
    text = run([*LLAMA3_8B, *flags], int(world))
    assert f"world {world} = tp {tensor} x" in text and f"dry run of {world} ranks: fine" in text


def test_the_issue_s_schedules_are_there():
    from megatron.core.context_extension import ContextSchedule

    schedule = ContextSchedule.from_yaml(ROOT / "examples/schedules/4k_to_1m.yaml")
    assert [
        (stage.seq_length, stage.iterations, stage.rotary_base) for stage in schedule.stages
    ] == [
        (4096, 1000, 1e4),
        (16384, 800, 5e4),
        (65536, 600, 5e5),
        (262144, 400, 5e6),
        (1048576, 200, 5e7),
    ]
    lwm = ContextSchedule.from_yaml(ROOT / "examples/schedules/lwm_32k_to_1m.yaml")
    assert (lwm.stages[-1].seq_length, lwm.stages[-1].rotary_base) == (1048576, 5e7)
    llama = ContextSchedule.from_yaml(ROOT / "examples/schedules/llama3_8k_to_128k.yaml")
    assert (llama.stages[0].seq_length, llama.stages[-1].seq_length) == (8192, 131072)


def held_by_a_rank(text):
    """Parameters a rank of each pipeline rank."""
    table = text.split("a rank holds")[1].splitlines()[2:]
    rows = [line.split() for line in table if re.match(r" +\d+ ", line)]
    return [int(next(word for word in row if "," in word).replace(",", "")) for row in rows]


@pytest.mark.parametrize("tied", ["", " --untie-embeddings-and-output-weights"])
def test_counted_parameters_are_those_of_the_model(tied):
    argv = command_line("--swiglu --global-batch-size 32" + tied)
    config = check_command_line(argv, world_size=1).config
    model = GPTModel(config.model, device="meta")
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert held_by_a_rank(run(argv, 1)) == [whole]
    parts = held_by_a_rank(run([*argv, "--pipeline-model-parallel-size", "4"], 4))
    copied = 0 if tied else config.model.padded_vocab_size * config.model.hidden_size
    assert sum(parts) == whole + copied and len(parts) == 4
    halves = held_by_a_rank(run([*argv, "--tensor-model-parallel-size", "2"], 2))
    alone = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
    assert whole / 2 <= halves[0] < whole / 2 + alone + 64 * 9 * config.model.num_layers


def test_bytes_follow_the_sharding_strategy():
    argv = command_line("--global-batch-size 32")
    whole = sum(
        p.numel()
        for p in GPTModel(
            check_command_line(argv, world_size=1).config.model, device="meta"
        ).parameters()
    )

    def sizes(add):
        from megatron.core.parallel_state import ParallelState
        from megatron.training.dry_run import pipeline_bytes

        dist.init_process_group("fake", rank=0, world_size=8)
        try:
            resolved = check_command_line([*argv, *add.split()], world_size=8)
            (part,) = pipeline_bytes(resolved.config, ParallelState())
        finally:
            dist.destroy_process_group()
        return part

    plain = sizes("")
    assert (plain.weights, plain.gradients, plain.optimizer) == (whole * 4, whole * 4, whole * 8)
    assert plain.in_step == 0 and sizes("--bf16").in_step == whole * 2
    sharded = sizes("--use-distributed-optimizer")
    assert whole * 4 / 8 <= sharded.weights < whole * 4 / 8 * 1.1
    assert sharded.optimizer == 2 * sharded.weights and sharded.in_step == whole * 8
    least = sizes("--data-parallel-sharding-strategy optim_grads_params --optimizer sgd")
    assert least.optimizer == least.weights and 0 < least.in_step < sharded.in_step
    assert sizes("--params-dtype float64").weights == whole * 8


def test_512_ranks_of_llama_3_8b_through_the_entry_point():
    flags = (
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 8 "
        "--num-layers-per-virtual-pipeline-stage 8 --seq-length 131072 --train-iters 100 "
        "--micro-batch-size 1 --global-batch-size 128 --dry-run --dry-run-world-size 512"
    )
    began = time.process_time(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "pretrain_gpt.py", *LLAMA3_8B, *flags.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "world 512 = tp 4 x dpcp 64 x pp 2" in done.stdout
    assert "0-7 16-23" in done.stdout and "1,677,721,600 tokens" in done.stdout
    print(f"{time.monotonic() - began[1]:.1f} s")


def test_torch_of_the_caller_is_left_alone():
    before = torch.get_default_dtype(), torch.get_num_threads()
    run(command_line(), 2)
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before
