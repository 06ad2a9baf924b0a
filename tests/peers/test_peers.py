"""Outputs and gradients equal those of other packages' context-parallel attention.

``bash tests/run.sh --peers`` (or ``pytest -m peers``) makes an environment of its own with
``tests/peers/make_env.sh`` (about 3 GB, once) and runs the comparisons in it.
"""

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter of the peers' environment."""
    made = subprocess.run(
        ["bash", HERE / "make_env.sh"], check=True, capture_output=True, text=True, timeout=3000
    )
    return made.stdout.strip().splitlines()[-1]


def run_script(interpreter: str, name: str, *args: str) -> None:
    # DeepSpeed builds a small library on first use; its lock would outlive a killed run.
    extensions = Path(interpreter).parent.parent / "extensions"
    for lock in extensions.glob("**/lock"):
        lock.unlink()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "PATH": f"{Path(interpreter).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [interpreter, HERE / name, *args], env=environment, capture_output=True, text=True,
        timeout=1800, cwd=ROOT,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"


@pytest.mark.peers
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", ["compare_ring_attention_pytorch.py", "compare_deepspeed.py"])
def test_peer(python: str, name: str) -> None:
    run_script(python, name)


@pytest.mark.peers
@pytest.mark.timeout(4000)
def test_jax_ringattention(python: str) -> None:
    folder = Path(python).parent.parent
    beside = folder.with_name(folder.name + "-jax")
    if (beside / "installed").read_text(encoding="ascii").strip() != "yes":
        pytest.fail("JAX's ringattention did not install; see make_env.sh's messages")
    run_script(python, "compare_jax.py", str(beside / "bin" / "python"))
