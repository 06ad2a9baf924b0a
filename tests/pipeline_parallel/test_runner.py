"""Runners on real ranks: any number of micro-batches, changing shapes, what is kept in memory."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel import ActivationShape, layer_ids, make_runner
from megatron.core.pipeline_parallel.runner import PipelineRunner, SingleStageRunner
from pretrain_gpt import loss_provider
from tests.distributed.toy import HIDDEN, Toy, batch_of, full_tensor, rows
from tests.utils.ranks import run_ranks

LAYERS = 4


def _stages(state, per_virtual):
    ids = layer_ids(LAYERS, state.pp_size, per_virtual)[state.pp_rank]
    chunks = [
        Toy(
            own,
            pre=state.is_pipeline_first_stage and i == 0,
            post=state.is_pipeline_last_stage and i == len(ids) - 1,
            dtype=torch.float64,
            tp_mesh=state.tp_mesh,
            tied=False,
        )
        for i, own in enumerate(ids)
    ]
    runner = make_runner(
        chunks,
        pp_group=state.pp_group,
        activation=ActivationShape(HIDDEN, torch.float64, state.tp_size),
        device=torch.device("cpu"),
    )
    return chunks, runner


def _mixed_batches(count):
    """Micro-batches of different row counts and lengths within one step."""
    return [batch_of(*rows(1 + i % 3, seed=i, length=4 * (1 + i % 4))) for i in range(count)]


def _dense(batches, scale):
    model = Toy(range(LAYERS), True, True, dtype=torch.float64, tied=False)
    total = sum(model(None, batch) for batch in batches)
    (total * scale).backward()
    return total.item(), {n: p.grad for n, p in model.named_parameters()}


def _any_counts(rank, world, pp, tp, per_virtual, counts):
    state = ParallelState(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    chunks, runner = _stages(state, per_virtual)
    assert isinstance(runner, PipelineRunner)
    for count in counts:
        batches = _mixed_batches(count)
        loss, grads = _dense(batches, 0.25)
        assert abs(runner.evaluate(batches).item() - loss) <= 1e-12 * loss
        assert all(p.grad is None for chunk in chunks for p in chunk.parameters())
        found = runner.run(batches, 0.25)
        assert found.dtype == torch.float64 and abs(found.item() - loss) <= 1e-12 * loss
        everywhere = [None] * world
        dist.all_gather_object(everywhere, found.item())
        assert len(set(everywhere)) == 1
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                error = (full_tensor(parameter.grad) - grads[name]).abs().max()
                assert error <= 1e-12 * grads[name].abs().max(), (count, name)
            chunk.zero_grad()


@pytest.mark.parametrize(
    ("world", "pp", "tp", "per_virtual", "counts"),
    [
        (2, 2, 1, None, (1, 2, 5)),
        (2, 2, 1, 1, (1, 2, 3, 7)),
        (4, 4, 1, None, (1, 3, 4, 9)),
        (4, 4, 1, 1, (1, 3, 6)),
        (4, 2, 2, 1, (2, 5)),
    ],
)
def test_any_number_of_micro_batches_of_any_shape(world, pp, tp, per_virtual, counts):
    run_ranks(world, _any_counts, pp, tp, per_virtual, counts)


def test_accumulation_counts_tokens_not_micro_batches():
    """Micro-batches with 1, 7, 0 and 16 loss tokens equal one batch of all rows."""
    tokens, labels = rows(4, seed=3, length=16)
    labels[:] = torch.randint(16, labels.shape, generator=torch.Generator().manual_seed(0))
    for row, kept in enumerate((1, 7, 0, 16)):
        labels[row, kept:] = -100
    together = batch_of(tokens, labels)
    apart = [batch_of(tokens[i : i + 1], labels[i : i + 1]) for i in range(4)]
    results = []
    for batches in ([together], apart):
        model = Toy(range(2), True, True, dtype=torch.float64)
        runner = SingleStageRunner(model, torch.device("cpu"))
        loss = runner.run(batches, 1 / 24)
        assert runner.evaluate(batches).item() == pytest.approx(loss.item(), rel=1e-14)
        results.append((loss, {n: p.grad for n, p in model.named_parameters()}))
    assert abs(results[0][0] - results[1][0]) <= 1e-13 * results[0][0]
    for name, grad in results[0][1].items():
        assert (grad - results[1][1][name]).abs().max() <= 1e-13 * grad.abs().max()


class _LabelsAsLosses(torch.nn.Module):
    """Each token's loss is its label, times a weight of one."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x, batch, *, dropout_key=None):
        return (self.weight * batch.labels[batch.labels != -100]).sum()


def test_the_mean_of_one_token_of_loss_1_and_three_of_loss_3_is_2_and_a_half():
    """Fault 14: the mean of the micro-batches' means would be 2."""
    batches = [
        batch_of(torch.zeros(1, 4, dtype=torch.int64), torch.tensor([labels]))
        for labels in ([1, -100, -100, -100], [3, 3, 3, -100])
    ]
    model = _LabelsAsLosses()
    scale = loss_provider(sum(int(batch.num_loss_tokens) for batch in batches))
    loss = SingleStageRunner(model, torch.device("cpu")).run(batches, scale) * scale
    assert loss.item() == 2.5 and model.weight.grad.item() == 2.5


class _Recorder(torch.nn.Module):
    def __init__(self, last):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
        self.last = last
        self.keys, self.modes = [], []

    def forward(self, x, batch, *, dropout_key=None):
        self.keys.append(dropout_key)
        self.modes.append((self.training, torch.is_grad_enabled()))
        if x is None:
            x = torch.ones(batch.tokens.shape[1], len(batch.tokens), HIDDEN, dtype=torch.float64)
        x = x * self.weight
        return x.sum() if self.last else x


def _keys_and_modes(rank, world):
    state = ParallelState(pipeline_model_parallel_size=2)
    module = _Recorder(state.is_pipeline_last_stage)
    calls = []
    runner = make_runner(
        [module],
        pp_group=state.pp_group,
        activation=ActivationShape(HIDDEN, torch.float64),
        device=torch.device("cpu"),
        before_backward=lambda m, last: calls.append((m is module, last)),
        after_evaluation=lambda m: calls.append((m is module, "evaluated")),
    )
    batches = _mixed_batches(3)
    runner.run(batches, 1.0, dropout_keys=["a", "b", "c"])
    assert module.keys == ["a", "b", "c"] and module.modes == [(True, True)] * 3
    assert calls == [(True, False), (True, False), (True, True)]
    runner.evaluate(batches)
    assert module.keys[3:] == [None] * 3 and module.modes[3:] == [(False, False)] * 3
    assert calls[3:] == [(True, "evaluated")] and module.training
    with pytest.raises(AssertionError):
        runner.run(batches, torch.tensor(1.0))  # an fp32 scale would round fp64 gradients
    return True


def test_dropout_keys_modes_and_callbacks():
    assert run_ranks(2, _keys_and_modes) == [True, True]


class _Witness:
    """Dies with the tensor that has it as an attribute."""


def _alive(rank, world):
    """Inputs and outputs of stages that are alive: few while a step runs, none after it."""
    state = ParallelState(pipeline_model_parallel_size=2)
    witnesses, most = [], 0

    def watch(tensor):
        tensor.witness = _Witness()
        witnesses.append(weakref.ref(tensor.witness))

    class Watching(_Recorder):
        def forward(self, x, batch, *, dropout_key=None):
            nonlocal most
            if x is not None:
                watch(x)
            out = super().forward(x, batch, dropout_key=dropout_key)
            watch(out)
            most = max(most, sum(w() is not None for w in witnesses))
            return out

    module = Watching(state.is_pipeline_last_stage)
    runner = make_runner(
        [module],
        pp_group=state.pp_group,
        activation=ActivationShape(HIDDEN, torch.float64),
        device=torch.device("cpu"),
    )
    batches = [batch_of(*rows(1))] * 40
    runner.run(batches, 1.0)
    runner.evaluate(batches)
    gc.collect()
    assert len(witnesses) >= 80 and not any(w() is not None for w in witnesses)
    return most


def test_memory_does_not_grow_with_micro_batches():
    assert max(run_ranks(2, _alive)) <= 4
