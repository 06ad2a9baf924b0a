"""``--rerun-check-interval``: compute a step twice and compare every intermediate bit.

A device that silently miscomputes spoils all ranks at the next reduction. So each rank takes
checksums on the way, before anything is reduced: of the output of each module and of each
parameter's gradient, per micro-batch. Micro-batches don't touch each other until gradients are
summed, so the fault lies where the first difference is:

    (micro-batch, forward < backward, pipeline stage in the order of the pass, event)

and the ranks that differ at the earliest place are named. Where ranks exchange activations
inside one event (context or tensor parallelism) several ranks may tie; then all are named.
On a difference the step is computed a third time: if that equals one of the two, a fault came
and went; if not, the computation isn't reproducible at all.

Cost of a checked step: twice the step, one more pass over all outputs. The optimizer's update
is not repeated.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from megatron.core.context_parallel.integrity import checksum

Place = tuple[int, int, int, int]
"""(micro-batch, 0 forward / 1 backward, stage in the order of the pass, event)."""
AT_THE_END: Place = (1 << 30, 0, 0, 0)


class RerunMismatch(RuntimeError):
    """A step gave other bits when it was computed again; the message names the rank."""


def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """``tensor.register_hook``, typed."""
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    return handle


@dataclasses.dataclass
class Recording:
    """What one computation of a step gave on this rank."""

    places: list[Place] = dataclasses.field(default_factory=list)
    labels: list[str] = dataclasses.field(default_factory=list)
    sums: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def add(self, place: Place, label: str, value: torch.Tensor) -> None:
        """Note a tensor's checksum."""
        if isinstance(value, DTensor):
            value = value.to_local()
        self.places.append(place)
        self.labels.append(label)
        self.sums.append(checksum(value.detach().contiguous()))

    def first_difference(self, other: "Recording") -> tuple[Place, str] | None:
        """Where the two first differ, in the order of cause and effect."""
        if self.labels != other.labels:
            return min(self.places, default=AT_THE_END), "the order of computation"
        if not self.sums:
            return None
        same = (torch.stack(self.sums) == torch.stack(other.sums)).all(dim=1).tolist()
        wrong = [(self.places[i], self.labels[i]) for i, equal in enumerate(same) if not equal]
        return min(wrong, default=None)


class Recorder:
    """Hooks on all modules of the chunks, for the time of one step.

    Args:
        chunks: model chunks of this pipeline rank.
        pp_rank, pp_size: give the order of chunks over ranks.
    """

    def __init__(self, chunks: list[nn.Module], *, pp_rank: int, pp_size: int) -> None:
        self.recording = Recording()
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()
        self._context = (0, 0, 0)
        self._event = 0
        for number, chunk in enumerate(chunks):
            self._follow_chunk(chunk, number * pp_size + pp_rank)

    def remove(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, micro_batch: int, phase: int, stage: int) -> None:
        self._context, self._event = (micro_batch, phase, stage), 0

    def _note(self, label: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._event += 1
            self.recording.add((*self._context, self._event), label, value)
        elif isinstance(value, tuple | list):
            for part in value:
                self._note(label, part)

    def _follow_chunk(self, chunk: nn.Module, stage: int) -> None:
        passes = iter(range(1 << 30))

        def before(module: nn.Module, args: Any) -> None:
            self._enter(next(passes), 0, stage)
            # Some weights are used without a call of their module (a chunked output layer).
            for name, child in module.named_modules():
                self._follow_parameters(name, child)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            micro_batch = self._context[0]
            self._note("output of the stage", output)
            if isinstance(output, torch.Tensor) and output.requires_grad:
                # Backward passes go through the stages the other way round.
                register_hook(output, lambda grad: self._enter(micro_batch, 1, -stage))

        self._handles.append(chunk.register_forward_pre_hook(before))
        self._handles.append(chunk.register_forward_hook(after))
        for name, module in chunk.named_modules():
            if module is not chunk and (not list(module.children()) or module._parameters):
                self._follow_module(name, module)

    def _follow_module(self, name: str, module: nn.Module) -> None:
        def before(module: nn.Module, args: Any) -> None:
            self._follow_parameters(name, module)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            self._note(f"output of {name}", output)

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after))

    def _follow_parameters(self, name: str, module: nn.Module) -> None:
        # FSDP puts the whole parameter in place for the time of a pass: another object.
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) in self._hooked or not parameter.requires_grad:
                continue
            self._hooked.add(id(parameter))
            label = f"gradient of {name}.{key}"

            def note(grad: torch.Tensor, label: str = label) -> None:
                self._note(label, grad)

            self._handles.append(register_hook(parameter, note))


def compute_twice(
    compute: Callable[[], tuple[float, float]],
    chunks: list[nn.Module],
    parameters: list[nn.Parameter],
    *,
    iteration: int,
    pp_rank: int,
    pp_size: int,
) -> tuple[float, float]:
    """Run ``compute`` (gradients of a step, from zero) twice and compare. Collective.

    Returns:
        What ``compute`` returned; its gradients are in place.

    Raises:
        RerunMismatch: on every rank, naming the rank that differed first.
    """

    def recorded() -> tuple[Recording, tuple[float, float]]:
        recorder = Recorder(chunks, pp_rank=pp_rank, pp_size=pp_size)
        try:
            result = compute()
        finally:
            recorder.remove()
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None:
                recorder.recording.add(AT_THE_END, f"reduced gradient {number}", parameter.grad)
        return recorder.recording, result

    first, _ = recorded()
    second, result = recorded()
    found = _over_ranks(first.first_difference(second))
    if not found:
        return result
    third, _ = recorded()
    again = [_over_ranks(third.first_difference(other)) for other in (first, second)]
    raise RerunMismatch(_describe(found, iteration, came_and_went=not all(again)))


def _over_ranks(mine: tuple[Place, str] | None) -> dict[int, tuple[Place, str]]:
    """Rank -> first difference, of the ranks that differ at the earliest place."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found = {rank: tuple(entry) for rank, entry in enumerate(every) if entry is not None}
    earliest = min((place for place, _ in found.values()), default=None)
    return {rank: entry for rank, entry in found.items() if entry[0] == earliest}


def _describe(found: dict[int, tuple[Place, str]], iteration: int, *, came_and_went: bool) -> str:
    place, label = next(iter(found.values()))
    where = "after the reduction of gradients"
    if place != AT_THE_END:
        where = f"micro-batch {place[0]}, {'backward' if place[1] else 'forward'}"
    ranks = f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"
    what = (
        "a third computation agreed with one of the two: the fault came and went; test that "
        "machine before it takes part again"
        if came_and_went
        else "a third computation differed too: the machine is faulty, or the computation isn't "
        "reproducible (--deterministic-mode)"
    )
    return (
        f"rerun check (--rerun-check-interval) at iteration {iteration}: {ranks} computed other "
        f"bits the second time, first at {where}, {label}; {what}"
    )
