"""The real model through runner, sharding, clipping and optimizer, over all axes, in fp64."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.config import ModelConfig, OptimizerConfig
from megatron.core.context_parallel import make_layout
from megatron.core.distributed import (
    Sharding,
    clip_gradients,
    finalize_gradients,
    gradient_norm,
)
from megatron.core.models.gpt import GPTModel, prepare_batch
from megatron.core.optimizer import build_optimizer
from megatron.core.packed_batch import PackedBatch
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel import ActivationShape, layer_ids, make_runner
from tests.distributed.toy import full_tensor
from tests.utils.ranks import run_ranks

ROWS, LENGTH, LAYERS, STEPS = 8, 16, 4, 3
TIED = "embedding.word_embeddings.weight"


def _config(tied, recompute):
    return ModelConfig(
        num_layers=LAYERS,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        normalization="RMSNorm",
        swiglu=True,
        position_embedding_type="rope",
        untie_embeddings_and_output_weights=not tied,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        vocab_size=29,
        make_vocab_size_divisible_by=8,
        params_dtype="float64",
        init_method_std=0.2,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
        loss_chunk_size=8,
    )


def _global_rows(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(29, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(29, (ROWS, LENGTH), generator=generator)
    for row in range(ROWS):
        labels[row, : row % 5] = -100
    cuts = torch.tensor([0, 5, 6, LENGTH], dtype=torch.int32)
    positions = torch.cat([torch.arange(b - a) for a, b in zip(cuts[:-1], cuts[1:])])
    return tokens, labels, positions.expand(ROWS, -1), cuts


def _batch(step, keep_rows, layout, places):
    tokens, labels, positions, cuts = _global_rows(step)
    return PackedBatch(
        tokens=tokens[keep_rows][:, places],
        labels=labels[keep_rows][:, places],
        loss_mask=(labels[keep_rows][:, places] != -100).float(),
        position_ids=positions[keep_rows][:, places],
        cu_seqlens=[cuts] * len(keep_rows),
        seq_length=LENGTH,
        layout=layout,
    )


def _reference(config, kind):
    model = GPTModel(config)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    if kind == "adam":
        optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False, fused=False)
    else:
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    history = []
    for step in range(STEPS):
        batch = _batch(step, list(range(ROWS)), None, torch.arange(LENGTH))
        optimizer.zero_grad()
        loss = model(None, batch) / batch.num_loss_tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append((loss.item(), norm.item()))
    return history, {n: p.detach().clone() for n, p in model.named_parameters()}


def _train(rank, world, config, kind, grid, strategy, expected):
    tp, pp, virtual, splits = grid
    state = ParallelState(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, splits=splits
    )
    sharding = Sharding(state.dpcp_mesh, strategy)
    ids = layer_ids(LAYERS, pp, virtual)[state.pp_rank]
    chunks = []
    for index, own in enumerate(ids):
        model = GPTModel(
            config,
            tp_mesh=state.tp_mesh,
            sequence_parallel=tp > 1,
            layer_ids=own,
            pre_process=state.is_pipeline_first_stage and index == 0,
            post_process=state.is_pipeline_last_stage and index == len(ids) - 1,
            shard_fn=sharding.shard,
        )
        chunks.append(sharding.shard(model))
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    parameters = [p for _, p in named]
    first = dict(named).get(TIED)
    last = dict(named).get("output_layer.weight")
    tied = pp > 1 and not config.untie_embeddings_and_output_weights
    tied_weight = (first if first is not None else last) if tied else None
    exclude = [last] if tied and last is not None else []
    optimizer = build_optimizer(
        OptimizerConfig(optimizer=kind, lr=0.01 if kind == "adam" else 0.1, weight_decay=0.1), named
    )
    runner = make_runner(
        chunks,
        pp_group=state.pp_group,
        activation=ActivationShape(16, torch.float64, tp),
        device=torch.device("cpu"),
        before_backward=sharding.before_backward,
        after_evaluation=sharding.after_evaluation,
    )
    history, weights = expected
    for step, (loss, norm) in enumerate(history):
        state.set_split(*splits[step % len(splits)])
        layout = make_layout("zigzag", LENGTH, state.ring_size, state.ulysses_size)
        places = layout.positions(state.ring_rank, state.ulysses_rank)
        mine = torch.arange(ROWS).chunk(state.dp_size)[state.dp_rank].tolist()
        batches = [
            prepare_batch(
                _batch(step, [row], layout, places),
                config,
                ring_group=state.ring_group,
                ulysses_group=state.ulysses_group,
                tp_size=tp,
            )
            for row in mine
        ]
        count = int((_global_rows(step)[1] != -100).sum())
        optimizer.zero_grad()
        found = runner.run(batches, 1 / count)
        dist.all_reduce(found, group=state.dpcp_group)
        assert abs(found.item() / count - loss) <= 1e-12 * loss
        finalize_gradients(
            parameters, tied_weight=tied_weight, embedding_group=state.embedding_group
        )
        found_norm = gradient_norm(parameters, group=state.world_group, exclude=exclude)
        assert abs(found_norm - norm) <= 1e-12 * norm
        clip_gradients(parameters, found_norm, 1.0)
        optimizer.step()
        evaluated = runner.evaluate(batches)
        dist.all_reduce(evaluated, group=state.dpcp_group)
        assert evaluated.item() < found.item()  # it has just learned these rows
    for name, parameter in named:
        want = weights[TIED if tied and name == "output_layer.weight" else name]
        error = (full_tensor(parameter.detach()) - want).abs().max() / want.abs().max()
        assert error <= 1e-10, (name, error.item())


@pytest.mark.parametrize(
    ("kind", "grid", "strategy", "tied", "recompute"),
    [
        # Adam divides by the root of small second moments, so errors of 1e-16 grow there.
        ("sgd", (2, 2, 1, [(1, 1), (2, 1), (1, 2)]), "no_shard", True, False),
        ("adam", (1, 2, None, [(2, 2), (1, 4), (1, 1)]), "optim_grads_params", True, True),
        ("adam", (2, 1, None, [(2, 2), (1, 1)]), "optim", False, False),
    ],
)
def test_gpt_with_switching_splits_equals_one_process(kind, grid, strategy, tied, recompute):
    config = _config(tied, recompute)
    run_ranks(8, _train, config, kind, grid, strategy, _reference(config, kind))
