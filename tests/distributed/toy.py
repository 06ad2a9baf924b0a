"""A small language model with the parallelism of the real one, written on its own.

Tensor-parallel MLP layers with sequence parallelism, a norm weight and a bias that are replicated
over tp but used on sequence shards, tied or untied output, documents of unequal loss. With
``mesh=None`` it is a plain dense model: the reference.
"""

import zlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megatron.core.collectives import gather_along, reduce_from_region, reduce_scatter_along
from megatron.core.packed_batch import PackedBatch

HIDDEN, FFN, VOCAB, LENGTH = 8, 12, 16, 8


def make(name, shape, dtype, tp_mesh, dim=None):
    """A parameter whose values depend on its name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    full = (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    if tp_mesh is None:
        return nn.Parameter(full)
    size, rank = tp_mesh.size(), tp_mesh.get_local_rank()
    local = full if dim is None else full.chunk(size, dim)[rank].contiguous()
    placement = Replicate() if dim is None else Shard(dim)
    return nn.Parameter(
        DTensor.from_local(
            local, tp_mesh, [placement], run_check=False, shape=full.shape, stride=full.stride()
        )
    )


def use(parameter, partial=False):
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=[Partial()]) if partial else parameter.to_local()


class Layer(nn.Module):
    def __init__(self, index, dtype, tp_mesh):
        super().__init__()
        name = f"layers.{index}"
        self.tp = tp_mesh.get_group() if tp_mesh is not None else None
        self.norm = make(f"{name}.norm", (HIDDEN,), dtype, tp_mesh)
        self.up = make(f"{name}.up", (FFN, HIDDEN), dtype, tp_mesh, 0)
        self.down = make(f"{name}.down", (HIDDEN, FFN), dtype, tp_mesh, 1)
        self.bias = make(f"{name}.bias", (HIDDEN,), dtype, tp_mesh)
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        y = F.rms_norm(x, (HIDDEN,)) * use(self.norm, partial=True)
        y = F.gelu(gather_along(y, self.tp) @ use(self.up).t()) @ use(self.down).t()
        return x + reduce_scatter_along(y, self.tp) + use(self.bias, partial=True)


class Toy(nn.Module):
    """One stage: ``layer_ids`` in the middle, embedding before, output layer and loss after."""

    def __init__(self, layer_ids, pre, post, *, dtype, tp_mesh=None, tied=True, shard=None):
        super().__init__()
        self.tp_mesh = tp_mesh
        self.tp = tp_mesh.get_group() if tp_mesh is not None else None
        self.pre, self.post, self.tied = pre, post, tied
        self.embedding = make("embedding", (VOCAB, HIDDEN), dtype, tp_mesh) if pre else None
        self.layers = nn.ModuleDict()
        for index in layer_ids:
            layer = Layer(index, dtype, tp_mesh)
            self.layers[str(index)] = shard(layer) if shard else layer
        self.output = None
        if post and not (tied and pre):
            name = "embedding" if tied else "output"
            self.output = make(name, (VOCAB, HIDDEN), dtype, tp_mesh)
        if shard:
            shard(self)

    def tied_copy(self):
        """The weight that has a twin on another pipeline rank, if any."""
        if not self.tied or (self.pre and self.post):
            return None
        return self.embedding if self.pre else self.output

    def forward(self, x, batch, *, dropout_key=None):
        size = self.tp_mesh.size() if self.tp_mesh is not None else 1
        rank = self.tp_mesh.get_local_rank() if self.tp_mesh is not None else 0
        if self.pre:
            own = batch.tokens.t().chunk(size)[rank]
            x = F.embedding(own, use(self.embedding, partial=True))
        for layer in self.layers.values():
            x = layer(x)
        if not self.post:
            return x
        weight = self.output if self.output is not None else self.embedding
        logits = x @ use(weight, partial=True).t()
        labels = batch.labels.t().chunk(size)[rank]
        wide = logits.float() if logits.dtype == torch.bfloat16 else logits
        loss = F.cross_entropy(
            wide.reshape(-1, VOCAB), labels.reshape(-1), ignore_index=-100, reduction="sum"
        )
        return reduce_from_region(loss, self.tp)


def rows(count, seed=0, length=LENGTH):
    """(tokens, labels) of a global batch; the number of loss tokens differs from row to row."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (count, length), generator=generator)
    labels = torch.randint(VOCAB, (count, length), generator=generator)
    for row in range(count):
        labels[row, : (row * 3) % length] = -100
    return tokens, labels


def batch_of(tokens, labels):
    length = tokens.shape[1]
    return PackedBatch(
        tokens=tokens,
        labels=labels,
        loss_mask=(labels != -100).float(),
        position_ids=torch.arange(length).expand_as(tokens),
        cu_seqlens=[torch.tensor([0, length], dtype=torch.int32)] * len(tokens),
        seq_length=length,
    )


def split_rows(tokens, labels, dpcp_rank, dpcp_size, micro_batch_size):
    """This rank's micro-batches of the global batch."""
    mine_t, mine_l = tokens.chunk(dpcp_size)[dpcp_rank], labels.chunk(dpcp_size)[dpcp_rank]
    pairs = zip(mine_t.split(micro_batch_size), mine_l.split(micro_batch_size))
    return [batch_of(t, label) for t, label in pairs]


def full_tensor(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
