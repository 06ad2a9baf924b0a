"""Weights, gradients and optimizer state over the dpcp ranks, by FSDP2.

One :class:`Sharding` says how; the model's builder calls ``sharding.shard(layer)`` on each finished
layer and then on the whole stage module, so full weights of one layer at most exist at a time.

==================  ===================================================  =========================
strategy            what a rank holds (dpcp = N)                         communication a step
==================  ===================================================  =========================
no_shard            everything; a copy of the weights during a step      all-reduce gradients once
optim               1/N of optimizer state; weights and gradients in     gather weights once,
                    full during a step, 1/N of them between steps        reduce-scatter once
optim_grads         the same, but gradients in full for one layer        gather weights once,
                                                                         reduce-scatter a
                                                                         micro-batch
optim_grads_params  1/N of all; full weights of one layer at a time,     gather weights twice and
                    and of the embedding and output layer                reduce-scatter a
                                                                         micro-batch
==================  ===================================================  =========================

Gradients are SUMS over dpcp, never means: the loss is divided once, by the number of loss tokens of
the global batch. With ``param_dtype`` bf16, layers compute in bf16 while weights, gradients and
their reductions stay in fp32; inputs are not cast (cos and sin of RoPE must stay fp32).

With one dpcp rank and no mixed precision nothing is wrapped: parameters stay what they were, at no
cost. Tensor-parallel parameters are DTensors on the tp slice of the same root mesh; FSDP2 adds its
dim in front. It doesn't offload to the CPU.
"""

import dataclasses

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megatron.core.compat import reduce_gradients_in_reduce_dtype, replicate_module

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How modules are spread over the dpcp ranks.

    Args:
        dpcp_mesh: 1-D ``dpcp`` slice of the root mesh.
        strategy: one of ``STRATEGIES``.
        param_dtype: dtype to compute in; None computes in the stored dtype.
        reduce_dtype: dtype gradients are summed in. Default: fp32 for half-precision compute,
            else the gradient's own.

    Raises:
        ValueError: for an unknown strategy.
    """

    dpcp_mesh: DeviceMesh
    strategy: str = "no_shard"
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"--data-parallel-sharding-strategy {self.strategy} must be one of "
                f"{', '.join(STRATEGIES)}"
            )
        assert self.dpcp_mesh.ndim == 1

    def wraps(self, module: nn.Module) -> bool:
        """Whether ``module`` needs FSDP at all: several ranks, or compute in another dtype."""
        if self.dpcp_mesh.size() > 1:
            return True
        dtypes = {parameter.dtype for parameter in module.parameters()}
        return self.param_dtype is not None and dtypes != {self.param_dtype}

    def shard(self, module: nn.Module) -> nn.Module:
        """Spread ``module`` (a layer, then the whole stage) in place; returns it.

        The module that a step's forward enters must be passed last: it becomes FSDP's root.
        """
        if not self.wraps(module):
            return module
        stored = {parameter.dtype for parameter in module.parameters()}
        half = (torch.bfloat16, torch.float16)
        reduce_dtype = self.reduce_dtype
        if reduce_dtype is None and (self.param_dtype in half or stored & set(half)):
            reduce_dtype = torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=self.param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
        )
        if self.strategy == "no_shard" and self.dpcp_mesh.size() > 1:
            replicate_module(module, mesh=self.dpcp_mesh, mp_policy=policy)
        else:
            fully_shard(
                module,
                mesh=self.dpcp_mesh,
                reshard_after_forward=None if self.strategy == "optim_grads_params" else False,
                mp_policy=policy,
            )
        assert isinstance(module, FSDPModule)
        # Neither call recurses: each wrapped module needs them.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if reduce_dtype is not None:
            reduce_gradients_in_reduce_dtype(module)
        return module

    def before_backward(self, module: nn.Module, last: bool) -> None:
        """Tell FSDP's root ``module`` whether the next backward is the step's last one.

        Gradients are reduced after the last micro-batch, or after each where the strategy shards
        them; weights stay gathered until then, unless the strategy shards them.
        """
        if not isinstance(module, FSDPModule):
            return
        module.set_is_last_backward(last)
        module.set_requires_gradient_sync(
            last or self.strategy in ("optim_grads", "optim_grads_params")
        )
        module.set_reshard_after_backward(last or self.strategy == "optim_grads_params")

    def after_evaluation(self, module: nn.Module) -> None:
        """Drop gathered weights and bookkeeping that forward passes without backward left."""
        if isinstance(module, FSDPModule):
            module.reset_iter_state()


def shard_module(
    module: nn.Module,
    dpcp_mesh: DeviceMesh,
    *,
    strategy: str = "no_shard",
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """:meth:`Sharding.shard` in one call, for a single module."""
    return Sharding(dpcp_mesh, strategy, param_dtype, reduce_dtype).shard(module)
