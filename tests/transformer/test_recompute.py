"""What recompute covers, what it keeps, and that attention and its transfers run just once."""

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.context_parallel import make_layout
from megatron.core.models.gpt import GPTModel, prepare_batch
from megatron.core.transformer.recompute import Span, rebuilt_in_backward, recompute_spans
from tests.models.helpers import gradients, local_part, small_config, whole_batch
from tests.utils.ranks import run_ranks

FULL = {"recompute_granularity": "full"}
AGAIN = {**FULL, "recompute_attention": True}
KINDS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "full, spans of two": {
        **FULL,
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "full, first layer": {**FULL, "recompute_method": "block", "recompute_num_layers": 1},
    "full, attention too": AGAIN,
    "full, mlp chunks": {**FULL, "mlp_chunk_size": 8},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "layernorm": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "mlp and layernorm": {
        "recompute_granularity": "selective",
        "recompute_modules": ("mlp", "layernorm"),
    },
}


def _spans(layers: int, **changes: Any) -> list[tuple[int, int, bool]]:
    spans = recompute_spans(layers, small_config(**changes))
    return [(span.start, span.stop, span.recompute) for span in spans]


def test_spans() -> None:
    assert _spans(2) == [(0, 1, False), (1, 2, False)]
    assert _spans(2, **KINDS["mlp"]) == [(0, 1, False), (1, 2, False)]
    assert _spans(3, **FULL) == [(0, 1, True), (1, 2, True), (2, 3, True)]
    uniform = {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2}
    assert _spans(5, **uniform) == [(0, 2, True), (2, 4, True), (4, 5, True)]
    block = {**FULL, "recompute_method": "block", "recompute_num_layers": 2}
    assert _spans(3, **block) == [(0, 1, True), (1, 2, True), (2, 3, False)]
    assert _spans(0, **uniform) == []
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"--recompute-num-layers {bad} must be at least 1"):
            _spans(3, **{**uniform, "recompute_num_layers": bad})
    assert Span(0, 2, recompute=True).recompute


def test_rebuilt_tensor_is_dropped_and_made_once_for_all_that_saved_it() -> None:
    x = torch.randn(6, 4, dtype=torch.float64)
    weights = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    made = []

    def rebuild() -> torch.Tensor:
        made.append(1)
        return x.sin()

    y = x.sin().requires_grad_()
    plain = [torch.nn.functional.linear(y, w) for w in weights]
    expected = torch.autograd.grad(sum(p.square().sum() for p in plain), [*weights, y])

    y = x.sin().requires_grad_()
    with rebuilt_in_backward(y, rebuild):
        outputs = [torch.nn.functional.linear(y.view(3, 2, 4), w) for w in weights]
    loss = sum(out.square().sum() for out in outputs)
    alive = weakref.ref(y)
    actual = torch.autograd.grad(loss, weights, retain_graph=True)
    assert len(made) == 1
    for one, other in zip(actual, expected, strict=False):
        assert torch.equal(one, other)
    torch.autograd.grad(loss, weights)
    assert len(made) == 2
    del y, outputs, loss
    assert alive() is None


class _Record(TorchDispatchMode):
    """Counts attention calls and transfers, and knows which tensors still live."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if "attention" in name:
            self.calls["attention backward" if "backward" in name else "attention"] += 1
        if name.startswith("c10d::"):
            self.calls["transfers"] += 1
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.made.append(weakref.ref(tensor))
        return out

    def live_bytes(self) -> int:
        gc.collect()
        tensors = [tensor for ref in self.made if (tensor := ref()) is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


def _step(model: GPTModel, batch: Any) -> tuple[_Record, int, dict[str, torch.Tensor]]:
    record = _Record()
    with record:
        loss = model(None, batch)
        live = record.live_bytes()
        loss.backward()
    return record, live, gradients(model)


@pytest.mark.parametrize("name", list(KINDS))
def test_gradients_are_equal_to_the_bit(name: str) -> None:
    batch = whole_batch([[7, 1, 24], [32]])
    changes = KINDS[name]
    chunk = {"mlp_chunk_size": changes.get("mlp_chunk_size", 0)}
    _, _, expected = _step(GPTModel(small_config(num_layers=3, **chunk)), batch)
    _, _, actual = _step(GPTModel(small_config(num_layers=3, **changes)), batch)
    assert actual.keys() == expected.keys()
    for key, gradient in actual.items():
        assert torch.equal(gradient, expected[key]), key


def test_full_recompute_keeps_the_input_and_attentions_out_and_lse() -> None:
    """Bytes that live after forward, per layer, exactly."""
    batch, tokens, layers = whole_batch([[64], [32, 32]]), 128, {}
    for name, changes in (("full", FULL), ("again", AGAIN), ("none", {})):
        live = []
        for count in (2, 4):
            model = GPTModel(small_config(num_layers=count, **changes))
            live.append(_step(model, batch)[1])
        layers[name] = (live[1] - live[0]) / 2 / tokens
    hidden, heads = 32, 4
    assert layers["again"] == hidden * 8
    assert layers["full"] == layers["again"] + hidden * 8 + heads * 8
    assert layers["none"] > 4 * layers["full"]


def test_norm_outputs_are_let_go() -> None:
    """``layernorm`` alone keeps no output of a layer's two norms."""
    batch, live = whole_batch([[64], [32, 32]]), {}
    for name, changes in (("none", {}), ("layernorm", KINDS["layernorm"])):
        per_count = []
        for count in (2, 4):
            model = GPTModel(small_config(num_layers=count, **changes))
            per_count.append(_step(model, batch)[1])
        live[name] = (per_count[1] - per_count[0]) / 2 / 128
    assert live["none"] - live["layernorm"] == 2 * 32 * 8


def _count(rank: int, world: int, kinds: list[tuple[int, int, str, dict[str, Any]]]) -> Any:
    whole = dist.group.WORLD
    results = []
    for ulysses, ring, cp_comm_type, changes in kinds:
        config = small_config(num_layers=3, **changes)
        batch = whole_batch([[7, 1, 24], [32]])
        layout = make_layout("zigzag", batch.seq_length, ring, ulysses)
        here = (rank, 0) if ring > 1 else (0, rank)
        batch = local_part(batch, layout, *here)
        prepare_batch(
            batch,
            config,
            ring_group=whole if ring > 1 else None,
            ulysses_group=whole if ulysses > 1 else None,
            cp_comm_type=cp_comm_type,
        )
        record, _, grads = _step(GPTModel(config), batch)
        arrays = {key: grad.numpy() for key, grad in grads.items()}
        results.append((dict(record.calls), arrays))
    return results


@pytest.mark.parametrize("sizes", [(1, 2, "p2p"), (1, 2, "all_gather"), (2, 1, "a2a")], ids=str)
def test_a_recomputed_layer_runs_no_attention_and_no_transfer_again(sizes: Any) -> None:
    changes: list[dict[str, Any]] = [{}, *KINDS.values()]
    for rank in run_ranks(2, _count, [(*sizes, change) for change in changes]):
        plain, plain_grads = rank[0]
        assert plain["attention"] > 0 and plain["transfers"] > 0
        for change, (calls, grads) in zip(changes[1:], rank[1:], strict=True):
            if change is AGAIN:
                assert calls["attention"] == 2 * plain["attention"]
                assert calls["transfers"] > plain["transfers"]
            else:
                assert calls == plain, change
            if "mlp_chunk_size" not in change:
                for key, gradient in grads.items():
                    assert (gradient == plain_grads[key]).all(), (change, key)
