"""bf16 compute: fp32 master weights and gradients, sums over ranks in fp32."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed import Sharding, finalize_gradients
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.runner import SingleStageRunner
from tests.distributed.toy import HIDDEN, LENGTH, Toy, full_tensor, make, rows, split_rows, use
from tests.utils.ranks import run_ranks


class _Scale(nn.Module):
    """y = weight * x with a weight that is replicated over tp: the gradient is rank-dependent."""

    def __init__(self, tp_mesh):
        super().__init__()
        self.weight = make("weight", (4,), torch.float32, tp_mesh)
        self.saw = None

    def forward(self, x, batch, *, dropout_key=None):
        weight = use(self.weight, partial=True)
        self.saw = weight.dtype
        return (weight.float() * batch).sum()


def _partial_sum(rank, world, strategy, micro_batches):
    """1 + 2^-9 (tp) and 2^8 (dpcp) need fp32: bf16 keeps 8 bits."""
    state = ParallelState(tensor_model_parallel_size=2)
    model = _Scale(state.tp_mesh)
    sharding = Sharding(state.dpcp_mesh, strategy, param_dtype=torch.bfloat16)
    sharding.shard(model)
    runner = SingleStageRunner(model, torch.device("cpu"), sharding.before_backward)
    piece = 1.0 if state.tp_rank == 0 else 2.0**-9
    batches = [torch.full((4,), piece)] * micro_batches
    runner.run(batches, 1.0 if state.dpcp_rank == 0 else 256.0)
    assert model.saw == torch.bfloat16 and model.weight.dtype == torch.float32
    grad = model.weight.grad
    assert isinstance(grad, DTensor) and grad.dtype == torch.float32
    scale = sum(1.0 if i == 0 else 256.0 for i in range(state.dpcp_size))
    expected = micro_batches * (1 + 2.0**-9) * scale
    assert torch.equal(full_tensor(grad), torch.full((4,), expected)), full_tensor(grad)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("world", "strategy"), [(2, "optim"), (4, "optim"), (4, "no_shard")])
def test_partial_gradients_are_summed_over_ranks_in_fp32(world, strategy, micro_batches):
    run_ranks(world, _partial_sum, strategy, micro_batches)


def _reference(tokens, labels, rounded):
    model = Toy(range(2), True, True, dtype=torch.float64)
    if rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().double()
    model(None, split_rows(tokens, labels, 0, 1, len(tokens))[0]).backward()
    return {n: p.grad for n, p in model.named_parameters()}


def _toy_bf16(rank, world, tp, strategy, micro):
    state = ParallelState(tensor_model_parallel_size=tp)
    sharding = Sharding(state.dpcp_mesh, strategy, param_dtype=torch.bfloat16)
    model = Toy(
        range(2), True, True, dtype=torch.float32, tp_mesh=state.tp_mesh, shard=sharding.shard
    )
    inputs = []
    model.layers["1"].register_forward_pre_hook(lambda m, args: inputs.append(args[0].dtype))
    runner = SingleStageRunner(
        model, torch.device("cpu"), sharding.before_backward, sharding.after_evaluation
    )
    tokens, labels = rows(8)
    batches = split_rows(tokens, labels, state.dpcp_rank, state.dpcp_size, micro)
    runner.evaluate(batches)
    runner.run(batches, 1.0)
    finalize_gradients(model.parameters())
    assert set(inputs) == {torch.bfloat16}
    expected = _reference(tokens, labels, rounded=True)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and parameter.grad.dtype == torch.float32
        error = (full_tensor(parameter.grad).double() - expected[name]).norm()
        assert error <= 0.03 * expected[name].norm(), (name, error / expected[name].norm())
    return True


@pytest.mark.parametrize(
    ("world", "tp", "strategy", "micro"),
    [(1, 1, "no_shard", 8), (2, 1, "no_shard", 2), (2, 2, "optim", 8), (4, 2, "optim_grads", 2)],
)
def test_a_model_in_bf16_stays_close_to_fp64(world, tp, strategy, micro):
    """bf16 keeps 8 bits, so each op is off by up to 0.4 %; 3 % bounds this model's dozen ops."""
    assert all(run_ranks(world, _toy_bf16, tp, strategy, micro))


def _inputs_are_not_cast(rank, world):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, cos):
            assert cos.dtype == torch.float32 and self.weight.dtype == torch.bfloat16
            return (self.weight * cos).sum()

    state = ParallelState()
    module = Sharding(state.dpcp_mesh, "no_shard", param_dtype=torch.bfloat16).shard(Rotary())
    module(torch.tensor([1.0, 131071.0])).backward()


def test_fp32_inputs_such_as_rope_tables_are_not_cast():
    run_ranks(1, _inputs_are_not_cast)


def _what_is_wrapped(rank, world):
    state = ParallelState()
    plain = nn.Linear(HIDDEN, LENGTH)
    weight = plain.weight
    Sharding(state.dpcp_mesh, "no_shard").shard(plain)
    assert plain.weight is weight and type(plain) is nn.Linear
    half = nn.Linear(4, 4, dtype=torch.bfloat16)
    Sharding(state.dpcp_mesh, "optim", param_dtype=torch.bfloat16).shard(half)
    assert type(half) is nn.Linear
    Sharding(state.dpcp_mesh, "optim", param_dtype=torch.bfloat16).shard(plain)
    assert isinstance(plain.weight, DTensor)
    with pytest.raises(ValueError, match="--data-parallel-sharding-strategy zero3 must be one of"):
        Sharding(state.dpcp_mesh, "zero3")


def test_one_rank_without_mixed_precision_is_left_alone():
    run_ranks(1, _what_is_wrapped)


def _stored_bf16(rank, world):
    """bf16 weights without fp32 copies: gradients are still summed over ranks in fp32."""
    state = ParallelState()
    module = nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    Sharding(state.dpcp_mesh, "optim").shard(module)
    # fp32: 256 + 1 + 1 = 258, which bf16 holds; in bf16 256 + 1 rounds to 256 twice.
    value = 256.0 if rank == 0 else 1.0
    module(torch.full((1, 4), value, dtype=torch.bfloat16)).sum().backward()
    grad = full_tensor(module.weight.grad)
    assert grad.dtype == torch.bfloat16 and torch.equal(grad, torch.full_like(grad, 258.0))
    dist.barrier()


def test_bf16_weights_reduce_in_fp32():
    run_ranks(3, _stored_bf16)
