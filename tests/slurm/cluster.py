"""A real Slurm on this machine: four "nodes" with fake GPUs, for tests of the job scripts.

Debian's build lets several slurmd share a host. Needs root, slurm-wlm and munge; listens on
ports of its own and leaves nothing running. Nodes are named n1 to n4 and resolve to loopback
through /etc/hosts (added once).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")

CONFIG = """
ClusterName=ci
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
SlurmctldPort=16817
SlurmctldPidFile={d}/state/ctld.pid
SlurmdPidFile={d}/state/slurmd.%n.pid
StateSaveLocation={d}/state
SlurmdSpoolDir={d}/spool/%n
SlurmctldLogFile={d}/log/ctld.log
SlurmdLogFile={d}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
DefMemPerNode=1000
GresTypes=gpu
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=n[1-4] Default=YES MaxTime=60 State=UP
"""


def _run(command: list[str], env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout


class Cluster:
    """Commands against the running cluster, with its SLURM_CONF set."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK"))}
        self.env = clean | {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, **extra: str) -> str:
        """Standard output of a Slurm command; raises with its words if it fails."""
        return _run(list(command), self.env | extra)

    def submit(self, *args: str, **extra: str) -> int:
        """Submit with sbatch; returns the job's id. ``extra`` are environment variables."""
        return int(self.run("sbatch", "--parsable", *args, **extra).strip().split(";")[0])

    def state(self, job: int) -> str:
        """Slurm's word for the job's state (PENDING, RUNNING, COMPLETED, FAILED, ...)."""
        text = self.run("scontrol", "show", "job", str(job), "-o")
        fields = dict(item.split("=", 1) for item in text.split() if "=" in item)
        return fields["JobState"]

    def restarts(self, job: int) -> int:
        """How often the job was requeued."""
        text = self.run("scontrol", "show", "job", str(job), "-o")
        fields = dict(item.split("=", 1) for item in text.split() if "=" in item)
        return int(fields["Restarts"])

    def wait(self, job: int, states: set[str], seconds: float, *, hurry: bool = False) -> str:
        """Wait until the job is in one of ``states``; ``hurry`` starts requeued jobs at once."""
        deadline = time.monotonic() + seconds
        state = ""
        while time.monotonic() < deadline:
            state = self.state(job)
            if state in states:
                return state
            if hurry and state == "PENDING":
                # A credential of the same second as the kill of the first life is revoked.
                time.sleep(3)
                with contextlib.suppress(RuntimeError):
                    self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
            time.sleep(0.5)
        raise TimeoutError(f"job {job} is {state}, not {sorted(states)}, after {seconds} s")


def available() -> bool:
    """Whether this machine can start the cluster."""
    return os.getuid() == 0 and bool(shutil.which("slurmctld")) and bool(shutil.which("munged"))


def _hosts() -> None:
    hosts = Path("/etc/hosts")
    if " n1 n2 n3 n4" not in hosts.read_text():
        with hosts.open("a") as file:
            file.write("127.0.0.1 n1 n2 n3 n4\n")


def _munge() -> subprocess.Popen[bytes] | None:
    if Path("/run/munge/munge.socket.2").exists() and shutil.which("unmunge"):
        ok = subprocess.run(["munge", "-n"], capture_output=True, check=False, timeout=20)
        if ok.returncode == 0:
            return None
    _run(["install", "-d", "-o", "munge", "-g", "munge", "-m", "755", "/run/munge"])
    daemon = subprocess.Popen(
        ["runuser", "-u", "munge", "--", "/usr/sbin/munged", "--foreground", "--force"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for _ in range(100):
        if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0:
            return daemon
        time.sleep(0.1)
    raise RuntimeError("munged did not start")


def _write_config(folder: Path) -> None:
    for name in ("state", "log", "dev", *(f"spool/{node}" for node in NODES)):
        (folder / name).mkdir(parents=True, exist_ok=True)
    nodes = "\n".join(
        f"NodeName={node} NodeAddr=127.0.0.1 NodeHostname=localhost Port={17001 + i} "
        "CPUs=64 RealMemory=500000 Gres=gpu:8 State=UNKNOWN"
        for i, node in enumerate(NODES)
    )
    (folder / "slurm.conf").write_text(CONFIG.format(d=folder, nodes=nodes))
    for i in range(8):
        device = folder / "dev" / f"fgpu{i}"
        if not device.exists():
            os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/fgpu[0-7]\n")


@contextlib.contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start the cluster under ``folder``, yield it, stop all of it."""
    _write_config(folder)
    _hosts()
    munge = _munge()
    cluster = Cluster(folder)
    _run(["/usr/sbin/slurmctld", "-c"], cluster.env)
    for node in NODES:
        _run(["/usr/sbin/slurmd", "-N", node], cluster.env)
    try:
        for _ in range(120):
            if cluster.run("sinfo", "-h", "-o", "%T").split() == ["idle"]:
                break
            time.sleep(0.5)
        else:
            raise RuntimeError(f"nodes are not idle: {cluster.run('sinfo')}")
        yield cluster
    finally:
        with contextlib.suppress(Exception):
            cluster.run("scancel", "--state=RUNNING", "--user=root")
            cluster.run("scancel", "--state=PENDING", "--user=root")
            time.sleep(1)
        for pid_file in (folder / "state").glob("*.pid"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(pid_file.read_text()), signal.SIGTERM)
        if munge is not None:
            munge.terminate()
            munge.wait(timeout=10)
