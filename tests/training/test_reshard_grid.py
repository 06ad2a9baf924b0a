"""A checkpoint of any of eight layouts of eight ranks goes on in any other, bit for bit.

Every axis is used: tensor (with sequence parallelism), ulysses, ring, pipeline (also
interleaved, with tied embeddings on its first and last rank) and data, with each kind of
sharding. For a pair, each rank's pieces of weights and optimizer state are compared with the
saved tensors, and the next step's loss and gradient norm with those of the saving run.
"""

import contextlib
import dataclasses
import io
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import iteration_folder
from tests.utils.jobs import TINY, metrics_of, run_job, tensors_of
from tests.utils.ranks import run_ranks

WORLD = 8
SAVED_AT = 2
LAYOUTS: dict[str, list[str]] = {
    # name: tp, ulysses, ring, pp, further flags
    "data 8": ["1", "1", "1", "1", "--use-distributed-optimizer"],
    "tensor 4 data 2": ["4", "1", "1", "1", "--data-parallel-sharding-strategy=optim_grads"],
    "tensor 2 ring 2 interleaved 2": ["2", "1", "2", "2", "--use-distributed-optimizer", "vpp"],
    "tensor 2 ulysses 2 ring 2": [
        *("2", "2", "2", "1"),
        "--data-parallel-sharding-strategy=optim_grads_params",
    ],
    "ulysses 2 pipeline 4": ["1", "2", "1", "4"],
    "ring 8": ["1", "1", "8", "1", "--use-distributed-optimizer"],
    "tensor 2 interleaved 2 data 2": [
        *("2", "1", "1", "2"),
        "--data-parallel-sharding-strategy=optim_grads_params",
        "vpp",
    ],
    "ulysses 2 ring 2 data 2": ["1", "2", "2", "1"],
}
SEED = int(os.environ.get("TEST_SEED", random.SystemRandom().randrange(10**6)))
FOLDER = tempfile.TemporaryDirectory()


def argv(layout: str, dtype: str) -> list[str]:
    """The command line of a layout; embeddings are tied, micro-batches hold one row."""
    tp, ulysses, ring, pp, *more = LAYOUTS[layout]
    more = ["--num-layers-per-virtual-pipeline-stage=1" if m == "vpp" else m for m in more]
    return [
        *TINY,
        "--no-untie-embeddings-and-output-weights",
        f"--params-dtype={dtype}",
        f"--tensor-model-parallel-size={tp}",
        *(["--sequence-parallel"] if tp != "1" else []),
        f"--pipeline-model-parallel-size={pp}",
        f"--context-parallel-size={int(ulysses) * int(ring)}",
        *("--hierarchical-context-parallel-sizes", ulysses, ring),
        *more,
    ]


def saved(layout: str, dtype: str) -> tuple[str, dict[str, float]]:
    """Folder of a run of this layout with a checkpoint of step 2, and its metrics of step 3."""
    folder = Path(FOLDER.name) / dtype / layout.replace(" ", "_")
    metrics = folder.with_suffix(".jsonl")
    if not folder.exists():
        flags = [f"--save={folder}", "--save-interval=2", "--exit-interval=3"]
        flags.append(f"--metrics-file={metrics}")
        run_job(WORLD, [*argv(layout, dtype), *flags], timeout=240).check()
    return str(folder), metrics_of(metrics)[SAVED_AT]


def load_each(
    rank: int, world: int, flags: list[str], sources: list[str]
) -> list[tuple[float, float]]:
    """Load every source into one layout, check all tensors, take one step."""
    import pretrain_gpt
    from megatron.core.tokenizers import build_tokenizer
    from megatron.training.arguments import check_command_line
    from megatron.training.build import build_trainer
    from megatron.training.signals import ExitSignals
    from megatron.training.stage_switch import enter_stage, leave_stage
    from megatron.training.train_step import train_step

    with contextlib.redirect_stdout(io.StringIO()):
        resolved = check_command_line(flags, world_size=world, ranks_per_node=world)
        trainer = build_trainer(
            resolved,
            build_tokenizer("NullTokenizer", None, 97),
            torch.device("cpu"),
            ExitSignals(),
            model_provider=pretrain_gpt.model_provider,
            data_provider=pretrain_gpt.data_provider,
            loss_provider=pretrain_gpt.loss_provider,
        )
        checkpointer: Any = trainer.checkpointer
        results = []
        for source in sources:
            with torch.no_grad():
                for parameter in trainer.parameters:
                    parameter.fill_(-1)
            options = dataclasses.replace(resolved.config.checkpoint, load=source, ckpt_step=2)
            checkpointer._config = dataclasses.replace(resolved.config, checkpoint=options)
            loaded = checkpointer.load()
            trainer.state = loaded.train_state
            check_pieces(checkpointer, Path(source))
            enter_stage(trainer, trainer.schedule.stage_at_iteration(SAVED_AT))
            result = train_step(trainer, trainer.loader.next_step())
            leave_stage(trainer)
            trainer.stage = None
            results.append((result.loss, result.grad_norm))
    return results


def check_pieces(checkpointer: Any, source: Path) -> None:
    """Every number this rank holds is the saved one; all ranks together hold all of them."""
    import torch.distributed as dist

    whole = tensors_of(iteration_folder(source, SAVED_AT))
    pieces = checkpointer._pieces(optimizer=True, rng={})
    for name, piece in pieces.items():
        where = tuple(
            slice(offset, offset + size)
            for offset, size in zip(piece.offsets, piece.tensor.shape, strict=True)
        )
        assert torch.equal(piece.tensor, whole[name][where]), (name, piece.offsets)
    covered: list[Any] = [None] * dist.get_world_size()
    mine = {(name, p.offsets): tuple(p.tensor.shape) for name, p in pieces.items()}
    dist.all_gather_object(covered, mine)
    union = {key: shape for part in covered for key, shape in part.items()}
    sizes: dict[str, int] = {}
    for (name, _), shape in union.items():
        sizes[name] = sizes.get(name, 0) + torch.Size(shape).numel()
    expected = {n: t.numel() for n, t in whole.items() if not n.startswith("rng.")}
    assert sizes == expected


def compare(target: str, sources: list[str], dtype: str, tolerance: float) -> None:
    folders = [saved(source, dtype) for source in sources]
    flags = argv(target, dtype)
    answers = run_ranks(WORLD, load_each, flags, [folder for folder, _ in folders], timeout=400)
    for results in answers:
        for source, (_, expected), (loss, norm) in zip(sources, folders, results, strict=True):
            assert abs(loss - expected["lm_loss"]) <= tolerance * expected["lm_loss"], source
            assert abs(norm - expected["grad_norm"]) <= tolerance * expected["grad_norm"], source


_choose = random.Random(SEED)
SAMPLE = [(target, _choose.sample(list(LAYOUTS), 2)) for target in _choose.sample(list(LAYOUTS), 2)]
TOLERANCES = {"float64": 1e-10, "float32": 1e-5}


@pytest.mark.parametrize(("target", "sources"), SAMPLE, ids=str)
def test_some_pairs(target: str, sources: list[str]) -> None:
    print(f"TEST_SEED={SEED}")
    compare(target, sources, "float64", TOLERANCES["float64"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("target", LAYOUTS)
def test_every_pair(target: str, dtype: str) -> None:
    began = time.monotonic()
    compare(target, list(LAYOUTS), dtype, TOLERANCES[dtype])
    print(f"{target}, {dtype}: {len(LAYOUTS)} pairs in {time.monotonic() - began:.0f} s")
