"""What the job script hands to srun, without a Slurm."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("given", "cpus", "queues"),
    [
        ({"SLURM_CPUS_PER_TASK": "8"}, "8", "unset"),
        ({"SLURM_CPUS_PER_TASK": "8", "SRUN_CPUS_PER_TASK": "4", "TP": "2"}, "4", "1"),
        ({"TP": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "unset", "8"),
    ],
)
def test_ranks_get_the_jobs_cores_and_queues_that_suit_their_parallelism(
    given: dict[str, str], cpus: str, queues: str, tmp_path: Path
) -> None:
    srun = tmp_path / "srun"
    told = "${SRUN_CPUS_PER_TASK:-unset} ${CUDA_DEVICE_MAX_CONNECTIONS:-unset}"
    srun.write_text(f'#!/bin/sh\necho "{told}"\n')
    srun.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODE": "layouts", **given}
    environ |= {"DATA": "data", "TOKENIZER": "model", "OUTPUT": str(tmp_path)}
    done = subprocess.run(
        ["bash", "examples/slurm/pretrain.sbatch"],
        cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == f"{cpus} {queues}\n"
