"""What a run reports and where."""

import dataclasses

from megatron.core.config.flags import flag


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
    """Log lines, the metrics file, TensorBoard and wandb."""

    log_interval: int = flag(100, "Steps between log lines.")
    metrics_file: str | None = flag(None, "File that gets one JSON object a line.", metavar="FILE")
    peak_tflops: float | None = flag(
        None, "Peak TFLOP/s of one device, for MFU. Default: the device's known peak."
    )
    tensorboard_dir: str | None = flag(None, "Folder for TensorBoard.", metavar="DIR")
    wandb_project: str | None = flag(None, "wandb project; turns wandb on.")
    wandb_exp_name: str | None = flag(None, "wandb run name.")
    wandb_save_dir: str | None = flag(None, "Folder for wandb files.", metavar="DIR")
