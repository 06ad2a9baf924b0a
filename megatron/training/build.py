"""From a checked configuration to the objects of a run on this rank."""

import dataclasses
import datetime
import json
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.config import RunConfig
from megatron.core.config.record import config_fields, value_of
from megatron.core.distributed import Sharding
from megatron.core.models.gpt.prepare import compute_dtype
from megatron.core.optimizer import build_optimizer
from megatron.core.parallel_state import ParallelState, assert_same_over_ranks, install
from megatron.core.pipeline_parallel import ActivationShape, layer_ids, make_runner
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.training.arguments import ResolvedRun, RunRecord, check_resume
from megatron.training.checkpointing import Checkpointer, seed_rank
from megatron.training.providers import DataProvider, LossProvider, ModelProvider
from megatron.training.reporting import Reporter
from megatron.training.signals import ExitSignals
from megatron.training.train_state import TrainState
from megatron.training.trainer import Trainer

EMBEDDING_NAME = "embedding.word_embeddings.weight"
HEAD_NAME = "output_layer.weight"


def with_vocabulary(config: RunConfig, tokenizer: Tokenizer) -> RunConfig:
    """The configuration with the tokenizer's vocabulary, unless a flag gave a larger one."""
    if config.model.vocab_size is not None:
        return config
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    return dataclasses.replace(config, model=model)


def open_tokenizer(resolved: ResolvedRun) -> tuple[ResolvedRun, Tokenizer]:
    """The run's tokenizer, and the run with its vocabulary.

    Raises:
        ValueError: if the tokenizer can't be opened.
    """
    config = resolved.config
    tokenizer = build_tokenizer(
        config.tokenizer.tokenizer_type or "NullTokenizer",
        config.tokenizer.tokenizer_model,
        config.model.vocab_size,
    )
    return dataclasses.replace(resolved, config=with_vocabulary(config, tokenizer)), tokenizer


def compare_over_ranks(resolved: ResolvedRun) -> None:
    """Refuse ranks that were started differently, naming the keys and values on all of them."""
    config = resolved.config
    values: dict[str, object] = {name: value_of(config, name) for name in config_fields()}
    if config.training.context_schedule is not None:  # else the flags above are the one stage
        for stage in resolved.schedule.to_record():
            prefix = f"{config.training.context_schedule}: stage {stage['index'] + 1}: "
            values |= {prefix + key: value for key, value in stage.items()}
    assert_same_over_ranks(values)


def build_parallel_state(resolved: ResolvedRun, device: torch.device) -> ParallelState:
    """All process groups of all stages; installed for Megatron-named getters."""
    parallel = resolved.config.parallel
    state = ParallelState(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        splits=resolved.schedule.splits,
        device_type=device.type,
        timeout=datetime.timedelta(minutes=parallel.distributed_timeout_minutes),
    )
    install(state)
    return state


def make_sharding(config: RunConfig, parallel: ParallelState) -> Sharding:
    """How weights, gradients and optimizer state spread over data and context ranks."""
    return Sharding(
        parallel.dpcp_mesh,
        config.parallel.data_parallel_sharding_strategy,
        param_dtype=torch.bfloat16 if config.model.bf16 else None,
    )


def build_chunks(
    config: RunConfig,
    parallel: ParallelState,
    provider: ModelProvider,
    *,
    shard_fn: Callable[[nn.Module], object] | None,
    device: torch.device | str,
) -> list[nn.Module]:
    """The model chunks of this pipeline rank, each sharded as soon as it is complete."""
    assert config.model.num_layers is not None
    pp = parallel.pp_size
    ids = layer_ids(
        config.model.num_layers, pp, config.parallel.num_layers_per_virtual_pipeline_stage
    )[parallel.pp_rank]
    chunks = []
    for number, layers in enumerate(ids):
        chunk = provider(
            config.model,
            tp_mesh=parallel.tp_mesh,
            sequence_parallel=config.parallel.sequence_parallel and parallel.tp_size > 1,
            layer_ids=layers,
            pre_process=parallel.pp_rank == 0 and number == 0,
            post_process=parallel.pp_rank == pp - 1 and number == len(ids) - 1,
            seed=config.training.seed,
            shard_fn=shard_fn,
            device=device,
        )
        if shard_fn is not None:
            shard_fn(chunk)
        chunks.append(chunk)
    return chunks


def global_parameters(
    chunks: list[nn.Module], *, tied: bool, pp_size: int
) -> tuple[list[tuple[str, nn.Parameter]], nn.Parameter | None, nn.Parameter | None]:
    """(parameters under global names, shared embedding here, its second copy here)."""
    shares = tied and pp_size > 1
    named: list[tuple[str, nn.Parameter]] = []
    weight: nn.Parameter | None = None
    copy: nn.Parameter | None = None
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if shares and name == HEAD_NAME:
                weight = copy = parameter
                name = EMBEDDING_NAME
            elif shares and name == EMBEDDING_NAME:
                weight = parameter
            named.append((name, parameter))
    return named, weight, copy


def build_trainer(
    resolved: ResolvedRun,
    tokenizer: Tokenizer,
    device: torch.device,
    signals: ExitSignals,
    *,
    model_provider: ModelProvider,
    data_provider: DataProvider,
    loss_provider: LossProvider,
) -> Trainer:
    """Build everything; the process group exists. Collective."""
    config = resolved.config
    compare_over_ranks(resolved)
    parallel = build_parallel_state(resolved, device)
    seed_rank(config.training.seed, 0, dist.get_rank())
    sharding = make_sharding(config, parallel)
    chunks = build_chunks(config, parallel, model_provider, shard_fn=sharding.shard, device=device)
    named, tied_weight, tied_copy = global_parameters(
        chunks,
        tied=not config.model.untie_embeddings_and_output_weights,
        pp_size=parallel.pp_size,
    )
    optimizer = build_optimizer(config.optimizer, named)
    state = TrainState()
    flat = {name: value_of(config, name) for name in config_fields()}
    reporter = Reporter(config, rank=dist.get_rank(), flat=flat)
    checkpointer = _checkpointer(resolved, named, optimizer, device, reporter)
    assert config.model.hidden_size is not None
    shards = parallel.tp_size if config.parallel.sequence_parallel else 1
    runner = make_runner(
        chunks,
        pp_group=parallel.pp_group,
        activation=ActivationShape(config.model.hidden_size, compute_dtype(config.model), shards),
        device=device,
        before_backward=sharding.before_backward,
        after_evaluation=sharding.after_evaluation,
    )
    return Trainer(
        config=config,
        schedule=resolved.schedule,
        device=device,
        parallel=parallel,
        tokenizer=tokenizer,
        chunks=chunks,
        named_parameters=named,
        tied_weight=tied_weight,
        tied_copy=tied_copy,
        optimizer=optimizer,
        runner=runner,
        data_provider=data_provider,
        loss_provider=loss_provider,
        checkpointer=checkpointer,
        reporter=reporter,
        signals=signals,
        state=state,
    )


def _checkpointer(
    resolved: ResolvedRun,
    named: list[tuple[str, nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    reporter: Reporter,
) -> Checkpointer:
    record = RunRecord(resolved.config, resolved.schedule)

    def check(saved_json: dict[str, object], saved_state: TrainState) -> str | None:
        saved = RunRecord.from_json(json.dumps(saved_json))
        consumed = saved.schedule.tokens_at(saved_state.iteration)
        report = check_resume(saved, record, consumed_tokens=consumed)
        for note in report.notes:
            reporter.say(note)
        return "\n".join(report.problems) or None

    return Checkpointer(
        resolved.config,
        named_parameters=named,
        optimizer=optimizer,
        device=device,
        config_record=json.loads(record.to_json()),
        check_resume=check,
        say=reporter.say,
        warn=reporter.warn,
        job_id=os.environ.get("SLURM_JOB_ID", ""),
    )
