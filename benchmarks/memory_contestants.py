"""Who trains under a limit of memory: anybatch, and the automatic modes of its peers, as documented."""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, Optimizer

import anybatch as ab

Batch = Mapping[str, Tensor]
ROWS, UPDATES = 32, 6
SHORT, LONG = 64, 128
LONG_UPDATE = 3  # whose rows are long: what fitted before does not fit then
IGNORE = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What each has to do: one update for every `ROWS` rows, in order, with `num_bytes` of memory to do it.

    Attributes:
        build: makes the model, the same each time.
        rows: tokens of each row.
        num_bytes: that tensors of a step may take, parameters included.
        tally: what is counted.
    """

    build: Callable[[], nn.Module]
    rows: Sequence[Tensor]
    num_bytes: int
    tally: "Tally"

    def prepare(self) -> tuple[nn.Module, Optimizer]:
        """A model and its optimizer, counted from here on; what was done before is lost."""
        self.tally.model = nn.Module()  # the one before must not stand in the way
        model = self.build()
        optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
        self.tally.follow(model, optimizer)
        return model, optimizer

    def batches(self, rows: int) -> Iterator[Batch]:
        """All rows, so many at a time."""
        for start in range(0, len(self.rows), rows):
            yield collate(self.rows[start : start + rows])


class Tally:
    """Counts rows through the model and updates, and what of them was for nothing.

    Attributes:
        model: the one in training now.
        rows: through the model in all.
        lost: updates made and thrown away.
        made: rows of each update that was kept.
        first_s: seconds from the start to the first update that was kept.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._pending = 0
        self.model: nn.Module = nn.Module()
        self.rows = 0
        self.lost = 0
        self.made: list[int] = []
        self.first_s = 0.0

    def follow(self, model: nn.Module, optimizer: Optimizer) -> None:
        """From here on this model and its optimizer."""
        self.restart()
        self.model = model
        model.register_forward_pre_hook(self._forward, with_kwargs=True)
        optimizer.register_step_post_hook(self._update)

    def restart(self) -> None:
        """What was made until now is thrown away."""
        self.lost += len(self.made)
        self.made, self._pending, self.first_s = [], 0, 0.0

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start

    def _forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del model, args
        rows = kwargs["input_ids"].shape[0]
        self.rows += rows
        self._pending += rows

    def _update(self, *_: object) -> None:
        if not self.made:
            self.first_s = self.seconds
        self.made.append(self._pending)
        self._pending = 0


def rows_of(words: int) -> list[Tensor]:
    """Rows of text, those of one update longer than the others."""
    generator = torch.Generator().manual_seed(0)
    lengths = [LONG if update == LONG_UPDATE else SHORT for update in range(UPDATES) for _ in range(ROWS)]
    return [torch.randint(words, (length,), generator=generator) for length in lengths]


def collate(rows: Sequence[Tensor]) -> Batch:
    """Padded to the longest; padding has no label."""
    tokens = pad_sequence(list(rows), batch_first=True)
    labels = pad_sequence(list(rows), batch_first=True, padding_value=IGNORE)
    return {"input_ids": tokens, "labels": labels}


def planned(job: Job) -> None:
    """anybatch, told the bytes there are."""
    _steps(job, memory=job.num_bytes)


def surviving(job: Job) -> None:
    """anybatch, told nothing: all rows at once, and smaller parts when memory runs out."""
    _steps(job)


def _steps(job: Job, **options: Any) -> None:
    model, optimizer = job.prepare()
    step = ab.Step(model, ab.ModelLoss(), optimizer, options=ab.Options(check=False), **options)
    for batch in job.batches(ROWS):
        report = step(batch)
        job.tally.made[-1] = report.rows  # without those that went through the model twice


def accelerate(job: Job) -> None:
    """accelerate's `find_executable_batch_size`: the training function starts anew with 0.9 of the rows."""
    from accelerate import Accelerator
    from accelerate.utils import find_executable_batch_size

    accelerator = Accelerator(cpu=True)

    @find_executable_batch_size(starting_batch_size=ROWS)
    def train(batch_size: int) -> None:
        accelerator.free_memory()
        model, optimizer = accelerator.prepare(*job.prepare())
        for batch in job.batches(batch_size):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    train()


def lightning(job: Job) -> None:
    """Lightning's batch-size finder, then a fit that adds up gradients to the rows that were wanted."""
    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.inner, self.optimizer = job.prepare()

        def training_step(self, batch: Batch, _: int) -> Tensor:
            return self.inner(**batch).loss

        def configure_optimizers(self) -> Optimizer:
            return self.optimizer

        def train_dataloader(self) -> Any:
            return DataLoader(list(job.rows), batch_size=self.batch_size, collate_fn=collate)  # type: ignore

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "max_epochs": 1}
    quiet |= {"default_root_dir": tempfile.gettempdir()}
    module = Module()
    Tuner(pl.Trainer(**quiet)).scale_batch_size(module, mode="power", max_val=2 * ROWS)
    job.tally.restart()
    gc.collect()
    parts = max(1, ROWS // module.batch_size)
    pl.Trainer(**quiet, accumulate_grad_batches=parts).fit(module)


OURS: dict[str, Callable[[Job], None]] = {"anybatch, planned": planned, "anybatch": surviving}
PEERS: dict[str, Callable[[Job], None]] = {"accelerate": accelerate, "lightning": lightning}
CONTESTANTS = OURS | PEERS
PACKAGES = {"accelerate": "accelerate", "lightning": "lightning"}
