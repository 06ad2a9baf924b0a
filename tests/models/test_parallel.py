"""Loss and every gradient are the same for every (tp, sequence parallel, ulysses, ring) in fp64."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from megatron.core.config import ModelConfig
from megatron.core.context_parallel import make_layout
from megatron.core.distributed import finalize_gradients
from megatron.core.models.gpt import GPTModel, prepare_batch
from tests.models.helpers import (
    assert_close,
    gpt2_fields,
    gradients,
    local_part,
    small_config,
    whole_batch,
)
from tests.utils.ranks import run_ranks

DOCUMENTS = [[7, 1, 24], [32]]
Grid = tuple[int, int, int, bool, str]
"""tp, ulysses, ring, sequence parallel, cp_comm_type."""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": gpt2_fields(),
    "one kv head, qk norm, qkv bias, tied": {
        "num_query_groups": 1,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": False,
    },
    "two kv heads, window, mlp chunks": {
        "num_query_groups": 2,
        "window_size": 9,
        "mlp_chunk_size": 16,
        "add_bias_linear": True,
    },
    "full recompute": {"recompute_granularity": "full", "mlp_chunk_size": 8},
    "full recompute with attention": {
        "recompute_granularity": "full",
        "recompute_attention": True,
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "selective recompute": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "mlp", "layernorm"),
    },
    "norms recomputed": gpt2_fields(
        recompute_granularity="selective", recompute_modules=("layernorm",)
    ),
}
FOUR: tuple[Grid, ...] = (
    (4, 1, 1, True, "auto"),
    (4, 1, 1, False, "auto"),
    (2, 1, 2, True, "p2p"),
    (2, 1, 2, False, "all_gather"),
    (2, 2, 1, True, "a2a"),
    (1, 2, 2, False, "a2a+p2p"),
    (1, 1, 4, False, "p2p"),
)


def _groups(sizes: Grid, rank: int, world: int) -> tuple[Any, Any, Any, int, int]:
    """tp mesh, ulysses group, ring group and this rank's ulysses and ring ranks; tp fastest."""
    tp, ulysses, ring, *_ = sizes
    mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dpcp", "tp"))["tp"]
    grid = torch.arange(world).view(ring, ulysses, tp)
    mine: dict[str, Any] = {}
    for axis, dim in (("ulysses", 1), ("ring", 0)):
        for members in grid.movedim(dim, -1).flatten(0, 1).tolist():
            group = dist.new_group(members)
            if rank in members:
                mine[axis] = group
    return mesh, mine["ulysses"], mine["ring"], rank // tp % ulysses, rank // (tp * ulysses)


def _gathered(model: GPTModel) -> dict[str, torch.Tensor]:
    """Whole gradients, summed over tp where partial and over the context-parallel ranks."""
    finalize_gradients(model.parameters())
    whole = {}
    for name, grad in gradients(model).items():
        whole[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).contiguous()
    return whole


def _rank(rank: int, world: int, grids: list[Grid], names: list[str]) -> Any:
    results = []
    for sizes in grids:
        tp, ulysses, ring, sequence_parallel, cp_comm_type = sizes
        mesh, ulysses_group, ring_group, ulysses_rank, ring_rank = _groups(sizes, rank, world)
        for name in names:
            config = small_config(**CONFIGS[name])
            batch = whole_batch(DOCUMENTS)
            layout = make_layout("zigzag", batch.seq_length, ring, ulysses)
            batch = local_part(batch, layout, ring_rank, ulysses_rank)
            prepare_batch(
                batch,
                config,
                ring_group=ring_group,
                ulysses_group=ulysses_group,
                tp_size=tp,
                cp_comm_type=cp_comm_type,
            )
            model = GPTModel(config, tp_mesh=mesh, sequence_parallel=sequence_parallel)
            loss = model(None, batch)
            loss.backward()
            losses = model.token_losses(batch)
            logits = model.logits(batch)
            grads = _gathered(model)
            for tensor in grads.values():  # equal on tp ranks: sum over the others
                dist.all_reduce(tensor)
                tensor /= tp
            total = loss.detach().clone()
            dist.all_reduce(total)
            at = layout.positions(ring_rank, ulysses_rank)
            kept = {k: v.numpy() for k, v in grads.items()} if rank == 0 else {}
            arrays = [x.detach().numpy() for x in (total / tp, at, losses, logits)]
            results.append((*arrays, kept))
    return results


def _check(world: int, grids: list[Grid], names: list[str]) -> None:
    ranks = run_ranks(world, _rank, grids, names, timeout=240)
    batch = whole_batch(DOCUMENTS)
    for index in range(len(grids) * len(names)):
        name, grid = names[index % len(names)], grids[index // len(names)]
        what = f"{name} on {grid}"
        changes = {
            k: v for k, v in CONFIGS[name].items() if "recompute" not in k and "chunk" not in k
        }
        model = GPTModel(small_config(**changes))
        loss = model(None, batch)
        loss.backward()
        losses, logits = model.token_losses(batch), model.logits(batch)
        for arrays in (rank[index][:4] for rank in ranks):
            total, at, part, some_logits = (torch.from_numpy(x) for x in arrays)
            assert_close(total, loss, 1e-12, f"loss of {what}")
            assert_close(part, losses[:, at], 1e-10, f"token losses of {what}")
            assert_close(some_logits, logits[:, at], 1e-10, f"logits of {what}")
        actual, expected = ranks[0][index][4], gradients(model)
        assert actual.keys() == expected.keys()
        for key, gradient in actual.items():
            assert_close(torch.from_numpy(gradient), expected[key], 1e-10, f"{key} of {what}")


def test_four_ranks_equal_one() -> None:
    """Every grid with three of the models, drawn anew in each run."""
    seed = random.randrange(1 << 16)
    print(f"models drawn with seed {seed}")
    draw = random.Random(seed)
    for grid in FOUR:
        _check(4, [grid], draw.sample(sorted(CONFIGS), 3))


@pytest.mark.slow
@pytest.mark.parametrize("grid", FOUR, ids=str)
def test_four_ranks_equal_one_with_every_model(grid: Grid) -> None:
    _check(4, [grid], list(CONFIGS))


@pytest.mark.slow
def test_eight_ranks_equal_one() -> None:
    _check(8, [(2, 2, 2, True, "a2a+p2p"), (2, 2, 2, True, "a2a+all_gather")], list(CONFIGS))


def test_two_ranks_with_every_model() -> None:
    _check(2, [(2, 1, 1, True, "auto"), (1, 1, 2, False, "p2p")], list(CONFIGS))


def _sharded(rank: int, world: int, fields: dict[str, Any]) -> Any:
    """FSDP2 over two data-parallel ranks that each take one row."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dpcp",))
    config: ModelConfig = small_config(**fields)
    options = {"mesh": mesh, "reshard_after_forward": True}
    model = GPTModel(config, shard_fn=lambda layer: fully_shard(layer, **options))
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    batch = whole_batch([DOCUMENTS[rank]], seed=rank)
    model(None, batch).backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {name: grad.numpy() for name, grad in grads.items()}


@pytest.mark.parametrize("name", [name for name in CONFIGS if "recompute" in name])
def test_recompute_under_fsdp(name: str) -> None:
    actual = run_ranks(2, _sharded, CONFIGS[name])[0]
    changes = {k: v for k, v in CONFIGS[name].items() if "recompute" not in k and "chunk" not in k}
    model = GPTModel(small_config(**changes))
    for row in range(2):
        model(None, whole_batch([DOCUMENTS[row]], seed=row)).backward()
    for key, gradient in gradients(model).items():
        assert_close(torch.from_numpy(actual[key]), gradient, 1e-10, f"{key} of {name}")
