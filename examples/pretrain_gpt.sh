#!/usr/bin/env bash
# Pretraining on one node with torchrun, one process per GPU (or per CPU rank).
#   DATA=corpus/books_text_document TOKENIZER=corpus/tokenizer.model \
#   OUTPUT=runs/first bash examples/pretrain_gpt.sh [more flags of pretrain_gpt.py]
# MODE=layouts trains a few steps with each context-parallel layout and communication instead, and
# leaves a table and OUTPUT/layouts.png: a trial before a long run. TRIAL_FLAGS="--steps 10 ..." are
# those of tools/benchmark_layouts.py.
# torchrun turns every exit code into 0 or 1: for runs that are requeued use
# examples/slurm/pretrain.sbatch. Flags given on the command line win over those below.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DATA=${DATA:?"prefix of a .bin/.idx pair, as written by tools/preprocess_data.py"}
TOKENIZER=${TOKENIZER:?"SentencePiece model that DATA was made with"}
OUTPUT=${OUTPUT:-runs/pretrain}
RANKS=${RANKS:-$(nvidia-smi -L 2>/dev/null | grep -c . || true)}
[ "$RANKS" -gt 0 ] || RANKS=2
TP=${TP:-1}
CP=${CP:-$RANKS}
PYTHON=${PYTHON:-.venv/bin/python}

# A 1.1-billion-parameter Llama-shaped model over 32K tokens; on CPU give a smaller one.
MODEL=(
  --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192
  --num-attention-heads 32 --group-query-attention --num-query-groups 8
  --normalization RMSNorm --swiglu --disable-bias-linear
  --position-embedding-type rope --rotary-base 500000
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
PARALLEL=(
  --tensor-model-parallel-size "$TP" --context-parallel-size "$CP"
  --use-distributed-optimizer --cp-layout balanced
)
[ "$TP" -gt 1 ] && PARALLEL+=(--sequence-parallel)
TRAINING=(
  --seq-length 32768 --micro-batch-size 1 --global-batch-size 32 --train-iters 1000
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 100
  --weight-decay 0.1 --adam-beta2 0.95 --bf16 --recompute-granularity full
)
DATA_FLAGS=(
  --data-path "$DATA" --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER"
  --packing best-fit
)
OUTPUT_FLAGS=(
  --save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval 100
  --log-interval 10 --eval-interval 100 --eval-iters 10
  --metrics-file "$OUTPUT/metrics.jsonl" --tensorboard-dir "$OUTPUT/tensorboard"
)

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# One queue to the GPU is for tensor parallelism; FSDP2 wants several (see slurm/pretrain.sbatch).
[ "$TP" -gt 1 ] && export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
PROGRAM=(pretrain_gpt.py)
if [ "${MODE:-}" = layouts ]; then
  # shellcheck disable=SC2086
  PROGRAM=(tools/benchmark_layouts.py --output "$OUTPUT/layouts.png" ${TRIAL_FLAGS:-} --)
fi
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" \
  "${PROGRAM[@]}" "${MODEL[@]}" "${PARALLEL[@]}" "${TRAINING[@]}" "${DATA_FLAGS[@]}" \
  "${OUTPUT_FLAGS[@]}" "$@"
