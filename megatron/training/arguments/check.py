"""Checking a configuration as a whole: every broken rule in one message, the world's last.

The rules are small named functions in ``rules``; each looks at :class:`Facts` and yields texts.
Reading the schedule file is one of them. Nothing starts here and torch isn't imported, so a wrong
configuration costs a fraction of a second, on any number of ranks.
"""

from collections.abc import Callable, Iterable, Sequence

from megatron.core.config import RunConfig
from megatron.core.context_extension import ContextSchedule, Stage, StageDefaults
from megatron.core.context_extension.schedule_file import load_yaml, read_stages
from megatron.training.arguments import resolve
from megatron.training.arguments.no_effect import settings_without_effect
from megatron.training.arguments.parser import parse_command_line
from megatron.training.arguments.rules import batch, checkpoint, data, model, optimizer, parallel
from megatron.training.arguments.rules.facts import Facts

Rule = Callable[[Facts], Iterable[str]]

RULES: tuple[Rule, ...] = (
    *model.RULES,
    *parallel.RULES,
    *batch.RULES,
    *optimizer.RULES,
    *data.RULES,
    *checkpoint.RULES,
)
"""Every rule but those of the world size."""


def _stages(config: RunConfig, defaults: StageDefaults) -> tuple[list[Stage], list[str]]:
    """The stages that can be read, and what is wrong with the schedule file."""
    path = config.training.context_schedule
    if path is not None:
        try:
            document = load_yaml(path)
        except ValueError as error:
            return [], [str(error)]
        stages, problems = read_stages(document, defaults)
        return stages, [f"{path}: {problem}" for problem in problems]
    # Rules of batches report a missing length of their own; the other rules still want a stage.
    lengths = ("train_iters", "train_samples", "train_tokens")
    given = [key for key in lengths if getattr(defaults, key) is not None]
    own = {} if len(given) == 1 else {"train_iters": 10**9}
    stages, _ = read_stages({"stages": [own]}, defaults)
    return stages, []


def _steps(stage: Stage, defaults: StageDefaults) -> int | None:
    """Iterations of a stage, also where its length is given in samples or tokens."""
    sizes = (stage.seq_length, stage.micro_batch_size, stage.global_batch_size)
    if any(size is not None and size < 1 for size in sizes):  # another rule refuses them
        return stage.train_iters
    try:
        return ContextSchedule.from_stages([stage], defaults).total_iterations or None
    except ValueError:
        return stage.train_iters


def _facts(config: RunConfig, world_size: int, ranks_per_node: int) -> tuple[Facts, list[str]]:
    parallel_sizes_valid = (
        min(
            config.parallel.tensor_model_parallel_size,
            config.parallel.pipeline_model_parallel_size,
            config.parallel.context_parallel_size,
            *(config.parallel.hierarchical_context_parallel_sizes or (1,)),
        )
        >= 1
    )
    stages: list[Stage] = []
    problems: list[str] = []
    steps: list[int | None] = []
    if parallel_sizes_valid:
        defaults = resolve.stage_defaults(config, world_size, ranks_per_node)
        stages, problems = _stages(config, defaults)
        steps = [_steps(stage, defaults) for stage in stages]
    facts = Facts(
        config=config,
        world_size=world_size,
        stages=tuple(stages),
        from_file=config.training.context_schedule is not None,
        dpcp=resolve.dpcp_size(config, world_size),
        steps=tuple(steps),
    )
    return facts, problems


def find_problems(
    config: RunConfig,
    world_size: int,
    ranks_per_node: int = resolve.DEFAULT_RANKS_PER_NODE,
) -> list[str]:
    """Every broken rule of ``config`` on ``world_size`` ranks; empty when all hold.

    Args:
        config: as parsed; defaults needn't be filled in.
        world_size: ranks of the run (of the dry run, when it is one).
        ranks_per_node: ranks that share fast links; the default split depends on it.
    """
    facts, problems = _facts(config, world_size, ranks_per_node)
    for rule in (*RULES, *batch.WORLD_RULES):
        problems += rule(facts)
    return list(dict.fromkeys(problems))


def validate(
    config: RunConfig,
    world_size: int,
    ranks_per_node: int = resolve.DEFAULT_RANKS_PER_NODE,
) -> None:
    """Refuse a configuration that breaks a rule.

    Raises:
        ValueError: every broken rule, a line each, those of the world size last.
    """
    problems = find_problems(config, world_size, ranks_per_node)
    if problems:
        raise ValueError("\n".join(problems))


def _notes(config: RunConfig, stages: Sequence[Stage], ranks_per_node: int) -> list[str]:
    """What isn't wrong but should be known."""
    notes, training = [], config.training
    if config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        notes.append("--sequence-parallel has no effect with --tensor-model-parallel-size 1")
    tensor = config.parallel.tensor_model_parallel_size
    for split in dict.fromkeys(stage.context_parallel for stage in stages):
        if tensor * split[0] > ranks_per_node:
            notes.append(
                f"tensor {tensor} x ulysses {split[0]} ranks span more than a node of "
                f"{ranks_per_node}: their traffic leaves the fast links"
            )
    if training.context_schedule is not None:
        if training.micro_batch_size is None:
            own, _ = read_stages(load_yaml(training.context_schedule), StageDefaults(1, 1))
            if any(stage.micro_batch_size is None for stage in own):
                notes.append("stages without micro_batch_size use 1")
        for key in ("train_iters", "train_samples", "train_tokens"):
            if getattr(training, key) is not None:
                notes.append(
                    f"--{key.replace('_', '-')} {getattr(training, key)} is the length of those "
                    "stages that give none, not of the run"
                )
    notes += settings_without_effect(config, stages)
    if config.data.data_cache_path is not None:
        notes.append(
            f"--data-cache-path {config.data.data_cache_path} stays unused: the order of documents "
            "is computed when a run starts, there is no index to cache"
        )
    if config.tokenizer.tokenizer_type is None:
        notes.append(f"no --tokenizer-type: NullTokenizer with {config.model.vocab_size} token ids")
    return notes


def check_command_line(
    argv: Sequence[str],
    *,
    world_size: int,
    ranks_per_node: int = resolve.DEFAULT_RANKS_PER_NODE,
) -> resolve.ResolvedRun:
    """Read, check and complete a command line: what the entry point calls first.

    With ``--dry-run`` the world is ``--dry-run-world-size`` ranks (8 on a node).

    Args:
        argv: the words after the program's name.
        world_size: ranks that were started.
        ranks_per_node: of them, on one node.

    Raises:
        ValueError: all that is wrong, a line each: words that can't be read first, then broken
            rules (leaving out those about flags that couldn't be read), the world size last.
    """
    parsed = parse_command_line(argv)
    config = parsed.config
    if config.training.dry_run and (config.training.dry_run_world_size or 0) > 0:
        world_size = config.training.dry_run_world_size or world_size
        ranks_per_node = min(world_size, resolve.DEFAULT_RANKS_PER_NODE)
    problems = list(parsed.problems)
    for problem in find_problems(config, world_size, ranks_per_node):
        words = {word.strip("();,:.") for word in problem.split()}
        if not words & parsed.unread:
            problems.append(problem)
    if problems:
        raise ValueError("\n".join(problems))
    schedule = resolve.resolve_schedule(
        config, world_size=world_size, ranks_per_node=ranks_per_node
    )
    return resolve.ResolvedRun(
        resolve.finalize(config, world_size, ranks_per_node),
        schedule,
        (*parsed.notes, *_notes(config, schedule.stages, ranks_per_node)),
        world_size,
    )


def refusal(error: ValueError, program: str = "pretrain_gpt.py") -> str:
    """The text that a user sees when a command line is refused."""
    lines = str(error).splitlines()
    if len(lines) == 1:
        return f"{program}: error: {lines[0]}"
    return f"{program}: {len(lines)} errors:\n" + "\n".join(f"  {line}" for line in lines)
