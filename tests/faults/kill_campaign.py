"""Kill a training run at random moments, resume it, and compare with the run nobody killed.

    python tests/faults/kill_campaign.py --trials 100
    python tests/faults/kill_campaign.py --trials 5 --launcher torchrun

Each trial starts a run of four ranks over three stages of growing context, on a random grid
with a random way to save, and kills it once or twice: SIGKILL to one random rank (the others
must end by themselves, in time), or to all of them at once (with the launcher, under torchrun).
The moments are those of ``moments.py``: steps, sync and background saves, the pointer's
update, loads, stage boundaries; or a random time. Then it is started again until it ends.

The final metrics and the final checkpoint must equal the unbroken run's bit for bit.
Exit codes: 0 all trials did; 1 not.
"""

import argparse
import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron.core.dist_checkpointing import iteration_folder
from tests.faults.moments import MOMENTS, strike
from tests.faults.small import SMALL, numbers
from tests.utils.corpus import write_corpus
from tests.utils.jobs import Job, free_port, run_job, tensors_of

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
ITERATIONS = 7
TIMEOUT_MINUTES = 0.75
"""A rank killed before the ranks met is missed after this long."""
END_S = 60 * TIMEOUT_MINUTES + 45
"""Seconds within which the other ranks must end after one was killed."""
GRIDS = {
    "tp 2": (["--tensor-model-parallel-size=2", "--sequence-parallel"], [[1, 1], [1, 2], [2, 1]]),
    "pp 2": (["--pipeline-model-parallel-size=2"], [[1, 1], [2, 1], [1, 2]]),
    "cp 4": (["--use-distributed-optimizer"], [[1, 1], [2, 1], [2, 2]]),
}
"""Flags of a grid, and [ulysses, ring] of each stage."""
LENGTHS = (32, 64, 128)
STEPS = (3, 2, 2)


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill of a trial."""

    moment: str
    """Of ``MOMENTS``, or ``a random time``."""
    count: int
    victim: int
    everyone: bool
    delay: float = 0.0

    def __str__(self) -> str:
        who = "all ranks" if self.everyone else f"rank {self.victim}"
        when = f"after {self.delay:.2f} s" if self.moment == "a random time" else f"#{self.count}"
        return f"{who} at {self.moment} {when}"


class Campaign:
    """Trials in one folder, with the unbroken runs they are compared with."""

    def __init__(self, folder: Path, *, launcher: str = "processes") -> None:
        self._folder = folder
        self._launcher = launcher
        self._unbroken: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
        write_corpus(f"{folder}/corpus", documents=300, vocab_size=97, longest=60)

    def flags(self, grid: str, name: str, *more: str) -> list[str]:
        """The command line of a run."""
        left_out = ("--mock-data", "--seq-length", "--train-iters", "--global", "--eval")
        schedule = self._folder / f"{grid.replace(' ', '')}.yaml"
        stages = [
            f"  - {{seq_length: {length}, train_iters: {steps}, rotary_base: {1e4 * length}, "
            f"context_parallel: {split}, global_batch_size: 4, micro_batch_size: 1}}"
            for length, steps, split in zip(LENGTHS, STEPS, GRIDS[grid][1], strict=True)
        ]
        schedule.write_text("stages:\n" + "\n".join(stages) + "\n")
        return [
            *(flag for flag in SMALL if not flag.startswith(left_out)),
            *GRIDS[grid][0],
            f"--distributed-timeout-minutes={TIMEOUT_MINUTES}",
            f"--context-schedule={schedule}",
            f"--data-path={self._folder}/corpus",
            "--split=80,20,0",
            "--num-attention-heads=4",
            "--hidden-dropout=0.1",
            "--eval-iters=1",
            "--eval-interval=3",
            f"--save={self._folder}/{name}",
            f"--load={self._folder}/{name}",
            f"--metrics-file={self._folder}/{name}.jsonl",
            *more,
        ]

    def unbroken(self, grid: str) -> tuple[Any, dict[str, torch.Tensor]]:
        """Metrics and tensors of the run of this grid that nobody kills."""
        if grid not in self._unbroken:
            name = f"unbroken_{grid.replace(' ', '')}"
            run_job(RANKS, self.flags(grid, name), timeout=180).check()
            self._unbroken[grid] = self.outcome(name)
        return self._unbroken[grid]

    def outcome(self, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
        """What must be equal."""
        tensors = tensors_of(iteration_folder(self._folder / name, ITERATIONS))
        return numbers(self._folder, name), tensors

    def trial(self, number: int, grid: str, saving: list[str], kills: list[Kill]) -> list[str]:
        """Run one trial; returns what went wrong."""
        name = f"trial{number}"
        argv = self.flags(grid, name, *saving)
        problems = []
        for index, kill in enumerate(kills):
            run = self._torchrun if self._launcher == "torchrun" else self._processes
            problems += run(argv, kill, self._folder / f"{name}.{index}.marker")
        result = run_job(RANKS, argv, timeout=180)
        if result.codes != [0] * RANKS:
            return [*problems, f"the last start ended with {result.codes}\n{result.text[-3000:]}"]
        metrics, tensors = self.outcome(name)
        expected_metrics, expected = self.unbroken(grid)
        if metrics != expected_metrics:
            problems.append(f"metrics differ: {metrics} instead of {expected_metrics}")
        wrong = [key for key in expected if not torch.equal(expected[key], tensors[key])]
        if wrong:
            problems.append(f"tensors differ: {wrong[:5]}")
        return problems

    def _processes(self, argv: list[str], kill: Kill, marker: Path) -> list[str]:
        extra: dict[str, Any] = {}
        if kill.moment in MOMENTS:
            extra["hook"] = partial(
                strike,
                moment=kill.moment,
                count=kill.count,
                victim=kill.victim,
                marker=str(marker) if kill.everyone else None,
            )
        job = Job(RANKS, argv, **extra)
        deadline = time.monotonic() + 120
        if kill.moment not in MOMENTS:
            time.sleep(kill.delay)
            if not kill.everyone:
                with contextlib.suppress(ProcessLookupError, AttributeError):
                    job.processes[kill.victim].kill()
        while kill.everyone and any(process.is_alive() for process in job.processes):
            if marker.exists() or kill.moment not in MOMENTS:
                job.kill()
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        job.processes[kill.victim].join(120)
        late = time.monotonic() + END_S
        for process in job.processes:
            process.join(max(0.0, late - time.monotonic()))
        alive = [rank for rank, process in enumerate(job.processes) if process.is_alive()]
        job.kill()
        result = job.result(10)
        if alive:
            return [f"ranks {alive} still ran {END_S} s after {kill}\n{result.text[-3000:]}"]
        return []

    def _torchrun(self, argv: list[str], kill: Kill, marker: Path) -> list[str]:
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}",
            f"--master-port={free_port()}", str(ROOT / "pretrain_gpt.py"), *argv,
        ]  # fmt: skip
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        with marker.with_suffix(".log").open("w") as log:
            launcher = subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=ROOT)
            time.sleep(8 + 4 * kill.delay)
            ranks = descendants(launcher.pid)
            if kill.everyone:
                # The ranks live in sessions of their own: killing the launcher doesn't end them.
                launcher.kill()
            for pid in ranks if kill.everyone else ranks[kill.victim : kill.victim + 1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                launcher.wait(END_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
        alive = [pid for pid in ranks if Path(f"/proc/{pid}").exists() and not zombie(pid)]
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return [f"processes {alive} still ran after {kill}"] if alive else []


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``, in the order they were started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return sorted(found)


def zombie(pid: int) -> bool:
    """Whether the process has ended and waits to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (OSError, IndexError):
        return True


def plan(rng: random.Random, launcher: str) -> tuple[str, list[str], list[Kill]]:
    """A random trial: (grid, flags of saving, kills)."""
    grid = rng.choice(list(GRIDS))
    saving = [f"--save-interval={rng.choice([1, 2])}"]
    saving += ["--async-save"] if rng.random() < 0.5 else []
    saving += ["--keep-checkpoints=1"] if rng.random() < 0.5 else []
    kills = []
    if launcher == "torchrun" or rng.random() < 0.15:
        everyone = rng.random() < 0.5
        kills.append(
            Kill("a random time", 0, rng.randrange(RANKS), everyone, delay=rng.uniform(0.5, 4))
        )
        return grid, saving, kills
    moment = rng.choice(list(MOMENTS))
    if MOMENTS[moment].in_resume:
        # Something must be there to load: the first run is killed late in training.
        count = rng.randrange(4, ITERATIONS)
        kills.append(Kill("after an update", count, rng.randrange(RANKS), everyone=True))
    spec = MOMENTS[moment]
    victim = 0 if spec.only_first_rank else rng.randrange(RANKS)
    kills.append(Kill(moment, rng.randrange(spec.most), victim, rng.random() < 0.4))
    return grid, saving, kills


def run_campaign(trials: int, seed: int, *, launcher: str = "processes") -> list[str]:
    """Run trials, saying how it goes; returns the problems of all of them."""
    rng = random.Random(seed)
    problems: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), launcher=launcher)
        for number in range(1, trials + 1):
            grid, saving, kills = plan(rng, launcher)
            found = campaign.trial(number, grid, saving, kills)
            problems += [f"trial {number} (seed {seed}): {problem}" for problem in found]
            elapsed = time.monotonic() - began
            print(
                f"[{number}/{trials}] {'FAILED' if found else 'equal'}  {elapsed:6.1f} s, about "
                f"{elapsed / number * (trials - number):.0f} s left | {grid}, "
                f"{' '.join(saving)} | kill {'; then '.join(map(str, kills))}",
                flush=True,
            )
    return problems


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, help="default: a random one, printed")
    parser.add_argument("--launcher", choices=("processes", "torchrun"), default="processes")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"seed {seed}")
    problems = run_campaign(args.trials, seed, launcher=args.launcher)
    for problem in problems:
        print(problem)
    print(f"{args.trials} trials, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
