"""Rules of the optimizer, the learning rate, and the optional packages behind flags."""

from collections.abc import Iterator

from megatron.core.config.flags import flag_name
from megatron.core.context_extension.schedule_file import LR_DECAY_STYLES
from megatron.training.arguments import transformer_engine_probe
from megatron.training.arguments.rules.facts import Facts


def learning_rate(facts: Facts) -> Iterator[str]:
    """The peak is given, the minimum is below it."""
    optimizer = facts.config.optimizer
    if optimizer.lr is None:
        yield "--lr is missing; give the peak learning rate, e.g. 3e-4"
    elif optimizer.lr < 0:
        yield f"--lr {optimizer.lr:g} must be at least 0; usual is 3e-4"
    if optimizer.min_lr < 0:
        yield f"--min-lr {optimizer.min_lr:g} must be at least 0; usual is a tenth of --lr"
    elif optimizer.lr is not None and optimizer.min_lr > optimizer.lr >= 0:
        yield (
            f"--min-lr {optimizer.min_lr:g} must not be greater than --lr {optimizer.lr:g}; usual "
            f"is {optimizer.lr / 10:g}"
        )


def coefficients(facts: Facts) -> Iterator[str]:
    """Ranges of the optimizer's numbers."""
    optimizer = facts.config.optimizer
    for name in ("adam_beta1", "adam_beta2", "sgd_momentum"):
        value = getattr(optimizer, name)
        if not 0 <= value < 1:
            yield f"{flag_name(name)} {value:g} must be at least 0 and below 1; usual is 0.9"
    for name in ("weight_decay", "clip_grad"):
        value = getattr(optimizer, name)
        if value < 0:
            yield f"{flag_name(name)} {value:g} must be at least 0; use 0 for none"
    if not optimizer.adam_eps > 0:
        yield f"--adam-eps {optimizer.adam_eps:g} must be greater than 0; usual is 1e-8"


def _decay_steps(facts: Facts) -> int | None:
    """Steps of decay: the flag, or the run's length where it is known."""
    if facts.config.optimizer.lr_decay_iters is not None:
        return facts.config.optimizer.lr_decay_iters
    known = [steps for steps in facts.steps if steps is not None]
    return sum(known) if known and len(known) == len(facts.steps) else None


def warmup(facts: Facts) -> Iterator[str]:
    """Warmup is said once and ends before the decay does."""
    optimizer = facts.config.optimizer
    steps, fraction = optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction
    decay = _decay_steps(facts)
    if steps < 0:
        yield f"--lr-warmup-iters {steps} must be at least 0; use 0 for none"
    if optimizer.lr_decay_iters is not None and optimizer.lr_decay_iters < 1:
        yield f"--lr-decay-iters {decay} must be at least 1; leave it out for the whole run"
    if fraction is not None:
        if steps:
            yield (
                f"--lr-warmup-iters {steps} and --lr-warmup-fraction {fraction:g} say the same "
                "thing twice; keep one"
            )
        if not 0 <= fraction < 1:
            yield f"--lr-warmup-fraction {fraction:g} must be at least 0 and below 1; usual is 0.01"
    elif decay is not None and decay >= 1 and steps >= decay:
        whose = "--lr-decay-iters" if optimizer.lr_decay_iters is not None else "the run's"
        yield (
            f"--lr-warmup-iters {steps} must be less than {whose} {decay} steps; lower it or raise "
            "--lr-decay-iters"
        )


def stable_decay(facts: Facts) -> Iterator[str]:
    """WSD needs the length of its last phase; other styles have none."""
    optimizer = facts.config.optimizer
    last = optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style != "WSD":
        if last is not None:
            yield (
                f"--lr-wsd-decay-iters {last} has no effect with --lr-decay-style "
                f"{optimizer.lr_decay_style}; use --lr-decay-style WSD"
            )
        return
    decay = _decay_steps(facts)
    if last is None:
        yield (
            "--lr-decay-style WSD needs --lr-wsd-decay-iters: the steps of its last phase, usually "
            "a tenth of the run"
        )
    elif last < 1:
        yield f"--lr-wsd-decay-iters {last} must be at least 1; usual is a tenth of the run"
    elif decay is not None:
        fraction = optimizer.lr_warmup_fraction
        steps = optimizer.lr_warmup_iters if fraction is None else fraction * decay
        if last > decay - max(0, steps) > 0:
            yield (
                f"--lr-wsd-decay-iters {last} must not be more than the {decay - steps:g} steps "
                "after warmup; lower it"
            )


def stage_learning_rates(facts: Facts) -> Iterator[str]:
    """A stage's own minimum stays below its peak, whichever of the two the flags give."""
    optimizer = facts.config.optimizer
    if optimizer.lr is None:
        return
    for stage in facts.stages:
        if stage.lr.peak is None and stage.lr.min is None or stage.lr.rule == "constant":
            continue
        peak = optimizer.lr if stage.lr.peak is None else stage.lr.peak
        least = optimizer.min_lr if stage.lr.min is None else stage.lr.min
        if least > peak:
            yield (
                f"stage {stage.number}: lr: min {least:g} must not be greater than peak {peak:g}; "
                "give both in the stage, or change --lr or --min-lr"
            )


def stage_warmups(facts: Facts) -> Iterator[str]:
    """A stage is as long as its own warmup, also where it counts samples or tokens."""
    for stage, steps in zip(facts.stages, facts.steps):
        if stage.train_iters is None and steps is not None and stage.lr.warmup_iters > steps:
            yield (
                f"stage {stage.number}: lr: warmup_iters {stage.lr.warmup_iters} must not be more "
                f"than the stage's {steps} iterations; lower it"
            )


def stage_decay_styles(facts: Facts) -> Iterator[str]:
    """A rewarmed stage decays inside itself, which not every style of a run can."""
    style = facts.config.optimizer.lr_decay_style
    for stage in facts.stages:
        if stage.lr.rule == "rewarm" and stage.lr.decay_style is None:
            if style not in LR_DECAY_STYLES:
                yield (
                    f"stage {stage.number}: lr: rule rewarm can't decay by --lr-decay-style "
                    f"{style} inside a stage; add decay_style ({', '.join(LR_DECAY_STYLES)})"
                )


def optimizer_package(facts: Facts) -> Iterator[str]:
    """Another implementation than torch's is there when asked for."""
    kind = facts.config.optimizer.optimizer_impl
    if kind == "torch":
        return
    from megatron.core.optimizer import apex_adapter, te_adapter

    if facts.config.model.params_dtype not in (None, "float32"):
        yield (
            f"--optimizer-impl {kind} updates float32 weights, not --params-dtype "
            f"{facts.config.model.params_dtype}; remove one of the two (--bf16 keeps float32 "
            "weights)"
        )
    if facts.config.parallel.distributed_backend == "gloo":
        yield (
            f"--optimizer-impl {kind} runs on CUDA, but with --distributed-backend gloo a run is "
            "on the CPU; remove one of the two"
        )
    try:
        (apex_adapter if kind == "apex" else te_adapter).probe()
    except ValueError as error:
        yield str(error)


def layer_package(facts: Facts) -> Iterator[str]:
    """Another implementation of the layers is there when asked for."""
    if facts.config.model.transformer_impl == "transformer_engine":
        problem = transformer_engine_probe.problem()
        if problem:
            yield f"--transformer-impl transformer_engine: {problem}"


RULES = (
    learning_rate,
    coefficients,
    warmup,
    stable_decay,
    stage_learning_rates,
    stage_warmups,
    stage_decay_styles,
    optimizer_package,
    layer_package,
)
