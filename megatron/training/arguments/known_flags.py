"""Megatron-LM flags that aren't configuration here: always on, or not supported, and why.

Scripts written for Megatron-LM are pasted in whole. A flag whose effect is built in is accepted
and named once in the log; a flag that would change the run is refused by name, with what to do,
instead of being an "unknown argument". Prefixes stand for families of flags.
"""

from megatron.core.config.values import read_int

ALWAYS_ON: dict[str, str] = {
    "--overlap-grad-reduce": "gradient reduction always overlaps with backward",
    "--overlap-param-gather": "parameter gathering always overlaps with forward",
    "--use-mcore-models": "there is one model implementation",
    "--ckpt-format": "checkpoints are always torch_dist",
    "--use-dist-ckpt": "checkpoints are always distributed",
    "--auto-detect-ckpt-format": "checkpoints are always torch_dist",
    "--dist-ckpt-format": "checkpoints are always torch_dist",
    "--ckpt-fully-parallel-save": "every rank always writes its own part",
    "--ckpt-fully-parallel-load": "every rank always reads its own part",
    "--calculate-per-token-loss": "the loss is always per token of the global batch",
    "--cross-entropy-loss-fusion": "head and loss are always computed together, in chunks",
    "--accumulate-allreduce-grads-in-fp32": "gradients are always reduced in fp32",
    "--attention-softmax-in-fp32": "softmax always runs in fp32",
    "--use-flash-attn": "attention always runs in blocks; choose with --attention-backend",
    "--no-create-attention-mask-in-dataloader": "no attention mask is ever built",
    "--no-gradient-accumulation-fusion": "there is no such fusion",
    "--no-async-tensor-model-parallel-allreduce": "there is no such fusion",
    "--no-masked-softmax-fusion": "there is no such fusion",
    "--no-bias-gelu-fusion": "there is no such fusion",
    "--no-bias-swiglu-fusion": "there is no such fusion",
    "--no-bias-dropout-fusion": "there is no such fusion",
    "--no-rope-fusion": "there is no such fusion",
    "--no-persist-layer-norm": "there is no such kernel",
    "--use-cpu-initialization": "initial weights never depend on the device",
    "--log-throughput": "throughput is always logged",
    "--exit-on-missing-checkpoint": "a missing --load is an error, unless it is --save too",
    "--use-torch-fsdp2": "data parallelism is always FSDP2; see --data-parallel-sharding-strategy",
    "--data-impl": "the data format is always mmap",
    "--local-rank": "the launcher's environment says the rank",
    "--local_rank": "the launcher's environment says the rank",
}
"""Flag -> why nothing needs to be done."""

REQUIRED_VALUES: dict[str, str] = {
    "--ckpt-format": "torch_dist",
    "--dist-ckpt-format": "torch_dist",
    "--data-impl": "mmap",
}
"""Always-on flags with a value, and the only value that is supported."""

TAKES_VALUE = frozenset(REQUIRED_VALUES) | {"--local-rank", "--local_rank"}

_NO_MOE = "there are no mixture-of-experts layers; train a dense model"
_NO_FP8 = "there is no FP8 or FP4 training; use --bf16"
_NO_ENCODER = "there are decoder-only models here, no encoders"
_SAMPLES = "the learning rate counts steps; use the flag that ends in -iters"
_EVEN_STAGES = "pipeline stages have equal numbers of layers; make --num-layers divisible"
_NO_OFFLOAD = "nothing is offloaded to the CPU; use --recompute-granularity full"
_LOSS_SCALE = "there is no fp16 and no loss scaling; use --bf16"
_LOGGED = "what is logged is fixed: see --metrics-file and --tensorboard-dir; remove it"
_OVERLAP = "how communication overlaps is fixed; remove it"
_GC = "Python's garbage collector is left alone; remove it"
_PROFILE = "run under torch.profiler or nsys instead"
_ONE_FORMAT = "checkpoints have one format and are always checked; remove it"
_GRAPHS = "there are no CUDA graphs; remove it"

UNSUPPORTED: dict[str, str] = {
    "--fp16": "fp16 needs loss scaling, which isn't built; use --bf16",
    "--fp16-lm-cross-entropy": "the loss is always computed in fp32; remove it",
    "--loss-scale": _LOSS_SCALE,
    "--initial-loss-scale": _LOSS_SCALE,
    "--min-loss-scale": _LOSS_SCALE,
    "--loss-scale-window": _LOSS_SCALE,
    "--hysteresis": _LOSS_SCALE,
    "--num-experts": _NO_MOE,
    "--expert-model-parallel-size": _NO_MOE,
    "--expert-tensor-parallel-size": _NO_MOE,
    "--multi-latent-attention": "there is no latent attention; use --group-query-attention",
    "--mtp-num-layers": "there is no multi-token prediction; remove it",
    "--decoder-first-pipeline-num-layers": _EVEN_STAGES,
    "--decoder-last-pipeline-num-layers": _EVEN_STAGES,
    "--pipeline-model-parallel-layout": _EVEN_STAGES,
    "--account-for-embedding-in-pipeline-split": _EVEN_STAGES,
    "--account-for-loss-in-pipeline-split": _EVEN_STAGES,
    "--num-virtual-stages-per-pipeline-rank": "use --num-layers-per-virtual-pipeline-stage",
    "--microbatch-group-size-per-virtual-pipeline-stage": "the interleaved schedule sets it",
    "--decoder-seq-length": _NO_ENCODER,
    "--rampup-batch-size": "use --context-schedule with a global_batch_size in each stage",
    "--lr-warmup-samples": _SAMPLES,
    "--lr-decay-samples": _SAMPLES,
    "--lr-wsd-decay-samples": _SAMPLES,
    "--lr-warmup-init": "warmup starts at 0; remove it",
    "--decoupled-lr": "one learning rate holds for all weights; remove it",
    "--decoupled-min-lr": "one learning rate holds for all weights; remove it",
    "--use-checkpoint-opt-param-scheduler": "that is the default; remove it",
    "--start-weight-decay": "weight decay is constant; use --weight-decay",
    "--end-weight-decay": "weight decay is constant; use --weight-decay",
    "--weight-decay-incr-style": "weight decay is constant; use --weight-decay",
    "--use-rotary-position-embeddings": "use --position-embedding-type rope",
    "--no-position-embedding": "it only drops the learned table; use --position-embedding-type "
    "rope, or none for no positions at all, and remove it",
    "--use-rope-scaling": "use --rope-scaling-type llama3 --original-max-position-embeddings 8192",
    "--rotary-seq-len-interpolation-factor": "use --rope-scaling-type linear and "
    "--rope-scaling-factor",
    "--rotary-scaling-factor": "use --rope-scaling-type and --rope-scaling-factor",
    "--rotary-interleaved": "RoPE turns halves, not neighbours; remove it",
    "--rope-type": "use --position-embedding-type rope and --rope-scaling-type",
    "--mrope-section": "there is no multimodal RoPE; remove it",
    "--no-rope-freq": "every layer has the same positions; remove it",
    "--apply-layernorm-1p": "use --normalization LayerNorm or RMSNorm as it is",
    "--squared-relu": "the MLP is GELU, or SwiGLU with --swiglu",
    "--openai-gelu": "the MLP is GELU, or SwiGLU with --swiglu",
    "--onnx-safe": "the MLP is GELU, or SwiGLU with --swiglu",
    "--quick-geglu": "the MLP is GELU, or SwiGLU with --swiglu",
    "--attention-output-gate": "attention has no output gate; remove it",
    "--softmax-type": "attention uses the plain softmax; remove it",
    "--qk-clip": "logits are never clipped; use --qk-layernorm",
    "--window-attn-skip-freq": "every layer has the same window; use --window-size",
    "--apply-residual-connection-post-layernorm": "layers are pre-norm; remove it",
    "--apply-query-key-layer-scaling": "softmax runs in fp32 and needs no such scaling; remove it",
    "--recompute-activations": "use --recompute-granularity selective",
    "--distribute-saved-activations": "use --sequence-parallel",
    "--cpu-offloading-num-layers": _NO_OFFLOAD,
    "--optimizer-cpu-offload": _NO_OFFLOAD,
    "--optimizer-offload-fraction": _NO_OFFLOAD,
    "--use-precision-aware-optimizer": "optimizer state has the type of the master weights",
    "--use-megatron-fsdp": "use --data-parallel-sharding-strategy (FSDP2)",
    "--use-custom-fsdp": "use --data-parallel-sharding-strategy (FSDP2)",
    "--num-distributed-optimizer-instances": "state is sharded over all data and context ranks",
    "--vocab-file": "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model FILE",
    "--merge-file": "use --tokenizer-type HuggingFaceTokenizer --tokenizer-model FILE",
    "--vocab-extra-ids": "add the tokens to the tokenizer",
    "--tiktoken-pattern": "the pattern comes with the tokenizer; see --tokenizer-model",
    "--data-args-path": "give the paths by --data-path",
    "--per-split-data-args-path": "use --train-data-path, --valid-data-path, --test-data-path",
    "--dataloader-type": "data is always one seeded stream of documents; remove it",
    "--num-dataset-builder-threads": "nothing is built ahead; remove it",
    "--no-save-rng": "random-number states are small and always saved; remove it",
    "--non-persistent-save-interval": "use --async-save with --keep-checkpoints",
    "--pretrained-checkpoint": "use --load with --finetune",
    "--no-initialization": "weights are always initialized; use --load",
    "--use-tp-pp-dp-mapping": "the order of ranks is fixed: tp, ulysses, ring, dp, pp",
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--batch-size": "use --micro-batch-size",
    "--warmup": "use --lr-warmup-fraction",
    "--checkpoint-activations": "use --recompute-granularity full",
    "--log-params-norm": "the gradient norm is logged; remove it",
    "--log-num-zeros-in-grad": "the gradient norm is logged; remove it",
    "--timing-log-level": "use --metrics-file, which has the times of each step",
    "--timing-log-option": "use --metrics-file, which has the times of each step",
    "--profile": _PROFILE,
    "--use-pytorch-profiler": _PROFILE,
    "--record-memory-history": _PROFILE,
    "--memory-snapshot-path": _PROFILE,
    "--log-timers-to-tensorboard": _LOGGED,
    "--log-batch-size-to-tensorboard": _LOGGED,
    "--log-validation-ppl-to-tensorboard": _LOGGED,
    "--log-memory-to-tensorboard": _LOGGED,
    "--log-world-size-to-tensorboard": _LOGGED,
    "--log-loss-scale-to-tensorboard": _LOGGED,
    "--no-log-loss-scale-to-tensorboard": _LOGGED,
    "--no-log-learnig-rate-to-tensorboard": _LOGGED,
    "--tensorboard-log-interval": "use --log-interval",
    "--tensorboard-queue-size": _LOGGED,
    "--log-progress": _LOGGED,
    "--log-straggler": _LOGGED,
    "--log-energy": _LOGGED,
    "--logging-level": _LOGGED,
    "--enable-one-logger": _LOGGED,
    "--no-one-logger": _LOGGED,
    "--wandb-entity": "set the variable WANDB_ENTITY",
    "--manual-gc": _GC,
    "--manual-gc-interval": _GC,
    "--no-manual-gc-eval": _GC,
    "--empty-unused-memory-level": "the allocator's cache is left alone; remove it",
    "--dist-ckpt-strictness": _ONE_FORMAT,
    "--async-strategy": "use --async-save",
    "--use-persistent-ckpt-worker": "use --async-save",
    "--no-ckpt-fully-parallel-save": "every rank always writes its own part; remove it",
    "--ckpt-assume-constant-structure": _ONE_FORMAT,
    "--load-model-opt-format": _ONE_FORMAT,
    "--save-retain-interval": "use --keep-checkpoints",
    "--use-checkpoint-args": "the command line always says what the model is; give its flags",
    "--use-mp-args-from-checkpoint-args": "any layout reads any checkpoint; remove it",
    "--grad-reduce-in-bf16": "gradients are always reduced in fp32; remove it",
    "--defer-embedding-wgrad-compute": _OVERLAP,
    "--wgrad-deferral-limit": _OVERLAP,
    "--delay-wgrad-compute": _OVERLAP,
    "--align-param-gather": _OVERLAP,
    "--no-align-param-gather": _OVERLAP,
    "--no-align-grad-reduce": _OVERLAP,
    "--no-delay-grad-reduce": _OVERLAP,
    "--no-overlap-p2p-communication": _OVERLAP,
    "--overlap-p2p-communication": _OVERLAP,
    "--overlap-p2p-communication-warmup-flush": _OVERLAP,
    "--overlap-param-gather-with-optimizer-step": _OVERLAP,
    "--no-scatter-gather-tensors-in-pipeline": _OVERLAP,
    "--use-ring-exchange-p2p": _OVERLAP,
    "--nccl-communicator-config-path": "set NCCL's variables; see examples/slurm/pretrain.sbatch",
    "--distributed-timeout-seconds-after-init": "use --distributed-timeout-minutes",
    "--disable-gloo-process-groups": "one backend serves all groups; see --distributed-backend",
    "--legacy-tokenizer": "there is one tokenizer system; remove it",
    "--tiktoken-num-special-tokens": "they come with the tokenizer; see --tokenizer-model",
    "--tiktoken-special-tokens": "they come with the tokenizer; see --tokenizer-model",
    "--no-mmap-bin-files": "token files are always mapped; remove it",
    "--mid-level-dataset-surplus": "nothing is built ahead; remove it",
    "--full-validation": "use --eval-iters",
    "--multiple-validation-sets": "use --valid-data-path with one blend",
    "--train-sync-interval": "steps are never synchronised by force; remove it",
    "--check-weight-hash-across-dp-replicas-interval": "use --rerun-check-interval",
    "--embedding-init-method-std": "all weights start from --init-method-std",
    "--init-method-xavier-uniform": "all weights start from --init-method-std",
    "--layernorm-epsilon": "use --norm-epsilon",
    "--te-rng-tracker": _GRAPHS,
    "--enable-cuda-graph": _GRAPHS,
    "--external-cuda-graph": _GRAPHS,
    "--use-legacy-models": "there is one model implementation; remove it",
    "--yaml-cfg": "give flags; stages go into --context-schedule",
    "--adlr-autoresume": "use --exit-signal-handler and Slurm's requeue",
    "--no-check-for-nan-in-loss-and-grad": "non-finite steps are skipped; see "
    "--max-skipped-iterations",
    "--spec": "there is one layer; choose its parts by flags",
    "--encoder-num-layers": "use --num-layers; " + _NO_ENCODER,
    "--encoder-seq-length": "use --seq-length; " + _NO_ENCODER,
    "--no-data-sharding": "data is always sharded; remove it",
    "--standalone-embedding-stage": _EVEN_STAGES,
}
"""Flag -> what to do instead."""

UNSUPPORTED_PREFIXES: dict[str, str] = {
    "--moe-": _NO_MOE,
    "--fp8-": _NO_FP8,
    "--fp4-": _NO_FP8,
    "--encoder-": _NO_ENCODER,
    "--retro-": "there is no retrieval model; remove it",
    "--vision-": "there are text models only; remove it",
    "--bert-": _NO_ENCODER,
    "--hybrid-": "all layers are attention and MLP; remove it",
    "--mamba-": "all layers are attention and MLP; remove it",
    "--inference-": "there is no inference server; remove it",
    "--profile-": _PROFILE,
    "--cuda-graph-": _GRAPHS,
    "--ddp-": _OVERLAP,
    "--straggler-": _LOGGED,
    "--fim-": "documents are trained on as they are; remove it",
    "--tp-comm-": "tensor-parallel communication isn't overlapped by user buffers; remove it",
    "--cpu-offloading": _NO_OFFLOAD,
    "--ckpt-convert-": "checkpoints have one format; remove it",
    "--heterogeneous-": "all layers are alike; remove it",
    "--rl-": "there is pretraining only; remove it",
    "--enable-ft-": "use --exit-signal-handler and Slurm's requeue",
    "--mla-": "there is no latent attention; use --group-query-attention",
}


RENAMED_VALUES: dict[tuple[str, str], str] = {
    ("--tokenizer-type", "Llama2Tokenizer"): "SentencePieceTokenizer",
    ("--tokenizer-type", "GPTSentencePieceTokenizer"): "SentencePieceTokenizer",
    ("--tokenizer-type", "GPT2BPETokenizer"): "HuggingFaceTokenizer",
    ("--tokenizer-type", "Llama3Tokenizer"): "HuggingFaceTokenizer or TikTokenizer",
    ("--position-embedding-type", "yarn"): "rope with --rope-scaling-type yarn",
    ("--attention-backend", "fused"): "cudnn",
    ("--attention-backend", "unfused"): "reference",
    ("--attention-backend", "local"): "reference",
}
"""(flag, Megatron's value) -> what it is called here."""


def window_size(text: str) -> tuple[str, str | None]:
    """The number of keys that ``--window-size`` means, and a note if that isn't ``text``.

    Megatron's ``left,right`` counts the keys beside the query, ``i - left .. i + right``; here
    ``W`` is the latest keys with the query's own among them, so ``127,0`` is 128.

    Raises:
        ValueError: for a pair that is no causal window.
    """
    words = text.strip("() ").replace(",", " ").split()
    if len(words) != 2:
        return text, None
    left, right = (read_int(word) for word in words)
    pair = f"{left},{right} (left,right as in Megatron-LM)"
    if left < 0:
        raise ValueError(f"{pair} is no window: every key is seen; leave the flag out")
    keys = left + 1
    if right:
        raise ValueError(
            f"{pair} is no causal window: right must be 0; use {left},0 or, the same here, {keys}"
        )
    return str(keys), (
        f"--window-size {pair} is {keys} keys, the query's own included: --window-size {keys}"
    )


def unsupported(flag: str) -> str | None:
    """What to do instead of ``flag``, a known Megatron flag; None if it isn't one."""
    if flag in UNSUPPORTED:
        return UNSUPPORTED[flag]
    for prefix, advice in UNSUPPORTED_PREFIXES.items():
        if flag.startswith(prefix):
            return advice
    return None
