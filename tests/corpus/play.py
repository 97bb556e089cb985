"""Playing a case of the corpus through a door, update by update, beside one plain backward."""

import copy
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import anybatch as ab
from anybatch.core import tree
from anybatch.losses import module_of
from anybatch.testing import tolerance
from tests.corpus.case import Case

RATE, UPDATES = 0.05, 9
DROPOUTS = ("p", "dropout", "dropout_p", "noise")  # what the random layers of the corpus call their strength


@contextmanager
def float64() -> Iterator[None]:
    """New tensors are float64, and the random stream is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def quiet(case: Case) -> Case:
    """Return the case without dropout, in the dtype in which it can be run."""
    for module in case.model.modules():
        for name in DROPOUTS:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    case.model.to(case.dtype)
    if callable(case.batch) or isinstance(case.batch, list):
        return case
    cast = lambda one: one.to(case.dtype) if one.is_floating_point() else one  # noqa: E731
    return replace(case, batch=tree.map_leaves(cast, case.batch))


def whole(loss: Any, model: nn.Module, batch: Any) -> Tensor:
    """The loss of the whole batch, without anybatch."""
    if isinstance(loss, ab.ModelLoss):
        return loss.call(model, batch)
    if isinstance(loss, nn.Module | ab.PerRow | ab.WholeBatch):
        found = (loss if isinstance(loss, nn.Module) else loss.function)(model(batch[0]), *batch[1:])
        if not isinstance(loss, ab.PerRow):
            return found
        values, weights = found if isinstance(found, tuple) else (found, torch.ones_like(found))
        return (values * weights).sum() / weights.expand_as(values).sum()
    found = loss(model, batch)
    totals: Iterable[Any] = found.values() if isinstance(found, Mapping) else [found]
    values = [one if isinstance(one, Tensor) else torch.as_tensor(one.sum / one.weight) for one in totals]
    return torch.stack(values).sum()


def trained(model: nn.Module, loss: Any) -> list[Tensor]:
    every = [*model.parameters(), *module_of(loss).parameters()]
    return [one for one in every if one.requires_grad]


class Played:
    """A training through one door, whose gradients are compared with the truth."""

    def __init__(self, case: Case, door: str, micro: Any) -> None:
        self.case, self.door, self.micro, self.noted = case, door, micro, ""
        self.parameters = trained(case.model, case.loss)
        self.optimizer = torch.optim.SGD(self.parameters, lr=RATE)
        keywords: dict[str, Any] = {"collate": case.collate, "options": ab.Options(**case.options)}
        keywords["micro_batch"] = None if "window" in door else micro
        if door.startswith("batch_loss"):
            self.step: Any = ab.BatchLoss(case.model, case.loss, **keywords)
        else:
            self.step = ab.Step(case.model, case.loss, self.optimizer, **keywords)

    def add(self, window: Any, batch: Any) -> None:
        rows = len(batch) if isinstance(batch, list) else len(tree.flatten(batch).leaves[0])
        for start in range(0, rows, self.micro):
            cut = lambda one, start=start: one[start : start + self.micro]  # noqa: E731
            window.add(cut(batch) if isinstance(batch, list) else tree.map_leaves(cut, batch))

    def truth(self, batch: Any) -> tuple[list[Tensor], float]:
        """Gradients and value of one plain backward on copies; random streams stay where they are."""
        model, loss = copy.deepcopy((self.case.model, self.case.loss))
        held = trained(model, loss)  # of TorchScript no leaves
        of_python, of_numpy = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            value = whole(loss, model, self.case.collate(batch) if self.case.collate else batch)
            found = torch.autograd.grad(value, held, allow_unused=True)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        pairs = zip(held, found, strict=True)
        return [torch.zeros_like(p) if one is None else one.to_dense() for p, one in pairs], value.item()

    def gradient(self, batch: Any) -> tuple[list[Tensor], Any]:
        before = [one.detach().clone() for one in self.parameters]
        if self.door.startswith("batch_loss"):
            given = self.step.window() if "window" in self.door else batch
            if given is not batch:
                self.add(given, batch)
            self.optimizer.zero_grad()  # that of the update before; late, if a window was filled
            self.step(given).backward()
            self.optimizer.step()
            report = self.step.report
        elif self.door == "window":
            with self.step.window() as window:
                self.add(window, batch)
            report = window.report
        else:
            report = self.step(batch)
        found = [(old - new.detach()) / RATE for old, new in zip(before, self.parameters, strict=True)]
        return found, report

    def update(self, number: int) -> str:
        """Return "exact", "refused", "warned", "silent" or "lost", or the name of a foreign error."""
        self.case.change(self.case.model, self.case.loss, number)
        batch = self.case.rows_of(number)
        expected, value = self.truth(batch)
        before = [one.detach().clone() for one in self.parameters]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found, report = self.gradient(batch)
            except Exception as error:
                self.noted = f"{type(error).__name__}: {error}"
                if not isinstance(error, ab.AnybatchError):
                    return type(error).__name__
                return "refused" if all(map(torch.equal, before, self.parameters)) else "lost"
        self.noted = next((str(one.message) for one in caught), "") or report.unchecked
        apart = [new - old for new, old in zip(found, expected, strict=True)]
        size, off = (torch.cat([one.flatten() for one in all_]).norm().item() for all_ in (expected, apart))
        rounding = 1e-9 if self.case.dtype == torch.float64 else 4 * tolerance(self.case.dtype, 8)
        if off <= rounding * max(size, 1e-3) and abs(report.loss - value) <= rounding * max(1.0, abs(value)):
            return "exact"
        return "warned" if self.noted or not report.checked else "silent"


def play(case: Case, door: str, micro: int, *, updates: int = UPDATES) -> tuple[list[str], str]:
    """The word of each update, up to the first that is refused; and the last thing that was noted."""
    played, said = Played(case, door, micro), list[str]()
    for number in range(1, updates + 1):
        said.append(played.update(number))
        if said[-1] not in ("exact", "warned", "silent"):
            break
    return said, played.noted


def broken(said: list[str]) -> str:
    """Name what breaks the law: no update is silent from the first power of two on."""
    silent = [number for number, one in enumerate(said, 1) if one == "silent"]
    if silent and silent[-1] >= 1 << (silent[0] - 1).bit_length():
        return f"silent at {silent}"
    return next((one for one in said if one not in ("exact", "warned", "silent", "refused")), "")
