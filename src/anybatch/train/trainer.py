"""The training loop: epochs, validation, progress, checkpoints, resume."""

import json
import math
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from anybatch.core import AnybatchError, CheckpointError, DataError, PlanError
from anybatch.losses import summed_loss
from anybatch.state import rng
from anybatch.step import Step
from anybatch.train import checkpoint
from anybatch.train.interrupt import Interruption, deferred
from anybatch.train.loader import Rows
from anybatch.train.loggers import EpochReport, JsonLog, RunInfo, TextLog, Watcher
from anybatch.train.metrics import Metric, RunningLoss, evaluate
from anybatch.train.progress import ProgressBar

LAST, BEST = "last.safetensors", "best.safetensors"


class Trainer:
    """Trains for epochs over rows in memory, one exact update per batch.

    The same seed gives the same run, bit for bit, also when it is interrupted and resumed. Validation runs in
    the precision of training and in evaluation mode; afterwards each module is in its former mode again.
    Checkpoints hold float32 weights also if the model's are shorter.

    Args:
        step: the step, with model, loss and optimizer. Its `order` holds within each batch; which rows are
            in a batch depends on the seed.
        train: training rows: tensors with rows first, nested in any way, or samples if the step has a
            `collate`.
        validation: rows for validation after each epoch, in the same form. None for no validation.
        batch_size: rows of a batch. The last one of an epoch may be smaller.
        seed: seed for the order of the rows. Random numbers inside the model follow torch's own seed.
        metrics: named functions of (outputs, targets) that return a `Total`, such as `anybatch.accuracy`, or
            folds.
        best_by: name of the validation value that decides which checkpoint is the best. NaN never is.
        larger_is_better: whether larger values of `best_by` are better.
        out: folder for checkpoints and logs. None to write nothing.
        save_every: also save after this many batches of an epoch. 0 to save after each epoch only.
        config: values stored in every checkpoint, such as the recipe's name. A resumed run must have the
            same.
        progress: show a progress bar with throughput and memory, and a line per epoch, on standard error.
        watchers: further objects that are told about start, updates and epochs (`Watcher`).

    Raises:
        BatchError, PlanError: rows, sizes, names or a config are not supported.
        DataError: the folder cannot be written.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> step = Step(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)
        >>> trainer = Trainer(step, (torch.zeros(10, 2), torch.zeros(10, 1)), batch_size=4, progress=False)
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
        progress: bool = True,
        watchers: Sequence[Watcher] = (),
    ) -> None:
        self.step = step
        self.train = Rows(train, step)
        self.validation = None if validation is None else Rows(validation, step)
        _check_whole("batch_size", batch_size, least=1)
        _check_whole("save_every", save_every, least=0)
        _check_whole("seed", seed, least=0)
        names = {"loss", *(metrics or {})}
        # The terms of a loss of the user's own have names that only a forward tells.
        if validation is not None and best_by not in names and summed_loss(step.loss) is not None:
            raise _unknown_best(best_by, names)
        self.batch_size, self.seed, self.metrics = batch_size, seed, dict(metrics or {})
        self.best_by, self.larger_is_better = best_by, larger_is_better
        self.config = _check_config(config or {})
        self.out = None if out is None else _make_folder(Path(out))
        self.save_every = save_every
        bars = (ProgressBar(next(step.model.parameters()).device),) if progress else ()
        self.watchers: tuple[Watcher, ...] = (*bars, *watchers)
        out = self.out
        self._logs = () if out is None else (TextLog(out / "log.txt"), JsonLog(out / "log.jsonl"))
        self.epoch = 0  # epochs finished
        self.updates = 0
        self.seconds = 0.0  # of training, over all starts
        self.best: float | None = None
        self._is_ours = False  # whether the checkpoints in `out` are of this run
        self._batch = 0  # batches done in the epoch under way
        self._fitted = batch_size  # rows of a micro-batch that were planned to fit in every step so far
        self._loss = RunningLoss()  # of the epoch under way

    def fit(self, *, epochs: int) -> list[EpochReport]:
        """Train until `epochs` epochs are done, counting those before a resume.

        Ctrl-C and SIGTERM take effect after the current update. Then, and after any error of anybatch, a
        checkpoint of the last update is saved, from which `resume` continues.

        Returns:
            The reports of the epochs finished in this call.

        Raises:
            CheckpointError: `out` holds another run, which would be overwritten.
        """
        _check_whole("epochs", epochs, least=1)
        if self.out is not None and not self._is_ours and (self.out / LAST).exists():
            raise CheckpointError(
                f"{self.out}: expected a folder without an earlier run, got one with {LAST}. Go on with that "
                f"run by resume({str(self.out)!r}), or choose another folder."
            )
        per_epoch = -(-self.train.count // self.batch_size)
        info = RunInfo(
            epochs=epochs,
            done_epochs=self.epoch,
            done_updates=self.epoch * per_epoch + self._batch,
            total_updates=epochs * per_epoch,
            rows=self.train.count,
        )
        reports: list[EpochReport] = []
        with ExitStack() as stops, deferred() as interruption:
            for watcher in (*self.watchers, *self._logs):
                watcher.start(info)
                stops.callback(watcher.stop)
            while self.epoch < epochs:
                reports.append(self._run_epoch(interruption))
                interruption.obey()
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
            "counts": self._loss.counts,
            "scale": self.step.scale.state(),
            "run": _identity(self),
            "config": self.config,
            "plans": [] if self.step.planning.budget is None else self.step.planning.budget.state(),
        }
        for log in self._logs:
            log.flush()  # so that a resume from here finds every update in them
        checkpoint.save(path, **_parts(self.step), progress=progress, random=rng.capture_process())

    def resume(self, path: str | Path) -> None:
        """Go on from a checkpoint: weights, optimizer, scheduler, random state and place in the epoch.

        The logs in `out` keep each update once: those made after the checkpoint are dropped by `fit`.

        Args:
            path: a checkpoint, or a folder with `last.safetensors`.

        Raises:
            CheckpointError: it is missing, damaged, of another model or of another run; nothing was changed.
        """
        path = Path(path) / LAST if Path(path).is_dir() else Path(path)
        found = checkpoint.load(path)
        _check_run(path, found.progress.get("run", {}), _identity(self))
        checkpoint.restore(found, **_parts(self.step))
        then = found.progress
        self.epoch, self._batch, self.updates = then["epoch"], then["batch"], then["updates"]
        self.seconds, self.best = then["seconds"], then["best"]
        self._loss = RunningLoss(then["totals"], **then.get("counts", {}))
        self.step.scale.load(then.get("scale", self.step.scale.state()))
        if self.step.planning.budget is not None:  # the same cuts as before, so the same bits
            self.step.planning.budget.load(then.get("plans", ()))
        rng.restore_process(found.random)
        homes = (path.parent.resolve(), path.resolve().parent)  # it may be a symlink, or the target of one
        self._is_ours = self.out is not None and self.out.resolve() in homes

    def _run_epoch(self, interruption: Interruption) -> EpochReport:
        before = self.seconds
        with self._saved_upon(AnybatchError):  # raised before an update, never in the middle of one
            rows = self._train_rows(interruption)
        with self._saved_upon(Exception):  # nothing is under way; a resume validates again
            validation = {} if self.validation is None else self._evaluate(self.validation)
            done = self._report(validation, rows, self.seconds - before)
            for log in self._logs:  # before it is saved: what a checkpoint counts as done is in the logs
                log.epoch(done)
            is_best = self._is_best(validation)
        self.epoch, self._batch, self._loss = self.epoch + 1, 0, RunningLoss()
        if is_best:
            self._save(BEST)  # first, so that no last checkpoint tells of a best one that is not there
        self._save(LAST)
        for watcher in self.watchers:
            watcher.epoch(done)
        return done

    def _report(self, validation: Mapping[str, float], rows: int, seconds: float) -> EpochReport:
        return EpochReport(
            epoch=self.epoch + 1,
            updates=self.updates,
            loss=self._loss.value(self.step.coefficients),
            validation=validation,
            learning_rate=float(self.step.optimizers[0].param_groups[0]["lr"]),
            seconds=seconds,
            samples_per_second=rows / seconds if rows else 0.0,
            **self._loss.counts,
        )

    def _train_rows(self, interruption: Interruption) -> int:
        """Train on what is left of the epoch; returns how many rows that was."""
        rows, clock = 0, time.perf_counter()
        for batch in self.train.batches(
            batch_size=self.batch_size, seed=self.seed, epoch=self.epoch, start=self._batch
        ):
            report = self.step(batch)
            rows += report.rows
            self._fitted = min(self._fitted, max(report.cut, default=self._fitted))
            now = time.perf_counter()
            self.seconds, clock = self.seconds + now - clock, now
            self._batch += 1
            self.updates += report.updated
            self._loss.add(report)
            for watcher in (*self.watchers, *self._logs):
                watcher.step(report)
            stop = interruption.signal  # read once: one that comes later waits for the next update
            if stop or (self.save_every and self._batch % self.save_every == 0):
                self._save(LAST)
            if stop:
                interruption.obey()
        return rows

    def _evaluate(self, rows: Rows) -> dict[str, float]:
        budget = self.step.planning.budget
        size = self.step.micro_batch or (self.batch_size if budget is None else self._fitted)
        size = min(size, rows.count)
        return evaluate(self.step, rows, self.metrics, micro_batch=size, batch_size=self.batch_size)

    def _is_best(self, validation: Mapping[str, float]) -> bool:
        if validation and self.best_by not in validation:
            raise _unknown_best(self.best_by, validation)
        value = validation.get(self.best_by, math.nan)
        sign = 1 if self.larger_is_better else -1
        is_better = sign * value > (-math.inf if self.best is None else sign * self.best)  # NaN never is
        if is_better:
            self.best = value
        return is_better

    @contextmanager
    def _saved_upon(self, error: type[Exception]) -> Generator[None]:
        """Leave a checkpoint behind before such an error goes on, if there was any update to keep."""
        try:
            yield
        except error:
            if self.updates:
                self._save(LAST)
            raise

    def _save(self, name: str) -> None:
        if self.out is not None:
            self.save(self.out / name)
            self._is_ours = True


def _parts(step: Step) -> dict[str, Any]:
    """What of a step a checkpoint keeps."""
    return {
        "model": step.model,
        "loss": step.loss_module,
        "optimizers": step.optimizers,
        "schedulers": step.schedulers,
        "masters": step.masters,
    }


def _identity(trainer: Trainer) -> dict[str, Any]:
    """What determines the result besides the cut; a resumed run must agree in it."""
    loss = getattr(trainer.step.loss, "function", trainer.step.loss)  # of ab.Terms or ab.WholeBatch
    loss = getattr(loss, "func", loss)  # of a partial
    return {
        **{f"config {name}": value for name, value in trainer.config.items()},
        "rows": trainer.train.count,
        "batch_size": trainer.batch_size,
        "seed": trainer.seed,
        "schedulers": len(trainer.step.schedulers),
        "loss": getattr(loss, "__qualname__", type(loss).__name__),
        "precision": str(trainer.step.precision),
        "non_finite": trainer.step.planning.settings.non_finite,
    }


def _check_run(path: Path, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    was = {"precision": "float32", "non_finite": "raise"} | dict(was)  # which older ones do not say
    changed = {name: (was.get(name), value) for name, value in now.items() if was.get(name) != value}
    if changed:
        raise CheckpointError(
            f"{path}: expected a run with the same rows, sizes, seed, precision and config, got "
            + ", ".join(f"{name} {old} there and {new} here" for name, (old, new) in changed.items())
            + ". Start it with the same values, or start a new run."
        )


def _make_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()  # one that exists may still not be written to
    except OSError as error:
        raise DataError(
            f"Expected a folder that can be written, got {path}: {error.strerror}. Choose another one."
        ) from None
    return path


def _check_whole(name: str, value: object, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise PlanError(
            f"Expected {name} to be a whole number of at least {least}, got {value!r}. Pass an int."
        )


def _unknown_best(best_by: str, names: Iterable[str]) -> PlanError:
    return PlanError(
        f"Expected best_by to name a validation value, got {best_by!r}. Choose from {sorted(names)}."
    )


def _check_config(config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(config)
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"Expected config to hold JSON values, got another: {error}. Make it strings and numbers."
        ) from None
    return dict(config)
