"""A Lightning module, and fits of it that say what they saw. Imported where Lightning is installed."""

from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from anybatch.homes.lightning import WholeBatchCallback
from tests.homes.tasks import LOSSES, MICRO_BATCH, ROWS, UPDATES, Run, data, dies_at, net

QUIET: dict[str, Any] = {"accelerator": "cpu", "log_every_n_steps": 1}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False}


class Task:
    """One of the tasks; keeps the gradient before clipping and the learning rate of each update."""

    def __init__(self, task: str, most: int = ROWS, width: int = 16) -> None:
        super().__init__()
        self.task, self.net = task, net(width, most)
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


class Module(Task, pl.LightningModule):
    """A task as a module."""


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


def fit(
    module: Module, *callbacks: pl.Callback, rows: int = ROWS, lightning: Any = pl, **options: Any
) -> pl.Trainer:
    """Train for an epoch of 20 batches of 24 rows, with clipping; `lightning` is the package."""
    chosen = QUIET | {"precision": "64-true", "max_epochs": 1, "gradient_clip_val": 0.1, "logger": Notes()}
    path, given = options.pop("ckpt_path", None), options.pop("data", None) or data(module.task)
    chosen |= {"enable_checkpointing": False} | options
    trainer = lightning.Trainer(callbacks=callbacks[0] if len(callbacks) == 1 else [*callbacks], **chosen)
    trainer.fit(module, DataLoader(TensorDataset(*given), rows), ckpt_path=path)
    return trainer


def train(
    task: str, *, is_cut: bool = False, parts: int = 1, rows: Any = None, ranks: int = 1, **options: Any
) -> Run:
    """Train on 20 batches, each in so many parts by the host's own accumulation."""
    lightning = import_module(options.pop("package", "lightning.pytorch"))
    kind = type("Module", (Task, lightning.LightningModule), {})
    module = kind(task, options.pop("most", ROWS), options.pop("width", 16))
    home, more = cutting(task, **options), {"accumulate_grad_batches": parts} if parts > 1 else {}
    if ranks > 1:  # its sampler would shuffle
        strategy = lightning.strategies.DDPStrategy(process_group_backend="gloo")
        more |= {"strategy": strategy, "devices": ranks, "use_distributed_sampler": False}
    more |= {"lightning": lightning, "rows": ROWS // parts, "data": rows}
    trainer = fit(module, *([home] if is_cut else []), **more)
    assert trainer.world_size == ranks
    assert trainer.global_step == len(module.gradients)
    assert "training_step" not in vars(module)
    losses = [*trainer.logger.values("loss_step"), *trainer.logger.values("loss_epoch")]
    return Run(module.gradients, losses, module.rates, [*module.parameters()], home.report)


class Dies(pl.Callback):
    """Kills the process in the second epoch, in the third forward of an update."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 3:
            dies_at(2, pl_module.net)


def halves(task: str, folder: Path, *, dies: bool = False) -> Run:
    """Train and save half-way, or go on from what is saved; with `dies`, end by SIGKILL soon after."""
    path = folder / f"step={UPDATES}.ckpt"
    module = Module(task).double()
    files = ModelCheckpoint(folder, every_n_train_steps=UPDATES, save_top_k=-1, filename="{step}")
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True}
    options["ckpt_path"] = path if path.exists() else None
    fit(module, cutting(task), files, *([Dies()] if dies else []), **options)
    if not options["ckpt_path"]:
        assert {*torch.load(path, weights_only=True)["state_dict"]} == {*module.state_dict()}
    return Run(module.gradients[-UPDATES:], [], module.rates, [*module.parameters()], None)
