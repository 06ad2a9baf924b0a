"""What the job script hands to srun, without a Slurm."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("given", "cpus"),
    [
        ({"SLURM_CPUS_PER_TASK": "8"}, "8"),
        ({"SLURM_CPUS_PER_TASK": "8", "SRUN_CPUS_PER_TASK": "4"}, "4"),
        ({}, "unset"),
    ],
)
def test_ranks_get_the_cores_that_the_job_asked_for(
    given: dict[str, str], cpus: str, tmp_path: Path
) -> None:
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "cores ${SRUN_CPUS_PER_TASK:-unset}"\n')
    srun.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "MODE": "layouts", **given}
    environ |= {"DATA": "data", "TOKENIZER": "model", "OUTPUT": str(tmp_path)}
    done = subprocess.run(
        ["bash", "examples/slurm/pretrain.sbatch"],
        cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == f"cores {cpus}\n"
