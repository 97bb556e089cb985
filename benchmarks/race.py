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

from benchmarks.config import Effort, RaceCase
from benchmarks.contestants import PEERS, Entry, Update
from benchmarks.exactness import relative_error
from benchmarks.ratios import paired_ratio
from benchmarks.results import Race
from benchmarks.tasks import TASKS, Batch, make_batch, make_model

BATCHES = 4  # updates walk through this many batches in turn


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

    def segment(self, batches: Sequence[Batch], repeats: int) -> tuple[float, float]:
        """Wall and CPU seconds of `repeats` updates; garbage is collected after the clock has stopped."""
        update, first = self.update, self.updates
        torch.manual_seed(first)  # everybody draws the same dropout
        wall, cpu = time.perf_counter(), time.process_time()
        for index in range(first, first + repeats):
            update(batches[index % len(batches)])
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        self.updates += repeats
        self.garbage += gc.collect()
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

    Peers join every few blocks only: the hand-written loop is the one to beat.
    """
    deadline = time.perf_counter() + seconds
    rows = case.rows * case.micro_batches
    batches = [make_batch(TASKS[case.task], rows, seed=seed + i, ragged=case.ragged) for i in range(BATCHES)]
    runners = {name: Runner(make_entry(case, seed=seed), build) for name, build in builders.items()}
    order = random.Random(seed)
    with quiet_collector(), torch.random.fork_rng(devices=[]):
        repeats = max(1, round(effort.segment_s / _warm_up(runners, batches, effort.warm_up)))
        for block in range(effort.most_blocks):
            entrants = [name for name in runners if name not in PEERS or block % effort.peers_every == 0]
            order.shuffle(entrants)
            run_block(block, [runners[name] for name in entrants], batches, repeats)
            late = time.perf_counter() > deadline
            if block + 1 >= effort.least_blocks and (late or _settled(case, effort, runners)):
                break
    return Race(
        case=case,
        blocks={name: runner.blocks for name, runner in runners.items()},
        wall={name: runner.wall for name, runner in runners.items()},
        cpu={name: runner.cpu for name, runner in runners.items()},
        step_s=median(runners["hand"].wall) / (2 * repeats),
        garbage={name: runner.garbage / runner.updates for name, runner in runners.items()},
        updates=runners["hand"].updates,
        difference=_difference(runners),
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
