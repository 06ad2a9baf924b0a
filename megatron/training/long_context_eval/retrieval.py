"""Passkey retrieval: is a key that was told once, somewhere far back, told again when asked?

A grid of (length x depth): each cell is the share of unseen trials in which every token of the key
is right (after Mohtashami and Jaggi, 2023, arXiv 2305.16300). Answers are read from one forward
pass over prompt and answer: greedy decoding yields the key exactly if the most likely token is
right at every step given the right ones before it, so no generation loop is needed. (In the
made-up language each digit has a question of its own; those are given, the digits are not.)

Cost: one forward pass a trial; logits are made at the answer's positions alone.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import local
from megatron.training.long_context_eval.checkpoint_model import LoadedModel
from megatron.training.long_context_eval.passkey_mix import PasskeyMix
from megatron.training.long_context_eval.rows import TOKENS_AT_ONCE, Tokens, batches_of


@dataclasses.dataclass(frozen=True)
class Trial:
    """A prompt and the answer that it asks for."""

    tokens: Tokens
    """int64 [length]: prompt, then answer."""
    answers: tuple[int, ...]
    """Indices of the tokens that must be predicted."""


class PasskeyTask(Protocol):
    """Makes trials."""

    def trial(self, rng: np.random.Generator, length: int, depth: float) -> Trial:
        """A trial of ``length`` tokens, its key told at ``depth`` (0 start, 1 end)."""
        ...


@dataclasses.dataclass(frozen=True)
class TokenTask:
    """Trials in the made-up language of :class:`PasskeyMix`."""

    mix: PasskeyMix

    def trial(self, rng: np.random.Generator, length: int, depth: float) -> Trial:
        """See :class:`PasskeyTask`; the filling is a document of all other facts."""
        key = self.mix.key(self.mix.digits(rng))
        room = _room(length, 2 * len(key))
        place = round(depth * room)
        filling = self.mix.document(rng, room, first_fact=self.mix.key_digits)
        tokens = np.concatenate((filling[:place], key, filling[place:], key))
        return Trial(tokens, tuple(range(length - len(key) + 1, length, 2)))


@dataclasses.dataclass(frozen=True)
class TextTask:
    """Trials in English, for a model with a tokenizer."""

    tokenize: Callable[[str], Tokens]
    key_digits: int = 5
    filling: str = (
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    )

    def trial(self, rng: np.random.Generator, length: int, depth: float) -> Trial:
        """See :class:`PasskeyTask`; the filling is the same five sentences again and again."""
        key = "".join(str(digit) for digit in rng.integers(0, 10, self.key_digits))
        told = self._ids(f"The pass key is {key}. Remember it. {key} is the pass key. ")
        question = "What is the pass key? The pass key is"
        asked, whole = self._ids(question), self._ids(f"{question} {key}")
        same = np.flatnonzero(asked != whole[: len(asked)])
        known = int(same[0]) if len(same) else len(asked)
        room = _room(length, len(told) + len(whole))
        filling = np.resize(self._ids(self.filling), room)
        place = round(depth * room)
        tokens = np.concatenate((filling[:place], told, filling[place:], whole))
        return Trial(tokens, tuple(range(length - len(whole) + known, length)))

    def _ids(self, text: str) -> Tokens:
        return np.asarray(self.tokenize(text), np.int64)


def _room(length: int, needed: int) -> int:
    if length < needed:
        raise ValueError(
            f"--passkey-lengths {length} is too short: key and question take {needed} tokens"
        )
    return length - needed


@dataclasses.dataclass(frozen=True)
class RetrievalGrid:
    """Accuracy by length and depth."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    trials: int
    """A cell's."""
    accuracy: tuple[tuple[float, ...], ...]
    """[lengths][depths]: share of trials with every token right."""

    def mean(self, length: int) -> float:
        """Accuracy at ``length`` over all depths."""
        row = self.accuracy[self.lengths.index(length)]
        return sum(row) / len(row)


def answers(
    model: GPTModel, trials: Sequence[Trial], *, device: torch.device, at_once: int
) -> list[bool]:
    """Whether greedy decoding would give each trial's answer; trials of equal length."""
    right: list[bool] = []
    weight = local(model.output_weight())[: model.vocab_size]
    documents = [trial.tokens for trial in trials]
    for batch in batches_of(documents, device=device, tokens_at_once=at_once):
        hidden = model(None, batch, output="hidden")  # [S, B, H]
        for row in range(hidden.shape[1]):
            trial = trials[len(right)]
            before = torch.tensor(trial.answers, device=hidden.device) - 1
            chosen = F.linear(hidden[before, row], weight).argmax(-1)
            right.append(bool((chosen == batch.labels[row, before]).all()))
    return right


def passkey_grid(
    loaded: LoadedModel,
    task: PasskeyTask,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    trials: int,
    seed: int = 0,
    tokens_at_once: int = TOKENS_AT_ONCE,
) -> RetrievalGrid:
    """Run ``trials`` trials in every cell; trial n of a cell depends on (seed, cell, n) alone."""
    rows = []
    for length in lengths:
        loaded.set_length(length)
        row = []
        for place, depth in enumerate(depths):
            made = [
                task.trial(np.random.default_rng((seed, length, place, number)), length, depth)
                for number in range(trials)
            ]
            with torch.no_grad():
                hits = answers(loaded.model, made, device=loaded.device, at_once=tokens_at_once)
            row.append(sum(hits) / len(hits))
        rows.append(tuple(row))
    return RetrievalGrid(tuple(lengths), tuple(depths), trials, tuple(rows))
