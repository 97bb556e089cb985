"""The training loop: epochs, validation, progress, checkpoints, resume."""

import math
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from anybatch import core
from anybatch.engine import learning_rate_of
from anybatch.losses import summed_loss
from anybatch.parallel import checkpoint
from anybatch.state import rng
from anybatch.step import Step, known_keywords
from anybatch.train.callbacks import is_better, load_states, states
from anybatch.train.files import make_folder
from anybatch.train.identity import check_config, check_run, identity
from anybatch.train.interrupt import Interruption, deferred
from anybatch.train.loader import Rows, Stream, open_data
from anybatch.train.loggers import JsonLog
from anybatch.train.metrics import RunningLoss, evaluate, metrics_of
from anybatch.train.progress import ProgressBar

_COUNTED = ("epoch", "steps", "updates", "seconds", "best")  # attributes that a checkpoint has


class Trainer:
    """A training over epochs of rows in memory or from a loader, with one exact update per batch.

    The same seed gives the same run, bit for bit, also if it is interrupted and resumed. Validation runs in
    the precision of training and in evaluation mode; afterwards each module is in its former mode again.
    Checkpoints hold float32 weights also for a 16-bit model.

    A loader is a DataLoader, an IterableDataset or any object that can be iterated in each epoch. Its items
    are batches of tensors with rows first or, if the step has a `collate`, samples (of a batching DataLoader:
    lists of samples). A resume in the middle of an epoch loads its earlier batches again.

    With several ranks (`anybatch.parallel`) each has the same data and computes its part of each batch, so
    that batches do not depend on the number of ranks. Rank 0 writes checkpoints and logs; any number of ranks
    can resume from them. Of a model with `fully_shard` all ranks write them.

    Args:
        step: the step, with model, loss and optimizer. Its `order` applies within each batch; the seed
            determines the rows of a batch.
        train: training rows: tensors with rows first, nested in any way; samples if the step has a
            `collate`; or a loader.
        validation: rows or a loader for validation after each epoch. None for no validation.
        batch_size: rows of a batch. The last batch of an epoch may be smaller. The items of a loader are
            joined and divided to this size. None, for a loader, makes one update per item.
        seed: seed for the order of the rows and for loading. Random numbers inside the model follow torch's
            own seed, on ranks after the first this seed.
        best_by: name of the validation value that determines the best checkpoint. NaN never counts.
        larger_is_better: True if larger values of `best_by` are better.
        out: folder for checkpoints and logs. None to write nothing.
        save_every, save_minutes: also save after so many batches of an epoch, or minutes. 0 for never.
        keep: how many checkpoints to keep, besides the best one; the last one always stays.
        config: values stored in every checkpoint, such as a recipe's name. A resumed run must have the same.
        progress: show a progress bar with throughput and memory, and a line per epoch, on standard error.
        callbacks: objects such as `ab.Metrics` (see `ab.Callback`); functions, called with each `StepReport`.

    Attributes:
        epoch, steps, updates: finished epochs, batches and updates since the start of the run.
        seconds: training time in seconds.
        best: the best value of `best_by`, or None.
        stopped: the reason if a callback stopped the training, else an empty string.

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

    @known_keywords()
    def __init__(
        self,
        step: Step,
        train: Any,
        validation: Any = None,
        *,
        batch_size: int | None = None,
        seed: int = 0,
        best_by: str = "loss",
        larger_is_better: bool = False,
        out: str | Path | None = None,
        save_every: int = 0,
        save_minutes: float = 0,
        keep: int = 0,
        config: Mapping[str, Any] | None = None,
        progress: bool = True,
        callbacks: Iterable[core.CallbackLike] = (),
    ) -> None:
        if not isinstance(step, Step):
            raise core.PlanError(
                f"Expected an ab.Step, got {core.kind_of(step)}. Make one: ab.Step(model, loss, optimizer)."
            )
        self.step = step
        self.train = open_data(train, step)
        self.validation = None if validation is None else open_data(validation, step)
        if batch_size is not None or isinstance(self.train, Rows):
            core.check_whole("batch_size", batch_size, least=1)
        for name, value in (("save_every", save_every), ("keep", keep), ("seed", seed)):
            core.check_whole(name, value, least=0)
        _check_saving(out, save_minutes, keep)
        own = core.check_callbacks(callbacks)
        given = core.check_callbacks([*step.callbacks, *own])  # refuses one that both have
        self.metrics = metrics_of(given)
        names = {"loss", *self.metrics}
        # The names of a user's terms are unknown before a forward.
        if validation is not None and best_by not in names and summed_loss(step.loss) is not None:
            raise _unknown_best(best_by, names)
        self.batch_size, self.seed = batch_size, seed
        self.best_by, self.larger_is_better = best_by, larger_is_better
        self.config, self._share = check_config(config or {}), self.train.share
        self.out = None if out is None or not self._share.is_writing else make_folder(Path(out))
        self.save_every, self.save_minutes, self.keep = save_every, save_minutes, keep
        is_shown = progress and not self._share.rank
        bars = [ProgressBar(next(step.model.parameters()).device)] if is_shown else []
        there = [one for one in own if getattr(one, "on_every_rank", True) or not self._share.rank]
        self.callbacks: tuple[Any, ...] = (*bars, *there)
        self._logs = [] if self.out is None or self._share.rank else [JsonLog(self.out / "log.jsonl")]
        self._own = (*self.callbacks, *self._logs)
        self._everyone = (*step.callbacks, *self._own)
        self.epoch = self.steps = self.updates = 0
        self.seconds, self.stopped, self._saved = 0.0, "", time.monotonic()
        self.best: float | None = None
        # Folders whose checkpoints are of this run; epochs and batches at its last save.
        self._ours, self._written = set[Path](), (-1, -1)
        self._batch = 0  # batches done in the current epoch
        self._digest = ""  # digest of the last of them, from a checkpoint
        self._fitted = batch_size  # rows of a micro-batch that fitted in every step so far
        self.epoch_loss = RunningLoss()
        # That of the last step, noted before callbacks, which may fail.
        self._reports: list[core.StepReport] = []

    def fit(self, epochs: int) -> list[core.EpochReport]:
        """Train until `epochs` epochs are done, including those before a resume, or a callback stops it.

        Ctrl-C and SIGTERM take effect after the current update. Then, and after any error but one inside
        of an update, a checkpoint of the last update is saved for `resume`.

        Args:
            epochs: number of the last epoch, at least 1.

        Returns:
            The reports of the epochs finished in this call.

        Raises:
            CheckpointError: `out` holds another run, which would be overwritten.
            BatchError: a loader gives no batch, or an unusable one.
            RankError: another rank failed, ended, or has other data.
        """
        core.check_whole("epochs", epochs, least=1)
        with deferred() as interruption, self._share.told(interruption), ExitStack() as stops:
            self._begin(epochs, stops)
            reports: list[core.EpochReport] = []
            while self.epoch < epochs and not self.stopped:
                reports += self._run_epoch(interruption)
                interruption.obey(_how_to_go_on(self))
        return reports

    def _begin(self, epochs: int, stops: ExitStack) -> None:
        """Start the callbacks; the stack stops those that were started, after a save if an error came."""
        if self.out is not None:
            self._refuse_other_run(self.out)
        per_epoch = self.train.per_epoch(self.batch_size)
        info = core.RunInfo(
            epochs=epochs,
            done_epochs=self.epoch,
            done_updates=self.steps,
            total_updates=None if per_epoch is None else epochs * per_epoch,
            rows=self.train.count,
        )
        self.stopped, self._saved = "", time.monotonic()
        stops.callback(self.step.attach)
        self.step.attach(self._own, first=(self._reports.append,))
        for callback in self._everyone:
            for start in core.bound([callback], "start"):
                start(self, info)
            for stop in core.bound([callback], "stop"):
                stops.callback(stop, self)
        stops.push(self._save_upon_error)

    def stop(self, reason: str) -> None:
        """End the training after this update or epoch, and save a checkpoint; for callbacks."""
        self.stopped = reason

    def evaluate(self, rows: Any) -> dict[str, float]:
        """Return loss, terms and metrics on these rows: sums over all of them, divided once.

        Args:
            rows: rows or a loader, of the same form as for training.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(2, 1)
            >>> step = Step(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
            >>> rows = (torch.zeros(3, 2), model.bias.detach() * torch.ones(3, 1))
            >>> Trainer(step, rows, batch_size=3).evaluate(rows)
            {'loss': 0.0}
        """
        with self._share.told(Interruption()):
            return self._evaluate(open_data(rows, self.step))

    def save(self, path: str | Path) -> None:
        """Write a checkpoint `step-N` in a folder; rank 0 writes, or with `fully_shard` all ranks.

        Args:
            path: the folder, in which the newest `keep` checkpoints stay, at least this one.

        Raises:
            CheckpointError: it cannot be written, or has another run's; earlier ones are unchanged.
            WindowError: the step has an open window.
        """
        if not self._share.is_writing:
            return
        _refuse_window(self.step, "save")
        self._ours.add(self._refuse_other_run(Path(path)))
        given: dict[str, Any] = _parts(self.step) | self._rest() | {"group": self._share.group}
        given["keep"] = 1 if Path(path).name == checkpoint.BEST else self.keep
        made = checkpoint.save(path, self.steps, **given)
        if not self._share.rank and (errors := self._tell(self._everyone, "save", self, made)):
            raise errors[0]

    def _refuse_other_run(self, folder: Path) -> Path:
        """Return the home of a run; raise CheckpointError if checkpoints of another one would be deleted."""
        home = _home(folder)
        if home not in self._ours and checkpoint.has_run(home):
            raise core.CheckpointError(
                f"{folder}: expected a folder without an earlier run, got one with checkpoints. Go on with "
                f"that run by resume({str(folder)!r}), or choose another folder."
            )
        return home

    def _rest(self) -> dict[str, Any]:
        for log in self._logs:
            log.flush()  # a resume from here needs every update in the log
        digest = ""
        if isinstance(self.train, Stream) and 0 < self._batch == self.train.loaded:
            digest = self.train.digest()
        budget = self.step.planning.budget
        progress = {name: getattr(self, name) for name in (*_COUNTED, "config")} | {
            "batch": self._batch,
            "digest": digest,
            "totals": self.epoch_loss.totals,
            "counts": self.epoch_loss.counts,
            "scale": self.step.scale.state(),
            "run": identity(self),
            "plans": [] if budget is None else budget.state(),
            "callbacks": states([*self.callbacks, *self.step.callbacks]),
        }
        return {"progress": progress, "random": rng.capture_process()}

    def resume(self, path: str | Path) -> None:
        """Load a checkpoint: weights, optimizer, scheduler, random state and position in the epoch.

        The log in `out` has each update once: `fit` drops those after the checkpoint. Callbacks with a state
        are matched by class and order; a warning names those without a match.

        Args:
            path: the folder of a run, or a checkpoint in it. In a folder, the last one is loaded or, if it is
                damaged, the newest one or the best one that is intact, with a warning.

        Raises:
            CheckpointError: there is none, or it is of another model or of another run; nothing was changed.
            WindowError: the step has an open window.
        """
        _refuse_window(self.step, "resume")
        found = checkpoint.load(path, is_many=self._share.is_lockstep, group=self._share.group)
        check_run(found, identity(self))
        checkpoint.restore(found, **_parts(self.step), group=self._share.group)
        then = found.progress
        for name in _COUNTED:
            setattr(self, name, then[name])
        self._batch, self._digest = then["batch"], then["digest"]
        self.epoch_loss = RunningLoss(then["totals"], **then["counts"])
        self.step.scale.load(then["scale"])
        if self.step.planning.budget is not None:  # the same cuts as before, so the same bits
            self.step.planning.budget.load(then["plans"])
        load_states(found.path, [*self.callbacks, *self.step.callbacks], then["callbacks"])
        rng.restore_process(found.random)
        self._ours.add(_home(found.path.parent))

    def __repr__(self) -> str:
        return f"Trainer(epoch {self.epoch}, update {self.updates}, out={self.out}, {self.step!r})"

    def _run_epoch(self, interruption: Interruption) -> list[core.EpochReport]:
        before = self.seconds
        rows = self._train_rows(interruption)
        place = f"epoch {self.epoch + 1} after {self._batch} batches"
        self._share.meet_with_buffers(f"{'a stop in' if self.stopped else 'the end of'} {place}")
        if self.stopped:
            return []
        validation: dict[str, float] = {}
        if self.validation is not None:
            with ExitStack() as contexts:
                for context in core.bound(self._everyone, "validation"):
                    contexts.enter_context(context(self))
                validation = self._evaluate(self.validation)
        done = _report(self, validation, rows, self.seconds - before)
        is_best = self._is_best(validation)
        self.epoch, self._batch, self.epoch_loss = self.epoch + 1, 0, RunningLoss()
        # Before the save: a checkpoint's epochs are in the logs and in the state of callbacks.
        errors = self._tell(self._everyone, "epoch", self, done)
        if is_best:
            # First, so that the last checkpoint never refers to a missing best one.
            self._save(checkpoint.BEST)
        self._save()
        if errors:
            raise errors[0]
        place = f"the checkpoint of epoch {self.epoch}{', to stop' * bool(self.stopped)}"
        said = self._share.meet(place, signal=interruption.signal)
        interruption.signal = max(one["signal"] for one in said)  # a signal of one rank is one of all
        return [done]

    def _tell(self, callbacks: Iterable[object], event: str, *given: Any) -> list[Exception]:
        errors: list[Exception] = []  # all callbacks are called, so that their states agree
        for function in core.bound(callbacks, event):
            try:
                function(*given)
            except Exception as error:
                errors.append(error)
        return errors

    def _train_rows(self, interruption: Interruption) -> int:
        rows, clock = 0, time.perf_counter()
        for batch in self._batches():
            errors = _made(self.step, batch, self._reports)
            (report,) = self._reports
            rows += report.rows
            if report.cut:
                self._fitted = min(self._fitted or max(report.cut), max(report.cut))
            now = time.perf_counter()
            self.seconds, clock = self.seconds + now - clock, now
            self._batch += 1
            self.steps += 1
            self.updates += report.updated
            self.epoch_loss.add(report)
            errors += self._tell(self._own, "update", report)
            stop = interruption.signal  # read once: a later signal waits for the next update
            is_late = self.save_minutes and time.monotonic() - self._saved >= 60 * self.save_minutes
            is_due = is_late or (self.save_every and self._batch % self.save_every == 0)
            if self._share.agrees(f"batch {self.steps}", bool(stop or errors or self.stopped or is_due)):
                self._save()
            if errors:
                raise errors[0]
            if stop:
                interruption.obey(_how_to_go_on(self))
            if self.stopped:
                break
        return rows

    def _batches(self) -> Generator[Any]:
        digest, self._digest = self._digest, ""
        left = self.train.batches(
            batch_size=self.batch_size, seed=self.seed, epoch=self.epoch, start=self._batch, digest=digest
        )
        with closing(left):
            self._share.draw_apart(self.seed, self.steps)  # before each batch is loaded
            for batch in left:
                yield batch
                self._share.draw_apart(self.seed, self.steps)

    def _evaluate(self, rows: Rows | Stream) -> dict[str, float]:
        budget = self.step.planning.budget
        size = self.step.micro_batch or (self.batch_size if budget is None else self._fitted)
        return evaluate(self.step, rows, self.metrics, micro_batch=size, batch_size=self.batch_size)

    def _is_best(self, validation: Mapping[str, float]) -> bool:
        if validation and self.best_by not in validation:
            raise _unknown_best(self.best_by, validation)
        value = validation.get(self.best_by, math.nan)
        if not is_better(value, self.best, larger=self.larger_is_better):
            return False
        self.best = value
        return True

    def _save_upon_error(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Between updates, or in one that was not begun to write.
        if error and self._share.can_save(error, self.steps) and self._written != (self.epoch, self.steps):
            self._save()

    def _save(self, name: str = "") -> None:
        if self.out is not None:
            self._written = self.epoch, self.steps  # before: a save that fails is not tried again
            self.save(self.out / name)
            self._saved = self._saved if name else time.monotonic()


def _home(folder: Path) -> Path:
    """Return the folder of a run, of which one of its best checkpoints is a part."""
    return folder.resolve().parent if folder.name == checkpoint.BEST else folder.resolve()


def _made(step: Step, batch: Any, reports: list[core.StepReport]) -> list[Exception]:
    """Make a step, which notes its report; return what a callback has raised after that."""
    reports.clear()
    try:
        step(batch)
    except Exception as error:
        if not reports:
            raise
        return [error]
    return []


def _report(trainer: Trainer, validation: Mapping[str, float], rows: int, seconds: float) -> core.EpochReport:
    running = trainer.epoch_loss
    return core.EpochReport(
        epoch=trainer.epoch + 1,
        updates=trainer.updates,
        loss=running.value(trainer.step.coefficients),
        validation=validation,
        learning_rate=learning_rate_of(trainer.step.optimizers),
        seconds=seconds,
        samples_per_second=rows / seconds if rows else 0.0,
        **running.counts,
    )


def _parts(step: Step) -> dict[str, Any]:
    return {
        "model": step.model,
        "loss": step.loss_module,
        "optimizers": step.optimizers,
        "schedulers": step.schedulers,
        "masters": step.masters,
    }


def _refuse_window(step: Step, wish: str) -> None:
    if step.open_window is not None:
        raise core.WindowError(
            f"Expected a step without an open window to {wish}, got one with {step.open_window.rows} rows in "
            "it. Close or discard it first."
        )


def _check_saving(out: object, minutes: float, keep: int) -> None:
    if not 0 <= minutes < math.inf:
        raise core.PlanError(f"Expected save_minutes of at least 0, got {minutes}. Pass 0 to leave them out.")
    if out is None and (minutes or keep):
        raise core.PlanError(
            f"Expected a folder for checkpoints, got none with save_minutes={minutes} and keep={keep}. Pass "
            "out= to the trainer."
        )


def _how_to_go_on(trainer: Trainer) -> str:
    out = trainer.out
    saved = "nothing was saved, as out= is None"
    if out is not None:
        last = (checkpoint.folders(out) or [out])[0]
        saved = f"{last} is saved; go on with trainer.resume({str(out)!r}) and fit()"
    return f"stopped at update {trainer.updates}; {saved}"


def _unknown_best(best_by: str, names: Iterable[str]) -> core.PlanError:
    return core.PlanError(
        f"Expected best_by to name a validation value, got {best_by!r}. Choose from {sorted(names)}."
    )
