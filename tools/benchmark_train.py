"""Training speed against a plain PyTorch model of the same shape, in one run.

    python tools/benchmark_train.py [--vocab-sizes 512 32000] [--rounds 7] [--dtype float32]

Three contestants train the same Llama-shaped model on rows of one document each: plain PyTorch
(causal scaled_dot_product_attention, fused AdamW, cross-entropy over full logits) with all cores
as threads; this framework on one rank with as many threads; and on two ranks with half the
threads each and context parallelism 2. They live in processes of their own and take turns, one
step each, so that noise of the machine hits all alike. Printed are medians and their ratios.
"""

import argparse
import dataclasses
import multiprocessing
import os
import socket
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model and batch that all contestants train."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq_length: int
    batch: int
    dtype: str


class PlainBlock(nn.Module):
    """A transformer layer as one would write it by hand."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.head_dim = shape.hidden // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        rows = (shape.heads + 2 * shape.kv_heads) * self.head_dim
        self.qkv = nn.Linear(shape.hidden, rows, bias=False)
        self.proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(out.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        result: torch.Tensor = x + self.down(F.silu(gate) * up)
        return result


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE on [B, heads, S, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class PlainModel(nn.Module):
    """A GPT in plain PyTorch with full logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        dim = shape.hidden // shape.heads
        inv = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(shape.seq_length, dtype=torch.float64), inv)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos().float())
        self.register_buffer("sin", angles.sin().float())

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plain_steps(shape: Shape, threads: int) -> Any:
    """Generator of step times of the plain model."""
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    bf16 = shape.dtype == "bfloat16"
    model = PlainModel(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    while True:
        data = torch.randint(shape.vocab, (shape.batch, shape.seq_length + 1))
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(data[:, :-1], data[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield time.perf_counter() - began


def flags(shape: Shape, cp: int) -> list[str]:
    """The command line that trains ``shape`` with the framework."""
    text = f"""
        --num-layers {shape.layers} --hidden-size {shape.hidden} --ffn-hidden-size {shape.ffn}
        --num-attention-heads {shape.heads} --group-query-attention
        --num-query-groups {shape.kv_heads} --normalization RMSNorm --swiglu --disable-bias-linear
        --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
        --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1
        --seq-length {shape.seq_length} --micro-batch-size {shape.batch}
        --global-batch-size {shape.batch} --train-iters 1000 --lr 1e-3
        --context-parallel-size {cp} --mock-data --no-reset-attention-mask
        --no-reset-position-ids --tokenizer-type NullTokenizer --vocab-size {shape.vocab}
        {"--bf16" if shape.dtype == "bfloat16" else ""}
    """
    return text.split()


def framework_steps(shape: Shape, rank: int, world: int, port: int, threads: int) -> Any:
    """Generator of step times of the framework on one of ``world`` ranks."""
    import pretrain_gpt
    from megatron.core.tokenizers import build_tokenizer
    from megatron.training.arguments import check_command_line
    from megatron.training.build import build_trainer
    from megatron.training.initialize import initialize_distributed
    from megatron.training.launch_env import LaunchEnvironment
    from megatron.training.signals import ExitSignals
    from megatron.training.stage_switch import enter_stage
    from megatron.training.train_step import train_step

    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    env = LaunchEnvironment(rank, world, rank, world, "127.0.0.1", port, "torchrun")
    resolved = check_command_line(flags(shape, world), world_size=world, ranks_per_node=world)
    device = initialize_distributed(env, resolved.config)
    trainer = build_trainer(
        resolved,
        build_tokenizer("NullTokenizer", None, shape.vocab),
        device,
        ExitSignals(),
        model_provider=pretrain_gpt.model_provider,
        data_provider=pretrain_gpt.data_provider,
        loss_provider=pretrain_gpt.loss_provider,
    )
    trainer.reporter.say = lambda text: None  # type: ignore[method-assign]
    enter_stage(trainer, trainer.schedule.stages[0])
    assert trainer.loader is not None
    while True:
        began = time.perf_counter()
        train_step(trainer, trainer.loader.next_step())
        trainer.state.iteration += 1
        yield time.perf_counter() - began


def serve(connection: Any, kind: str, *args: Any) -> None:
    """Process of a contestant: one step for each message, its time as the answer."""
    steps = plain_steps(*args) if kind == "plain" else framework_steps(*args)
    while connection.recv():
        connection.send(next(steps))


class Contestant:
    """One or more processes that take a step together when asked."""

    def __init__(self, kind: str, argument_lists: list[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self._processes = []
        for arguments in argument_lists:
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, kind, *arguments), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def step(self) -> float:
        """Seconds of one step (of the slowest process)."""
        for pipe in self._pipes:
            pipe.send(True)
        return max(float(pipe.recv()) for pipe in self._pipes)

    def stop(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compare(shape: Shape, cores: int, rounds: int) -> dict[str, float]:
    """Median tokens per second of each contestant, one step each in turn."""
    half = max(1, cores // 2)
    port = free_port()
    contestants = {
        "plain PyTorch, 1 process": Contestant("plain", [(shape, cores)]),
        "framework, 1 rank": Contestant("framework", [(shape, 0, 1, free_port(), cores)]),
        "framework, 2 ranks, cp 2": Contestant(
            "framework", [(shape, rank, 2, port, half) for rank in range(2)]
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    try:
        for turn in range(rounds + 2):
            for name, contestant in contestants.items():
                seconds = contestant.step()
                if turn >= 2:  # the first steps warm up
                    times[name].append(seconds)
            print(f"\r  vocab {shape.vocab}: round {turn + 1}/{rounds + 2}", end="", flush=True)
        print()
    finally:
        for contestant in contestants.values():
            contestant.stop()
    tokens = shape.batch * shape.seq_length
    return {name: tokens / statistics.median(values) for name, values in times.items()}


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vocab-sizes", type=int, nargs="+", default=[512, 32000], help="a table for each"
    )
    parser.add_argument("--rounds", type=int, default=7, help="steps of each that count")
    parser.add_argument("--layers", type=int, default=6, help="transformer layers")
    parser.add_argument("--hidden", type=int, default=384, help="width of the residual stream")
    parser.add_argument("--heads", type=int, default=6, help="query heads")
    parser.add_argument("--kv-heads", type=int, default=6, help="key/value heads")
    parser.add_argument("--ffn", type=int, default=1024, help="width of the MLP")
    parser.add_argument("--seq-length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=4, help="rows of a step")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation"
    )
    args = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    print(f"{time.strftime('%Y-%m-%d')}, {cores} cores, torch {torch.__version__}, {args.dtype}")
    for vocab in args.vocab_sizes:
        shape = Shape(
            args.layers, args.hidden, args.heads, args.kv_heads, args.ffn, vocab,
            args.seq_length, args.batch, args.dtype,
        )  # fmt: skip
        speeds = compare(shape, cores, args.rounds)
        plain = speeds["plain PyTorch, 1 process"]
        for name, speed in speeds.items():
            print(f"  {name:<26} {speed:>9,.0f} tokens/s   {speed / plain:.3f} of plain")
    return 0


if __name__ == "__main__":
    sys.exit(main())
