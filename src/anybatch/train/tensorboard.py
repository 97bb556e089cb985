"""TensorBoard: loss, speed and records of callbacks, written during training."""

from pathlib import Path
from typing import Any

from anybatch.core import EpochReport, PlanError, RunInfo, StepReport
from anybatch.train.callbacks import TrainerCallback, records


class TensorBoard(TrainerCallback):
    """A callback that writes scalars for TensorBoard: `Trainer(..., callbacks=[TensorBoard(folder)])`.

    The scalars are loss, terms, learning rate, rows per second, rows of a micro-batch and gradient norm;
    values of each epoch; and records of callbacks, by layer. Updates are numbered as in the log.
    A resume drops the events after its checkpoint.

    Args:
        folder: the folder for `tensorboard --logdir`.
        every: updates between two writes; records of callbacks are always written.

    Raises:
        PlanError: tensorboard is not installed; from `start`.
    """

    on_every_rank = False

    def __init__(self, folder: str | Path, *, every: int = 10) -> None:
        self.folder, self.every = Path(folder), every
        self._writer: Any = None
        self._at = 0

    def start(self, trainer: Any, info: RunInfo) -> None:
        """Open an event file."""
        super().start(trainer, info)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PlanError(
                f"Expected tensorboard, got {error}. Install it: pip install 'anybatch[tensorboard]'."
            ) from None
        self._at = info.done_updates
        self._writer = SummaryWriter(str(self.folder), purge_step=self._at + 1)

    def update(self, report: StepReport) -> None:
        """Write the scalars of an update."""
        self._at += 1
        if self._at % self.every == 0 or self._at == 1:
            values = {
                "loss": report.loss,
                "learning rate": report.learning_rate,
                "rows per second": report.rows / report.seconds if report.seconds else 0.0,
                "rows of a micro-batch": max(report.cut, default=0),
                "gradient norm": report.grad_norm,
            }
            terms = report.terms if len(report.terms) > 1 else {}
            self._write(values | {f"terms/{name}": value for name, value in terms.items()})
        for callback, record in records(self._trainer).items():
            layers = record.pop("layers", ())
            record.pop("classes", None)
            for name, value in record.items():
                tag = f"{callback} {name}"
                named = zip(layers, value, strict=True) if isinstance(value, list) else [("", value)]
                self._write({f"{tag}/{layer}" if layer else tag: number for layer, number in named})

    def epoch(self, trainer: Any, report: EpochReport) -> None:
        """Write the scalars of an epoch."""
        values = {"epoch/loss": report.loss, "epoch/samples per second": report.samples_per_second}
        self._write(values | {f"validation/{name}": value for name, value in report.validation.items()})

    def stop(self, trainer: Any) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        super().stop(trainer)

    def _write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, self._at)
