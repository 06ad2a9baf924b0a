#!/usr/bin/env bash
# What extending the context is worth, on 2 CPU cores: one short run, then three ways to spend the
# same further tokens:
#
#   short       stays at the short length
#   extended    4x the length, a larger theta
#   same-theta  4x the length, the old theta
#
#   bash examples/extension_demo.sh           the whole demonstration
#   FORM=short bash examples/extension_demo.sh    the form that CI runs (margins not judged)
#
# The documents are a made-up language in which facts are told and asked for again far later
# (tools/make_passkey_data.py). Measured: loss by position on held-out documents, and passkey
# retrieval (five digits told once). Nothing is downloaded. Results in runs/extension_demo:
# position_loss.png, passkey.png, evaluation.txt, evaluation.json.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
FORM=${FORM:-full}
OUT=${OUT:-runs/extension_demo}
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
SHORT=64
LONG=$((4 * SHORT))
if [ "$FORM" = short ]; then
  RANKS=1 FIRST=12 MORE=6 ROWS=16 LOG=3 DOCUMENTS=400 HELD_OUT=8 TRIALS=2
else
  RANKS=2 FIRST=600 MORE=250 ROWS=32 LOG=20 DOCUMENTS=5000 HELD_OUT=256 TRIALS=25
fi
TOTAL=$((FIRST + MORE))
LONG_ROWS=$((ROWS * SHORT / LONG))   # as many tokens a step

step() { printf '\n[%s s] %s\n' "$SECONDS" "$*"; }
SECONDS=0
if [ -e "$OUT" ] && [ ! -f "$OUT/.extension_demo" ]; then
  echo "extension_demo: $OUT exists and is not a folder of mine; remove it or set OUT" >&2
  exit 1
fi
rm -rf "$OUT"   # a run starts fresh
mkdir -p "$OUT"
touch "$OUT/.extension_demo"
export OMP_NUM_THREADS=1

step "1/4 documents"
"$PYTHON" tools/make_passkey_data.py --output-prefix "$OUT/train" --documents "$DOCUMENTS" \
  --lengths $((2 * LONG)) --seed 1
"$PYTHON" tools/make_passkey_data.py --output-prefix "$OUT/held_out" --documents "$HELD_OUT" \
  --lengths $((2 * LONG)) --seed 2

# schedule NAME SECOND_LENGTH THETA RING ROWS
schedule() {
  cat > "$OUT/$1.yaml" <<YAML
stages:
  - {name: short, seq_length: $SHORT, train_iters: $FIRST, rotary_base: 100,
     context_parallel: [1, 1], global_batch_size: $ROWS, micro_batch_size: $((ROWS / RANKS))}
  - {name: $1, seq_length: $2, train_iters: $MORE, rotary_base: $3,
     context_parallel: [1, $4], global_batch_size: $5, micro_batch_size: $(($5 * $4 / RANKS))}
YAML
}
schedule short "$SHORT" 100 1 "$ROWS"
schedule extended "$LONG" 1000 "$RANKS" "$LONG_ROWS"
schedule same-theta "$LONG" 100 "$RANKS" "$LONG_ROWS"

LAUNCH=("$PYTHON")
[ "$RANKS" = 1 ] || LAUNCH+=(-m torch.distributed.run --standalone --nproc-per-node "$RANKS")

# train NAME CHECKPOINTS_TO_GO_ON_FROM FLAGS...
train() {
  local name=$1 from=$2
  shift 2
  "${LAUNCH[@]}" pretrain_gpt.py \
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 \
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope \
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1 \
    --tokenizer-type NullTokenizer --vocab-size 128 \
    --data-path "$OUT/train" --split 100,0,0 --num-workers 0 \
    --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 10 \
    --weight-decay 0.01 --adam-beta2 0.98 --eval-iters 0 --log-interval "$LOG" \
    --context-schedule "$OUT/$name.yaml" --save "$OUT/$name" --load "$OUT/$from" \
    --metrics-file "$OUT/$name.jsonl" "$@"
}

step "2/4 the short stage: $FIRST steps of $((ROWS * SHORT)) tokens, length $SHORT"
train short short --exit-interval "$FIRST"

step "3/4 three ways to spend $MORE further steps"
for name in extended same-theta; do
  train "$name" short
done
train short short

step "4/4 evaluation"
"$PYTHON" tools/evaluate.py --output "$OUT" \
  --load short="$OUT/short" extended="$OUT/extended" same-theta="$OUT/same-theta" \
  --data-path "$OUT/held_out" --length "$LONG" --documents "$HELD_OUT" --buckets 16 \
  --passkey-lengths "$SHORT" $((2 * SHORT)) "$LONG" --passkey-trials "$TRIALS" \
  --passkey-depths 0 0.33 0.67 1
"$PYTHON" - "$OUT/evaluation.json" "$SHORT" "$LONG" "$FORM" <<'PY'
import json, sys
values, short, long = json.load(open(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
def beyond(name):
    buckets = [b for b in values["loss_by_position"][name]["buckets"] if b["low"] >= short]
    return sum(b["loss"] for b in buckets) / len(buckets)
def retrieved(name):
    grid = values["passkey"][name]
    return sum(grid["accuracy"][-1]) / len(grid["depths"])
for name in values["passkey"]:
    print(f"{name:>10}: loss beyond position {short} {beyond(name):.4f}, "
          f"passkeys at length {long} {retrieved(name):.1%}")
if sys.argv[4] == "full":
    assert beyond("extended") < beyond("short") - 0.1, "extending did not pay"
    assert retrieved("extended") > 0.9, "the extended model does not retrieve"
PY
echo "took $SECONDS s; results in $OUT"
