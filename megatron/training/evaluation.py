"""Loss on held-out documents: the training step's own rows, counts and sums, without updates.

Each evaluation of a stage reads the same rows from the start of the part, so the numbers of a
run can be compared with each other.
"""

import math

from megatron.training.stage_switch import eval_loader, stage_record
from megatron.training.train_step import global_counts, prepare, summed_loss
from megatron.training.trainer import Trainer


def evaluate(trainer: Trainer, part: str = "valid") -> float | None:
    """Mean token loss over ``--eval-iters`` global batches of ``part``; reported.

    Returns:
        None if there is no such data or ``--eval-iters`` is 0.
    """
    iterations = trainer.config.training.eval_iters
    if iterations == 0:
        return None
    loader = eval_loader(trainer, part)
    if loader is None:
        return None
    loader.rewind()
    total, tokens = 0.0, 0
    for _ in range(iterations):
        batches = loader.next_step()
        loss_tokens, _ = global_counts(trainer, batches)
        prepared = prepare(trainer, batches, training=False)
        total += summed_loss(trainer, trainer.runner.evaluate(prepared))
        tokens += loss_tokens
    loss = total / tokens if tokens else math.nan
    trainer.reporter.evaluation(
        {
            "iteration": trainer.state.iteration,
            **stage_record(trainer.current_stage),
            "consumed_samples": trainer.state.consumed_samples,
            "consumed_tokens": trainer.state.consumed_tokens,
            "split": part,
            "eval_lm_loss": loss,
            "eval_perplexity": math.exp(min(loss, 20.0)),
            "loss_tokens": tokens,
        }
    )
    return loss
