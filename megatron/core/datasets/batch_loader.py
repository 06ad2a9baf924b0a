"""The micro-batches of one rank, global batch after global batch.

Row r of a global batch is the same row on every layout; it goes to micro-batch m, data-parallel
rank d, place j with ``r = (m * dp_size + d) * micro_batch_size + j``. Ranks that share rows
(tensor, pipeline and context parallel) plan the same rows from the same state; each reads only
the positions that its layout gives it.

``loader.state`` is the position after the steps that were taken, whatever was read ahead. Give
it to another loader, with another sequence length, batch size, packing, blend or number of
ranks, and that goes on with the next token.

Cost: a step reads and copies ``rows * s`` tokens; planning is about 1 us a document of the
global batch.
"""

import dataclasses
import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron.core.datasets.document_source import DocumentSource
from megatron.core.datasets.fragments import Fragments, PackedRows
from megatron.core.datasets.index_format import DatasetError
from megatron.core.datasets.packing import BEST_FIT_WINDOW
from megatron.core.datasets.prefetch import Prefetcher
from megatron.core.datasets.row_planner import DataPosition, RowPlanner
from megatron.core.datasets.row_reader import RowReader, Share
from megatron.core.packed_batch import IGNORE_INDEX, PackedBatch


class Layout(Protocol):
    """Who holds which positions of a row."""

    def positions(self, ring_rank: int, ulysses_rank: int = 0) -> torch.Tensor:
        """int64 [s]: global positions of a rank, in local order."""
        ...


LayoutFn = Callable[[list[torch.Tensor]], Layout]
"""From the cu_seqlens of a micro-batch's rows to its layout."""


@dataclasses.dataclass(frozen=True)
class _Whole:
    """The layout of a rank that holds whole rows."""

    seq_length: int

    def positions(self, ring_rank: int, ulysses_rank: int = 0) -> torch.Tensor:
        assert ring_rank == 0 and ulysses_rank == 0
        return torch.arange(self.seq_length)


@dataclasses.dataclass(frozen=True)
class BatchRules:
    """How rows become this rank's batches. Fields as the arguments of ``BatchLoader``."""

    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    ring_rank: int = 0
    ulysses_rank: int = 0
    layout_fn: LayoutFn | None = None
    eod_token: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = True
    reset_attention_mask: bool = True

    def __post_init__(self) -> None:
        for name in ("seq_length", "micro_batch_size", "global_batch_size", "dp_size"):
            if getattr(self, name) < 1:
                flag = "--" + name.replace("_", "-")
                raise DatasetError(f"{flag} {getattr(self, name)} must be at least 1")
        rows = self.micro_batch_size * self.dp_size
        if self.global_batch_size % rows:
            below = self.global_batch_size // rows * rows
            choices = " or ".join(str(n) for n in (below, below + rows) if n)
            raise DatasetError(
                f"--global-batch-size {self.global_batch_size} must be a multiple of "
                f"--micro-batch-size x data-parallel size ({self.micro_batch_size} x "
                f"{self.dp_size} = {rows}); use {choices}"
            )
        if not 0 <= self.dp_rank < self.dp_size:
            raise DatasetError(f"data-parallel rank {self.dp_rank} is not in 0..{self.dp_size - 1}")
        if self.layout_fn is None and (self.ring_rank or self.ulysses_rank):
            raise DatasetError("a rank that holds part of a row needs a layout (layout_fn)")
        if self.eod_mask_loss and self.eod_token is None:
            raise DatasetError(
                "--eod-mask-loss needs the id of the end-of-document token, and the tokenizer "
                "has none; use another tokenizer or --no-eod-mask-loss"
            )

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of one global batch on each data-parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def rows_of(self, microbatch: int) -> range:
        """This rank's rows of the global batch in one micro-batch."""
        first = (microbatch * self.dp_size + self.dp_rank) * self.micro_batch_size
        return range(first, first + self.micro_batch_size)


class _Arrays:
    """The arrays of a step, in two blocks.

    The system takes back and hands out again (zeroed, page by page) many small blocks, which
    costs more than reading them; one large block a step is kept and used again.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        micro_batches, rows, length = shape
        self.ids = np.empty((micro_batches, 3, rows, length), dtype=np.int64)
        """Tokens, labels, positions of each micro-batch."""
        self.loss_mask = np.empty(shape, dtype=np.float32)

    def tensors(self, m: int) -> dict[str, torch.Tensor]:
        """The fields of micro-batch ``m``."""
        names = ("tokens", "labels", "position_ids")
        fields = {name: torch.from_numpy(ids) for name, ids in zip(names, self.ids[m])}
        return {**fields, "loss_mask": torch.from_numpy(self.loss_mask[m])}


class _Maker:
    """Makes steps: plans the rows of a global batch, reads this rank's part."""

    def __init__(
        self,
        source: DocumentSource,
        state: dict[str, Any] | None,
        packing: str,
        window: int,
        rules: BatchRules,
    ) -> None:
        self._rules = rules
        self._planner = RowPlanner(
            source,
            state,
            packing=packing,
            seq_length=rules.seq_length,
            global_batch_size=rules.global_batch_size,
            best_fit_window=window,
        )
        self._reader = RowReader(
            self._planner.corpora,
            vocab_size=source.vocab_size,
            pad_token=rules.eod_token or 0,
            reset_position_ids=rules.reset_position_ids,
        )
        whole = _Whole(rules.seq_length)
        self._layout_fn: LayoutFn = rules.layout_fn or (lambda _: whole)
        self._share: tuple[Layout, Share] | None = None

    def position(self) -> DataPosition:
        """Where the next step begins."""
        return self._planner.position()

    def step(self) -> tuple[list[PackedBatch], DataPosition]:
        """This rank's micro-batches of the next global batch and the position after it."""
        first_sample = self._planner.consumed_samples
        rows = self._planner.next_rows()
        arrays: _Arrays | None = None
        batches = []
        for m in range(self._rules.num_microbatches):
            mine = self._rules.rows_of(m)
            cu_seqlens = [torch.from_numpy(self._cu_seqlens(rows, row)) for row in mine]
            layout = self._layout_fn(cu_seqlens)
            share = self._share_of(layout)
            if arrays is None:
                shape = (self._rules.num_microbatches, len(mine), len(share.positions))
                arrays = _Arrays(shape)
            pieces = [rows.row(row) for row in mine]
            self._read(pieces, share, arrays, m)
            batches.append(
                PackedBatch(
                    **arrays.tensors(m),
                    cu_seqlens=cu_seqlens,
                    seq_length=rows.seq_length,
                    layout=layout,
                    sample_ids=[first_sample + row for row in mine],
                    row_hashes=[self._planner.row_hash(row, rows.seq_length) for row in pieces],
                )
            )
        return batches, self._planner.position()

    def _cu_seqlens(self, rows: PackedRows, row: int) -> npt.NDArray[np.int32]:
        if self._rules.reset_attention_mask:
            return rows.cu_seqlens(row)
        return np.array([0, rows.seq_length], dtype=np.int32)

    def _read(self, rows: list[Fragments], share: Share, arrays: "_Arrays", m: int) -> None:
        """Fill micro-batch ``m``."""
        ids = arrays.ids[m]
        for j, row in enumerate(rows):
            self._reader.read_into(row, share, self._rules.seq_length, tuple(ids[:, j]))
        tokens, labels, _ = ids
        if self._rules.eod_mask_loss:
            labels[tokens == self._rules.eod_token] = IGNORE_INDEX
        np.not_equal(labels, IGNORE_INDEX, out=arrays.loss_mask[m])

    def _share_of(self, layout: Layout) -> Share:
        if self._share is None or self._share[0] is not layout:
            positions = layout.positions(self._rules.ring_rank, self._rules.ulysses_rank)
            self._share = (layout, Share.of(positions.numpy()))
        return self._share[1]


class BatchLoader:
    """Gives the micro-batches of one rank.

    Args:
        source: what is read; shared freely.
        state: a position to continue from (another loader's ``state``); None: the start.
        seq_length: S, tokens of a row.
        packing: ``concat`` or ``best-fit``.
        best_fit_window: documents that best-fit looks ahead.
        micro_batch_size: rows of a micro-batch.
        global_batch_size: rows of a step over all data-parallel ranks.
        dp_rank, dp_size: of the data-parallel axis.
        ring_rank, ulysses_rank: place on the context-parallel axes.
        layout_fn: from a micro-batch's cu_seqlens to its layout; None: rows are whole.
        eod_token: end-of-document id, also used as padding.
        eod_mask_loss: no loss where the input is ``eod_token``.
        reset_position_ids: positions begin at 0 in each document (else in each row).
        reset_attention_mask: cu_seqlens list the documents (else one of the whole row).
        num_workers: steps that a background thread keeps ready; 0: none, no thread.

    Raises:
        DatasetError: on arguments that don't fit together or a damaged state.
    """

    def __init__(
        self,
        source: DocumentSource,
        state: dict[str, Any] | None = None,
        *,
        packing: str = "concat",
        best_fit_window: int = BEST_FIT_WINDOW,
        num_workers: int = 0,
        **rules: Any,
    ) -> None:
        self._prefetcher: Prefetcher[tuple[list[PackedBatch], DataPosition]] | None
        self._finalizer: weakref.finalize[..., Any] | None
        if num_workers < 0:
            raise DatasetError(f"--num-workers {num_workers} must be at least 0")
        self._source, self._packing, self._num_workers = source, packing, num_workers
        self._window = best_fit_window
        self.rules = BatchRules(**rules)
        self._start(state)

    def next_step(self) -> list[PackedBatch]:
        """This rank's micro-batches of the next global batch.

        Raises:
            DatasetError: on a token id outside the vocabulary. The position stays, so the next
                call raises the same.
        """
        if self._process != os.getpid():  # a fork has no thread: begin again where we are
            if self._finalizer is not None:
                self._finalizer.detach()
            self._start(self.state)
        if self._prefetcher is None and self._num_workers:
            self._prefetcher = Prefetcher(self._maker.step, self._num_workers)
            self._finalizer = weakref.finalize(self, self._prefetcher.close)
        make = self._prefetcher.get if self._prefetcher else self._maker.step
        try:
            batches, self._position = make()
        except BaseException:
            self.rewind(self.state)  # a failed step doesn't move the position
            raise
        return batches

    @property
    def state(self) -> dict[str, Any]:
        """JSON-able position after the steps taken; the same on every rank."""
        return self._position.state()

    @property
    def position(self) -> DataPosition:
        """The position as an object: consumed tokens and samples, padding rate."""
        return self._position

    @property
    def consumed_tokens(self) -> int:
        """Tokens of documents in all rows so far (padding not counted)."""
        return self._position.consumed_tokens

    @property
    def consumed_samples(self) -> int:
        """Rows so far."""
        return self._position.consumed_samples

    @property
    def padding_rate(self) -> float:
        """Share of padding in all rows so far."""
        return self._position.padding_rate

    def rewind(self, state: dict[str, Any] | None = None) -> None:
        """Go to a position (None: the start), e.g. before each evaluation."""
        self.close()
        self._start(state)

    def close(self) -> None:
        """Stop the background thread. The loader can still be used; it then starts another."""
        if self._finalizer is not None:
            self._finalizer()
            self._start(self.state)

    def _start(self, state: dict[str, Any] | None) -> None:
        self._process = os.getpid()
        self._maker = _Maker(self._source, state, self._packing, self._window, self.rules)
        self._position = self._maker.position()
        self._prefetcher = None
        self._finalizer = None

    def __enter__(self) -> "BatchLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
