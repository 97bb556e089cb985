"""Cases: a loss with its options, what it trains, what it is trained on."""

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.laws.draw import Draw

Make = Callable[[Draw], Any]
REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A model, a loss and a batch, in one dtype."""

    model: nn.Module
    loss: Any
    batch: Any
    rows: int


@dataclass(frozen=True, slots=True)
class Made:
    """An option made from the drawn rows."""

    make: Make


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A loss with one choice of options (fixed, or made from drawn rows), as function, module, or both."""

    name: str
    forms: Mapping[str, Callable[..., Any]]
    options: Mapping[str, Any]
    model: Callable[[], nn.Module]
    batch: Make

    def problem(
        self, form: str, rows: int, *, seed: int = 0, mask: str = "some", dtype: torch.dtype = torch.float64
    ) -> Problem:
        seed += zlib.crc32(self.name.encode())  # cases that share options do not share rows
        draw = Draw(rows, seed=seed, mask=mask, dtype=dtype, options=self.options)
        made = {
            key: value.make(draw) if isinstance(value, Made) else value for key, value in self.options.items()
        }
        loss = self.forms[form](**made)
        if isinstance(loss, nn.Module):
            loss = loss.to(dtype)
        return Problem(model=self.model().to(dtype), loss=loss, batch=self.batch(draw), rows=rows)


def cases_of(
    name: str,
    losses: Sequence[Callable[..., Any]],
    model: Callable[[], nn.Module],
    batch: Make,
    *,
    reductions: Sequence[str] = REDUCTIONS,
    **options: Sequence[Any],
) -> Iterator[Case]:
    """One case for every combination of options; `None` leaves one out. A loss is a module or a function."""
    forms: dict[str, Callable[..., Any]] = {}
    for loss in losses:
        is_module = isinstance(loss, type)
        forms["module" if is_module else "function"] = loss if is_module else partial(_bound, loss)
    options = {**options, "reduction": reductions}
    for values in itertools.product(*options.values()):
        chosen = {key: value for key, value in zip(options, values, strict=True) if value is not None}
        words = [name, *[f"{key}={_word(value)}" for key, value in chosen.items()]]
        yield Case(name="-".join(words), forms=forms, options=chosen, model=model, batch=batch)


def _bound(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return partial(function, **options) if options else function


def _word(value: object) -> str:
    value = value.make if isinstance(value, Made) else value
    if callable(value):
        return value.__name__
    return str(value) if isinstance(value, str | int | float | bool) else type(value).__name__
