"""The loop around the step: epochs, validation, progress, checkpoints, resume."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from anybatch import rng
from anybatch.errors import AnybatchError, CheckpointError, DataError, PlanError
from anybatch.events import StepReport
from anybatch.step import Step
from anybatch.train import checkpoint
from anybatch.train.interrupt import Interruption, deferred
from anybatch.train.metrics import Metric, RunningLoss, evaluate, to_device
from anybatch.train.rows import Rows
from anybatch.train.watch import Course, EpochReport, JsonLog, TextLog, Watcher

LAST, BEST = "last.safetensors", "best.safetensors"


class Trainer:
    """Trains for epochs over rows held in memory, one exact step per logical batch.

    The same seed gives the same run to the last bit, also when it is stopped and resumed. The model stays in
    the mode it is in (a frozen BatchNorm stays frozen); validation runs in evaluation mode and puts it back.

    Args:
        step: the model, loss, optimizer and cut.
        train: training rows: any nesting of tensors with rows first, or samples where the step has a
            `collate`.
        validation: rows for validation after each epoch, of the same form; None for no validation.
        batch_size: rows of a logical batch; the last one of an epoch may be shorter.
        seed: determines the order of rows of every epoch. Random numbers inside the model follow torch's
            own seed.
        metrics: named functions of (outputs, targets) to a `Total`, as `anybatch.accuracy`, or folds.
        best_by: which validation value makes a checkpoint the best one.
        larger_is_better: whether larger values of it are better.
        out: folder for checkpoints and logs; None to write nothing.
        save_every: also save after this many batches of an epoch; 0 for after each epoch only.
        config: JSON values kept in every checkpoint, such as the recipe's name.
        watchers: who is told how it goes, besides the logs in `out`.

    Raises:
        BatchError, PlanError: rows or sizes that cannot be trained on.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> step = Step(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)
        >>> trainer = Trainer(step, (torch.zeros(10, 2), torch.zeros(10, 1)), batch_size=4)
        >>> [report.updates for report in trainer.fit(epochs=2)]
        [3, 6]
    """

    def __init__(
        self,
        step: Step,
        train: Any,
        validation: Any = None,
        *,
        batch_size: int,
        seed: int = 0,
        metrics: Mapping[str, Metric] | None = None,
        best_by: str = "loss",
        larger_is_better: bool = False,
        out: str | Path | None = None,
        save_every: int = 0,
        config: Mapping[str, Any] | None = None,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.step = step
        self.train = Rows(train, step)
        self.validation = None if validation is None else Rows(validation, step)
        _check_sizes(batch_size, step.micro_batch, self.train.count, save_every)
        self.batch_size = batch_size
        self.seed = seed
        self.metrics = dict(metrics or {})
        self.best_by, self.larger_is_better = best_by, larger_is_better
        self.out = None if out is None else _make_folder(Path(out))
        self.save_every = save_every
        self.config = dict(config or {})
        logs = () if self.out is None else (TextLog(self.out / "log.txt"), JsonLog(self.out / "log.jsonl"))
        self.watchers: tuple[Watcher, ...] = (*watchers, *logs)
        self.epoch = 0  # epochs finished
        self.updates = 0
        self.seconds = 0.0  # of training, over all starts
        self.best: float | None = None
        self._batch = 0  # batches done in the epoch under way
        self._loss = RunningLoss()  # of the epoch under way

    def fit(self, *, epochs: int) -> list[EpochReport]:
        """Train until `epochs` epochs are done, counting those before a resume.

        Ctrl-C and SIGTERM wait for the update under way; they and every error of anybatch leave a checkpoint
        of the last whole update behind, from which `resume` goes on.

        Returns:
            The reports of the epochs finished in this call.
        """
        if epochs < 1:
            raise PlanError(f"Expected at least 1 epoch, got {epochs}. Pass epochs=1 or more.")
        per_epoch = -(-self.train.count // self.batch_size)
        course = Course(
            epochs=epochs,
            done_updates=self.epoch * per_epoch + self._batch,
            total_updates=epochs * per_epoch,
            rows=self.train.count,
        )
        reports: list[EpochReport] = []
        for watcher in self.watchers:
            watcher.start(course)
        try:
            with deferred() as interruption:
                while self.epoch < epochs:
                    reports.append(self._run_epoch(interruption))
        except AnybatchError:  # raised before an update, never in the middle of one
            self._save(LAST)
            raise
        finally:
            for watcher in self.watchers:
                watcher.stop()
        return reports

    def evaluate(self, rows: Any) -> dict[str, float]:
        """Loss, terms and metrics on these rows: sums over all of them, divided once.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(2, 1)
            >>> step = Step(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
            >>> rows = (torch.zeros(3, 2), model.bias.detach() * torch.ones(3, 1))
            >>> Trainer(step, rows, batch_size=3).evaluate(rows)
            {'loss': 0.0}
        """
        return self._evaluate(Rows(rows, self.step))

    def save(self, path: str | Path) -> None:
        """Write everything needed to go on from here, atomically."""
        progress = {
            "epoch": self.epoch,
            "batch": self._batch,
            "updates": self.updates,
            "seconds": self.seconds,
            "best": self.best,
            "totals": self._loss.totals,
            "run": self._run_identity(),
            "config": self.config,
        }
        checkpoint.save(
            path,
            model=self.step.model,
            optimizers=self.step.optimizers,
            schedulers=self.step.schedulers,
            progress=progress,
            random=rng.capture_process(),
        )

    def resume(self, path: str | Path) -> None:
        """Go on from a checkpoint: weights, optimizer, scheduler, random state and place in the epoch.

        Args:
            path: a checkpoint, or a folder with `last.safetensors`.

        Raises:
            CheckpointError: it is missing, damaged, of another model or of another run; nothing was changed.
        """
        path = Path(path) / LAST if Path(path).is_dir() else Path(path)
        found = checkpoint.load(path)
        was, now = found.progress["run"], self._run_identity()
        if was != now:
            changed = {name: (was.get(name), value) for name, value in now.items() if was.get(name) != value}
            raise CheckpointError(
                f"{path}: expected a run with the same rows, batch size and seed, got "
                + ", ".join(f"{name} {old} there and {new} here" for name, (old, new) in changed.items())
                + ". Start it with the same values, or start a new run."
            )
        checkpoint.restore(
            found, model=self.step.model, optimizers=self.step.optimizers, schedulers=self.step.schedulers
        )
        progress = found.progress
        self.epoch, self._batch, self.updates = progress["epoch"], progress["batch"], progress["updates"]
        self.seconds, self.best = progress["seconds"], progress["best"]
        self._loss = RunningLoss(progress["totals"])
        rng.restore_process(found.random)

    def _run_epoch(self, interruption: Interruption) -> EpochReport:
        device = next(self.step.model.parameters()).device
        began, first = time.perf_counter(), self._batch
        for batch in self.train.batches(
            batch_size=self.batch_size, seed=self.seed, epoch=self.epoch, start=first
        ):
            report = self.step(batch if self.step.collate is not None else to_device(batch, device))
            self._note(report)
            if interruption.signal or (self.save_every and self._batch % self.save_every == 0):
                self._save(LAST)
            interruption.obey()
        seconds = time.perf_counter() - began
        self.seconds += seconds
        rows = self.train.count - first * self.batch_size
        loss = self._loss.value(self.step.coefficients)
        self.epoch, self._batch, self._loss = self.epoch + 1, 0, RunningLoss()
        validation = {} if self.validation is None else self._evaluate(self.validation)
        is_best = self._is_best(validation)
        self._save(LAST)
        if is_best:
            self._save(BEST)
        done = EpochReport(
            epoch=self.epoch,
            updates=self.updates,
            loss=loss,
            validation=validation,
            learning_rate=float(self.step.optimizers[0].param_groups[0]["lr"]),
            seconds=seconds,
            samples_per_second=rows / seconds,
        )
        for watcher in self.watchers:
            watcher.epoch(done)
        return done

    def _note(self, report: StepReport) -> None:
        self._batch += 1
        self.updates += report.updated
        self._loss.add(report)
        for watcher in self.watchers:
            watcher.step(report)

    def _evaluate(self, rows: Rows) -> dict[str, float]:
        micro_batch = self.step.micro_batch or self.batch_size
        return evaluate(self.step, rows, self.metrics, micro_batch=min(micro_batch, rows.count))

    def _is_best(self, validation: Mapping[str, float]) -> bool:
        if not validation:
            return False
        if self.best_by not in validation:
            raise PlanError(
                f"Expected best_by to name a validation value, got {self.best_by!r}. Choose from "
                f"{sorted(validation)}."
            )
        value = validation[self.best_by]
        better = self.best is None or (value > self.best if self.larger_is_better else value < self.best)
        if better:
            self.best = value
        return better

    def _save(self, name: str) -> None:
        if self.out is not None:
            self.save(self.out / name)

    def _run_identity(self) -> dict[str, int]:
        """What determines the order of rows; a resumed run must agree in it."""
        return {"rows": self.train.count, "batch_size": self.batch_size, "seed": self.seed}


def _make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"Expected a folder that can be written, got {path}: {error.strerror}. Choose another one."
        ) from None
    return path


def _check_sizes(batch_size: int, micro_batch: int | None, rows: int, save_every: int) -> None:
    if batch_size < 1 or save_every < 0:
        raise PlanError(
            f"Expected batch_size of at least 1 and save_every of at least 0, got {batch_size} and "
            f"{save_every}."
        )
    if micro_batch is not None and micro_batch > min(batch_size, rows):
        raise PlanError(
            f"Expected micro_batch to be at most the {min(batch_size, rows)} rows of a batch, got "
            f"{micro_batch}. Pass a smaller one."
        )
