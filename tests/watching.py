"""Losses and models whose result depends on the split: from more rows on, later, in backward, in windows.

`python -m tests.watching [--part cases|exact|drawn|cost] [--only NAME] [--share S] [--rounds N] [--seed S]`
plays a share of the cases through every door, and ends with 1 where a wrong update stays silent.
"""

import argparse
import copy
import random
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anybatch as ab

UPDATES, RATE, ROUNDING = 9, 0.05, 1e-9
MICRO, ROWS, SEEDS = (1, 2, 5, 8, 16), (40, 128), range(5)
DOORS = ("step", "window", "batch_loss")
Batch = tuple[Tensor, ...]
Make = Callable[[], tuple[nn.Module, Any]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Model and loss from a seed, batches of an update, and what changes before it.

    Attributes:
        parts: rows of the parts of a window, in place of equal ones.
        is_figure: the value of the loss counts too.
    """

    kind: str
    make: Make
    batch: Callable[[int, int], Any]
    change: Callable[[nn.Module, Any, int], None] = lambda model, loss, update: None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    doors: tuple[str, ...] = DOORS
    collate: Any = None
    parts: Callable[[int], list[int]] | None = None
    is_figure: bool = False


def vectors(rows: int, update: int) -> Batch:
    """Features, classes, values, a mask of ones."""
    return torch.randn(rows, 6), torch.randint(4, (rows,)), torch.randn(rows, 4), torch.ones(rows)


def whole(loss: Any, model: nn.Module, batch: Any) -> Tensor:
    """The loss of the whole batch, without anybatch."""
    if isinstance(loss, nn.Module):
        return loss(model(batch[0]), *batch[1:])
    if isinstance(loss, ab.PerRow):
        found = loss.function(model(batch[0]), *batch[1:])
        values, weights = found if isinstance(found, tuple) else (found, torch.ones_like(found))
        return (values * weights).sum() / weights.expand_as(values).sum()
    if isinstance(loss, ab.WholeBatch):
        value = loss.function(model(batch[0]), *batch[1:])
        return value.mean() if isinstance(value, ab.Total) else value
    if isinstance(loss, ab.ModelLoss):
        return loss.call(model, batch)
    if isinstance(loss, ab.Additive):
        return loss.function(model, batch)
    found = loss(model, batch)
    totals: Iterable[ab.Total] = found.values() if isinstance(found, Mapping) else [found]
    return torch.stack([torch.as_tensor(one.sum / one.weight) for one in totals]).sum()


def truth(case: Case, model: nn.Module, loss: Any, batch: Any) -> tuple[list[Tensor], float]:
    """Gradients and value of one plain backward on copies; the random stream stays where it is."""
    model, loss = copy.deepcopy((model, loss))
    model.zero_grad()
    with torch.random.fork_rng(devices=[]):
        value = whole(loss, model, case.collate(batch) if case.collate else batch)
        value.backward()
    held = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained(model)]
    return held, value.item()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def taken(batch: Any, start: int, end: int) -> Any:
    return batch[start:end] if isinstance(batch, list) else tuple(one[start:end] for one in batch)


class Played:
    """A training through one door, whose gradients are compared with the truth."""

    def __init__(self, case: Case, door: str, micro: int, **more: Any) -> None:
        self.case, self.door, self.micro, self.noted = case, door, micro, ""
        self.model, self.loss = case.make()
        self.model.double()
        self.optimizer = torch.optim.SGD(trained(self.model), lr=RATE)
        keywords: dict[str, Any] = {
            "micro_batch": None if door == "window" else micro,
            "collate": case.collate,
            "options": ab.Options(**{**case.options, **more}),
        }
        if door.startswith("batch_loss"):
            self.step: Any = ab.BatchLoss(self.model, self.loss, **keywords)
        else:
            self.step = ab.Step(self.model, self.loss, self.optimizer, **keywords)

    def add(self, window: Any, batch: Any) -> None:
        rows = len(batch) if isinstance(batch, list) else len(batch[0])
        sizes = self.case.parts(rows) if self.case.parts else [self.micro] * -(-rows // self.micro)
        start = 0
        for size in sizes:
            window.add(taken(batch, start, min(start + size, rows)))
            start += size

    def gradient(self, batch: Any) -> tuple[list[Tensor], Any]:
        before = [p.detach().clone() for p in trained(self.model)]
        if not self.door.startswith("batch_loss"):
            if self.door == "window":
                with self.step.window() as window:
                    self.add(window, batch)
                report = window.report
            else:
                report = self.step(batch)
            pairs = zip(before, trained(self.model), strict=True)
            return [(old - new.detach()) / RATE for old, new in pairs], report
        given = batch
        if self.door == "batch_loss window":  # the gradient of the update before is dropped late
            given = self.step.window()
            self.add(given, batch)
        if self.door != "batch_loss":
            self.optimizer.zero_grad()
        self.step(given).backward()
        held = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trained(self.model)]
        self.optimizer.step()
        if self.door == "batch_loss":
            self.optimizer.zero_grad()
        return held, self.step.report

    def update(self, number: int, rows: int) -> str:
        """Return "exact", "refused", "warned", "silent" or "lost", or the name of a foreign error."""
        self.case.change(self.model, self.loss, number)
        batch = self.case.batch(rows, number)
        expected, value = truth(self.case, self.model, self.loss, batch)
        before = [p.detach().clone() for p in trained(self.model)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found, report = self.gradient(batch)
            except ab.AnybatchError as error:
                self.noted = f"{type(error).__name__}: {error}"
                kept = all(torch.equal(*pair) for pair in zip(before, trained(self.model), strict=True))
                return "refused" if kept else "lost"
            except Exception as error:
                self.noted = f"{type(error).__name__}: {error}"
                return type(error).__name__
        self.noted = self.noted or next((str(one.message) for one in caught), "") or report.unchecked
        apart = [new - old for new, old in zip(found, expected, strict=True)]
        size, off = (torch.cat([one.flatten() for one in all_]).norm().item() for all_ in (expected, apart))
        is_wrong = off > ROUNDING * max(size, 1e-6) + 1e-12 / RATE
        if self.case.is_figure:
            is_wrong |= abs(report.loss - value) > ROUNDING * max(1.0, abs(value))
        if not is_wrong:
            return "exact"
        return "warned" if self.noted or not report.checked else "silent"


@contextmanager
def float64() -> Iterator[None]:
    """New tensors are float64, and the random stream is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def play(
    case: Case, door: str, micro: int, rows: int, seed: int, updates: int = UPDATES
) -> tuple[list[str], str]:
    """The word of each update, up to the first that is refused; and the first thing that was noted."""
    with float64():
        torch.manual_seed(seed)
        played, said = Played(case, door, micro), list[str]()
        for number in range(1, updates + 1):
            said.append(played.update(number, rows))
            if said[-1] not in ("exact", "warned", "silent"):
                break
    return said, played.noted


def broken(said: list[str], *, last: int = 8) -> str:
    """Name the law that a play breaks: no update is silent from the first power of two on, or after 8."""
    silent = [number for number, one in enumerate(said, 1) if one == "silent"]
    odd = [one for one in said if one not in ("exact", "warned", "silent", "refused")]
    if silent:
        due = 1 << (silent[0] - 1).bit_length()
        late = [one for one in silent if one >= min(due, last + 1)]
        return f"SILENT at {silent}, due by {due}" if late else odd[0] if odd else ""
    return odd[0] if odd else ""


def checked(case: Case, rows: int, seed: int) -> str:
    """The word of `ab.check` on the state of the last update."""
    with float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        played = Played(case, "step", 5)
        for number in range(1, UPDATES + 1):
            case.change(played.model, played.loss, number)
            batch = case.batch(rows, number)
            with torch.no_grad():
                for p in trained(played.model):
                    p.add_(0.02 * torch.randn_like(p))
        try:
            options = ab.Options(**case.options)
            report = ab.check(played.model, played.loss, batch, collate=case.collate, options=options)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:120]
        return "exact" if report.exact else "not exact"


def run_cases(
    names: list[str], drawn: random.Random, share: float, failing: Path | None, verbose: bool = False
) -> int:
    bad = list[str]()
    from tests.watched import CASES

    for name in names:
        case, found = CASES[name], Counter[str]()
        every = [*product(case.doors, MICRO, ROWS, SEEDS)]
        begin = time.process_time()
        for door, micro, rows, seed in drawn.sample(every, max(1, round(share * len(every)))):
            said, noted = play(case, door, micro, rows, seed)
            why = broken(said)
            if verbose:
                print(door, micro, rows, seed, said, noted[:300])
            found[
                why.split(" at")[0] or (said[-1] if said[-1] == "refused" else max(said, key=RANK.index))
            ] += 1
            if why:
                bad.append(f"{name} | {door} | micro {micro} of {rows} | seed {seed} | {why}")
        print(f"{case.kind:20} {name:34} {dict(found)} check: {checked(case, 40, 0)}", end=" ")
        print(f"{time.process_time() - begin:.1f} s", flush=True)
    if failing:
        failing.write_text("\n".join(bad) + "\n")
    print(f"{len(bad)} plays break the law", *bad[:20], sep="\n")
    return len(bad)


RANK = ["exact", "warned", "silent"]


def run_exact(names: list[str], drawn: random.Random, share: float, failing: Path | None) -> int:
    """Losses that no split changes: refused, wrong or warned is told."""
    from tests.unsplit import EXACT

    bad = list[str]()
    for name in names:
        for dropout, door, micro in product((0.0, 0.3), DOORS, (1, 5, 16)):
            is_refused = door == "window" and name.endswith("as WholeBatch")  # by name
            if drawn.random() > share or is_refused:
                continue
            case = EXACT[name](dropout)
            with float64():
                torch.manual_seed(0)
                played = Played(case, door, micro)
                for number in range(1, 5):
                    said = played.update(number, 40)
                    if played.noted or (said != "exact" and not dropout):
                        where = f"{name} | dropout {dropout} | {door} | micro {micro} | update {number}"
                        bad.append(f"{where} | {said} | {played.noted[:150]}")
                        break
    if failing:
        failing.write_text("\n".join(bad) + "\n")
    print(f"{len(bad)} of {len(names)} losses refused, wrong or warned", *bad, sep="\n")
    return len(bad)


def run_drawn(names: list[str], drawn: random.Random, share: float, failing: Path | None) -> int:
    """400 combinations of which one thing changes at an update from 2 to 12."""
    from tests.unsplit import draw

    bad, found = list[str](), Counter[str]()
    for number in range(round(400 * share)):
        case, name, door, micro, rows = draw(drawn)
        if names and not any(one in name for one in names):
            continue
        said, _ = play(case, door, micro, rows, number, updates=20)
        why = broken(said, last=19)
        found[why.split(" at")[0] or said[-1]] += 1
        if why:
            bad.append(f"{name} | {door} | micro {micro} of {rows} | seed {number} | {why}")
    if failing:
        failing.write_text("\n".join(bad) + "\n")
    print(dict(found), *bad, sep="\n")
    return len(bad)


def run_cost(*_: Any) -> int:
    """CPU time of 500 updates with `check` on and off, in turns, and of the first step."""
    from benchmarks.models import WORDS, LeNet5, bert_tiny

    def bert_call(model: nn.Module, batch: Batch) -> Tensor:
        return model(input_ids=batch[0], labels=batch[1]).loss

    images = torch.randn(32, 1, 32, 32), torch.randint(10, (32,))
    words, labels = torch.randint(WORDS, (16, 24)), torch.randint(2, (16,))
    for name, model, loss, batch in (
        ("LeNet-5", LeNet5, nn.CrossEntropyLoss(), images),
        ("BERT", bert_tiny, ab.ModelLoss(call=bert_call), (words, labels)),
    ):
        spent, each = {True: 0.0, False: 0.0}, {True: list[float](), False: list[float]()}
        first = dict[bool, float]()
        steps = {}
        for check in spent:
            torch.manual_seed(0)
            made = model()
            optimizer = torch.optim.SGD(made.parameters(), lr=1e-3)
            steps[check] = ab.Step(made, loss, optimizer, micro_batch=4, options=ab.Options(check=check))
        for number in range(500):
            for check in (True, False) if number % 2 else (False, True):
                begin = time.process_time()
                steps[check](batch)
                took = time.process_time() - begin
                first.setdefault(check, took)
                spent[check] += took
                each[check].append(took)
        middle = [statistics.median(each[check]) for check in (True, False)]
        print(
            f"{name}: first step {first}, 500 updates {spent}, ratio {spent[True] / spent[False]:.4f}, ",
            end="",
        )
        print(f"medians {middle}, ratio {middle[0] / middle[1]:.4f}", flush=True)
    return 0


def main() -> int:
    from tests.unsplit import EXACT
    from tests.watched import CASES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", choices=["cases", "exact", "drawn", "cost"], default="cases")
    parser.add_argument("--only", default="", help="part of the name or kind of a case")
    parser.add_argument("--share", type=float, default=0.1, help="of the combinations of each case")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failing", type=Path, help="a file for the plays that break the law")
    parser.add_argument("--verbose", action="store_true", help="print every play of a case")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    all_of = {"cases": [*CASES], "exact": [*EXACT], "drawn": [asked.only] if asked.only else [], "cost": []}
    names = [
        one
        for one in all_of[asked.part]
        if asked.only in one or asked.only in getattr(CASES.get(one), "kind", "")
    ]
    part = {
        "cases": partial(run_cases, verbose=asked.verbose),
        "exact": run_exact,
        "drawn": run_drawn,
        "cost": run_cost,
    }[asked.part]
    seeds = range(asked.seed, asked.seed + asked.rounds)
    return int(sum(part(names, random.Random(seed), asked.share, asked.failing) for seed in seeds) > 0)


if __name__ == "__main__":
    sys.exit(main())
