#!/usr/bin/env bash
# Makes (or finds) an environment of its own with other packages' context-parallel attention, and
# prints the path of its python.
#   bash tests/peers/make_env.sh [FOLDER]
# FOLDER defaults to ${XDG_CACHE_HOME:-~/.cache}/megatron-long-context/peers, never inside the
# repository. About 3 GB. JAX's ringattention gets an environment beside it (FOLDER-jax), since it
# wants other versions; where it does not install, "no" is written to FOLDER-jax/installed.
set -euo pipefail

FOLDER=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-long-context/peers}
BASE=$(command -v python3.11 || command -v python3)

if [ ! -e "$FOLDER/complete" ]; then
  rm -rf "$FOLDER"
  mkdir -p "$(dirname "$FOLDER")"
  "$BASE" -m venv "$FOLDER"
  PIP=("$FOLDER/bin/python" -m pip install --quiet --disable-pip-version-check)
  # torch first and pinned, so that nothing pulls another build.
  "${PIP[@]}" "torch==2.13.0" numpy setuptools wheel ninja >&2
  "${PIP[@]}" "ring-attention-pytorch==0.5.20" >&2
  DS_BUILD_OPS=0 "${PIP[@]}" --no-build-isolation "deepspeed==0.19.8" >&2
  touch "$FOLDER/complete"
fi
if [ ! -e "$FOLDER-jax/installed" ]; then
  rm -rf "$FOLDER-jax"
  "$BASE" -m venv "$FOLDER-jax"
  if "$FOLDER-jax/bin/python" -m pip install --quiet --disable-pip-version-check \
    "ringattention==0.1.2" "jax[cpu]>=0.4.30,<0.5" "numpy<2.3" >&2; then
    echo yes >"$FOLDER-jax/installed"
  else
    echo no >"$FOLDER-jax/installed"
  fi
fi
echo "$FOLDER/bin/python"
