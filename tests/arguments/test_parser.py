"""The command line: every flag of the public face, values, and words that aren't ours."""

import dataclasses
import shlex
import subprocess
import sys

import pytest

from megatron.core.config import RunConfig
from megatron.core.config.record import config_fields, value_of
from megatron.training.arguments import build_parser, parse_args
from megatron.training.arguments.known_flags import ALWAYS_ON, UNSUPPORTED, unsupported
from megatron.training.arguments.parser import parse_command_line

PUBLIC_FLAGS = shlex.split("""
--num-layers --hidden-size --ffn-hidden-size --num-attention-heads --group-query-attention
--num-query-groups --kv-channels --normalization --norm-epsilon --swiglu --add-bias-linear
--disable-bias-linear --add-qkv-bias --qk-layernorm --untie-embeddings-and-output-weights
--position-embedding-type --max-position-embeddings --rotary-base --rotary-percent
--rope-scaling-type --rope-scaling-factor --original-max-position-embeddings --window-size
--attention-dropout --hidden-dropout --init-method-std --tensor-model-parallel-size
--pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage --context-parallel-size
--hierarchical-context-parallel-sizes --cp-comm-type --cp-layout --cp-check-interval
--sequence-parallel --use-distributed-optimizer --data-parallel-sharding-strategy
--distributed-backend --distributed-timeout-minutes --micro-batch-size --global-batch-size
--train-iters --train-samples --train-tokens --seq-length --context-schedule --lr --min-lr
--lr-decay-style --lr-warmup-iters --lr-warmup-fraction --lr-decay-iters --lr-wsd-decay-iters
--lr-wsd-decay-style --override-opt-param-scheduler --weight-decay --adam-beta1 --adam-beta2
--adam-eps --optimizer --sgd-momentum --clip-grad --bf16 --params-dtype --seed
--deterministic-mode --data-path --train-data-path --valid-data-path --test-data-path --split
--packing --long-document-upsampling --reset-position-ids --reset-attention-mask --eod-mask-loss
--data-cache-path --num-workers --mock-data --tokenizer-type --tokenizer-model --vocab-size
--make-vocab-size-divisible-by --save --load --save-interval --async-save --keep-checkpoints
--ckpt-step --finetune --no-save-optim --no-load-optim --no-load-rng --load-fallback
--allow-changed --exit-interval --exit-signal-handler --exit-duration-in-mins
--iterations-to-skip --max-skipped-iterations --rerun-check-interval --eval-interval --eval-iters
--log-interval --metrics-file --peak-tflops --tensorboard-dir --wandb-project --wandb-exp-name
--wandb-save-dir --recompute-granularity --recompute-attention --recompute-method
--recompute-num-layers --recompute-modules --loss-chunk-size --mlp-chunk-size --attention-backend
--transformer-impl --optimizer-impl --dry-run --dry-run-world-size --no-reset-position-ids
--no-reset-attention-mask
""")


def parse_words(text):
    return parse_args(shlex.split(text))


def test_every_public_flag_exists_and_help_shows_it_with_its_default():
    parser = build_parser()
    known = parser.option_names()
    assert not set(PUBLIC_FLAGS) - set(known)
    text = parser.format_help()
    for flag in PUBLIC_FLAGS:
        assert flag in text
    for title in ("model:", "parallelism:", "optimizer and learning rate:", "checkpoints:"):
        assert title in text
    assert "RoPE base (theta). [10000.0]" in text and max(map(len, text.splitlines())) <= 130


def test_no_words_give_the_defaults():
    assert parse_args([]) == RunConfig()


def test_values_have_the_types_of_their_fields():
    config = parse_words(
        "--num-layers 4 --lr 3e-4 --train-samples 1e6 --hidden-size=1_024 --swiglu --min-lr -1e-9 "
        "--hierarchical-context-parallel-sizes 2 4 --data-path 0.3 a 0.7 b --seed -1 "
        "--recompute-modules mlp layernorm --iterations-to-skip 3 7 --save out"
    )
    assert config.model.num_layers == 4 and config.model.hidden_size == 1024
    assert config.optimizer.lr == 3e-4 and config.optimizer.min_lr == -1e-9
    assert config.training.train_samples == 1_000_000 and config.training.seed == -1
    assert config.model.swiglu is True
    assert config.parallel.hierarchical_context_parallel_sizes == (2, 4)
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.model.recompute_modules == ("mlp", "layernorm")
    assert config.training.iterations_to_skip == (3, 7) and config.checkpoint.save == "out"


@pytest.mark.parametrize(
    "words",
    [
        ["--window-size", "128"],
        ["--window-size", "127,0"],
        ["--window-size", "127", "0"],
        ["--window-size=127,0"],
        ["--window-size", "(127, 0)"],
    ],
)
def test_a_window_counts_the_query_whichever_way_it_is_written(words):
    """Megatron's left counts the keys before the query, ours the query's own too."""
    assert parse_args(words).model.window_size == 128


def test_a_list_that_starts_with_a_minus_is_a_value():
    assert parse_args(["--split", "-1,1,1"]).data.split == "-1,1,1"  # to be refused as a split


def test_the_last_of_a_repeated_flag_wins():
    config = parse_words("--seed 1 --bf16 --seed 2 --no-bf16 --data-path a --data-path b c")
    assert config.training.seed == 2 and config.model.bf16 is False
    assert config.data.data_path == ("b", "c")


def test_every_switch_goes_both_ways():
    for name, (_, field) in config_fields().items():
        if not isinstance(field.default, bool):
            continue
        on = "--" + name.replace("_", "-")
        off = "--" + (name.removeprefix("no_") if name.startswith("no_") else f"no_{name}")
        assert value_of(parse_args([on]), name) is True
        assert value_of(parse_args([on, off.replace("_", "-")]), name) is False
    assert parse_args(["--disable-bias-linear"]).model.add_bias_linear is False


@pytest.mark.parametrize(
    "words, message",
    [
        ("--num-layer 4", "--num-layer is an unknown flag; did you mean --num-layers?"),
        ("--num_layers 4", "--num_layers is an unknown flag; did you mean --num-layers?"),
        ("--zzzz", "--zzzz is an unknown flag; see --help"),
        ("-x 3", "-x is an unknown flag"),
        ("--window-size -1,0", "--window-size: -1,0 (left,right as in Megatron-LM) is no window"),
        ("--lr -1,0", "--lr: '-1,0' is not a number"),
        ("-1,0", "'-1,0' belongs to no flag"),
        ("--window-size 64,64", "--window-size: 64,64 (left,right as in Megatron-LM) is no causal"),
        ("--window-size 64 64", "right must be 0; use 64,0 or, the same here, 65"),
        ("--window-size=-1,0", "is no window: every key is seen; leave the flag out"),
        ("--window-size 64,x", "--window-size: 'x' is not an integer"),
        ("--num-layers four", "--num-layers: 'four' is not an integer"),
        ("--num-layers 4.5", "--num-layers: 4.5 is not an integer"),
        ("--lr fast", "--lr: 'fast' is not a number"),
        ("--lr nan", "--lr: 'nan' is not a finite number"),
        ("--lr", "--lr expected one value; give it after the flag"),
        ("--lr --bf16", "--lr expected one value"),
        ("--bf16 true", "'true' belongs to no flag"),
        ("--bf16=true", "--bf16 takes no value; write the flag alone"),
        ("--packing bestfit", "--packing: 'bestfit' is not a choice; did you mean best-fit?"),
        (
            "--recompute-modules mpl",
            "--recompute-modules: 'mpl' is not a choice; did you mean mlp?",
        ),
        ("--hierarchical-context-parallel-sizes 2", "expected 2 values"),
        ("--data-path", "--data-path: has no value"),
        ("--load=", "--load: is empty; give a value or leave the flag out"),
        ("stray --bf16", "'stray' belongs to no flag"),
        ("--seed 1 2", "'2' belongs to no flag"),
        ("--fp16", "--fp16 is a Megatron-LM flag that isn't supported: fp16 needs loss scaling"),
        ("--num-experts 8", "--num-experts is a Megatron-LM flag that isn't supported"),
        ("--moe-router-topk 2", "--moe-router-topk is a Megatron-LM flag that isn't supported"),
        ("--encoder-num-layers 2", "use --num-layers"),
        ("--decoder-first-pipeline-num-layers 3", "pipeline stages have equal numbers of layers"),
        ("--use-rotary-position-embeddings", "use --position-embedding-type rope"),
        ("--rampup-batch-size 1 2 3", "use --context-schedule"),
        ("--ckpt-format zarr", "--ckpt-format zarr isn't supported: checkpoints are always"),
        ("--ckpt-format", "use torch_dist or remove the flag"),
    ],
)
def test_words_that_are_not_understood(words, message):
    with pytest.raises(ValueError) as caught:
        parse_args(words.split())
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_all_that_is_wrong_is_said_at_once_and_the_rest_is_read():
    parsed = parse_command_line(
        shlex.split("--fp16 --lr --seed x --num-layers 3 --foo 1 --optimizer no")
    )
    assert len(parsed.problems) == 5
    assert parsed.config.model.num_layers == 3
    assert parsed.unread == {"--lr", "--seed", "--optimizer"}


def test_flags_that_are_always_on_are_accepted_with_one_line_each():
    words = (
        "--overlap-grad-reduce --overlap-param-gather --use-mcore-models --ckpt-format torch_dist "
        "--calculate-per-token-loss --overlap-grad-reduce --local-rank 3 --ckpt-format=torch_dist"
    )
    parsed = parse_command_line([*words.split(), "--num-layers", "2"])
    assert not parsed.problems and len(parsed.notes) == 6
    assert parsed.config == parse_args(["--num-layers", "2"])


def test_lists_of_known_flags_contradict_neither_ours_nor_each_other():
    ours = set(build_parser().option_names())
    assert not ours & (set(ALWAYS_ON) | set(UNSUPPORTED)) and not set(ALWAYS_ON) & set(UNSUPPORTED)
    assert not any(unsupported(flag) for flag in ours | set(ALWAYS_ON))
    assert len(UNSUPPORTED) > 80


MEGATRON_EXAMPLE = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu
--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0
--init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
--untie-embeddings-and-output-weights
--disable-bias-linear --normalization RMSNorm --micro-batch-size 1 --global-batch-size 128
--train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015
--min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
--clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
--grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
--empty-unused-memory-level 1 --exit-duration-in-mins 235 --tensor-model-parallel-size 1
--context-parallel-size 1 --pipeline-model-parallel-size 1 --sequence-parallel --fp8-format hybrid
--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data
--tokenizer-type NullTokenizer --vocab-size 128256 --tiktoken-pattern v2 --split 99,1,0
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1
--eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
--profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
--distributed-timeout-minutes 60 --save a --load a --tensorboard-dir b
--ckpt-fully-parallel-load --log-timers-to-tensorboard --log-memory-to-tensorboard
"""
"""The flags of Megatron-LM's Llama-3-8B example script."""


def test_a_script_of_megatron_has_no_unknown_flag():
    parsed = parse_command_line(shlex.split(MEGATRON_EXAMPLE))
    for problem in parsed.problems:
        assert "isn't supported" in problem or "is not a choice; use cudnn" in problem, problem
    assert parsed.config.model.num_layers == 32
    assert any("--cross-entropy-loss-fusion accepted" in note for note in parsed.notes)


def test_field_names_are_unique_and_every_field_has_a_flag():
    total = sum(
        len(dataclasses.fields(getattr(RunConfig(), section.name)))
        for section in dataclasses.fields(RunConfig)
    )
    assert len(config_fields()) == total


def test_help_exits_with_0_and_needs_no_torch():
    code = (
        "import sys; from megatron.training.arguments import parse_args\n"
        "try: parse_args(['--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--hierarchical-context-parallel-sizes U R" in done.stdout
