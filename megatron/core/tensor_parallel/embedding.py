"""Word embedding with the rows of the table cut over tp.

Each rank looks up the ids that fall into its rows and gives zeros for the rest; one all-reduce,
or with sequence parallelism one reduce-scatter along the sequence, adds them up (one summand
is not zero, so the sum is exact in any dtype).

The table has ``ModelConfig.padded_vocab_size`` rows, the vocabulary rounded up to a multiple that
does not depend on tp. Padding rows start at 0, are never looked up and never get a gradient.
"""

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.collectives import reduce_from_region, reduce_scatter_along
from megatron.core.tensor_parallel.initialization import NormalInit
from megatron.core.tensor_parallel.parameters import TensorParallel, local


def vocab_parallel_weight(
    tp: TensorParallel, name: str, vocab_size: int, padded_size: int, hidden_size: int, std: float
) -> nn.Parameter:
    """A [padded vocabulary, hidden] parameter, rows cut over tp, padding rows zero.

    For word embeddings and for an output layer of its own alike.

    Raises:
        ValueError: tp does not divide the padded vocabulary.
    """
    if padded_size < vocab_size:
        raise ValueError(f"{name}: padded size {padded_size} is below --vocab-size {vocab_size}")
    if padded_size % tp.size:
        raise ValueError(
            f"{name}: padded vocabulary {padded_size} is not a multiple of "
            f"--tensor-model-parallel-size {tp.size}; use a --make-vocab-size-divisible-by "
            f"that is a multiple of {tp.size}"
        )
    init = NormalInit(std, rows=vocab_size)
    return tp.parameter(name, (padded_size, hidden_size), init=init, shard_dim=0)


class VocabParallelEmbedding(nn.Module):
    """[B, s] token ids -> [s, B, H], or [s / tp, B, H] with sequence parallelism.

    Args:
        name: the module's global name; the parameter is ``name.weight``.

    Raises:
        ValueError: see `vocab_parallel_weight`; in forward: an id outside [0, vocab_size).
    """

    def __init__(
        self,
        vocab_size: int,
        padded_size: int,
        hidden_size: int,
        tp: TensorParallel,
        *,
        name: str,
        std: float,
    ) -> None:
        super().__init__()
        self.vocab_size, self.padded_size, self.tp = vocab_size, padded_size, tp
        self.weight = vocab_parallel_weight(
            tp, f"{name}.weight", vocab_size, padded_size, hidden_size, std
        )

    def forward(self, ids: torch.Tensor, host_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Look up ``ids`` [B, s].

        Checking their range waits for the device, unless ``host_ids``, the same on the CPU, are
        given.
        """
        check_ids(ids if host_ids is None else host_ids, self.vocab_size)
        weight, group = local(self.weight), self.tp.group
        ids = ids.t()
        if group is None:
            return F.embedding(ids, weight)
        rows = weight.shape[0]
        own = ids - self.tp.rank * rows
        outside = (own < 0) | (own >= rows)
        partial = F.embedding(own.masked_fill(outside, 0), weight)
        partial = partial.masked_fill(outside.unsqueeze(-1), 0.0)
        if self.tp.shards_sequence:
            return reduce_scatter_along(partial, group, 0)
        return reduce_from_region(partial, group)

    def extra_repr(self) -> str:
        """Vocabulary and its padding."""
        return f"{self.vocab_size} (padded {self.padded_size})"


def check_ids(ids: torch.Tensor, vocab_size: int, what: str = "token id") -> None:
    """Refuse ids outside [0, vocab_size): with rows cut over tp they would read as zeros.

    Raises:
        ValueError: with the offending id.
    """
    if ids.numel() == 0 or ids.is_meta:
        return
    low, high = (int(bound) for bound in torch.stack(torch.aminmax(ids)).tolist())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise ValueError(
            f"{what} {bad} is outside the model's vocabulary of {vocab_size}: the data was made "
            "with another tokenizer, or --vocab-size is too small"
        )
