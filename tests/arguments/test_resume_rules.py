"""What a resume may change: the past not silently, weights never, the future freely."""

import pytest

from megatron.training.arguments import RunRecord, check_command_line, check_resume
from tests.arguments.good import command_line
from tests.arguments.test_wrong_schedules import DROPPED, write


def record(add="", drop="", world=8):
    run = check_command_line(command_line(add, drop), world_size=world)
    return RunRecord(run.config, run.schedule)


def report(old, new, iteration=5):
    return check_resume(old, new, consumed_tokens=old.schedule.tokens_at(iteration))


def test_an_unchanged_run_goes_on_without_a_word():
    assert report(record(), record()).problems == ()
    assert report(record(), record()).notes == ()


def test_a_record_survives_being_written_down():
    old = record("--rope-scaling-type linear")
    assert RunRecord.from_json(old.to_json()) == old
    with pytest.raises(ValueError, match="run record can't be read"):
        RunRecord.from_json("{}")


@pytest.mark.parametrize(
    "add, drop, name",
    [
        ("--seq-length 2048", "", "seq_length"),
        ("--rotary-base 1e6", "", "rotary_base"),
        ("--rope-scaling-type linear", "", "rope_scaling"),
        ("--global-batch-size 32", "", "global_batch_size"),
        ("--packing best-fit", "", "packing"),
        ("--long-document-upsampling 16384:2", "", "long_document_upsampling"),
        ("--seed 5", "", "seed"),
        ("--split 90,10,0", "", "split"),
        ("--no-reset-position-ids", "", "reset_position_ids"),
        ("--no-reset-attention-mask", "", "reset_attention_mask"),
        ("--window-size 64", "", "window_size"),
        ("--rotary-percent 0.5", "", "rotary_percent"),
    ],
)
def test_a_changed_past_is_refused_until_it_is_allowed_by_name(add, drop, name):
    old = record()
    refused = report(old, record(add, drop))
    assert len(refused.problems) == 2 and name in refused.problems[0]
    assert f"--allow-changed {name}" in refused.problems[1]
    allowed = report(old, record(f"{add} --allow-changed {name}", drop))
    assert allowed.problems == ()
    assert any(note.startswith("allowed by --allow-changed") for note in allowed.notes)


def test_the_refusal_says_flag_and_both_values_and_cure():
    problems = report(record("--split 90,10,0"), record("--split 80,20,0")).problems
    assert problems[0] == ("split (--split) was 90,10,0 in the checkpoint's run, now 80,20,0")
    assert "set these flags back, or pass --allow-changed split" in problems[1]


def test_one_allowed_change_does_not_allow_another():
    new = record("--seq-length 2048 --rotary-base 1e6 --allow-changed seq_length")
    problems = report(record(), new).problems
    assert "rotary_base of the tokens from 0 on was 10000 (stage 1), now 1e+06" in problems[0]
    assert "--allow-changed rotary_base,seq_length" in problems[1]


@pytest.mark.parametrize(
    "add, name",
    [
        ("--num-layers 8", "num_layers 4, this run 8"),
        ("--hidden-size 128", "hidden_size"),
        ("--swiglu", "swiglu"),
        ("--vocab-size 600", "vocab_size"),
        ("--group-query-attention --num-query-groups 2", "num_kv_heads"),
        ("--untie-embeddings-and-output-weights", "untie_embeddings_and_output_weights"),
    ],
)
def test_weights_must_fit_even_for_finetuning(add, name):
    for finetune in ("", f" --finetune --load {__file__.rsplit('/', 1)[0]}"):
        problems = report(record(), record(add + finetune)).problems
        assert problems and any(name in text and "weights don't fit" in text for text in problems)


def test_finetuning_forgets_the_past():
    folder = __file__.rsplit("/", 1)[0]
    new = record(f"--seq-length 2048 --rotary-base 1e6 --seed 9 --finetune --load {folder}")
    assert report(record(), new).problems == ()


def test_before_the_first_step_nothing_is_past():
    assert report(record(), record("--seq-length 2048 --seed 7"), iteration=0).problems == ()


def test_parallel_sizes_and_intervals_are_free_and_said():
    new = record("--tensor-model-parallel-size 2 --context-parallel-size 2 --log-interval 7")
    outcome = report(record(), new)
    assert outcome.problems == ()
    assert "--log-interval 100 -> 7" in " ".join(outcome.notes)


def test_learning_rate_settings_need_the_override():
    old, add = record(), "--lr 5e-4 --lr-decay-style cosine"
    (problem,) = report(old, record(add)).problems
    assert "--lr 0.0005 (was 0.001)" in problem and "--override-opt-param-scheduler" in problem
    assert report(old, record(f"{add} --override-opt-param-scheduler")).problems == ()


def test_a_decay_that_followed_from_the_length_may_follow_a_new_one():
    assert report(record(), record("--train-iters 20", "")).problems == ()
    given = record("--lr-decay-iters 100")
    assert report(given, record("--lr-decay-iters 100 --train-iters 100")).problems == ()
    (problem,) = report(given, record("--train-iters 50")).problems
    assert "--lr-decay-iters 50 (was 100)" in problem


def test_another_optimizer_needs_fresh_state():
    (problem,) = report(record(), record("--optimizer sgd")).problems
    assert "--no-load-optim" in problem
    assert report(record(), record("--optimizer sgd --no-load-optim")).problems == ()


STAGES = [
    {"seq_length": 1024, "train_iters": 4, "global_batch_size": 16},
    {"seq_length": 2048, "train_iters": 4, "global_batch_size": 8, "rotary_base": 5e4},
    {"seq_length": 4096, "train_iters": 4, "global_batch_size": 8, "rotary_base": 5e5},
]


def staged(tmp_path, stages, add=""):
    return record(f"--context-schedule {write(tmp_path, *stages)} {add}", DROPPED)


def test_a_changed_later_part_is_allowed_and_said(tmp_path):
    old = staged(tmp_path, STAGES)
    longer = [STAGES[0], STAGES[1] | {"train_iters": 9}, STAGES[2] | {"rotary_base": 1e6}]
    outcome = report(old, staged(tmp_path, longer), iteration=6)
    assert outcome.problems == ()
    assert any("12 iterations in 3 stages then, 17 in 3 now" in note for note in outcome.notes)
    elastic = [stage | {"context_parallel": [2, 2]} for stage in STAGES]
    assert report(old, staged(tmp_path, elastic), iteration=6).problems == ()


def test_a_changed_earlier_part_is_refused(tmp_path):
    old = staged(tmp_path, STAGES)
    other = [STAGES[0] | {"rotary_base": 2e4}, *STAGES[1:]]
    problems = report(old, staged(tmp_path, other), iteration=6).problems
    assert "rotary_base of the tokens from 0 on was 10000 (stage 1), now 20000" in problems[0]
    shorter = [STAGES[0] | {"train_iters": 3}, *STAGES[1:]]
    problems = report(old, staged(tmp_path, shorter), iteration=6).problems
    assert any("seq_length of the tokens from 49,152 on" in text for text in problems)
    # On the boundary itself the later stage has no past yet.
    later = [STAGES[0], STAGES[1] | {"rotary_base": 9e4}, STAGES[2]]
    assert report(old, staged(tmp_path, later), iteration=4).problems == ()
    assert report(old, staged(tmp_path, later), iteration=5).problems != ()


def test_upsampling_may_change_for_a_stage_that_has_not_begun(tmp_path):
    """Another set of length buckets starts its documents again: that is refused once begun."""
    old = staged(tmp_path, STAGES)
    more = [STAGES[0], STAGES[1] | {"long_document_upsampling": ["1024:2"]}, STAGES[2]]
    new = staged(tmp_path, more)
    assert report(old, new, iteration=4).problems == ()
    problems = report(old, new, iteration=5).problems
    assert "long_document_upsampling of the tokens from 65,536 on was None (stage 2)" in problems[0]
    assert "now 1024:2 (stage 2)" in problems[0]
    assert "--allow-changed long_document_upsampling" in problems[1]


def test_a_schedule_may_go_on_from_a_run_without_one(tmp_path):
    plain = record("--train-iters 4")
    outcome = report(plain, staged(tmp_path, STAGES), iteration=4)
    assert outcome.problems == ()
    problems = report(plain, staged(tmp_path, STAGES[1:]), iteration=4).problems
    names = "global_batch_size,rotary_base,seq_length"
    assert f"--allow-changed {names}" in problems[-1]
    assert (
        report(
            plain, staged(tmp_path, STAGES[1:], f"--allow-changed {names}"), iteration=4
        ).problems
        == ()
    )


@pytest.mark.parametrize(("before", "now"), [("0", "0.9"), ("0.9", "0")])
def test_momentum_that_comes_or_goes_needs_fresh_state(before, now):
    saved = record(f"--optimizer sgd --sgd-momentum {before}")
    (problem,) = report(saved, record(f"--optimizer sgd --sgd-momentum {now}")).problems
    assert f"--sgd-momentum was {before}" in problem and "--no-load-optim" in problem
    assert (
        report(saved, record(f"--optimizer sgd --sgd-momentum {now} --no-load-optim")).problems
        == ()
    )
