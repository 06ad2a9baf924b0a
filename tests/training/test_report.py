"""The summary of a run, from its metrics."""

from typing import Any

from tools.report import summary


def record(iteration: int, **more: Any) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "consumed_tokens": iteration * 1000,
        "stage": 1,
        "seq_length": 64,
        "rotary_base": 1e4,
        **more,
    }


def test_steps_after_the_last_log_line_are_counted() -> None:
    train = [record(5, lm_loss=4.0), record(10, lm_loss=3.0)]
    lines = summary([*train, record(12, eval_lm_loss=2.5)], None).splitlines()
    assert lines[0].startswith("steps 12, tokens 12,000, ")
    assert lines[1] == "training loss    4.000 -> 3.000"


def test_a_run_without_evaluation() -> None:
    assert summary([record(5, lm_loss=4.0)], None).startswith("steps 5, tokens 5,000, ")
