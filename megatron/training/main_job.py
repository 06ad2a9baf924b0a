"""A training job from its command line to its exit code.

Order matters: the command line is checked before torch is imported, headers of data files are
checked and the tokenizer is opened before any process group exists, the ranks compare their
settings before the first real collective. What a user got wrong ends in one message on rank 0 and
exit code 2, without a traceback. A rank that fails, dies or hangs ends the run on all ranks,
which name it.
"""

import contextlib
import faulthandler
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.training.arguments import ResolvedRun, check_command_line, refusal
from megatron.training.launch_env import LaunchEnvironment, launch_environment
from megatron.training.signals import ExitSignals
from megatron.training.streams import open_missing_streams

if TYPE_CHECKING:  # torch must not be imported before the command line is checked
    import torch

    from megatron.core.tokenizers import Tokenizer
    from megatron.training.providers import DataProvider, LossProvider, ModelProvider
    from megatron.training.watchdog import Watchdog

USER_ERROR = 2

LONE_REFUSAL_SECONDS = 1.0
"""How long a rank that isn't its node's first waits before it says that it is refused."""


def pretrain(
    model_provider: "ModelProvider",
    data_provider: "DataProvider",
    loss_provider: "LossProvider",
    *,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    signals: ExitSignals | None = None,
) -> int:
    """Run a training job; returns the exit code.

    Args:
        model_provider: builds a pipeline chunk of the model.
        data_provider: opens the documents of a part.
        loss_provider: scale of the summed loss of a global batch.
        argv: command line after the program's name; default: ``sys.argv[1:]``.
        environ: environment with rank and rendezvous; default: ``os.environ``.
        signals: handler that was installed before heavy imports; default: a new one.

    Returns:
        0 at the end or at a planned stop, 99 after a signal (saved; start me again), 128 + its
        number after a signal without ``--save`` or before the ranks have met, 2 for a wrong
        command line, 3 after too many steps that weren't finite, 4 after a step that gave other
        bits when it was computed again, 1 after any other failure of this or another rank.
    """
    started = time.time()
    open_missing_streams()
    signals = signals or ExitSignals().install()
    try:
        env = launch_environment(environ)
    except ValueError as error:
        _say_refusal(refusal(error))
        return USER_ERROR
    try:
        resolved = check_command_line(
            list(sys.argv[1:] if argv is None else argv),
            world_size=env.world_size,
            ranks_per_node=env.ranks_per_node,
        )
        _look_for_checkpoint(resolved)
        if resolved.config.training.dry_run:
            from megatron.training.dry_run import dry_run

            return dry_run(resolved) if env.rank == 0 else 0
        return _run(resolved, env, signals, started, (model_provider, data_provider, loss_provider))
    except ValueError as error:
        if env.rank == 0:
            _say_refusal(refusal(error))
        elif env.local_rank == 0:
            # A file may be missing on this node alone: the first rank of each node says so.
            _say_refusal(f"rank {env.rank}: {refusal(error)}")
        else:
            # Mostly all ranks are refused alike, and the launcher ends this one meanwhile.
            time.sleep(LONE_REFUSAL_SECONDS)
            _say_refusal(f"rank {env.rank}: {refusal(error).splitlines()[0]}")
        return USER_ERROR


def _say_refusal(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk under the log: the exit code says it too
        print(text, file=sys.stderr, flush=True)


def _look_for_checkpoint(resolved: ResolvedRun) -> None:
    options = resolved.config.checkpoint
    if options.load is None and options.save is None:
        return
    from megatron.training.load_folder import refuse_missing_checkpoint

    refuse_missing_checkpoint(options)


def _run(
    resolved: ResolvedRun,
    env: LaunchEnvironment,
    signals: ExitSignals,
    started: float,
    providers: "tuple[ModelProvider, DataProvider, LossProvider]",
) -> int:
    import torch
    import torch.distributed as dist

    from megatron.core.parallel_state import destroy_model_parallel
    from megatron.training.build import open_tokenizer
    from megatron.training.initialize import RendezvousError, initialize_distributed, leave_groups

    logging.basicConfig(
        level=logging.INFO if env.rank == 0 else logging.WARNING, format="%(message)s"
    )
    config = resolved.config
    resolved, tokenizer = open_tokenizer(resolved)
    handled = config.training.exit_signal_handler
    if not handled:
        signals.give_up()
    meeting = f"{env.describe()} waits for the other ranks"
    try:
        with signals.deadly(meeting) if handled else contextlib.nullcontext():
            device = initialize_distributed(env, resolved.config)
            timeout_s = resolved.config.parallel.distributed_timeout_minutes * 60
            watchdog = _watchdog(env, timeout_s, signals if handled else None)
    except RendezvousError as error:
        print(f"pretrain: {error}", file=sys.stderr, flush=True)
        return 1
    failed = True
    try:
        code = _train(resolved, signals, started, tokenizer, device, watchdog, providers)
        watchdog.leaving()
        dist.all_reduce(torch.zeros(1))
        failed = False
        return code
    except Exception as error:
        return watchdog.conclude(error, USER_ERROR if isinstance(error, ValueError) else 1)
    finally:
        watchdog.close()
        destroy_model_parallel()
        leave_groups(failed=failed)


def _watchdog(env: LaunchEnvironment, timeout_s: float, signals: ExitSignals | None) -> "Watchdog":
    from megatron.training.watchdog import LIMIT_SHARE, Watchdog, make_store

    faulthandler.enable()
    store = make_store(env.master_addr, LIMIT_SHARE * timeout_s)
    watchdog = Watchdog(store, env.rank, env.world_size, timeout_s=timeout_s, signals=signals)
    return watchdog.start()


def _train(
    resolved: ResolvedRun,
    signals: ExitSignals,
    started: float,
    tokenizer: "Tokenizer",
    device: "torch.device",
    watchdog: "Watchdog",
    providers: "tuple[ModelProvider, DataProvider, LossProvider]",
) -> int:
    from megatron.training.build import build_trainer
    from megatron.training.initialize import set_determinism
    from megatron.training.loop import TrainingLoop

    model_provider, data_provider, loss_provider = providers
    set_determinism(resolved.config, device)
    trainer = build_trainer(
        resolved,
        tokenizer,
        device,
        signals,
        model_provider=model_provider,
        data_provider=data_provider,
        loss_provider=loss_provider,
    )
    watchdog.follow(trainer.chunks)
    reporter = trainer.reporter
    reporter.say(trainer.parallel.describe())
    for note in resolved.notes:
        reporter.say(note)
    trainer.checkpointer.report_progress(watchdog.progress)
    watchdog.watch_writer(lambda: trainer.checkpointer.writer)
    with watchdog.limited("loading a checkpoint"):
        loaded = trainer.checkpointer.load()
    if loaded is not None:
        trainer.state = loaded.train_state
        reporter.say(f"loaded {loaded.folder}: going on after iteration {trainer.state.iteration}")
    elif resolved.config.checkpoint.load is not None:
        folder = resolved.config.checkpoint.load
        reporter.say(f"--load {folder} holds no whole checkpoint yet: starting fresh")
    reporter.open(run_id=trainer.state.run_id, resumed=trainer.state.iteration > 0)
    try:
        return TrainingLoop(trainer, watchdog, started=started).run()
    finally:
        reporter.close()
