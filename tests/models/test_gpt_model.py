"""The model beyond its arithmetic: stages, initial values, positions, theta, documents, errors."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron.core.context_parallel import make_layout
from megatron.core.models.gpt import GPTModel, prepare_batch
from megatron.core.packed_batch import IGNORE_INDEX, PackedBatch
from tests.models.helpers import (
    assert_close,
    gpt2_fields,
    gradients,
    local_part,
    small_config,
    whole_batch,
)

DOCUMENTS = [[7, 1, 24], [32]]


@pytest.mark.parametrize("tied", [False, True])
def test_pipeline_stages_equal_the_whole(tied: bool) -> None:
    config = small_config(num_layers=5, untie_embeddings_and_output_weights=not tied)
    batch = whole_batch(DOCUMENTS)
    whole = GPTModel(config)
    loss = whole(None, batch)
    loss.backward()
    names = dict(whole.named_parameters())

    x, stages = None, []
    for layer_ids in ([0, 1], [2], [3, 4]):
        first, last = layer_ids[0] == 0, layer_ids[-1] == 4
        stage = GPTModel(config, layer_ids=layer_ids, pre_process=first, post_process=last)
        stages.append(stage)
        x = stage(x, batch)
    assert x is not None and torch.equal(x, loss)
    x.backward()
    assert not hasattr(stages[1].embedding, "word_embeddings")
    assert stages[0].output_layer is None and stages[1].output_layer is None
    word = "embedding.word_embeddings.weight"
    seen = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            where = word if tied and name == "output_layer.weight" else name
            assert torch.equal(parameter, names[where]), name
            seen[where] = seen.get(where, 0.0) + parameter.grad
    assert seen.keys() == names.keys()
    for name, gradient in seen.items():
        assert_close(gradient, names[name].grad, 1e-13, name)


def test_initial_values() -> None:
    config = small_config(hidden_size=128, num_layers=8, init_method_std=0.02, **_dense())
    model = GPTModel(config, seed=7)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.all(parameter == (0.0 if name.endswith("bias") else 1.0)), name
            continue
        scaled = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        wanted = 0.02 / (4.0 if scaled else 1.0)
        used = parameter[:61] if "word_embeddings" in name else parameter
        assert used.std().item() == pytest.approx(wanted, rel=0.05), name
        assert abs(used.mean().item()) < wanted / 10
    assert torch.all(model.embedding.word_embeddings.weight[61:] == 0)
    one, other = (dict(GPTModel(config, seed=s).named_parameters()) for s in (7, 8))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, one[name])
        if parameter.dim() == 2:
            assert not torch.equal(parameter, other[name])


def _dense() -> dict[str, Any]:
    return gpt2_fields(ffn_hidden_size=512)


def test_meta_device_and_sharding_layer_by_layer() -> None:
    meta = GPTModel(small_config(), device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters())
    shapes = {name: p.shape for name, p in meta.named_parameters()}
    built: list[Any] = []
    model = GPTModel(small_config(), layer_ids=[1], shard_fn=built.append)
    assert built == [model.decoder.layers["1"]]
    mine = {name: p.shape for name, p in model.named_parameters()}
    assert mine.keys() < shapes.keys() and all(shapes[name] == mine[name] for name in mine)


def test_new_theta_takes_full_effect_and_is_never_saved() -> None:
    """Fault 12: weights saved at 1e4 and loaded at 1e6 rotate by the 1e6 formula alone."""
    batch = whole_batch([[16]])
    batch.position_ids += 5000
    old, new = (GPTModel(small_config(rotary_base=theta)) for theta in (1e4, 1e6))
    saved = old.state_dict()
    assert not [name for name in saved if "rotary" in name or "freq" in name]
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.zero_()
    new.load_state_dict(saved)
    expected = new.logits(batch)
    assert (old.logits(batch) - expected).abs().max() > 1e-3
    old.set_rope(1e6)
    assert torch.equal(old.logits(batch), expected)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    old.set_rope(1e6, yarn, 256)
    assert not torch.equal(old.logits(batch), expected)


def test_rope_rule_of_the_flags() -> None:
    assert small_config().rope_scaling is None
    config = small_config(
        rope_scaling_type="yarn", rope_scaling_factor=4.0, max_position_embeddings=64
    )
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config.rope_scaling == wanted
    batch, plain = whole_batch([[40]]), GPTModel(small_config())
    plain.set_rope(10000.0, wanted)
    assert torch.equal(GPTModel(config).logits(batch), plain.logits(batch))


@pytest.mark.parametrize("fields", [{}, gpt2_fields()], ids=["rope", "learned"])
def test_documents_do_not_see_each_other(fields: dict[str, Any]) -> None:
    """Each document of a row gets the logits and gradients that it gets alone (fault 10)."""
    lengths = [5, 1, 1, 9, 16]
    packed = whole_batch([lengths], ignored=0)
    together = GPTModel(small_config(**fields))
    logits = together.logits(packed)
    together(None, packed).backward()
    alone = GPTModel(small_config(**fields))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        single = PackedBatch(
            tokens=packed.tokens[:, part],
            labels=packed.labels[:, part],
            loss_mask=packed.loss_mask[:, part],
            position_ids=torch.arange(length)[None],
            cu_seqlens=[torch.tensor([0, length], dtype=torch.int32)],
            seq_length=length,
        )
        assert_close(logits[:, part], alone.logits(single), 1e-12, f"document at {start}")
        alone(None, single).backward()
        start += length
    for name, gradient in gradients(together).items():
        assert_close(gradient, gradients(alone)[name], 1e-12, name)

    other = packed.tokens.clone()
    other[:, 5:7] = (other[:, 5:7] + 1) % 61  # the two documents of one token
    packed.tokens = other
    changed = together.logits(packed)
    assert torch.equal(changed[:, :5], logits[:, :5]) and torch.equal(changed[:, 7:], logits[:, 7:])
    assert not torch.equal(changed[:, 5:7], logits[:, 5:7])


def test_without_position_embedding_only_order_matters() -> None:
    model = GPTModel(small_config(position_embedding_type="none"))
    batch = whole_batch([[32]])
    expected = model.logits(batch)
    batch.position_ids += 17
    assert torch.equal(model.logits(batch), expected)
    with pytest.raises(ValueError, match="--position-embedding-type none has no RoPE"):
        model.set_rope(1e6)


@pytest.mark.parametrize("chunk", [1, 7, 64, 67, 2048])
def test_loss_chunks(chunk: int) -> None:
    """Fault 37: any chunk, ignored labels and a wholly ignored chunk included."""
    batch = whole_batch([[32], [32]], ignored=5)
    batch.labels[0, 8:24] = IGNORE_INDEX
    results = []
    for size in (0, chunk):
        model = GPTModel(small_config(loss_chunk_size=size))
        loss = model(None, batch)
        loss.backward()
        results.append((loss, gradients(model)))
        losses = model.token_losses(batch)
        assert losses.shape == (2, 32) and not losses.requires_grad
        assert torch.all(losses[batch.labels == IGNORE_INDEX] == 0)
        assert_close(losses.sum(), loss, 1e-13, "sum of token losses")
    assert_close(results[1][0], results[0][0], 1e-13, "loss")
    for name, gradient in results[1][1].items():
        assert_close(gradient, results[0][1][name], 1e-12, name)


@pytest.mark.parametrize("fields", [{}, gpt2_fields()], ids=["llama", "gpt2"])
def test_bf16(fields: dict[str, Any]) -> None:
    """Near the fp64 model with the same (bf16) weights; fp32 loss; no worse in later layers."""
    batch = whole_batch(DOCUMENTS)
    fields = {**fields, "num_layers": 4, "init_method_std": 0.1}
    low = GPTModel(small_config(**fields, params_dtype="bfloat16"))
    high = GPTModel(small_config(**fields))
    high.load_state_dict({name: tensor.double() for name, tensor in low.state_dict().items()})
    losses = []
    for model in (low, high):
        losses.append(model(None, batch))
        losses[-1].backward()
    assert losses[0].dtype == torch.float32 and losses[1].dtype == torch.float64
    assert_close(losses[0], losses[1], 5e-3, "loss")
    exact = gradients(high)
    for name, gradient in gradients(low).items():
        assert gradient.dtype == torch.bfloat16
        error = (gradient.double() - exact[name]).norm() / exact[name].norm()
        assert error < 0.05, f"{name}: {error}"


def test_fp64_stays_fp64() -> None:
    """A result that passed through fp32 anywhere would be off by 1e-8."""
    batch = whole_batch([[32]])
    model = GPTModel(small_config(qk_layernorm=True))
    assert model(None, batch).dtype == model.logits(batch).dtype == torch.float64


def test_a_plan_serves_every_layer_and_both_ways() -> None:
    config, batch = small_config(num_layers=3), whole_batch(DOCUMENTS)
    expected = GPTModel(config)(None, batch)
    prepare_batch(batch, config)
    plan = batch.attention_plan
    loss = GPTModel(config)(None, batch)
    assert torch.equal(loss, expected)
    loss.backward()
    assert batch.attention_plan is plan and plan.calls == 6


def _refuse(match: str, batch: PackedBatch | None = None, **changes: Any) -> None:
    with pytest.raises(ValueError, match=match):
        GPTModel(small_config(**changes))(None, batch or whole_batch(DOCUMENTS))


def test_a_batch_from_the_cpu_is_looked_at_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Range checks and the search for ignored labels would wait for the device otherwise."""
    batch = whole_batch(DOCUMENTS)
    far = batch.to("meta")
    assert far.moved_from is batch and far.to("meta").on_host is batch
    assert batch.to("cpu").on_host.moved_from is None
    model = GPTModel(small_config(**gpt2_fields()))
    loss = model(None, batch)

    to_cpu = torch.Tensor.cpu

    def waits(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is batch.labels:
            raise AssertionError("waited for the device")
        return to_cpu(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", waits)
    with pytest.raises(AssertionError, match="waited for the device"):
        model(None, batch)
    host = dataclasses.replace(batch, labels=batch.labels.clone())
    assert torch.equal(model(None, dataclasses.replace(batch, moved_from=host)), loss)
    for name, error in (
        ("tokens", "token id"), ("labels", "label"), ("position_ids", "has position")
    ):  # fmt: skip
        wrong = dataclasses.replace(batch, **{name: getattr(batch, name) + 1000})
        with pytest.raises(ValueError, match=error):
            model(None, dataclasses.replace(batch, moved_from=wrong))


def test_errors() -> None:
    _refuse("--num-layers None must be at least 1", num_layers=None)
    _refuse("--vocab-size 0 must be at least 1", vocab_size=0)
    _refuse("--num-query-groups 3 must divide --num-attention-heads 4", num_query_groups=3)
    _refuse(
        "learned_absolute needs --max-position-embeddings",
        **gpt2_fields(max_position_embeddings=None),
    )
    _refuse(
        "--max-position-embeddings 31 must be greater .* position 31; raise it to at least 32",
        **gpt2_fields(max_position_embeddings=31),
    )
    wrong = whole_batch(DOCUMENTS)
    wrong.tokens[0, 3] = 61
    _refuse("token id 61", wrong)
    part = local_part(whole_batch(DOCUMENTS), make_layout("zigzag", 32, 2), 0, 0)
    _refuse("has no attention plan; call prepare_batch", part)
    with pytest.raises(ValueError, match="has 16 tokens a row; --seq-length 32 over ring size 1"):
        prepare_batch(part, small_config())
    stage = GPTModel(small_config(), layer_ids=[1], pre_process=False)
    with pytest.raises(ValueError, match="needs the hidden states before it"):
        stage(None, whole_batch(DOCUMENTS))
