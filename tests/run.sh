#!/usr/bin/env bash
# Makes the environment if it is missing and runs all tests.
#   bash tests/run.sh            what CI runs (a random sample of the large grids)
#   bash tests/run.sh --slow     the full grids too (long)
#   bash tests/run.sh --peers    also against other packages, in an environment of their own
#   further arguments go to pytest, e.g. bash tests/run.sh tests/datasets -k hypothesis
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
bash tools/setup_env.sh --dev

LEFT_OUT=()
SLOW=0 PEERS=0
while [ $# -gt 0 ]; do
  case "$1" in
    --slow) SLOW=1 ;;
    --peers) PEERS=1 ;;
    *) break ;;
  esac
  shift
done
[ "$SLOW" = 1 ] || LEFT_OUT+=(slow)
[ "$PEERS" = 1 ] || LEFT_OUT+=(peers)
if ! command -v slurmctld >/dev/null || ! command -v munged >/dev/null || [ "$(id -u)" != 0 ]; then
  LEFT_OUT+=(slurm)
  echo "run.sh: without the Slurm tests (they need root and Debian's slurm-wlm and munge)"
fi
EXPRESSION=$(printf ' and not %s' "${LEFT_OUT[@]}")

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest -m "${EXPRESSION# and }" --durations=15 "$@"
