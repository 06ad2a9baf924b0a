"""When a run saves and loads, and what of it: weights, optimizer, random states, positions.

Tensors are stored under global names: ``model.<name>``, ``optimizer.<state>.<name>`` and
``rng.<device>.<rank>``. Everything else is JSON: the train state, the configuration that
shaped it, the number of ranks.

Random states: a run resumed on as many ranks gives each rank its own state back; on another
number of ranks, each starts from (seed, iteration, rank). Nothing in this code base draws from
them in a step (dropout and data order are functions of keys), so either is exact.
"""

import contextlib
import dataclasses
import datetime
import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.config import RunConfig
from megatron.core.dist_checkpointing import (
    CheckpointError,
    CheckpointSaver,
    Piece,
    choose_checkpoint,
    iteration_folder,
    make_pieces,
    read_listing,
    read_pieces,
    verify_checkpoint,
)
from megatron.core.dist_checkpointing.directory import begin_past, is_complete, past_iterations
from megatron.core.dist_checkpointing.errors import CheckpointMismatch, on_all_ranks
from megatron.core.dist_checkpointing.progress import Progress, no_progress
from megatron.training.load_folder import beginning, starts_fresh_when_empty, what_to_load
from megatron.training.saved_state import FORMAT_VERSION, SavedState, read_saved_state
from megatron.training.train_state import TrainState

VOCABULARY_TENSORS = ("embedding.word_embeddings.weight", "output_layer.weight")
OPTIMIZER_TENSORS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
GROUP_TIMEOUT = datetime.timedelta(days=7)
"""Ranks may wait long for one that writes or reads; if it gets nowhere, the watchdog says so."""


def ensure_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the zero state of its first step, so that it can be read into."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if optimizer.state[parameter]:
                continue
            if "betas" in group:
                on_device = group.get("fused") or group.get("capturable")
                optimizer.state[parameter] = {
                    "step": torch.zeros(
                        (), dtype=torch.float32, device=parameter.device if on_device else "cpu"
                    ),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            elif group.get("momentum"):
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]]
) -> Iterable[tuple[str, torch.Tensor]]:
    """The optimizer's tensors under their stored names."""
    for name, parameter in named:
        state = optimizer.state.get(parameter, {})
        for key in OPTIMIZER_TENSORS:
            if isinstance(state.get(key), torch.Tensor):
                yield f"optimizer.{key}.{name}", state[key]


def set_optimizer_step(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set Adam's step count (the same for every parameter)."""
    for group in optimizer.param_groups:
        if "bias_correction" in group:  # FusedAdam of apex and Transformer Engine counts here
            group["step"] = steps
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].fill_(float(steps))


def _rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


@dataclasses.dataclass
class LoadedCheckpoint:
    """What a load found beside the tensors it has put in place."""

    folder: Path
    train_state: TrainState
    config: dict[str, Any]
    world_size: int


class Checkpointer:
    """Saves and loads one run.

    Args:
        named_parameters: this rank's parameters under global names; the copy of a tied
            embedding on the last pipeline rank under the embedding's name.
        config_record: JSON of the run's configuration, for the checkpoint.
        check_resume: given the saved configuration and train state, returns an error text or
            None; called before any tensor is read.
        say, warn: for the log.
        job_id: the scheduler's, to be named to other runs.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        named_parameters: list[tuple[str, torch.nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        config_record: Mapping[str, Any],
        check_resume: Callable[[dict[str, Any], TrainState], str | None],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        job_id: str = "",
    ) -> None:
        self._config = config
        self._loading = config.checkpoint
        """Options of loading as they apply to this start; see ``what_to_load``."""
        self._named = named_parameters
        self._optimizer = optimizer
        self._device = device
        self._record = dict(config_record)
        self._check_resume = check_resume
        self._say = say
        self._warn = warn
        self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        self._progress: Progress = no_progress
        self._admitted: dict[Path, SavedState] = {}
        self.last_saved: int | None = None
        self._saver: CheckpointSaver | None = None
        if config.checkpoint.save:
            root = Path(config.checkpoint.save)
            on_all_ranks(lambda: self._make_folder(root), self._group, f"making --save {root}")
            self._saver = CheckpointSaver(
                root,
                group=dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT),
                background=config.checkpoint.async_save,
                keep=config.checkpoint.keep_checkpoints,
                job_id=job_id,
            )

    @staticmethod
    def _make_folder(root: Path) -> None:
        """Now, rather than at the first save hours later."""
        if dist.get_rank() == 0:
            root.mkdir(parents=True, exist_ok=True)

    def report_progress(self, progress: Progress) -> None:
        """Call ``progress`` as a save or a load gets on, in the thread that does it."""
        self._progress = progress
        if self._saver is not None:
            self._saver.progress = progress

    @property
    def writer(self) -> threading.Thread | None:
        """The thread of a background save, or None."""
        return None if self._saver is None else self._saver.thread

    @property
    def saves(self) -> bool:
        """Whether ``--save`` was given."""
        return self._saver is not None

    def _vocabulary_rows(self) -> dict[str, int]:
        assert self._config.model.vocab_size is not None
        return dict.fromkeys(VOCABULARY_TENSORS, self._config.model.vocab_size)

    def _pieces(self, *, optimizer: bool, rng: Mapping[str, torch.Tensor]) -> dict[str, Piece]:
        tensors: list[tuple[str, torch.Tensor]] = [(f"model.{n}", p) for n, p in self._named]
        if optimizer:
            tensors += optimizer_tensors(self._optimizer, self._named)
        rank = dist.get_rank()
        tensors += [(f"rng.{kind}.{rank}", state) for kind, state in rng.items()]
        return make_pieces(tensors, self._vocabulary_rows())

    def save(self, state: TrainState) -> None:
        """Save after the finished step ``state.iteration``; collective.

        Raises:
            CheckpointError: on all ranks, if this or an earlier background save failed.
        """
        assert self._saver is not None
        with_optimizer = not self._config.checkpoint.no_save_optim
        note = beginning(self._config.checkpoint)
        if note and note not in state.began:
            state.began.append(note)
        body = {
            "format_version": FORMAT_VERSION,
            "iteration": state.iteration,
            "world_size": dist.get_world_size(),
            "has_optimizer": with_optimizer,
            "train_state": state.to_json(),
            "config": self._record,
        }
        if with_optimizer:
            # Before the first update there is none, and a resume would miss it.
            ensure_optimizer_state(self._optimizer)
        pieces = self._pieces(optimizer=with_optimizer, rng=_rng_states(self._device))
        self._saver.save(state.iteration, pieces, body)
        self.last_saved = state.iteration

    def failure(self) -> CheckpointError | None:
        """Why a background save failed on this rank, or None."""
        return self._saver.failure() if self._saver else None

    def finish(self) -> None:
        """Wait for a background save and leave; raises CheckpointError if it failed."""
        if self._saver is not None:
            self._saver.wait()
            self._saver.release()

    def load(self) -> LoadedCheckpoint | None:
        """Load what ``--load`` asks for; None means a fresh start. Collective.

        Before it reads tensors ``--save`` becomes this run's: one that still saves there fails at
        its next save, so it can't prune what is read here.

        Raises:
            CheckpointError: if there is nothing to load, or what there is can't be loaded.
            ValueError: if the saved run differs in what must not differ.
        """
        loaded = None if self._config.checkpoint.load is None else self._load()
        if loaded is None:
            self._own()
        if self._saver is not None:
            on_all_ranks(self._begin_past, self._group, f"writing to {self._saver.root}")
        return loaded

    def _begin_past(self) -> None:
        assert self._saver is not None
        if dist.get_rank() == 0:
            begin_past(self._saver.root, self.last_saved or 0)

    def _own(self) -> None:
        warning = None if self._saver is None else self._saver.own()
        if warning:
            self._warn(warning)

    def _choose(self) -> None:
        """What this start loads, by the first rank for all."""
        answer: list[Any] = [None]

        def look() -> None:
            if dist.get_rank() == 0:
                answer[0] = what_to_load(self._config.checkpoint)

        on_all_ranks(look, self._group, "choosing what to load")
        dist.broadcast_object_list(answer, src=0, group=self._group)
        self._loading, line = answer[0]
        if line:
            self._say(line)

    def _load(self) -> LoadedCheckpoint | None:
        self._choose()
        options = self._loading
        assert options.load is not None
        root = Path(options.load)
        iteration, warning = choose_checkpoint(root, iteration=options.ckpt_step, group=self._group)
        if warning:
            self._warn(warning)
        if iteration is None:
            if starts_fresh_when_empty(options) and not options.finetune:
                return None
            raise CheckpointError(
                f"--load {root} holds no whole checkpoint; check the folder, or leave --load out "
                "to start fresh"
            )
        # A run whose settings are refused takes nothing from one that still saves.
        with contextlib.suppress(CheckpointError):
            self._admit(iteration_folder(root, iteration))
        self._own()
        # The run before may have finished a checkpoint in the meantime, and pruned this one.
        latest, _ = choose_checkpoint(root, iteration=options.ckpt_step, group=self._group)
        iteration = iteration if latest is None else latest
        while True:
            folder = iteration_folder(root, iteration)
            try:
                verify_checkpoint(folder, group=self._group, progress=self._progress)
                return self._load_from(folder)
            except CheckpointMismatch:
                raise  # an earlier checkpoint of the run would not fit either
            except CheckpointError as error:
                earlier = self._earlier(root, iteration)
                if earlier is None:
                    raise
                if not options.load_fallback:
                    raise CheckpointError(
                        f"{error}. --load-fallback goes on from the checkpoint before it, {earlier}"
                    ) from None
                self._warn(f"{error}; --load-fallback: trying iteration {earlier}")
                iteration = earlier

    def _earlier(self, root: Path, iteration: int) -> int | None:
        answer: list[int | None] = [None]
        if dist.get_rank() == 0:
            before = past_iterations(root, iteration)
            whole = (i for i in before if is_complete(iteration_folder(root, i)))
            answer[0] = next(whole, None)
        dist.broadcast_object_list(answer, src=0, group=self._group)
        return answer[0]

    def _admit(self, folder: Path) -> SavedState:
        """A checkpoint's state, once it is known that this run may go on from it."""
        if folder not in self._admitted:
            body = on_all_ranks(lambda: read_saved_state(folder), self._group, f"reading {folder}")
            if not self._loading.finetune:
                problem = self._check_resume(body.config, body.train_state)
                if problem:
                    raise ValueError(problem)
            self._admitted[folder] = body
        return self._admitted[folder]

    def _load_from(self, folder: Path) -> LoadedCheckpoint:
        options = self._loading
        body = self._admit(folder)
        saved = LoadedCheckpoint(folder, body.train_state, body.config, body.world_size)
        optimizer = not (options.finetune or options.no_load_optim)
        if optimizer and not body.has_optimizer:
            raise CheckpointMismatch(
                f"{folder} was saved with --no-save-optim; pass --no-load-optim or --finetune"
            )
        if optimizer:
            ensure_optimizer_state(self._optimizer)
        listing = read_listing(folder, group=self._group)
        stored = set(listing.state_dict_metadata)
        rng = self._rng_to_load(saved, stored)
        pieces = self._pieces(optimizer=optimizer, rng=rng)
        self._refuse_leftovers(folder, stored, pieces, optimizer=optimizer)
        read_pieces(folder, pieces, group=self._group, listing=listing, progress=self._progress)
        if optimizer:
            set_optimizer_step(self._optimizer, saved.train_state.optimizer_steps)
        else:
            saved.train_state.optimizer_steps = 0  # those of the optimizer that starts here
        self._set_rng(rng, saved.train_state.iteration)
        if options.finetune:
            saved.train_state = TrainState()
        elif saved.train_state.iteration and folder.parent.resolve() == self._save_root():
            self.last_saved = saved.train_state.iteration
        return saved

    def _save_root(self) -> Path | None:
        save = self._config.checkpoint.save
        return Path(save).resolve() if save else None

    def _refuse_leftovers(
        self, folder: Path, stored: set[str], pieces: Mapping[str, Piece], *, optimizer: bool
    ) -> None:
        """Every stored weight must have a place in this run; read_pieces checks the converse."""
        names: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(names, sorted(pieces), group=self._group)
        known = {name for part in names for name in part}
        prefixes = ("model.", "optimizer.") if optimizer else ("model.",)
        left = [n for n in stored if n.startswith(prefixes) and n not in known]
        if left:
            flags = "model flags"
            if all(name.startswith("optimizer.") for name in left):
                flags = "optimizer flags (--optimizer, --sgd-momentum)"
            raise CheckpointMismatch(
                f"{folder} holds {len(left)} tensors that this run has no place for: "
                f"{', '.join(sorted(left)[:4])}{', ...' if len(left) > 4 else ''}; give the "
                f"{flags} it was saved with"
            )

    def _rng_to_load(self, saved: LoadedCheckpoint, stored: set[str]) -> dict[str, torch.Tensor]:
        options = self._loading
        if options.finetune or options.no_load_rng or saved.world_size != dist.get_world_size():
            return {}
        rank = dist.get_rank()
        return {
            kind: state
            for kind, state in _rng_states(self._device).items()
            if f"rng.{kind}.{rank}" in stored
        }

    def _set_rng(self, rng: Mapping[str, torch.Tensor], iteration: int) -> None:
        if not rng:
            seed_rank(self._config.training.seed, iteration, dist.get_rank())
            return
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng:
            torch.cuda.set_rng_state(rng["cuda"], self._device)


def seed_rank(seed: int, iteration: int, rank: int) -> None:
    """Seed torch's default generators as a function of (seed, iteration, rank)."""
    digest = hashlib.sha256(f"{seed}:{iteration}:{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
