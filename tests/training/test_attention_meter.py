"""Attention statistics, FLOPs and tokens in the metrics lines."""

from pathlib import Path

import pytest
import torch

from megatron.core.config import ModelConfig
from megatron.core.context_parallel import make_layout
from megatron.core.context_parallel.cost_model import measure
from megatron.core.context_parallel.work import pair_matrix
from megatron.core.models.gpt.flops import training_flops
from megatron.training.attention_meter import AttentionMeter
from megatron.training.metrics_file import read_metrics
from tests.utils.corpus import write_corpus
from tests.utils.jobs import TINY, run_job
from tests.utils.ranks import run_ranks

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    swiglu=True,
    vocab_size=97,
)
"""The model of ``TINY``."""


def test_dense_ring_numbers(tmp_path: Path) -> None:
    """Dense rows on a ring of 2: balance, bytes and pairs are known beforehand."""
    flags = [
        *TINY, "--context-parallel-size=2", "--cp-comm-type=p2p", "--no-reset-attention-mask",
        "--no-reset-position-ids", "--train-iters=2", "--log-interval=2",
        f"--metrics-file={tmp_path}/m.jsonl",
    ]  # fmt: skip
    for layout in ("contiguous", "zigzag"):
        result = run_job(2, [*flags, f"--cp-layout={layout}"], timeout=120)
        result.check()
        (record,) = read_metrics(str(tmp_path / "m.jsonl"))
        work = measure(make_layout(layout, 64, 2), None)
        assert record["cp_comm_type"] == "p2p"
        assert record["cp_work_balance"] == pytest.approx(work.balance)
        assert record["dp_work_balance"] == pytest.approx(1.0)
        # 8 micro-batches x 4 layers; forward K and V (2 KV heads x 8 channels, float32), backward
        # the same again and their gradients home. One rank's keys are needed whole; of the other's,
        # a zigzag ring needs the first half and a contiguous one nothing.
        kv = 32 * 2 * 2 * 8 * 4
        share = {"contiguous": (1 + 0) / 2, "zigzag": (1 + 0.5) / 2}[layout]
        assert record["cp_bytes_sent"] == 8 * 4 * 3 * kv * share
        assert 0 < record["cp_exposed_wait_mean"] <= record["cp_exposed_wait"]
        assert record["cp_exposed_wait"] < record["iteration_time"]
        assert f"cp p2p balance {work.balance:.2f} | cp wait (ms)" in result.text
        # Each row's tokens and pairs count once, although two ranks know of them.
        flops = training_flops(MODEL, 8 * 64, 8 * 64 * 65 // 2)
        seconds = record["iteration_time"]
        assert record["tflops_per_device"] * 1e12 * 2 == pytest.approx(flops / seconds)
        assert record["tokens_per_second"] == pytest.approx(8 * 64 / seconds)


def test_data_parallel_work(tmp_path: Path) -> None:
    """Packed rows on 2 context x 2 data ranks: both balances, and nothing sent without a ring."""
    write_corpus(f"{tmp_path}/corpus", documents=100, vocab_size=97, longest=60)
    base = [
        *(flag for flag in TINY if flag != "--mock-data"), "--train-iters=1",
        f"--data-path={tmp_path}/corpus", f"--metrics-file={tmp_path}/m.jsonl",
    ]  # fmt: skip
    ring = ["--context-parallel-size=2", "--cp-comm-type=all_gather", "--cp-layout=contiguous"]
    run_job(4, [*base, *ring], timeout=120).check()
    (record,) = read_metrics(str(tmp_path / "m.jsonl"))
    assert record["cp_work_balance"] > 1.0 and record["dp_work_balance"] > 1.0
    assert record["cp_bytes_sent"] > 0 and record["cp_tasks"] >= 1
    result = run_job(2, base, timeout=120)
    result.check()
    (record,) = read_metrics(str(tmp_path / "m.jsonl"))
    assert record["cp_bytes_sent"] == record["cp_exposed_wait"] == 0.0
    assert record["cp_work_balance"] == 1.0 and record["dp_work_balance"] > 1.0
    assert "cp wait" not in result.text


class _Batch:
    def __init__(self, plan: object) -> None:
        self.attention_plan = plan


class _Plan:
    def __init__(self, stats: object) -> None:
        self.stats = stats


def _meter_on_rank(rank: int, world: int) -> list[dict[str, object]]:
    from megatron.core.context_parallel import AttentionStats

    bounds = torch.tensor([0, 40, 64], dtype=torch.int32)
    pairs = tuple(int(n) for n in pair_matrix(make_layout("contiguous", 64, 2), bounds).sum(1))
    meter = AttentionMeter()
    kind = ("all_gather", "p2p")[rank]
    stats = AttentionStats(kind, 3 + rank, pairs[rank], pairs, 100 * (rank + 1), 2, 0.5, 4)
    meter.add([_Batch(_Plan(stats)), _Batch(_Plan(stats))])  # type: ignore[list-item]
    return [meter.take(2), meter.take(1), {"pairs": pairs}]


def test_sums_over_micro_batches_and_ranks() -> None:
    (first, empty, known), other = run_ranks(2, _meter_on_rank, timeout=60)
    assert other == [first, empty, known]
    pairs = known["pairs"]
    assert first == {
        "cp_comm_type": "p2p/all_gather",
        "cp_work_balance": pytest.approx(max(pairs) / (sum(pairs) / 2)),
        "dp_work_balance": pytest.approx(1.0),
        "cp_tasks": 4.0,
        "cp_bytes_sent": pytest.approx(150.0),
        "cp_exposed_wait": pytest.approx(0.5),
        "cp_exposed_wait_mean": pytest.approx(0.5),
    }
    assert empty["cp_bytes_sent"] == 0.0 and empty["cp_comm_type"] == ""
