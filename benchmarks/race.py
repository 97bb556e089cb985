"""The race: every contestant does the same updates in turn, in one process, and each block is one pair."""

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import cast

import torch
from torch import nn

from anybatch.engine import is_due
from benchmarks.config import Effort, RaceCase
from benchmarks.contestants import PEERS, RIVALS, Entry, Update
from benchmarks.exactness import relative_error
from benchmarks.ratios import paired_ratio
from benchmarks.results import Race
from benchmarks.tasks import TASKS, Batch, make_batch, make_model

BATCHES = 4  # updates walk through this many batches in turn
TRAINED = 200  # updates of a training whose seconds are summed up


def make_entry(case: RaceCase, *, seed: int) -> Entry:
    """A fresh copy of the model, for one contestant or for two that train it in turn."""
    task = TASKS[case.task]
    model = make_model(task, seed=seed)
    optimizer = task.optimizer(model.parameters())
    model = cast("nn.Module", torch.compile(model)) if case.compiled else model
    return Entry.of(case, task, model, optimizer)


class Runner:
    """One contestant, with its seconds by block and the garbage it leaves."""

    def __init__(self, entry: Entry, build: Callable[[Entry], Update]) -> None:
        self.model = entry.model
        self.update = build(entry)
        self.updates = 0
        self.garbage = 0
        self.blocks: list[int] = []
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.every: list[float] = []  # CPU seconds of each update since the first

    def segment(self, batches: Sequence[Batch], repeats: int) -> tuple[float, float]:
        """Wall and CPU seconds of `repeats` plain updates; garbage is collected after the clock has stopped.

        Updates that a step compares are made on the way, by everybody, and count in `every` only.
        """
        update = self.update
        torch.manual_seed(self.updates)  # everybody draws the same dropout
        wall = cpu = 0.0
        while repeats:
            batch = batches[self.updates % len(batches)]
            wall_before, cpu_before = time.perf_counter(), time.process_time()
            update(batch)
            cpu_spent, wall_spent = time.process_time() - cpu_before, time.perf_counter() - wall_before
            self.updates += 1
            self.every.append(cpu_spent)
            if not is_due(self.updates):
                wall, cpu, repeats = wall + wall_spent, cpu + cpu_spent, repeats - 1
        self.garbage += 0 if gc.isenabled() else gc.collect()
        return wall, cpu


def race(
    case: RaceCase,
    effort: Effort,
    builders: Mapping[str, Callable[[Entry], Update]],
    *,
    seconds: float,
    seed: int,
) -> Race:
    """Run blocks until anybatch's ratio is settled, or blocks or seconds are used up.

    Peers join every few blocks only: the hand-written loop is the one to beat. Where 1,000 updates have a
    limit, half of the seconds are for trainings from the first update on.
    """
    deadline = time.perf_counter() + seconds
    is_trained = case.thousand is not None and effort.trainings > 0
    pairs_end = deadline - seconds / 2 if is_trained else deadline
    rows = case.rows * case.micro_batches
    batches = [make_batch(TASKS[case.task], rows, seed=seed + i, ragged=case.ragged) for i in range(BATCHES)]
    runners = {name: Runner(make_entry(case, seed=seed), build) for name, build in builders.items()}
    order = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        with quiet_collector():
            repeats = max(1, round(effort.segment_s / _warm_up(runners, batches, effort.warm_up)))
            for block in range(effort.most_blocks):
                entrants = [name for name in runners if name not in PEERS or block % effort.peers_every == 0]
                order.shuffle(entrants)
                run_block(block, [runners[name] for name in entrants], batches, repeats)
                late = time.perf_counter() > pairs_end
                if block + 1 >= effort.least_blocks and (late or _settled(case, effort, runners)):
                    break
        most = effort.trainings if is_trained else 0
        training = _trainings(case, batches, repeats, most=most, deadline=deadline, seed=seed)
    return Race(
        case=case,
        blocks={name: runner.blocks for name, runner in runners.items()},
        wall={name: runner.wall for name, runner in runners.items()},
        cpu={name: runner.cpu for name, runner in runners.items()},
        step_s=median(runners["hand"].wall) / (2 * repeats),
        garbage={name: runner.garbage / runner.updates for name, runner in runners.items()},
        updates=runners["hand"].updates,
        difference=_difference(runners),
        training=training,
    )


def run_block(block: int, entrants: Sequence[Runner], batches: Sequence[Batch], repeats: int) -> None:
    """A palindrome of segments (A B B A): going first, or a machine that slowly warms up, favours nobody."""
    for runner in entrants:
        runner.blocks.append(block)
        runner.wall.append(0.0)
        runner.cpu.append(0.0)
    for runner in (*entrants, *reversed(entrants)):
        wall, cpu = runner.segment(batches, repeats)
        runner.wall[-1] += wall
        runner.cpu[-1] += cpu


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection inside, except where asked for; what exists now is not searched again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _trainings(
    case: RaceCase, batches: Sequence[Batch], repeats: int, *, most: int, deadline: float, seed: int
) -> dict[str, list[list[float]]]:
    """CPU seconds of each of the first updates of fresh contestants, in turn.

    Garbage is collected as in any program, while the clock runs: comparing leaves some.
    """
    found: dict[str, list[list[float]]] = {name: [] for name in RIVALS}
    for number in range(most):
        began = time.perf_counter()
        pair = {name: Runner(make_entry(case, seed=seed + number), build) for name, build in RIVALS.items()}
        order = list(pair.values())
        while order[0].updates < TRAINED:
            for runner in order:
                runner.segment(batches, repeats)
            order.reverse()  # A B B A
        for name, runner in pair.items():
            found[name].append(runner.every[:TRAINED])
        now = time.perf_counter()
        if now + (now - began) > deadline:
            break
    return found


def _warm_up(runners: Mapping[str, Runner], batches: Sequence[Batch], updates: int) -> float:
    """The same few updates for everybody; returns how long one of the hand-written loop takes."""
    for runner in runners.values():
        runner.segment(batches, updates)
    again = {name: runner.segment(batches, updates)[0] for name, runner in runners.items()}
    return again["hand"] / updates


def _settled(case: RaceCase, effort: Effort, runners: Mapping[str, Runner]) -> bool:
    ratio = paired_ratio(runners["anybatch"].cpu, runners["hand"].cpu)
    if case.threshold is None:
        return ratio.width <= 3 * effort.interval
    decided = not ratio.low <= case.threshold <= ratio.high
    return ratio.width <= effort.interval or (effort.decided and decided)


def _difference(runners: Mapping[str, Runner]) -> float:
    """Of anybatch's trained parameters from the hand-written loop's, relative; 0 for the same bits."""
    ours, by_hand = (
        torch.cat([p.detach().flatten() for p in runners[name].model.parameters()])
        for name in ("anybatch", "hand")
    )
    return 0.0 if torch.equal(ours, by_hand) else relative_error(ours.double(), by_hand.double())
