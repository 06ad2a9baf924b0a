"""The small parts of the training room: launch environment, signals, metrics, loggers, rates."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.core.config import OptimizerConfig, RunConfig
from megatron.core.config.record import replace_values
from megatron.core.context_extension import ContextSchedule, StageDefaults
from megatron.training.launch_env import first_host, launch_environment, slurm_port
from megatron.training.learning_rate import learning_rate
from megatron.training.loggers import BackgroundLogger
from megatron.training.main_job import pretrain
from megatron.training.metrics_file import MetricsFile, cut_torn_line, read_metrics
from megatron.training.reporting import Reporter, format_training_line, peak_tflops
from megatron.training.signals import ExitSignals

SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "1234",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NODELIST": "a[3-4]",
}


def test_single_process_without_a_launcher() -> None:
    env = launch_environment({})
    assert (env.rank, env.world_size, env.launcher) == (0, 1, "single")


def test_torchrun() -> None:
    env = launch_environment(
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
        | {"MASTER_ADDR": "h", "MASTER_PORT": "77"}
    )
    assert (env.rank, env.world_size, env.local_rank, env.ranks_per_node) == (5, 8, 1, 4)
    assert (env.master_addr, env.master_port) == ("h", 77)


def test_slurm() -> None:
    env = launch_environment(SLURM)
    assert (env.rank, env.world_size, env.local_rank, env.ranks_per_node) == (3, 4, 1, 2)
    assert env.master_addr == "a3"
    assert env.master_port == slurm_port(1234)


def test_two_jobs_on_one_node_get_two_ports() -> None:
    other = launch_environment(SLURM | {"SLURM_JOB_ID": "1235"})
    assert other.master_port != launch_environment(SLURM).master_port


def test_two_steps_of_one_job_get_two_ports() -> None:
    # Else rank 1 of the one trains with rank 0 of the other.
    other = launch_environment(SLURM | {"SLURM_STEP_ID": "1"})
    assert other.master_port != launch_environment(SLURM).master_port
    assert all(20000 <= slurm_port(job, step) < 32768 for job in (0, 11999) for step in (0, 40))


def test_a_step_may_be_smaller_than_its_job() -> None:
    # srun -n2 in a job of --nodes=2 --ntasks-per-node=2: the step keeps the job's variable.
    step = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NUM_NODES": "2"}
    assert launch_environment(SLURM | step).ranks_per_node == 1


def test_the_shell_of_salloc_is_no_rank() -> None:
    # With LaunchParameters=use_interactive_step it is a step, and has the tasks of the job.
    shell = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "4294967290"}
    shell |= {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_NODES": "1"}
    env = launch_environment(SLURM | shell | {"SLURM_GPUS_ON_NODE": "8"})
    assert (env.world_size, env.launcher) == (1, "single")


def test_a_batch_script_is_no_rank_but_a_task_without_its_step_is() -> None:
    without = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}
    assert launch_environment(without) == launch_environment(SLURM)
    script = without | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"}
    assert launch_environment(script).launcher == "single"
    assert launch_environment(SLURM | {"ENVIRONMENT": "BATCH"}).launcher == "slurm"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a[3-4]", "a3"),
        ("gpu[03-07,9],login1", "gpu03"),
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("rack[1-2]-x", "rack1-x"),
        ("r[1-2]n[03-04]", "r1n03"),
        ("r[5,1-2]n[3-4]z,a[1-2]", "r5n3z"),
    ],
)
def test_first_host(nodes: str, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "a[", "a[]", "a]1", ","])
def test_a_node_list_without_a_host_is_refused(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="names no host"):
        first_host(nodes)


def test_the_rendezvous_is_on_the_first_node_of_the_step() -> None:
    # srun may start a step on a part of the job's nodes; rank 0 is on the first of them.
    step = {"SLURM_JOB_NODELIST": "a[3-6]", "SLURM_NNODES": "4"}
    step |= {"SLURM_STEP_NODELIST": "a[5-6]", "SLURM_STEP_NUM_NODES": "2"}
    assert launch_environment(SLURM | step).master_addr == "a5"


def test_scontrol_is_asked_where_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "scontrol"
    fake.write_text("#!/bin/sh\necho strange7\necho strange8\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert first_host("whatever[7-8]") == "strange7"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_NTASKS": "5"}, "2 nodes x 2 tasks"),
        ({"SLURM_GPUS_ON_NODE": "8"}, "SLURM_GPUS_ON_NODE=8"),
        ({"SLURM_PROCID": "9"}, "rank 9"),
        ({"SLURM_NTASKS": "four"}, "whole number"),
        ({"SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": ""}, "don't divide"),
        ({"SLURM_NNODES": "0", "SLURM_NTASKS_PER_NODE": ""}, "don't divide over 0 nodes"),
        ({"SLURM_NTASKS": ""}, "SLURM_NTASKS is not set"),
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
        ({"SLURM_LOCALID": "2"}, "local rank 2 must lie in 0..1"),
    ],
)
def test_contradicting_slurm_variables(changes: dict[str, str], words: str) -> None:
    environ = {key: value for key, value in (SLURM | changes).items() if value}
    with pytest.raises(ValueError, match=words):
        launch_environment(environ)


@pytest.mark.parametrize(
    ("tasks", "nodes", "per_node"),
    [
        ("4", "2", "2(x2)"),
        ("4", "2", "2,2"),
        ("9", "3", "3,4,2"),
        ("12", "3", "4,2,6"),
        ("12", "4", "3(x2),2,4"),
    ],
)
def test_nodes_with_unequal_tasks_are_refused(tasks: str, nodes: str, per_node: str) -> None:
    environ = SLURM | {"SLURM_NTASKS": tasks, "SLURM_NNODES": nodes}
    del environ["SLURM_NTASKS_PER_NODE"]
    environ["SLURM_STEP_TASKS_PER_NODE"] = per_node
    if tasks == "4":
        assert launch_environment(environ).ranks_per_node == 2
    else:
        with pytest.raises(ValueError, match="start one task per device on every node"):
            launch_environment(environ)


@pytest.mark.parametrize("alone", [{"RANK": "1"}, {"RANK": "0"}, {"WORLD_SIZE": "2"}])
def test_half_of_a_rank_is_refused(alone: dict[str, str]) -> None:
    # Else each of the processes would be rank 0 of 1, and all would write the same files.
    with pytest.raises(ValueError, match="set both"):
        launch_environment(alone)
    assert launch_environment({"WORLD_SIZE": "1"}).launcher == "single"


@pytest.mark.parametrize("size", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
@pytest.mark.parametrize("slurm", [{}, SLURM], ids=["alone", "in a job"])
def test_ranks_of_mpirun_are_refused(size: str, slurm: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{size}=2: mpirun started .* RANK, WORLD_SIZE"):
        launch_environment(slurm | {size: "2"})
    same = slurm.get("SLURM_NTASKS", "1")  # srun --mpi=pmi2 says so too; torchrun knows better
    launch_environment(slurm | {size: same})
    launch_environment({size: "2", "RANK": "3", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be at least 1"),
        ({"RANK": "2"}, "rank 2 must lie in 0..1"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK='x' must be a whole number"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' must be a whole number"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 must lie in 1..65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 must lie in 1..65535"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is empty"),
        ({"LOCAL_RANK": "5"}, "local rank 5 must lie in 0..1"),
        ({"LOCAL_WORLD_SIZE": "0"}, "ranks of this node: 0"),
    ],
)
def test_wrong_torchrun_variables(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        launch_environment({"RANK": "0", "WORLD_SIZE": "2"} | changes)


def test_first_signal_is_kept_and_second_kills() -> None:
    code = (
        "import os, signal, time\n"
        "from megatron.training.signals import ExitSignals\n"
        "s = ExitSignals().install()\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "time.sleep(0.1); print(s.name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(5); print('survived')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.stdout == "SIGUSR1\n"
    assert done.returncode == -signal.SIGTERM


def test_the_entry_point_checks_flags_without_torch() -> None:
    code = (
        "import sys\n"
        "import pretrain_gpt\n"
        "from megatron.training import pretrain\n"
        "code = pretrain(None, None, None, argv=['--num-layers', 'x'], environ={})\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150)
    assert done.returncode == 2, done.stderr
    assert "--num-layers" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("local", [0, 1])
def test_a_rank_that_is_refused_alone_says_so(
    local: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.training.main_job.LONE_REFUSAL_SECONDS", 0.0)
    rank = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": f"{local}", "LOCAL_WORLD_SIZE": "2"}
    argv = ["--num-layers=0", "--hidden-size=-1"]
    none: Any = None
    assert pretrain(none, none, none, argv=argv, environ=rank, signals=ExitSignals()) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("rank 3: pretrain_gpt.py: ") and "errors:" in said[0]
    assert (len(said) == 1) == (local == 1)  # the node's first rank lists them


def test_metrics_lines_survive_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.jsonl"
    file = MetricsFile(str(path), fresh=True)
    file.write({"iteration": 1, "lm_loss": 2.0})
    file.write({"iteration": 2, "lm_loss": math.nan})
    file.close()
    with path.open("a") as torn:
        torn.write('{"iteration": 3, "lm_')
    assert [r["iteration"] for r in read_metrics(str(path))] == [1, 2]
    file = MetricsFile(str(path), fresh=False)
    file.write({"iteration": 2, "lm_loss": 1.5})
    file.write({"iteration": 2, "eval_lm_loss": 1.0})
    file.close()
    records = read_metrics(str(path))
    assert [(r["iteration"], r.get("lm_loss")) for r in records] == [(1, 2.0), (2, 1.5), (2, None)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_line_that_is_not_written_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    file = MetricsFile(str(path), fresh=True)
    file.write({"iteration": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    with pytest.raises(OSError, match="No space left"):
        file.write({"iteration": 2})
    monkeypatch.setattr(os, "write", write)
    file.write({"iteration": 3})
    file.close()
    assert [r["iteration"] for r in read_metrics(str(path))] == [1, 3]


def test_a_full_disk_under_log_and_metrics_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = replace_values(RunConfig(), {"metrics_file": "/dev/full"})
    reporter = Reporter(config, rank=0, flat={})
    reporter.open(run_id="x", resumed=False)
    record = {"split": "valid", "iteration": 1, "eval_lm_loss": 2.0, "loss_tokens": 8}
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        reporter.evaluation(record)
        reporter.evaluation(record)
        with contextlib.suppress(OSError):
            full.close()
        reporter.evaluation(record)
    reporter.close()
    text = capfd.readouterr().err
    assert text.count("--metrics-file /dev/full: No space left on device; lines are lost") == 1


@pytest.mark.parametrize("text", ["", "no newline at all", "a" * 10_000])
def test_a_file_without_a_whole_line_becomes_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(text)
    assert cut_torn_line(path) == len(text)
    assert path.read_text() == ""


@pytest.mark.parametrize("torn", [0, 1, 4095, 4096, 4097, 10_000])
def test_whole_lines_before_a_torn_one_stay(tmp_path: Path, torn: int) -> None:
    """Whatever its length: the file is read backwards, block by block."""
    path = tmp_path / "m.jsonl"
    path.write_text("a\nbc\n" + "x" * torn)
    assert cut_torn_line(path) == torn
    assert path.read_text() == "a\nbc\n"


class Sink:
    def __init__(self, fail: str) -> None:
        self.fail, self.seen = fail, []  # type: ignore[var-annotated]
        if fail == "init":
            raise RuntimeError("no network")
        if fail == "hang in init":
            time.sleep(60)

    def log(self, values: Any, step: int) -> None:
        if self.fail == "log":
            raise RuntimeError("quota")
        self.seen.append((step, dict(values)))

    def finish(self) -> None:
        if self.fail == "exit":
            raise SystemExit(1)


@pytest.mark.parametrize("fail", ["init", "hang in init", "log", "exit"])
def test_a_failing_logger_never_stops_a_run(fail: str) -> None:
    warnings: list[str] = []
    began = time.monotonic()
    logger = BackgroundLogger("wandb", lambda: Sink(fail), warnings.append)
    for step in range(5):
        logger.log({"loss": 1.0}, step)
        time.sleep(0.02)
    logger.finish(seconds=1.0)
    # Not a speed: a hanging service must not hang the run (the sink's hang is much longer).
    assert time.monotonic() - began < 25
    assert len(warnings) == 1
    assert "training goes on" in warnings[0]


def test_a_working_logger_gets_all() -> None:
    sinks: list[Sink] = []

    def make() -> Sink:
        sinks.append(Sink(""))
        return sinks[-1]

    logger = BackgroundLogger("wandb", make, lambda text: pytest.fail(text))
    for step in range(3):
        logger.log({"loss": float(step)}, step)
    logger.finish()
    assert len(sinks) == 1
    assert sinks[0].seen == [(0, {"loss": 0.0}), (1, {"loss": 1.0}), (2, {"loss": 2.0})]


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA A10G", None),
        ("Some other card", None),
        (None, None),
    ],
)
def test_known_peaks(name: str | None, peak: float | None) -> None:
    assert peak_tflops(None, name) == peak
    assert peak_tflops(100.0, name) == 100.0


def test_log_line_of_a_step_without_numbers() -> None:
    record = {
        "iteration": 1,
        "stage": 1,
        "seq_length": 8,
        "context_parallel_size": 1,
        "consumed_tokens": 8,
        "lm_loss": None,
        "grad_norm": 1.0,
        "learning_rate": 0.1,
        "iteration_time": 0.5,
        "tokens_per_second": 16.0,
        "tflops_per_device": 0.1,
        "mfu": None,
        "skipped": 1,
    }
    line = format_training_line(record, 10)
    assert "lm loss nan" in line and "skipped 1" in line


def schedule(*stages: dict[str, Any]) -> ContextSchedule:
    common = {"seq_length": 8, "global_batch_size": 1, "micro_batch_size": 1}
    return ContextSchedule.from_mapping(
        {"stages": [common | stage for stage in stages]}, StageDefaults()
    )


def test_learning_rate_rules_of_stages() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.0, lr_decay_style="linear")
    stages = schedule(
        {"train_iters": 10},
        {"train_iters": 10, "lr": {"rule": "constant", "peak": 0.3}},
        {"train_iters": 10, "lr": {"rule": "rewarm", "peak": 0.5, "min": 0.1, "warmup_iters": 4}},
        {"train_iters": 10},
    )
    rates = [learning_rate(config, stages, i) for i in range(40)]
    assert rates[:10] == pytest.approx([1 - i / 40 for i in range(10)])
    assert rates[10:20] == [0.3] * 10
    assert rates[20:24] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rates[24:30] == pytest.approx([0.5 - 0.4 * i / 6 for i in range(6)])
    assert rates[30:] == pytest.approx([1 - i / 40 for i in range(30, 40)])
