"""Stages: boundaries, lookups, precedence, and reading values by the type of their field."""

import random

import pytest

from megatron.core.context_extension import ContextSchedule, LearningRateRule, StageDefaults

FOUR_K_TO_64K = """
stages:
  - {seq_length: 4096, train_iters: 10, global_batch_size: 8}
  - name: middle
    seq_length: 16384
    train_samples: 5
    global_batch_size: 2
    rotary_base: 5e5
  - seq_length: 65_536
    train_tokens: 1e5
    global_batch_size: 1
    rotary_base: 5.0E+6
    context_parallel: [2, 4]
    rope_scaling: {rope_type: yarn, factor: 4, original_max_position_embeddings: 16384}
    lr: {rule: rewarm, peak: 1e-4, min: 1e-5, warmup_iters: 1}
    data_path: [0.3, books, 0.7, web]
    long_document_upsampling: [16384:2, 65536:4]
    packing: best-fit
"""


def load(tmp_path, text, defaults=None):
    path = tmp_path / "stages.yaml"
    path.write_text(text, encoding="utf-8")
    return ContextSchedule.from_yaml(path, defaults)


def test_values_are_read_by_the_type_of_their_key(tmp_path):
    first, middle, last = load(tmp_path, FOUR_K_TO_64K).stages
    assert (first.name, middle.name, first.number, last.index) == ("stage 1", "middle", 1, 2)
    assert (first.rotary_base, middle.rotary_base, last.rotary_base) == (1e4, 5e5, 5e6)
    assert (last.seq_length, last.train_tokens) == (65536, 100000)
    assert (last.ulysses_size, last.ring_size, last.context_parallel_size) == (2, 4, 8)
    assert last.rope_scaling["factor"] == 4.0 and first.rope_scaling is None
    assert last.lr == LearningRateRule("rewarm", 1e-4, 1e-5, 1)
    assert first.lr.rule == "continue"
    assert last.data_path == ("0.3", "books", "0.7", "web") and last.packing == "best-fit"
    # YAML 1.1 reads 16384:2 as 16384 * 60 + 2.
    assert last.long_document_upsampling == ("16384:2", "65536:4")


def test_lengths_in_samples_and_tokens_round_up_to_whole_steps(tmp_path):
    schedule = load(tmp_path, FOUR_K_TO_64K)
    first, middle, last = schedule.stages
    assert (first.iterations, middle.iterations, last.iterations) == (10, 3, 2)
    assert first.end_tokens == middle.start_tokens == 10 * 8 * 4096
    assert middle.end_samples - middle.start_samples == 6
    assert last.end_tokens - last.start_tokens == 2 * 65536
    assert schedule.total_iterations == 15
    assert schedule.total_samples == 80 + 6 + 2
    assert schedule.total_tokens == last.end_tokens
    assert schedule.splits == ((1, 1), (2, 4))


def test_a_boundary_belongs_to_the_later_stage_and_the_end_to_the_last(tmp_path):
    schedule = load(tmp_path, FOUR_K_TO_64K)
    first, middle, last = schedule.stages
    for at, stage in (
        (0, first),
        (first.end_tokens - 1, first),
        (first.end_tokens, middle),
        (middle.end_tokens - 1, middle),
        (middle.end_tokens, last),
        (schedule.total_tokens, last),
        (10**12, last),
    ):
        assert schedule.stage_at(at) is stage
    assert [schedule.stage_at_iteration(i).number for i in (0, 9, 10, 12, 13, 15, 99)] == [
        *(1, 1, 2, 2, 3, 3, 3)
    ]
    with pytest.raises(ValueError, match="consumed tokens -1 must be at least 0"):
        schedule.stage_at(-1)


def test_tokens_and_iterations_agree_with_counting_step_by_step():
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(50):
        stages = [
            {
                "seq_length": draw.choice([1, 7, 128, 4096]),
                "global_batch_size": draw.randint(1, 9),
                draw.choice(["train_iters", "train_samples", "train_tokens"]): draw.randint(1, 40),
            }
            for _ in range(draw.randint(1, 5))
        ]
        schedule = ContextSchedule.from_mapping({"stages": stages})
        tokens = iteration = 0
        for stage in schedule.stages:
            done = 0
            while not _enough(stage, done):
                assert schedule.stage_at(tokens) is stage
                assert schedule.stage_at(tokens + stage.tokens_per_step - 1) is stage
                assert schedule.stage_at_iteration(iteration) is stage
                assert schedule.tokens_at(iteration) == tokens
                done += 1
                iteration += 1
                tokens += stage.tokens_per_step
        assert (schedule.total_iterations, schedule.total_tokens) == (iteration, tokens)
        assert schedule.tokens_at(iteration) == tokens


def _enough(stage, steps):
    if stage.train_iters is not None:
        return steps >= stage.train_iters
    if stage.train_samples is not None:
        return steps * stage.global_batch_size >= stage.train_samples
    return steps * stage.tokens_per_step >= stage.train_tokens


def test_flags_fill_the_keys_that_a_stage_lacks():
    flags = StageDefaults(
        seq_length=512,
        train_iters=7,
        rotary_base=123.0,
        rope_scaling={"rope_type": "linear", "factor": 2.0},
        context_parallel=(1, 2),
        micro_batch_size=2,
        global_batch_size=4,
        data_path=("web",),
        packing="best-fit",
        dpcp_size=8,
    )
    own = {
        "seq_length": 1024,
        "train_tokens": 10**6,
        "rotary_base": 5e5,
        "rope_scaling": {"rope_type": "default"},
        "context_parallel": [2, 2],
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "data_path": "0.5 a 0.5 b",
        "packing": "concat",
    }
    plain, full = ContextSchedule.from_mapping({"stages": [{}, own]}, flags).stages
    assert (plain.seq_length, plain.train_iters, plain.rotary_base) == (512, 7, 123.0)
    assert plain.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert (plain.context_parallel, plain.micro_batch_size) == ((1, 2), 2)
    assert (plain.global_batch_size, plain.data_path, plain.packing) == (4, ("web",), "best-fit")
    assert (full.seq_length, full.train_iters, full.train_tokens) == (1024, None, 10**6)
    assert full.rope_scaling is None and full.context_parallel == (2, 2)
    assert (full.global_batch_size, full.data_path) == (8, ("0.5", "a", "0.5", "b"))


def test_the_batch_of_a_stage_without_one_follows_its_data_parallel_size():
    flags = StageDefaults(micro_batch_size=2, train_iters=1, seq_length=64, dpcp_size=8)
    stages = [{"context_parallel": [1, ring]} for ring in (1, 2, 8)]
    schedule = ContextSchedule.from_mapping({"stages": stages}, flags)
    assert [stage.global_batch_size for stage in schedule.stages] == [16, 8, 2]


def test_a_run_without_a_file_is_a_schedule_of_one_stage():
    flags = StageDefaults(seq_length=128, train_samples=10, global_batch_size=4)
    schedule = ContextSchedule.single(flags)
    assert len(schedule.stages) == 1 and schedule.total_iterations == 3
    same = ContextSchedule.from_mapping(
        {"stages": [{"seq_length": 128, "train_samples": 10, "global_batch_size": 4}]}
    )
    assert schedule.stages[0].end_tokens == same.stages[0].end_tokens
    with pytest.raises(ValueError, match="seq_length is missing"):
        ContextSchedule.single(StageDefaults(train_iters=1))


def test_a_file_read_without_flags_places_tokens_without_a_batch_but_not_iterations():
    schedule = ContextSchedule.from_mapping(
        {
            "stages": [
                {"seq_length": 10, "train_tokens": 105},
                {"seq_length": 10, "train_samples": 2},
            ]
        }
    )
    assert [stage.end_tokens for stage in schedule.stages] == [105, 125]
    with pytest.raises(ValueError, match="stage 1: global_batch_size is missing"):
        ContextSchedule.from_mapping({"stages": [{"seq_length": 10, "train_iters": 2}]})


def test_a_schedule_survives_being_written_down(tmp_path):
    import json

    schedule = load(tmp_path, FOUR_K_TO_64K)
    again = ContextSchedule.from_record(json.loads(json.dumps(schedule.to_record())))
    assert again == schedule


BAD_STAGES = {
    "unknown key": (
        "seq_lenght: 4096, train_iters: 1",
        "unknown key seq_lenght; did you mean seq_",
    ),
    "synonym": ("theta: 1e4, train_iters: 1", "unknown key theta; did you mean rotary_base"),
    "no length": ("global_batch_size: 1", "the train length is missing; add one of train_iters"),
    "two lengths": (
        "train_iters: 1, train_tokens: 5",
        "train_iters and train_tokens are both given",
    ),
    "zero length": ("train_iters: 0", "train_iters: 0 must be at least 1"),
    "fraction": ("train_iters: 1.5", "train_iters: 1.5 is not an integer"),
    "words": ("train_iters: many", "train_iters: 'many' is not an integer"),
    "bool": ("train_iters: true", "train_iters: True is not an integer"),
    "negative length": (
        "train_iters: 1, seq_length: -4096",
        "seq_length: -4096 must be at least 1",
    ),
    "theta": ("train_iters: 1, rotary_base: 0.5", "rotary_base: 0.5 must be greater than 1"),
    "infinite theta": ("train_iters: 1, rotary_base: 1e999", "rotary_base: inf is not a finite"),
    "not a pair": (
        "train_iters: 1, context_parallel: 4",
        "write [ulysses size, ring size], e.g. [1, 4]",
    ),
    "three sizes": ("train_iters: 1, context_parallel: [1, 2, 3]", "is not a pair"),
    "zero ring": (
        "train_iters: 1, context_parallel: [1, 0]",
        "context_parallel: 0 must be at least 1",
    ),
    "packing": (
        "train_iters: 1, packing: bestfit",
        "packing: bestfit is unknown; did you mean best-fit",
    ),
    "rope rule": (
        "train_iters: 1, rope_scaling: {rope_type: yran}",
        "rope_type yran is unknown; did you",
    ),
    "rope key": ("train_iters: 1, rope_scaling: {rope_type: linear}", "needs factor; add it"),
    "lr number": ("train_iters: 1, lr: 1e-4", "lr: 0.0001 is not a mapping; write {rule: constant"),
    "lr rule": ("train_iters: 1, lr: {rule: rewarn}", "unknown rule; did you mean rewarm"),
    "lr key": ("train_iters: 1, lr: {peek: 1}", "unknown key peek; did you mean peak"),
    "lr order": (
        "train_iters: 1, lr: {peak: 1e-5, min: 1e-4}",
        "min 0.0001 must not be greater than peak",
    ),
    "lr warmup": (
        "train_iters: 1, lr: {rule: rewarm, warmup_iters: 9}",
        "warmup_iters 9 must not be more than the stage's 1 iterations",
    ),
    "lr useless": (
        "train_iters: 1, lr: {rule: constant, warmup_iters: 1}",
        "warmup_iters has a meaning with rule rewarm only",
    ),
    "upsampling": (
        "train_iters: 1, long_document_upsampling: [16384]",
        "16384 must be MIN_TOKENS:WEIGHT",
    ),
    "data": ("train_iters: 1, data_path: []", "data_path: [] is neither a path nor a list"),
}


@pytest.mark.parametrize("case", BAD_STAGES)
def test_bad_stages_name_stage_key_and_cure(tmp_path, case):
    body, message = BAD_STAGES[case]
    seq = "" if "seq_len" in body else "seq_length: 64, "
    good = "{seq_length: 64, train_iters: 1, global_batch_size: 1}"
    text = f"stages:\n  - {good}\n  - {{{seq}{body}}}\n"
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text)
    assert f"stage 2: {message}" in str(caught.value) or (
        "stage 2: " in str(caught.value) and message in str(caught.value)
    )
    assert "stage 1" not in str(caught.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "the key stages is missing"),
        ("stage: []", "the key stages is missing; did you mean stages?"),
        ("name: x\nstage: []", "did you mean stages? (the file has stage)"),
        ("Stages: []", "the key stages is missing; did you mean stages?"),
        ("stages: {}", "stages must be a list with at least one stage"),
        ("stages: []", "stages must be a list with at least one stage"),
        ("stages: [5]", "stage 1: 5 is not a mapping"),
        ("stages: [", "is not YAML"),
        (
            "seq_length: 1\nstages: [{seq_length: 1, train_tokens: 1}]",
            "unknown key seq_length beside stages; put it into the stages",
        ),
        (
            "rope_theta: 1\nstages: []",
            "unknown key rope_theta beside stages; did you mean rotary_b",
        ),
        ("seq_lenght: 1\nstages: []", "beside stages; did you mean seq_length?; put it into"),
        ("stage: []\nstages: []", "unknown key stage beside stages; did you mean stages?"),
        ("stages:\n  - seq_length: 1\n    seq_length: 2", "key seq_length is given twice"),
        ("stages: [!!python/object/apply:os.getcwd []]", "is not YAML"),
        ("stages: [{seq_length: !!int abc}]", "is not YAML: invalid literal"),
        ("stages: [{seq_length: !!float abc}]", "is not YAML: could not convert"),
        ("stages: [{seq_length: !!bool abc}]", "is not YAML"),
        ("stages: [{seq_length: !!timestamp abc}]", "is not YAML"),
        ("stages: [{seq_length: 1_0_}]", "is not YAML: invalid literal"),
        ("stages: [{seq_length: " + "9" * 5000 + "}]", "is not YAML: Exceeds the limit"),
        ("[" * 3000, "nested too deeply"),
        ("stages: [{seq_length: 1, <<: 3}]", "is not YAML: << in line 1 must name"),
        ("stages: [&a {<<: *a}]", "stage 1: seq_length is missing"),
        ("stages:\n  - &a {x: 1}\n  - {<<: *a, <<: *a}", "key << is given twice"),
    ],
)
def test_bad_files(tmp_path, text, message):
    with pytest.raises(ValueError, match="stages.yaml") as caught:
        load(tmp_path, text)
    assert message in str(caught.value)


def test_numbers_with_leading_zeros_are_decimal(tmp_path):
    # YAML 1.1, and so PyYAML by itself, reads 0400 as octal.
    text = "stages: [{seq_length: 0400, train_iters: 012, global_batch_size: +2}]"
    (stage,) = load(tmp_path, text).stages
    assert (stage.seq_length, stage.train_iters, stage.global_batch_size) == (400, 12, 2)


def test_a_stage_may_take_keys_from_another_one(tmp_path):
    text = """
stages:
  - &first {seq_length: 64, train_iters: 2, global_batch_size: 1, rotary_base: 5e5}
  - &second {<<: *first, seq_length: 128}
  - {<<: *second, train_iters: 3}
  - {<<: [{seq_length: 256}, *second]}
"""
    stages = load(tmp_path, text).stages
    assert [stage.seq_length for stage in stages] == [64, 128, 128, 256]
    assert [stage.iterations for stage in stages] == [2, 2, 3, 2]
    assert {stage.rotary_base for stage in stages} == {5e5}


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_that_is_not_utf8_is_named(tmp_path, encoding):
    path = tmp_path / "stages.yaml"
    path.write_bytes("# é\nstages: []".encode(encoding))
    with pytest.raises(ValueError, match="stages.yaml is not UTF-8 .byte . is 0x..[)]; save it"):
        ContextSchedule.from_yaml(path)


def test_a_missing_file_and_all_faults_at_once(tmp_path):
    with pytest.raises(ValueError, match="--context-schedule .* can't be read .*No such file"):
        ContextSchedule.from_yaml(tmp_path / "none.yaml")
    text = "stages:\n  - {seq_length: x}\n  - {seq_length: 1, train_iters: y, packing: z}\n"
    with pytest.raises(ValueError) as caught:
        load(tmp_path, text)
    assert len(str(caught.value).splitlines()) == 4
