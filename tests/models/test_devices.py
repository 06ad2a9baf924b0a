"""A model away from the CPU: every tensor that it makes or uses lies on its device.

The meta device stands for a GPU: mixing devices raises there, and the libraries' own rules for
shapes and types run. The fake backend stands for the other ranks.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.context_parallel import make_layout
from megatron.core.context_parallel import plan as planning
from megatron.core.context_parallel.kernels.base import BlockKernel
from megatron.core.context_parallel.kernels.cuda_flash import CudaFlashKernel
from megatron.core.context_parallel.kernels.cudnn import CudnnKernel
from megatron.core.context_parallel.kernels.reference import ReferenceKernel
from megatron.core.models.gpt import GPTModel, prepare_batch
from megatron.core.parallel_state import ParallelState
from tests.models.helpers import gpt2_fields, local_part, small_config, whole_batch
from tests.utils.ranks import run_ranks

DOCUMENTS = [[7, 1, 24], [32]]


def step(
    fields: dict[str, Any],
    kernel: BlockKernel,
    groups: dict[str, Any],
    ranks: tuple[int, int] = (0, 0),
    comm: str = "auto",
) -> None:
    """Forward and backward of one micro-batch on the meta device."""
    config = small_config(params_dtype="bfloat16", hidden_size=64, **fields)
    sizes = tuple(1 if group is None else group.size() for group in groups.values())
    batch = whole_batch(DOCUMENTS)
    if sizes and sizes != (1, 1):
        layout = make_layout("zigzag", 32, *sizes, batch.cu_seqlens)
        batch = local_part(batch, layout, *ranks)
    batch = batch.to("meta")
    model = GPTModel(config, device="meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "select_kernel", lambda *_, **__: kernel)
        prepare_batch(batch, config, **groups, cp_comm_type=comm)
    loss = model(None, batch)
    loss.backward()
    assert loss.is_meta
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.is_meta
        assert parameter.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("kernel", [CudaFlashKernel(), CudnnKernel(), ReferenceKernel()])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"window_size": 5},
        {"qk_layernorm": True, "recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
        gpt2_fields(),
    ],
)
def test_one_rank(fields: dict[str, Any], kernel: BlockKernel) -> None:
    step(fields, kernel, {})


def _over_ranks(rank: int, world: int, split: tuple[int, int], comm: str) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=4)
    state = ParallelState(splits=[split])
    groups = {"ring_group": state.ring_group, "ulysses_group": state.ulysses_group}
    moved: list[str] = []

    class Work:
        def wait(self) -> None:
            pass

    def batch(ops: list[dist.P2POp]) -> list[Work]:
        moved.extend(op.tensor.device.type for op in ops)
        return [Work()]

    def exchange(received: torch.Tensor, sent: torch.Tensor, *_: Any, **__: Any) -> Work:
        moved.extend((received.device.type, sent.device.type))
        return Work()

    with pytest.MonkeyPatch.context() as patch:  # the fake backend knows no meta tensors
        patch.setattr(dist, "batch_isend_irecv", batch)
        patch.setattr(dist, "all_to_all_single", exchange)
        step({}, CudaFlashKernel(), groups, (state.ring_rank, state.ulysses_rank), comm)
    assert set(moved) == {"meta"}


@pytest.mark.parametrize(
    ("split", "comm"),
    [((1, 4), "p2p"), ((1, 4), "all_gather"), ((4, 1), "a2a"), ((2, 2), "a2a+p2p")],
)
def test_one_of_four_ranks(split: tuple[int, int], comm: str) -> None:
    run_ranks(1, _over_ranks, split, comm)
