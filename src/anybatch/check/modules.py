"""The first module that makes split and whole differ, and why: it runs by itself on changed inputs"""

import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from anybatch.batchnorm import find_batch_norms
from anybatch.check.draws import OutOfTime
from anybatch.check.finding import Finding, listed, module_finding
from anybatch.check.passes import Bench, Call
from anybatch.check.rows import agree
from anybatch.check.splits import Table, fault_of, inputs_of, outputs_of
from anybatch.state import rng
from anybatch.trial import Axis, RowPart, find_axis, select

Run = Callable[[Sequence[Tensor], RowPart], list[Tensor]]


class ComparedCall(NamedTuple):
    """A call of a module with the same inputs as its calls on parts of the rows, and other outputs."""

    call: Call  # the call on all rows
    fault: str  # how its outputs differ, as `fault_of` says
    inputs: Sequence[Axis | None]  # the axis of rows in each input
    outputs: Sequence[Axis | None]  # the axis of rows in each output


def first_that_differs(
    calls: Table,
    tables: Sequence[Table],
    parts: Sequence[RowPart],
    tolerance: float,
    *,
    from_end: bool = False,
) -> ComparedCall | None:
    """Return the first call with the same inputs and other outputs in the parts; inner calls come first.

    A call with one value for all rows comes last: its parent may weigh these values rightly.
    """
    pooled: list[ComparedCall] = []
    for call in calls.values():
        compare = partial(fault_of, call, tables, parts, tolerance, from_end=from_end)
        fault = "unknown" if compare(of=inputs_of) else compare()
        if fault in ("", "unknown"):
            continue
        axes = [
            [
                find_axis(a.shape, b.shape, parts[0])
                for a, b in zip(of(call), of(tables[0][call.key]), strict=False)
            ]
            for of in (inputs_of, outputs_of)
        ]
        tested = ComparedCall(call, fault, *axes)
        if fault != "pooled":
            return tested
        pooled.append(tested)
    return next(iter(pooled), None)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTest:
    """A test that finds why a module differs: it runs the module on changed inputs."""

    bench: Bench
    total: int  # rows of the batch
    tolerance: float  # relative error that counts as rounding

    def explain(self, tested: ComparedCall) -> Finding:
        """Return the finding about a module that differs."""
        name = tested.call.key[0]
        with self.bench.fresh() as (model, _):
            module = model.get_submodule(name)
            alike = [key for key, one in model.named_modules() if type(one) is type(module)]
        if find_batch_norms([module]):
            what = f"`{name or 'the model'}` normalises by mean and variance over the micro-batch."
            more = " The others do the same." * (len(alike) > 1)
            return module_finding("meeting", listed(alike), module, what + more)
        try:
            kind, what = self._classify(tested)
        except OutOfTime:
            kind, what = "unexplained", "differs; there was no time to look for the reason"
        except Exception as error:  # some modules cannot run on other rows
            kind, what = "unexplained", f"differs, and fails with {type(error).__name__} on other rows"
        place = name or type(module).__name__
        return module_finding(kind, name, module, f"`{place}` {what}.")

    def _classify(self, tested: ComparedCall) -> tuple[str, str]:
        if tested.fault == "dropped rows":
            return "dropped rows", "returns fewer rows for micro-batches than for the whole batch"
        if self._count_unreplayed(tested):
            return "position", (
                "draws random numbers by position, from a generator of its own or after setting a seed: "
                "a row gets other numbers in another micro-batch"
            )
        if not self._is_deterministic(tested):
            return "state", "returns another output when it is called again with the same rows"
        if tested.fault == "pooled":
            return "meeting", "returns one value for all rows, and each micro-batch gets another"
        changed = self._count_changed(tested)
        if changed:
            return "meeting", f"mixes rows: when one is changed, {changed} other rows of {self.total} change"
        if sources := self._sources(tested):
            return "position", (
                f"draws random numbers from {sources}, by position: a row gets other numbers in another "
                "micro-batch"
            )
        if not self._is_equivariant(tested):
            return "position", "returns another output for a row at another place in the batch"
        return "meeting", "returns another output for a row when other rows are missing"

    @property
    def _whole(self) -> RowPart:
        return RowPart.whole(self.total)

    def _are_same(self, one: Sequence[Tensor], other: Sequence[Tensor], part: RowPart) -> bool:
        return all(agree(a, [(b, part)], self.tolerance) for a, b in zip(one, other, strict=True))

    @contextmanager
    def _fresh(self, call: Call) -> Generator[tuple[nn.Module, Run]]:
        """Yield a fresh copy of the module, and a function that runs it with the random streams of a call."""
        with self.bench.fresh() as (model, _), torch.no_grad():
            module = model.get_submodule(call.key[0])

            def run(inputs: Sequence[Tensor], part: RowPart) -> list[Tensor]:
                self.bench.draws.begin(part, call.state)
                copies = [value.clone() for value in inputs]  # a module may write to its inputs
                return [value.clone() for value in call.repeat(module, copies)]

            yield module, run

    def _count_unreplayed(self, tested: ComparedCall) -> int:
        with self._fresh(tested.call) as (_, run):
            run(tested.call.inputs, self._whole)
            return self.bench.draws.unreplayed

    def _is_deterministic(self, tested: ComparedCall) -> bool:
        inputs = tested.call.inputs
        with self._fresh(tested.call) as (_, run):
            return self._are_same(run(inputs, self._whole), run(inputs, self._whole), self._whole)

    def _count_changed(self, tested: ComparedCall) -> int:
        most = 0
        with self._fresh(tested.call) as (_, run):
            before = run(tested.call.inputs, self._whole)
            for shift in range(self.total):  # with 0, other numbers
                for row in range(self.total):
                    changed = _change_row(tested.call.inputs, tested.inputs, row, shift, self.total)
                    others = [other for other in range(self.total) if other != row]
                    most = max(most, self._differing(tested, before, run(changed, self._whole), others))
                if most:
                    return most
        return most

    def _differing(
        self, tested: ComparedCall, before: Sequence[Tensor], after: Sequence[Tensor], rows: Sequence[int]
    ) -> int:
        def differs(row: int) -> bool:
            part = RowPart((row,), self.total)
            return any(
                not agree(select(a, axis, part), [(select(b, axis, part), self._whole)], self.tolerance)
                for a, b, axis in zip(before, after, tested.outputs, strict=True)
                if axis is not None
            )

        return sum(map(differs, rows))

    def _sources(self, tested: ComparedCall) -> str:
        """Return the libraries whose default streams the module moves."""
        with self._fresh(tested.call) as (_, run):
            self.bench.draws.begin(self._whole, tested.call.state)  # as `run` does
            before = rng.capture(rng.of_process())
            run(tested.call.inputs, self._whole)
            now = rng.capture(rng.of_process())
        moved = [one for one in rng.of_process() if not rng.is_same(before, now, of=(one,))]
        return " and ".join(["Python's random" if one is random else "NumPy" for one in moved])

    def _is_equivariant(self, tested: ComparedCall) -> bool:
        turned = RowPart(tuple(range(self.total))[::-1], self.total)
        with self._fresh(tested.call) as (_, run):
            before = run(tested.call.inputs, self._whole)
            after = run(_select_all(tested.call.inputs, tested.inputs, turned), turned)
        return self._are_same(_select_all(before, tested.outputs, turned), after, turned)


def _select_all(inputs: Sequence[Tensor], axes: Sequence[Axis | None], part: RowPart) -> list[Tensor]:
    return [select(value, axis, part) for value, axis in zip(inputs, axes, strict=True)]


def _pattern(like: Tensor) -> Tensor:
    """Return numbers that differ from entry to entry."""
    return torch.cos(torch.arange(like.numel(), device=like.device)).view(like.shape).to(like.dtype)


def _change_row(
    inputs: Sequence[Tensor], axes: Sequence[Axis | None], row: int, shift: int, total: int
) -> list[Tensor]:
    """Replace a row by the one `shift` rows further; for 0 by other numbers, if any are real."""
    pairs = list(zip(inputs, axes, strict=True))
    real = not shift and any(axis is not None and value.is_floating_point() for value, axis in pairs)
    order = list(range(total))
    order[row] = (row + (shift or 1)) % total
    changed: list[Tensor] = []
    for value, axis in pairs:
        if axis is None or (real and not value.is_floating_point()):
            changed.append(value)
        elif real:
            ours = (torch.arange(total, device=value.device) == row).repeat_interleave(axis.per_row)
            ours = ours.view(-1, *[1] * (value.dim() - axis.place - 1))
            changed.append(torch.where(ours, value + _pattern(value) * (1 + value.abs().mean()), value))
        else:
            changed.append(select(value, axis, RowPart(tuple(order), total)))
    return changed
