"""Rules of an asynchronous parameter server on digits, in virtual time: uneven workers, many learning rates.

`python -m benchmarks.asynchronous [--quick] [--picture FILE]`: worker k takes about `slowness[k]` for a
micro-batch and 1 to push and pull. In one setting the staleness has a bound, as in `ParameterServer`. Nothing
depends on the machine but the seconds of the study.
"""

import random
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from heapq import heappop, heappush, heapreplace
from itertools import product
from math import inf
from pathlib import Path
from statistics import mean, median

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from anybatch.core import PlanError
from anybatch.data import hold_out_rows, load
from anybatch.observe.figure import checked, new_figure, save
from anybatch.parallel import make_rule
from benchmarks.memory_report import Raw, Record, Study
from benchmarks.report import table
from benchmarks.thresholds import Verdict

# Rule, workers, micro-batches of each between pull and push, units that one may be ahead of the slowest.
Run = tuple[str, int, int] | tuple[str, int, int, int]
RULES = ("accumulate", "normalize", "dynsgd", "synchronous")
SETTINGS = [*product((4, 10), (5, 10, 20))]
BOUNDED: list[Run] = [(rule, 10, 10, bound) for rule, bound in product(RULES[:3], (0, 2))]
ALONE: Run = ("synchronous", 1, 1)  # plain SGD in one process
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
PACKAGES = ("scikit-learn",)
ROWS, EPOCHS, SEEDS, MARKS = 4, 20, 5, 20  # rows of a micro-batch; epochs that workers of slowness 1 compute
SPREAD, JITTER = 0.5, 0.1  # standard deviation of the logarithm: slowness of workers; time of each round


@cache
def digits() -> list[tuple[Tensor, Tensor]]:
    """Training rows, rows that choose the learning rate, test rows: 64 pixels each."""
    split = load("digits")
    train, name = split.train, split.train.name
    parts = [
        (train.inputs[rows], train.targets[rows]) for rows in hold_out_rows(len(train), 0.2, 0, name=name)
    ]
    parts.append((split.test.inputs, split.test.targets))
    return [(F.avg_pool2d(inputs, 4).flatten(1), targets) for inputs, targets in parts]


class World:
    """An MLP with its parameters in one flat tensor, the order of the rows, and the workers' clocks."""

    def __init__(self, run: Run, rate: float, seed: int, epochs: int) -> None:
        _, self.workers, self.local, *bound = run
        self.bound = bound[0] if bound else inf
        self.rate, self.draw = rate, random.Random(seed)
        spread = SPREAD if self.workers > 1 else 0
        self.slowness = [self.draw.lognormvariate(0, spread) for _ in range(self.workers)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        self.parameters = [*self.model.parameters()]
        self.flat = parameters_to_vector(self.parameters).detach()
        self.order, self.left = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.int64)
        self.horizon = epochs * len(digits()[0][1]) / ROWS / self.workers
        self.curve, self.rows = list[float](), 0

    def time_for(self, worker: int, micro_batches: int) -> float:
        return micro_batches * self.slowness[worker] * self.draw.lognormvariate(0, JITTER)

    def descend(self, flat: Tensor, updates: int, rows: int) -> Tensor:
        """Parameters after some updates of SGD by the next rows, each row once in each epoch."""
        vector_to_parameters(flat := flat.clone(), self.parameters)  # views of `flat` from here on
        inputs, targets = digits()[0]
        while len(self.left) < updates * rows:
            self.left = torch.cat([self.left, torch.randperm(len(targets), generator=self.order)])
        taken, self.left = self.left.tensor_split([updates * rows])
        self.rows += len(taken)
        first, bias, last, last_bias = self.parameters  # a third faster than modules and `parameter.data`
        values = [parameter.data for parameter in self.parameters]
        for some in taken.split(rows):
            hidden = torch.tanh(F.linear(inputs[some], first, bias))
            loss = F.cross_entropy(F.linear(hidden, last, last_bias), targets[some])
            gradients = torch.autograd.grad(loss, self.parameters)
            for value, gradient in zip(values, gradients, strict=True):
                value.add_(gradient, alpha=-self.rate)
        return flat

    @torch.no_grad()
    def accuracy(self, part: int) -> float:
        inputs, targets = digits()[part]
        vector_to_parameters(self.flat, self.parameters)
        return 100 * float((self.model(inputs).argmax(1) == targets).float().mean())

    def until(self, now: float) -> bool:
        """Note the test accuracy at each mark before `now`; whether time is left then."""
        while len(self.curve) < MARKS and self.horizon * (len(self.curve) + 1) / MARKS < now:
            self.curve.append(self.accuracy(2))
        return now <= self.horizon


def asynchronous(world: World, name: str) -> Iterator[int]:
    """Each worker pulls, makes local updates and pushes, within its bound; the staleness, -1 if refused."""
    rule, version, now = make_rule(name), 0, 0.0  # type: ignore[arg-type]
    clocks, idle = [0] * world.workers, [*range(world.workers)]
    pulled, events = dict[int, tuple[Tensor, int]](), list[tuple[float, int]]()
    while True:
        for worker in [one for one in idle if clocks[one] - min(clocks) <= world.bound]:
            idle.remove(worker)
            pulled[worker] = world.flat.clone(), version
            heappush(events, (now + world.time_for(worker, world.local) + 1, worker))
        now, worker = heappop(events)
        if not world.until(now):
            return
        start, seen = pulled[worker]
        pushed = world.descend(start, world.local, ROWS) - start
        try:
            rule.apply(world.flat, pushed, staleness=version - seen, steps=world.local)
            yield version - seen
            version += 1
        except PlanError:  # NaN or infinity; the worker pulls and goes on
            yield -1
        clocks[worker] += 1
        idle.append(worker)


def synchronous(world: World) -> Iterator[int]:
    """As many rows between messages, but one exact update of all; a micro-batch goes to who is free first."""
    now, count = 0.0, world.workers * world.local
    while True:
        free = [(now, worker) for worker in range(world.workers)]
        for _ in range(count):
            heapreplace(free, (free[0][0] + world.time_for(free[0][1], 1), free[0][1]))
        now = max(free)[0] + (world.workers > 1)
        if not world.until(now):
            return
        world.flat = world.descend(world.flat, 1, count * ROWS)
        yield 0


def simulate(run: Run, rate: float, seed: int, epochs: int) -> Record:
    began, world = time.process_time(), World(run, rate, seed, epochs)
    pushes = [*(synchronous(world) if run[0] == "synchronous" else asynchronous(world, run[0]))]
    world.until(inf)
    stale, valid = [one for one in pushes if one >= 0] or [0], world.accuracy(1)
    figures = {
        "updates": len(stale),
        "refused": pushes.count(-1),
        "staleness": mean(stale),
        "rows": world.rows,
    }
    clocks = {"horizon": world.horizon, "seconds": time.process_time() - began}
    return {"run": run, "rate": rate, "curve": world.curve, "valid": valid, **figures, **clocks}


def measure(*, seeds: int, epochs: int) -> Iterator[Record]:
    """Every rule in every setting; and in the end the first run again, to show that it repeats."""
    runs = [ALONE, *(("synchronous", workers, 1) for workers in (4, 10))]
    for run in [*runs, *((rule, *setting) for rule, setting in product(RULES, SETTINGS)), *BOUNDED]:
        yield from (simulate(run, rate, seed, epochs) for rate, seed in product(RATES, range(seeds)))
        print(*run, "done", flush=True)
    yield simulate(ALONE, RATES[0], 0, epochs)


class Found(dict[Run, dict[float, list[Record]]]):
    """Records by run and learning rate: those of all seeds."""

    def __init__(self, records: Sequence[Record]) -> None:
        for record in records[:-1]:
            run: Run = tuple(record["run"])  # JSON makes it a list
            self.setdefault(run, {}).setdefault(record["rate"], []).append(record)

    def best(self, run: Run) -> float:
        """The learning rate that is best on rows held out of training, in the mean over the seeds."""
        return max(RATES, key=lambda rate: mean(one["valid"] for one in self[run][rate]))

    def curves(self, run: Run, rate: float) -> list[list[float]]:
        """Test accuracies at all marks: median, lowest and highest of the seeds."""
        marks = [*zip(*(one["curve"] for one in self[run][rate]), strict=True)]
        return [[figure(mark) for mark in marks] for figure in (median, min, max)]


def judge(records: Sequence[Record]) -> Iterator[Verdict]:
    """The simulation repeats and learns; which rule wins is a finding, not a threshold."""
    found = Found(records)
    apart = max(abs(a - b) for a, b in zip(records[0]["curve"], records[-1]["curve"], strict=True))
    error = 100 - found.curves(ALONE, found.best(ALONE))[0][-1]
    yield Verdict(what="the same run again: points apart", measured=apart, limit=0)
    yield Verdict(what="one process: test error in percent", measured=error, limit=5)
    yield Verdict(what="CPU minutes", measured=sum(one["seconds"] for one in records) / 60, limit=20)


def sections(records: Sequence[Record]) -> Iterator[str]:
    """A line for each rule and setting."""
    found, lines = Found(records), list[tuple[str, ...]]()
    shared = found.best(ALONE)
    for run, rates in found.items():
        best = found.best(run)
        ends = ([curve[-1] for curve in found.curves(run, rate)] for rate in (best, shared))
        means = [mean(one[name] for one in rates[best]) for name in ("staleness", "updates", "rows")]
        refused = sum(one["refused"] for runs in rates.values() for one in runs)
        figures = (f"{means[0]:.1f}", f"{means[1]:,.0f}", f"{means[2]:,.0f}", str(refused))
        accuracies = ("{:.1f} ({:.1f} to {:.1f})".format(*end) for end in ends)
        setting = (*map(str, run), *["none"] * (4 - len(run)))
        lines.append((*setting, f"{best:g}", *accuracies, *figures))
    yield from (
        "",
        "## Who wins: settings in which the median at the end is the highest, ties on both sides",
        "",
    )
    for title, rate_of in ((f"all at {shared:g}", lambda _: shared), ("each at its best rate", found.best)):
        runs = ([(rule, *setting) for rule in RULES[:3]] for setting in SETTINGS)
        ends = [[round(found.curves(run, rate_of(run))[0][-1], 1) for run in three] for three in runs]
        wins = (sum(three[index] == max(three) for three in ends) for index in range(3))
        counts = ", ".join(f"{rule} {count}" for rule, count in zip(RULES, wins, strict=False))
        yield f"- {title}: {counts} of {len(ends)}"
    header = ("rule", "workers", "local", "bound", "best rate", "accuracy at best rate, %")
    yield from ("", "## Test accuracy at the end", "")
    yield from (*table((*header, f"at {shared:g}, %", "staleness", "updates", "rows", "refused"), lines), "")
    yield "Medians and ranges over the seeds. Local: micro-batches of 4 rows between a pull and the push."
    yield "Bound: units that a worker may be ahead of the slowest; with more it waits."
    yield f"Best rate: of {', '.join(map('{:g}'.format, RATES))}, by a fifth of the training rows, held out."
    yield f"{shared:g} is the best rate of one process. Refused: pushes that are not finite, at all rates."


def picture(records: Sequence[Record], path: Path) -> None:
    """Accuracy over virtual time, a panel for each setting."""
    found, figure = Found(records), new_figure(11, 6.6)
    shared = found.best(ALONE)
    panels = figure.subplots(2, 3, sharex="row", sharey=True).flat
    for panel, setting in zip(panels, SETTINGS, strict=True):
        panel.set_title(f"{setting[0]} workers, {setting[1]} local micro-batches", fontsize=10)
        panel.grid(alpha=0.3)
        for color, rule in zip(("C3", "C0", "C2", "0.35"), RULES, strict=True):
            run: Run = (rule, *setting)
            horizon, best = found[run][shared][0]["horizon"], found.best(run)
            times = [horizon * number / MARKS for number in range(1, MARKS + 1)]
            panel.plot(times, found.curves(run, shared)[0], ":", color=color)
            middle, low, high = found.curves(run, best)
            panel.plot(times, middle, color=color, label=rule)
            panel.fill_between(times, low, high, color=color, alpha=0.15)
    panels[0].legend(loc="lower right", fontsize=8)
    figure.supxlabel("virtual time (1: a micro-batch on a worker of median speed)", fontsize=10)
    figure.supylabel("test accuracy, %", fontsize=10)
    title = f"Solid: each at its best learning rate, median and range. Dotted: all at {shared:g}, median"
    figure.suptitle(title, fontsize=11)
    save(figure, checked(path), title="", text="")


def main(arguments: Sequence[str] | None = None) -> int:
    torch.set_num_threads(1)
    title = "Rules of an asynchronous parameter server in virtual time"
    study = Study(kind="asynchronous", title=title, judge=judge, sections=sections, packages=PACKAGES)
    parser = study.parser()
    parser.add_argument("--quick", action="store_true", help="two seeds, five epochs: for a first look")
    parser.add_argument("--picture", type=Path, help="write one, which needs matplotlib")
    options = parser.parse_args(arguments)
    name, seeds, epochs = ("quick", 2, 5) if options.quick else ("digits", SEEDS, EPOCHS)
    records = [] if options.raw else measure(seeds=seeds, epochs=epochs)
    raw = Raw.load(options.raw) if options.raw else study.collected(records, config=name)
    if options.picture:
        picture(raw.records, options.picture)
    return study.finish(raw, options.folder, keep=not options.raw)


if __name__ == "__main__":
    sys.exit(main())
