#!/usr/bin/env bash
# Makes (or completes) the virtual environment .venv of this checkout; safe to run again.
#   bash tools/setup_env.sh [--dev]
# PYTHON names the interpreter (default: python3.11, else python3). --dev adds the test tools.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=${VENV:-"$ROOT/.venv"}
EXTRAS=hf,tiktoken,zstd
[ "${1:-}" = --dev ] && EXTRAS=dev,$EXTRAS
NEED_MB=3500

fail() { printf 'setup_env: %s\n' "$*" >&2; exit 1; }

PYTHON=${PYTHON:-$(command -v python3.11 || command -v python3 || true)}
[ -n "$PYTHON" ] || fail "no python3 found; install Python 3.11 or set PYTHON=/path/to/python3.11"
VERSION=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
  fail "$PYTHON can't be run as Python; set PYTHON=/path/to/python3.11"
case "$VERSION" in
  3.11|3.12|3.13) ;;
  *) fail "$PYTHON is Python $VERSION; 3.11 is needed (3.12 and 3.13 are taken): set PYTHON=/path/to/python3.11" ;;
esac

STAMP="$VENV/.installed-$(printf '%s %s' "$EXTRAS" "$(cat "$ROOT/setup.py")" | cksum | tr ' ' -)"
if [ -f "$STAMP" ]; then
  exit 0
fi
FREE_MB=$(df -Pm "$ROOT" | awk 'NR==2 {print $4}')
if [ ! -d "$VENV" ] && [ "$FREE_MB" -lt "$NEED_MB" ]; then
  fail "$ROOT has $FREE_MB MB free; the environment needs about $NEED_MB MB"
fi

echo "setup_env: installing into $VENV (about 2 GB, a few minutes)"
# An environment whose making was interrupted has a python but no pip: make it again.
"$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv --clear "$VENV"
PIP=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
# torch first and pinned: a range would let another package pull a newer, larger build.
"$VENV/bin/python" -c 'import torch' 2>/dev/null || "${PIP[@]}" "torch==${TORCH_VERSION:-2.13.0}"
"${PIP[@]}" --editable "$ROOT[$EXTRAS]"
touch "$STAMP"
echo "setup_env: done"
