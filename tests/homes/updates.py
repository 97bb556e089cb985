"""One update by SGD with lr 1 in the loop of a host: parameters move by the gradient."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import nn

import anybatch as ab
from anybatch.homes.lightning import WholeBatchCallback
from tests.homes.lightnings import QUIET


def in_trainer(
    model: nn.Module,
    rows: Any,
    collate: Callable[..., Any],
    *bases: type,
    times: int = 1,
    compute_loss: Any = None,
    **options: Any,
) -> None:
    """Make it in transformers' Trainer under these bases, in so many parts by its own accumulation."""
    arguments = transformers.TrainingArguments(
        per_device_train_batch_size=len(rows) // times, gradient_accumulation_steps=times, max_steps=1,
        max_grad_norm=0.0, remove_unused_columns=False, save_strategy="no", disable_tqdm=True, use_cpu=True,
        report_to=[],
    )  # fmt: skip
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    own = {"compute_loss": lambda self, model, inputs, *_, **__: compute_loss(model, inputs)}
    host = type("Host", (*bases, transformers.Trainer), own if compute_loss else {})
    scheduler = torch.optim.lr_scheduler.ConstantLR(sgd, factor=1.0)
    data = {"data_collator": collate, "train_dataset": rows}
    host(model, arguments, optimizers=(sgd, scheduler), **data, **options).train()


def in_lightning(net: nn.Module, usual: Callable[..., Any], batches: Any, **options: Any) -> ab.StepReport:
    """Make it in Lightning's Trainer; `options` are those of the callback."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return usual(self.net, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    home, quiet = WholeBatchCallback(**options), {"logger": False, "enable_checkpointing": False, **QUIET}
    pl.Trainer(callbacks=[home], precision="64-true", max_epochs=1, **quiet).fit(Module(), batches)
    assert home.report is not None
    return home.report
