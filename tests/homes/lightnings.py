"""A Lightning module, and fits of it that say what they saw. Imported where Lightning is installed."""

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from anybatch.homes.lightning import WholeBatchCallback
from tests.homes.tasks import LOSSES, MICRO_BATCH, ROWS, Net, data

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


class Module(pl.LightningModule):
    """One of the tasks; keeps the gradient before clipping and the learning rate of each update."""

    def __init__(self, task: str, most: int = ROWS, width: int = 16) -> None:
        super().__init__()
        self.task, self.net = task, Net(width, most)
        self.gradients: list[dict[str, Tensor]] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = LOSSES[self.task](self.net, batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in self.named_parameters()})
        self.rates.append(optimizer.param_groups[0]["lr"])


class Notes(Logger):
    """A logger that keeps what is logged."""

    name, version = "notes", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Keep nothing of these."""

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append((step, dict(metrics)))

    def values(self, name: str) -> list[float]:
        return [metrics[name] for _, metrics in self.rows if name in metrics]


def cutting(task: str, **options: Any) -> WholeBatchCallback:
    """The callback for a task, the only line that changes."""
    return WholeBatchCallback(rows_meet=task != "tokens", **{"micro_batch": MICRO_BATCH} | options)


def fit(module: Module, *callbacks: pl.Callback, rows: int = ROWS, **options: Any) -> pl.Trainer:
    """Train for an epoch of 20 batches of 24 rows, with clipping."""
    chosen = QUIET | {"precision": "64-true", "max_epochs": 1, "gradient_clip_val": 0.1, "logger": Notes()}
    given = {"ckpt_path": options.pop("ckpt_path", None), "data": options.pop("data", None)}
    chosen |= {"enable_checkpointing": False} | options
    trainer = pl.Trainer(callbacks=[*callbacks], **chosen)
    given_data = data(module.task) if given["data"] is None else given["data"]
    trainer.fit(module, DataLoader(TensorDataset(*given_data), rows), ckpt_path=given["ckpt_path"])
    return trainer


def fit_on_rank(
    rank: int, size: int, task: str, is_cut: bool
) -> tuple[dict[str, Tensor], list[float], float]:
    """Train one update on every other batch; return gradient, logged losses and the parameters' sum."""
    before = {**os.environ}
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(size))
    try:
        module = Module(task)
        strategy = DDPStrategy(process_group_backend="gloo")
        trainer = fit(
            module,
            *([cutting(task)] if is_cut else ()),
            strategy=strategy,
            devices=size,
            use_distributed_sampler=False,  # it would shuffle
            data=[torch.cat(part.split(ROWS)[rank::size]) for part in data(task, batches=6)],
        )
        assert trainer.world_size == size
        parameters = sum(float(p.double().sum()) for p in module.parameters())
        return module.gradients[0], trainer.logger.values("loss_step"), parameters
    finally:
        os.environ.clear()
        os.environ.update(before)
