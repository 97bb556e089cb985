"""A campaign: the laws on hundreds of cases drawn at random, and trainings killed at random moments.

`python -m tests.soak [--minutes M | --rounds N] [--seed S] [--only LAW]` goes round by round. Each round
draws other cases; the same seed and round draw the same ones. It ends with 1 where a law is broken.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec

import hypothesis
import torch

from tests.conftest import TORCH_RANDOM
from tests.laws import planted
from tests.laws.drawn import LAWS, run
from tests.parallel import drawn, faults
from tests.parallel.deadly import AGENTS_S, stay
from tests.parallel.spawned import spawned
from tests.step import test_budgets_hold

EXAMPLES = 10  # of a law in a round, times its share
DEATHS = 6  # of the driver of servers and workers in a round; about forty of these end meanwhile
FAULTS = 34  # on a rank in a round, so that three rounds plant about 100
LOOKS = 100  # cases in a round
SAVES = 30  # kills in a round


def fault(seed: int) -> int:
    """Steps of three ranks, one of which meets a fault; then as many rows that fall on them anyhow."""
    with spawned(3) as ranks:
        faults.assert_all_agreed(ranks, "drawn", seed * FAULTS, FAULTS)
        ranks.run(drawn.several, seed * FAULTS, FAULTS, False, seconds=300.0)
    return 2 * FAULTS


def look(seed: int) -> int:
    """Losses and models with a fault that makes the result depend on the split, and without."""
    with warnings.catch_warnings():
        for number in range(seed * LOOKS, (seed + 1) * LOOKS):
            planted.assert_said(number)
    return LOOKS


def end(seed: int) -> int:
    """Windows of two ranks, in which one has a fault."""
    with spawned(2) as ranks:
        faults.assert_all_agreed(ranks, "window", seed * FAULTS, FAULTS)
    return FAULTS


def last(seed: int) -> int:
    """Faults in the last micro-batch of two and three ranks, while buckets are summed."""
    for size in (2, 3):
        with spawned(size) as ranks:
            faults.assert_all_agreed(ranks, "last", seed * FAULTS, FAULTS)
    return 2 * FAULTS


def shard(seed: int) -> int:
    """Sharded models on drawn rows, with a fault on one rank, and with one that ends or stands still."""
    for size, count in ((2, 75), (4, 20)):
        with spawned(size) as ranks:
            found = ranks.run(drawn.several, seed * count, count, True, seconds=600.0)
            assert all(one == found[0] for one in found)
            for loss in ("tokens", "whole"):
                faults.assert_all_agreed(ranks, "sharded", seed * count, count, loss)
    for number in range(6 * seed, 6 * seed + 6):
        with spawned(2 + number % 3) as ranks:
            faults.assert_ended(ranks, signal.SIGSTOP if number % 2 else signal.SIGKILL, number)
    return 291


def keep(seed: int) -> int:
    """Budgets in which memory runs out in drawn steps."""
    for number in range(seed * LOOKS, (seed + 1) * LOOKS):
        test_budgets_hold.run(number)
    return LOOKS


def save(seed: int) -> int:
    """Runs on 1, 2 and 4 ranks, plain and sharded, of which a rank is killed at any moment."""
    program = [sys.executable, "-m", "tests.parallel.mortal_saves"]
    command = [*program, "--kills", str(SAVES), "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stdout + done.stderr
    return SAVES


def serve(seed: int) -> int:
    """A training by servers and workers on Ray; how many of them, and of its drivers, ended."""
    command = [sys.executable, "-m", "tests.parallel.deadly", str(seed), str(DEATHS), "1"]
    mark = f"ANYBATCH_SOAK={seed} {os.getpid()}"
    environment = os.environ | dict([mark.split("=")])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert not done.returncode, done.stderr
    left = stay(mark, AGENTS_S)
    assert not left, f"after {AGENTS_S} s there are {left}"
    return sum(json.loads(done.stdout.splitlines()[-1])["ended"].values())


CAMPAIGNS: dict[str, Callable[[int], int]] = {
    "killed at any moment": save,
    "a fault planted in a loss": look,
    "a fault in a window of two ranks": end,
    "a fault in the last micro-batch of ranks": last,
    "sharded models": shard,
    "memory that runs out within a budget": keep,
    "a fault on one rank": fault,
} | ({"servers, workers and drivers that end": serve} if find_spec("ray") else {})


def attempt(law: str, seed: int) -> tuple[int, str]:
    """Return how many cases were tried, and what is wrong."""
    torch.manual_seed(0)
    random.seed(0)
    try:
        if law in CAMPAIGNS:
            return CAMPAIGNS[law](seed), ""
        examples = EXAMPLES * LAWS[law].share
        run(LAWS[law], seed=seed, examples=examples)
    except Exception:
        return 1, traceback.format_exc()
    return examples, ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="no round begins after these")
    parser.add_argument("--rounds", type=int, help="instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[*LAWS, *CAMPAIGNS])
    asked = parser.parse_args()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "reduction. 'mean' divides", UserWarning)
    warnings.filterwarnings("ignore", "Expected trained running statistics", UserWarning)  # nets made for it
    torch.set_num_threads(1)
    hypothesis.register_random(TORCH_RANDOM)
    tried: Counter[str] = Counter()
    broken: list[str] = []
    start, number = time.monotonic(), 0
    while number < asked.rounds if asked.rounds else time.monotonic() - start < 60 * asked.minutes:
        for law in [asked.only] if asked.only else [*LAWS, *CAMPAIGNS]:
            count, wrong = attempt(law, 1000 * asked.seed + number)
            tried[law] += count
            if wrong:
                broken.append(law)
                print(f"{wrong}\nbroken: {law!r}, seed {asked.seed}, round {number}", flush=True)
        number += 1
        cases = ", ".join(f"{law} {count}" for law, count in tried.items())
        print(f"{time.monotonic() - start:5.0f} s, round {number}: {cases}; {len(broken)} broken", flush=True)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
