"""The table of wrong configurations: each is refused with flag, rule and cure."""

import os
import resource
import struct
import subprocess
import sys

import pytest

from megatron.training.arguments import check_command_line, refusal
from tests.arguments.good import command_line

# name: (flags to drop, flags to add, world size, what the message must hold)
WRONG = {
    "no layers": ("--num-layers", "", 1, ["--num-layers is missing"]),
    "no width": ("--hidden-size", "", 1, ["--hidden-size is missing"]),
    "no heads": ("--num-attention-heads", "", 1, ["--num-attention-heads is missing"]),
    "no length": ("--seq-length", "", 1, ["--seq-length is missing", "--context-schedule"]),
    "no micro batch": ("--micro-batch-size", "", 1, ["--micro-batch-size is missing"]),
    "no train length": ("--train-iters", "", 1, ["one of --train-iters, --train-samples"]),
    "no lr": ("--lr", "", 1, ["--lr is missing", "3e-4"]),
    "no data": ("--mock-data", "", 1, ["there is no data", "--data-path", "--mock-data"]),
    "no tokenizer": (
        "--tokenizer-type --vocab-size",
        "",
        1,
        ["--tokenizer-type is missing", "NullTokenizer"],
    ),
    "null tokenizer without size": ("--vocab-size", "", 1, ["NullTokenizer needs --vocab-size"]),
    "tokenizer without model": (
        "",
        "--tokenizer-type SentencePieceTokenizer",
        1,
        ["needs --tokenizer-model"],
    ),
    "tokenizer file missing": (
        "",
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model /none/x.model",
        1,
        ["--tokenizer-model /none/x.model doesn't exist"],
    ),
    "tokenizer model unused": ("", "--tokenizer-model x", 1, ["has no effect with"]),
    "loss mask": ("", "--eod-mask-loss", 1, ["--eod-mask-loss needs a tokenizer with an end-of-"]),
    "layers 0": ("", "--num-layers 0", 1, ["--num-layers 0 must be at least 1"]),
    "hidden by heads": ("", "--hidden-size 100", 1, ["--hidden-size 100", "use 96 or 104"]),
    "heads by groups": (
        "",
        "--group-query-attention --num-query-groups 3",
        1,
        ["--num-attention-heads 8 must be a multiple of --num-query-groups 3"],
    ),
    "groups without flag": ("", "--num-query-groups 2", 1, ["add that flag"]),
    "heads by tp": (
        "",
        "--tensor-model-parallel-size 16",
        16,
        ["--num-attention-heads 8 must be a multiple of --tensor-model-parallel-size 16", "4, 8"],
    ),
    "kv heads by tp": (
        "",
        "--num-attention-heads 12 --hidden-size 96 --group-query-attention --num-query-groups 3 "
        "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 128",
        2,
        ["--num-query-groups 3 must be a multiple or a divisor of --tensor-model-parallel-size 2"],
    ),
    "mlp by tp": (
        "",
        "--ffn-hidden-size 130 --tensor-model-parallel-size 4",
        4,
        ["--ffn-hidden-size 130", "use 128 or 132"],
    ),
    "vocabulary by tp": (
        "",
        "--make-vocab-size-divisible-by 1 --vocab-size 509 --tensor-model-parallel-size 2",
        2,
        ["--make-vocab-size-divisible-by 1", "use 2"],
    ),
    "layers by pp": (
        "",
        "--pipeline-model-parallel-size 3",
        3,
        ["--num-layers 4 must be a multiple of --pipeline-model-parallel-size 3", "use 3 or 6"],
    ),
    "virtual stages": (
        "",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        2,
        ["--num-layers-per-virtual-pipeline-stage 3 must divide the 2 layers"],
    ),
    "virtual without pipeline": (
        "",
        "--num-layers-per-virtual-pipeline-stage 1",
        1,
        ["needs a pipeline"],
    ),
    "length by layout": (
        "",
        "--seq-length 1002 --context-parallel-size 4 --cp-comm-type p2p",
        4,
        ["--seq-length 1002 must be a multiple of 8", "zigzag", "use 1000 or 1008"],
    ),
    "length by tp": (
        "",
        "--seq-length 1028 --context-parallel-size 2 --cp-comm-type p2p --sequence-parallel "
        "--tensor-model-parallel-size 4",
        8,
        ["--seq-length 1028 must be a multiple of 8", "--sequence-parallel", "use 1024 or 1032"],
    ),
    "ulysses by heads": (
        "",
        "--context-parallel-size 16 --cp-comm-type a2a",
        16,
        ["ulysses size 16 must not be more than the 8 query heads", "8 x 2"],
    ),
    "split product": (
        "",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 4",
        8,
        ["--hierarchical-context-parallel-sizes 2 4", "use --context-parallel-size 8"],
    ),
    "a2a with a ring": (
        "",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2 --cp-comm-type a2a",
        4,
        ["--cp-comm-type a2a is ulysses alone", "a2a+p2p"],
    ),
    "p2p with ulysses": (
        "",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2 --cp-comm-type p2p",
        4,
        ["--cp-comm-type p2p has no ulysses ranks", "a2a+p2p"],
    ),
    "gather with ulysses": (
        "",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 4 1 "
        "--cp-comm-type all_gather",
        4,
        ["--cp-comm-type all_gather has no ulysses ranks", "sizes 1 4"],
    ),
    "world by tp": (
        "",
        "--tensor-model-parallel-size 2",
        3,
        ["world size 3 must be a multiple of --tensor-model-parallel-size 2", "2 or 4 ranks"],
    ),
    "world by cp": (
        "",
        "--context-parallel-size 4",
        6,
        ["world size 6 must be a multiple of", "--context-parallel-size 4", "4 or 8 ranks"],
    ),
    "batch by dp": (
        "",
        "--global-batch-size 6",
        4,
        ["--global-batch-size 6 must be a multiple of", "data-parallel size 4", "use 4 or 8"],
    ),
    "batch by micro": ("", "--micro-batch-size 3", 1, ["--global-batch-size 16", "use 15 or 18"]),
    "too few micro-batches": (
        "",
        "--pipeline-model-parallel-size 4 --global-batch-size 2",
        4,
        ["gives 2 micro-batches", "needs at least 4", "use --global-batch-size 4"],
    ),
    "uneven rounds": (
        "",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--global-batch-size 5",
        2,
        ["gives 5 micro-batches", "interleaved", "use --global-batch-size 6"],
    ),
    "two train lengths": (
        "",
        "--train-tokens 1000",
        1,
        ["--train-iters 10 and --train-tokens 1000 are both given", "exactly one"],
    ),
    "train length 0": ("", "--train-iters 0", 1, ["--train-iters 0 must be at least 1"]),
    "window": ("", "--window-size 0", 1, ["--window-size 0 must be at least 1"]),
    "dropout": ("", "--hidden-dropout 1.0", 1, ["--hidden-dropout 1.0", "below 1"]),
    "dropout with flash": (
        "",
        "--attention-backend flash",
        1,
        ["--attention-backend flash has no dropout", "--attention-dropout 0"],
    ),
    "odd rotation": ("", "--kv-channels 7", 1, ["rotates 7 dimensions", "even"]),
    "rotary percent": ("", "--rotary-percent 1.5", 1, ["--rotary-percent 1.5 must be in (0, 1]"]),
    "theta": ("", "--rotary-base 1", 1, ["--rotary-base 1 must be greater than 1"]),
    "scaling without length": (
        "",
        "--rope-scaling-type yarn",
        1,
        ["--rope-scaling-type yarn needs", "--original-max-position-embeddings"],
    ),
    "scaling factor alone": (
        "",
        "--rope-scaling-factor 4",
        1,
        ["--rope-scaling-factor 4 has no effect without --rope-scaling-type"],
    ),
    "huge heads": (
        "",
        "--hidden-size 4000000000",
        1,
        ["--hidden-size 4000000000 over --num-attention-heads 8", "larger than 8192", "128"],
    ),
    "longrope by flags": ("", "--rope-scaling-type longrope", 1, ["--context-schedule"]),
    "scaling without rope": (
        "",
        "--rope-scaling-type linear --position-embedding-type none",
        1,
        ["--rope-scaling-type linear has no effect", "--position-embedding-type rope"],
    ),
    "learned without table": (
        "",
        "--position-embedding-type learned_absolute",
        1,
        ["--max-position-embeddings is missing"],
    ),
    "learned table too short": (
        "",
        "--position-embedding-type learned_absolute --max-position-embeddings 512",
        1,
        ["--seq-length 1024 must not be more than --max-position-embeddings 512"],
    ),
    "bf16 of float64": (
        "",
        "--bf16 --params-dtype float64",
        1,
        ["--bf16 keeps float32 master weights", "--params-dtype float64"],
    ),
    "recompute method": ("", "--recompute-method uniform", 1, ["--recompute-granularity full"]),
    "recompute block": (
        "",
        "--recompute-granularity full --recompute-method block",
        1,
        ["--recompute-method block needs --recompute-num-layers"],
    ),
    "recompute too many": (
        "",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 9",
        1,
        ["--recompute-num-layers 9 must not be more than the 4 layers"],
    ),
    "recompute modules": ("", "--recompute-modules mlp", 1, ["--recompute-granularity selective"]),
    "min lr": ("", "--min-lr 1", 1, ["--min-lr 1 must not be greater than --lr 0.001"]),
    "warmup": (
        "",
        "--lr-warmup-iters 10",
        1,
        ["--lr-warmup-iters 10 must be less than the run's 10"],
    ),
    "two warmups": (
        "",
        "--lr-warmup-iters 2 --lr-warmup-fraction 0.1",
        1,
        ["say the same thing twice", "keep one"],
    ),
    "wsd": ("", "--lr-decay-style WSD", 1, ["needs --lr-wsd-decay-iters"]),
    "wsd too long": (
        "",
        "--lr-decay-style WSD --lr-wsd-decay-iters 11",
        1,
        ["--lr-wsd-decay-iters 11 must not be more than the 10 steps"],
    ),
    "wsd without style": ("", "--lr-wsd-decay-iters 5", 1, ["use --lr-decay-style WSD"]),
    "adam beta": ("", "--adam-beta2 1", 1, ["--adam-beta2 1 must be at least 0 and below 1"]),
    "clip": ("", "--clip-grad -1", 1, ["--clip-grad -1 must be at least 0"]),
    "layers of transformer engine": (
        "",
        "--transformer-impl transformer_engine",
        1,
        ["--transformer-impl transformer_engine", "pip install", "--transformer-impl local"],
    ),
    "data files missing": (
        "--mock-data",
        "--data-path /none/books",
        1,
        ["--data-path /none/books: the file /none/books.bin doesn't exist", "preprocess_data.py"],
    ),
    "data twice": ("", "--data-path x", 1, ["--mock-data and --data-path are both given"]),
    "split": ("", "--split 1,x", 1, ["--split 1,x"]),
    "workers": ("", "--num-workers -1", 1, ["--num-workers -1 must be at least 0"]),
    "upsampling": (
        "",
        "--long-document-upsampling 16384",
        1,
        ["--long-document-upsampling: 16384 must be MIN_TOKENS:WEIGHT"],
    ),
    "upsampling twice": (
        "",
        "--long-document-upsampling 1e3:2 1000:3",
        1,
        ["--long-document-upsampling: 1000:3: this length is given twice"],
    ),
    "save interval alone": ("", "--save-interval 5", 1, ["has no effect without --save"]),
    "save interval 0": (
        "",
        "--save x --save-interval 0",
        1,
        ["--save-interval 0 must be at least 1"],
    ),
    "load missing": ("", "--load /none/run", 1, ["--load /none/run doesn't exist", "--save"]),
    "load is a file": ("", "--load setup.py", 1, ["--load setup.py is a file; give the folder"]),
    "load and save are a file": (
        "",
        "--load setup.py --save setup.py",
        1,
        ["--save setup.py is a"],
    ),
    "ckpt step of a missing folder": (
        "",
        "--load /tmp/none/run --save /tmp/none/run --ckpt-step 5",
        1,
        ["--load /tmp/none/run doesn't exist, so --ckpt-step 5 can't be loaded"],
    ),
    "finetune from a missing folder": (
        "",
        "--load /tmp/none/run --save /tmp/none/run --finetune",
        1,
        ["--load /tmp/none/run doesn't exist, but --finetune needs its weights"],
    ),
    "finetune alone": ("", "--finetune", 1, ["--finetune has no effect without --load"]),
    "ckpt step alone": ("", "--ckpt-step 5", 1, ["--ckpt-step 5 has no effect without --load"]),
    "allowed name": (
        "",
        "--allow-changed seq_lenght",
        1,
        ["--allow-changed seq_lenght", "did you mean seq_length"],
    ),
    "save below a file": (
        "",
        "--save setup.py/run",
        1,
        ["--save setup.py/run can't be made", "setup.py is a file"],
    ),
    "metrics file is a folder": (
        "",
        "--metrics-file tests",
        1,
        ["--metrics-file tests is a folder", "tests/metrics.jsonl"],
    ),
    "metrics file below a file": (
        "",
        "--metrics-file setup.py/m.jsonl",
        1,
        ["--metrics-file setup.py can't be made"],
    ),
    "mask without a readable tokenizer": (
        "",
        "--eod-mask-loss --tokenizer-type Llama2Tokenizer",
        1,
        ["--tokenizer-type: 'Llama2Tokenizer' is not a choice; use SentencePieceTokenizer"],
    ),
    "log interval": ("", "--log-interval 0", 1, ["--log-interval 0 must be at least 1"]),
    "eval interval": ("", "--eval-interval 0", 1, ["--eval-interval 0", "use --eval-iters 0"]),
    "peak": ("", "--peak-tflops 0", 1, ["--peak-tflops 0 must be greater than 0"]),
    "exit interval": ("", "--exit-interval 0", 1, ["--exit-interval 0 must be at least 1"]),
    "pretended world alone": ("", "--dry-run-world-size 8", 1, ["has no effect without --dry-run"]),
    "fp16": ("", "--fp16", 1, ["--fp16", "use --bf16"]),
    "schedule missing": ("", "--context-schedule /none.yaml", 1, ["--context-schedule /none.yaml"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_with_flag_and_cure(name):
    drop, add, world, texts = WRONG[name]
    with pytest.raises(ValueError) as caught:
        check_command_line(command_line(add, drop), world_size=world)
    message = str(caught.value)
    for text in texts:
        assert text in message
    assert len(message.splitlines()) == 1, message  # one fault, one error: no noise after it


def test_validation_data_alone_is_refused(tmp_path):
    for end in (".bin", ".idx"):
        (tmp_path / f"v{end}").touch()
    with pytest.raises(ValueError, match="--valid-data-path is given without --train-data-path"):
        add = f"--valid-data-path {tmp_path / 'v'}"
        check_command_line(command_line(add, "--mock-data"), world_size=1)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", "0 bytes is shorter than the 34 B header"),
        (b"PK" + bytes(40), "not a Megatron index"),
        (b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4), "cut short"),
    ],
)
def test_a_damaged_index_is_refused_before_torch_is_imported(tmp_path, index, message):
    prefix = tmp_path / "books"
    prefix.with_suffix(".bin").touch()
    prefix.with_suffix(".idx").write_bytes(index)
    with pytest.raises(ValueError) as caught:
        check_command_line(command_line(f"--data-path {prefix}", "--mock-data"), world_size=1)
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and text.startswith(f"--data-path {prefix}: ")
    assert message in text and "tools/preprocess_data.py" in text


def test_a_prefix_with_its_extension_is_refused_with_the_right_one(tmp_path):
    add = f"--data-path {tmp_path}/books.bin"
    with pytest.raises(ValueError, match=rf"\(use {tmp_path}/books\)"):
        check_command_line(command_line(add, "--mock-data"), world_size=1)


def test_one_checkpoint_is_not_the_folder_of_all(tmp_path):
    (tmp_path / "iter_0000020").mkdir()
    with pytest.raises(ValueError, match=rf"use --load {tmp_path} --ckpt-step 20$"):
        check_command_line(command_line(f"--load {tmp_path}/iter_0000020"), world_size=1)


@pytest.mark.parametrize("flag", ["--save", "--metrics-file"])
def test_a_folder_that_is_read_only_is_refused(tmp_path, monkeypatch, flag):
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root
    with pytest.raises(ValueError, match=rf"{flag} .*{tmp_path} is read-only for this user"):
        check_command_line(command_line(f"{flag} {tmp_path}/a/b"), world_size=1)
    check_command_line(command_line(f"{flag} {tmp_path}/a/b --dry-run"), world_size=1)


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root
    with pytest.raises(ValueError, match=rf"--load {tmp_path} can't be read by this user"):
        check_command_line(command_line(f"--load {tmp_path}"), world_size=1)


def test_a_folder_that_the_run_will_make_is_no_fault(tmp_path):
    check_command_line(command_line(f"--load {tmp_path}/a --save {tmp_path}/a"), world_size=1)


def test_the_unchanged_command_line_is_fine():
    for world in (1, 2, 16):
        run = check_command_line(command_line(), world_size=world)
        assert run.schedule.total_iterations == 10 and run.notes == ()


OPTIONAL = {
    "apex": ("--optimizer-impl apex", ["--optimizer-impl apex", "github.com/NVIDIA/apex"]),
    "te": ("--optimizer-impl te", ["--optimizer-impl te", "transformer-engine"]),
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_absent_packages_are_refused_with_the_install_hint(name, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    hidden = ("apex", "transformer_engine")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name in hidden else real(name, *a)
    )
    add, texts = OPTIONAL[name]
    with pytest.raises(ValueError) as caught:
        check_command_line(command_line(add), world_size=1)
    assert all(text in str(caught.value) for text in texts)


@pytest.mark.parametrize(
    ("add", "text"),
    [
        ("--params-dtype bfloat16", "apex updates float32 weights, not --params-dtype bfloat16"),
        ("--distributed-backend gloo", "apex runs on CUDA, but with --distributed-backend gloo"),
    ],
)
def test_what_an_optional_optimizer_cannot_update_is_refused(add, text, monkeypatch):
    monkeypatch.setattr("megatron.core.optimizer.apex_adapter.probe", lambda: None)
    line = command_line("--optimizer-impl apex --bf16")
    assert check_command_line(line, world_size=1).config.optimizer.optimizer_impl == "apex"
    with pytest.raises(ValueError) as caught:
        check_command_line(command_line(f"--optimizer-impl apex {add}"), world_size=1)
    assert text in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_all_broken_rules_come_at_once_with_the_world_size_last():
    add = (
        "--hidden-size 100 --fp16 --seq-length 1001 --context-parallel-size 2 --lr x --min-lr 1 "
        "--tensor-model-parallel-size 2 --window-size 0 --save-interval 3"
    )
    with pytest.raises(ValueError) as caught:
        check_command_line(command_line(add), world_size=7)
    lines = str(caught.value).splitlines()
    assert lines[-1].startswith("world size 7 must be a multiple of")
    for flag in ("--fp16", "--lr", "--hidden-size", "--window-size", "--seq-length", "--save-int"):
        assert sum(line.startswith(flag) for line in lines) == 1, flag
    text = refusal(caught.value)
    assert text.startswith(f"pretrain_gpt.py: {len(lines)} errors:")


def test_a_flag_that_could_not_be_read_brings_no_second_error():
    with pytest.raises(ValueError) as caught:
        check_command_line(command_line("--num-layers x --lr y", "--num-layers --lr"), world_size=1)
    assert len(str(caught.value).splitlines()) == 2


def processor_seconds() -> float:
    """Processor time of finished child processes: what a busy machine doesn't stretch."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


ENTRY = """
import sys
from megatron.training.arguments import check_command_line, refusal
try:
    check_command_line(sys.argv[1:], world_size=int({world}))
except ValueError as error:
    sys.exit(refusal(error))
finally:
    assert "torch" not in sys.modules, "checking must not wait for torch"
"""


@pytest.mark.parametrize(
    "name", ["no lr", "hidden by heads", "world by cp", "fp16", "load missing"]
)
def test_a_refusal_is_quick_and_has_no_traceback(name):
    drop, add, world, texts = WRONG[name]
    began = processor_seconds()
    done = subprocess.run(
        [sys.executable, "-c", ENTRY.format(world=world), *command_line(add, drop)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    took = processor_seconds() - began
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert all(text in done.stderr for text in texts)
    assert took < 5, f"{took:.1f} s"
