"""LeNet-5 on MNIST in every precision, from one seed: the test accuracies beside float32's."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

import anybatch as ab
from anybatch.core.errors import DataError
from anybatch.data.dataset import Dataset, DataSplit
from anybatch.data.load import load
from benchmarks.memory_report import Record
from benchmarks.models import LeNet5
from benchmarks.precision_config import Lessons, Part, Settings
from benchmarks.report import table
from benchmarks.thresholds import Verdict

PRECISIONS = ("float32", "bf16-mixed", "fp16-mixed", "bf16-true", "fp16-true")
TESTED = 500  # rows that are tested together


def measure(settings: Settings) -> Iterator[Record]:
    """One record for each precision, or one that says why there is none."""
    try:
        split = read(settings.data, settings.lessons)
    except DataError as error:
        yield {"skipped": str(error)}
        return
    for precision in PRECISIONS:
        record = train(precision, split, settings.lessons, seed=settings.seed)
        print(
            f"lenet5 in {precision}: {record['accuracy'][-1]:.2%} after {record['seconds']:.0f} s", flush=True
        )
        yield record


def read(folder: Path | None, lessons: Lessons) -> DataSplit:
    """As many rows of MNIST as are wanted.

    Raises:
        DataError: it is not there.
    """
    if folder is None:
        raise DataError(f"Expected --data with the folder of MNIST in IDX form, got {folder}. Name it.")
    whole = load(folder)
    return DataSplit(
        train=_first(whole.train, lessons.train_rows), test=_first(whole.test, lessons.test_rows)
    )


def _first(rows: Dataset, count: int) -> Dataset:
    return replace(rows, inputs=rows.inputs[:count], targets=rows.targets[:count])


def train(precision: str, split: DataSplit, lessons: Lessons, *, seed: int) -> Record:
    """A few epochs in one precision; weights and the order of the rows come from the seed alone."""
    order = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LeNet5()
    count = -(-len(split.train) // lessons.rows) * lessons.epochs
    optimizer = SGD(model.parameters(), lr=lessons.lr, momentum=0.9)
    decay = LambdaLR(optimizer, lambda update: 1 - update / count)
    step = ab.Step(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        micro_batch=lessons.micro_batch,
        options=ab.Options(scheduler=decay),
        precision=precision,
    )
    accuracy: list[float] = []
    redone = updates = 0
    start = time.perf_counter()
    for _ in range(lessons.epochs):
        for rows in torch.randperm(len(split.train), generator=order).split(lessons.rows):
            report = step((split.train.inputs[rows], split.train.targets[rows]))
            redone, updates = redone + report.redone, updates + report.updated
        accuracy.append(tested(step, split.test))
    return {
        "precision": precision,
        "accuracy": accuracy,
        "updates": updates,
        "redone": redone,
        "scale": step.scale.value,
        "seconds": time.perf_counter() - start,
        "points": lessons.points,
        "worst": lessons.worst,
        "rows": len(split.train),
        "batch": lessons.rows,
        "micro_batch": lessons.micro_batch,
    }


@torch.no_grad()
def tested(step: ab.Step, rows: Dataset) -> float:
    """The share of rows that the model tells right, in the precision that it is trained in."""
    right = 0
    for inputs, targets in zip(rows.inputs.split(TESTED), rows.targets.split(TESTED), strict=True):
        with step.precision.computing({"cpu"}):
            right += int((step.model(inputs).argmax(1) == targets).sum())
    return right / len(rows)


# ---- judgement and report


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    """Every precision learns what float32 learns, and float32 learns."""
    final = {record["precision"]: 100 * record["accuracy"][-1] for record in records if "accuracy" in record}
    for record in records:
        name = record.get("precision")
        if name == "float32":
            what = "lenet5 in float32: test error in percent"
            yield Verdict(what=what, measured=100 - final[name], limit=record["worst"])
        elif name is not None:
            far = abs(final[name] - final["float32"])
            yield Verdict(what=f"lenet5 in {name}: points from float32", measured=far, limit=record["points"])


def sections(records: Sequence[Record]) -> Iterator[str]:
    """A line for each precision."""
    yield from ("", "## LeNet-5 on MNIST, from one seed")
    yield from (
        line for record in records if "skipped" in record for line in ("", f"Left out: {record['skipped']}")
    )
    trained = [record for record in records if "accuracy" in record]
    if not trained:
        return
    epochs = len(trained[0]["accuracy"])
    header = (
        "precision",
        *(f"epoch {epoch}" for epoch in range(1, epochs + 1)),
        *("updates", "redone", "last scale", "seconds"),
    )
    lines = [
        (
            record["precision"],
            *(f"{accuracy:.2%}" for accuracy in record["accuracy"]),
            *(f"{record['updates']:,}", f"{record['redone']:,}", f"{record['scale']:,.0f}"),
            f"{record['seconds']:.0f}",
        )
        for record in trained
    ]
    first = trained[0]
    yield from ("", *table(header, lines), "")
    yield (
        f"Test accuracy after each epoch of {first['rows']:,} rows, in batches of {first['batch']} cut into "
        f"micro-batches of {first['micro_batch']}."
    )
    yield "Redone: micro-batches whose gradient overflowed. Seconds: of one core of a shared machine."


PART = Part(measure=measure, judge=judge, sections=sections)
