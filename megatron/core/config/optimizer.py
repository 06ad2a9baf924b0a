"""Optimizer, clipping and learning-rate schedule."""

import dataclasses

from megatron.core.config.flags import flag


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning-rate rule; iterations count steps, as in Megatron-LM."""

    optimizer: str = flag("adam", "Optimizer.", choices=("adam", "sgd"))
    optimizer_impl: str = flag(
        "torch", "Implementation of the optimizer.", choices=("torch", "apex", "te")
    )
    lr: float | None = flag(None, "Peak learning rate.")
    min_lr: float = flag(0.0, "Smallest learning rate after decay.")
    lr_decay_style: str = flag(
        "linear",
        "Decay of the learning rate.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_warmup_iters: int = flag(0, "Steps of linear warmup.")
    lr_warmup_fraction: float | None = flag(None, "Part of the decay steps used for warmup.")
    lr_decay_iters: int | None = flag(None, "Steps to decay over. Default: the whole run.")
    lr_wsd_decay_iters: int | None = flag(None, "Steps of the decay phase of WSD.")
    lr_wsd_decay_style: str = flag(
        "exponential",
        "Decay of the last phase of WSD.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    override_opt_param_scheduler: bool = flag(
        False, "On resume take learning-rate settings from the command line."
    )
    weight_decay: float = flag(0.01, "Weight decay (not on norms and biases).")
    adam_beta1: float = flag(0.9, "Adam beta 1.")
    adam_beta2: float = flag(0.999, "Adam beta 2.")
    adam_eps: float = flag(1e-8, "Adam epsilon.")
    sgd_momentum: float = flag(0.9, "Momentum of SGD.")
    clip_grad: float = flag(1.0, "Largest global gradient norm (0: no clipping).")
