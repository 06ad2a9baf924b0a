"""Defaults filled in, the split of context-parallel ranks, and agreement with other rooms."""

import pytest

from megatron.core.config.parallel import CP_LAYOUTS, layout_multiple
from megatron.core.context_parallel import make_layout
from megatron.core.rank_grid import build_grid
from megatron.training.arguments import (
    check_command_line,
    finalize,
    parse_args,
)
from megatron.training.arguments.resolve import flag_split
from tests.arguments.good import command_line


def finished(add="", drop="", world=8, ranks_per_node=8):
    argv = command_line(add, drop)
    return check_command_line(argv, world_size=world, ranks_per_node=ranks_per_node)


def test_every_default_is_filled_in_and_filling_again_changes_nothing():
    config = finished("--swiglu --use-distributed-optimizer", "--global-batch-size").config
    assert (config.model.kv_channels, config.model.ffn_hidden_size) == (8, 128)
    assert config.model.params_dtype == "float32"
    assert config.training.global_batch_size == 8
    assert config.parallel.hierarchical_context_parallel_sizes == (1, 1)
    assert config.parallel.data_parallel_sharding_strategy == "optim"
    assert config.optimizer.lr_decay_iters == 10
    full = finished("--recompute-granularity full").config.model
    assert (full.recompute_method, config.model.recompute_method) == ("uniform", None)
    again = finalize(config, 8)
    assert again == config


def test_train_samples_and_tokens_become_iterations():
    for add, steps in (
        ("--train-samples 33", 3),
        ("--train-tokens 33e3", 3),
        ("--train-iters 7", 7),
    ):
        run = finished(add, "--train-iters")
        assert run.schedule.total_iterations == run.config.training.train_iters == steps
        assert (
            run.config.training.train_samples is None and run.config.training.train_tokens is None
        )


@pytest.mark.parametrize(
    "flags, per_node, split",
    [
        ("", 8, (1, 1)),
        ("--context-parallel-size 4", 8, (4, 1)),
        ("--context-parallel-size 16", 8, (8, 2)),
        ("--context-parallel-size 16 --tensor-model-parallel-size 4", 8, (2, 8)),
        ("--context-parallel-size 6", 4, (3, 2)),
        ("--context-parallel-size 4 --cp-comm-type p2p", 8, (1, 4)),
        ("--context-parallel-size 4 --cp-comm-type all_gather", 8, (1, 4)),
        ("--context-parallel-size 4 --cp-comm-type a2a", 2, (4, 1)),
        ("--context-parallel-size 8 --cp-comm-type a2a+p2p", 4, (4, 2)),
        ("--context-parallel-size 8 --hierarchical-context-parallel-sizes 2 4", 8, (2, 4)),
    ],
)
def test_split_of_context_parallel_ranks(flags, per_node, split):
    config = parse_args([*command_line(), *flags.split()])
    assert flag_split(config, per_node) == split


def test_rope_scaling_of_the_flags():
    words = "--rope-scaling-type yarn --rope-scaling-factor 16 --max-position-embeddings 4096"
    model = parse_args(words.split()).model
    assert model.rope_scaling == {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
    }
    assert parse_args([]).model.rope_scaling is None
    run = finished(words + " --original-max-position-embeddings 1024")
    assert run.schedule.stages[0].rope_scaling["original_max_position_embeddings"] == 1024


def test_a_dry_run_checks_the_pretended_world():
    run = finished("--dry-run --dry-run-world-size 16", world=1)
    assert run.config.training.global_batch_size == 16
    with pytest.raises(ValueError, match="world size 3 must be a multiple of"):
        finished("--dry-run --dry-run-world-size 3 --tensor-model-parallel-size 2", world=2)


def test_notes_say_what_has_no_effect_or_leaves_the_node():
    notes = finished("--sequence-parallel").notes
    assert notes == ("--sequence-parallel has no effect with --tensor-model-parallel-size 1",)
    notes = finished("--context-parallel-size 8 --cp-comm-type a2a", ranks_per_node=4).notes
    assert len(notes) == 1 and "span more than a node of 4" in notes[0]


def test_allowed_edges_are_allowed():
    finished("--split 100,0,0 --eval-iters 0 --save runs/none --load runs/none")
    finished("--params-dtype float64 --optimizer sgd --clip-grad 0 --lr-decay-style constant")
    finished("--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4")
    finished("--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-warmup-iters 2")
    finished("--recompute-granularity full --recompute-attention --mlp-chunk-size 64")


@pytest.mark.parametrize("kind", CP_LAYOUTS)
def test_the_multiple_of_a_layout_is_what_make_layout_takes(kind):
    for ring in (1, 2, 3, 4, 6):
        for ulysses in (1, 2, 3, 4):
            multiple = layout_multiple(kind, ring, ulysses)
            for length in range(1, 3 * multiple + 1):
                if length % multiple == 0:
                    make_layout(kind, length, ring, ulysses)
                elif length % max(1, multiple // 2) == 0 or length < 4:
                    with pytest.raises(ValueError):
                        make_layout(kind, length, ring, ulysses)


def test_the_world_rules_agree_with_the_rank_grid():
    for world in range(1, 25):
        for tensor, pipeline, context in ((1, 1, 1), (2, 1, 2), (1, 2, 3), (2, 2, 2)):
            flags = (
                f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} "
                f"--context-parallel-size {context} --cp-comm-type p2p --seq-length 1152"
            )
            try:
                finished(flags, "--global-batch-size --seq-length", world) if pipeline == 1 else (
                    finished(flags + f" --global-batch-size {world * 4}", "", world)
                )
                fits = True
            except ValueError as error:
                fits = "world size" not in str(error)
            try:
                build_grid(
                    world,
                    tensor_model_parallel_size=tensor,
                    pipeline_model_parallel_size=pipeline,
                    ring_size=context,
                )
                grid_fits = True
            except ValueError:
                grid_fits = False
            assert fits == grid_fits, (world, tensor, pipeline, context)
