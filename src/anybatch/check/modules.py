"""Modules that make split and whole differ, and why: each runs by itself on the same inputs, split"""

import math
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anybatch.check.draws import OutOfTime
from anybatch.check.finding import WAYS_OUT, Finding, module_finding
from anybatch.check.passes import Bench, Call, Key
from anybatch.check.rows import Axis, RowPart, agree, find_axis, select
from anybatch.state import rng

ROW_BY_ROW = (
    "draws random numbers for one row after the other ({} times for {} rows, {} for half of them). They "
    "cannot be replayed: a row gets other numbers in another micro-batch"
)
ROW_BY_ROW_WAYS_OUT = (
    "Draw for all rows at once, one entry for each: torch.rand(len(x)).",
    "If any numbers will do, as in augmentation, this is no fault: check the rest in .eval().",
)
Run = Callable[[Sequence[Tensor], RowPart], list[Tensor]]
GIVE_TENSOR = WAYS_OUT["position"][-1]  # the first is about random numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedCall:
    """A call of a module on the whole batch, compared with its calls on the parts."""

    call: Call  # the call on the whole batch
    fault: str  # "" if they agree, "outputs", "pooled", "dropped rows" or "unknown"
    unreplayed: int = 0  # random draws of this call that are not replayed
    inputs: Sequence[Axis | None] = ()  # the axis of rows in each input
    outputs: Sequence[Axis | None] = ()  # the axis of rows in each output


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleTest:
    """A test that finds why a module differs: it runs the module on changed inputs."""

    bench: Bench
    total: int  # rows of the batch
    tolerance: float  # relative error that counts as rounding
    deadline: float = math.inf  # stop changing rows then, on the clock of `time.perf_counter`

    def explain(self, tested: ComparedCall) -> Finding:
        """Return the finding about a module that differs."""
        name = tested.call.key[0]
        with self.bench.fresh() as (model, _):
            module = model.get_submodule(name)
        try:
            kind, what, *ways_out = self._classify(tested)
        except Exception as error:  # some modules cannot run on other rows
            kind, what = "unexplained", f"differs, and fails with {type(error).__name__} on other rows"
            ways_out = list[str]()
        place = name or type(module).__name__
        return module_finding(kind, name, module, f"`{place}` {what}.", tuple(ways_out))

    def _classify(self, tested: ComparedCall) -> tuple[str, ...]:
        """Return the kind, a sentence, and ways out that replace those of the kind."""
        if tested.fault == "dropped rows":
            return "dropped rows", "returns fewer rows for micro-batches than for the whole batch"
        if tested.unreplayed:
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
        sources, draws, draws_of_half = self._count_draws(tested)
        if sources:
            return "position", (
                f"draws random numbers from {sources}, by position: a row gets other numbers in another "
                "micro-batch"
            )
        if not self._is_row_wise(tested):
            return "meeting", "returns another output for a row when other rows are missing or replaced"
        if draws > draws_of_half:
            return "position", ROW_BY_ROW.format(draws, self.total, draws_of_half), *ROW_BY_ROW_WAYS_OUT
        if not self._is_equivariant(tested):
            return "position", "returns another output for a row at another place in the batch", GIVE_TENSOR
        return "unexplained", "returns other outputs in a micro-batch than in the whole batch"

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
                return [value.clone() for value in call.repeat(module, _copies(inputs))]

            yield module, run

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
                    if time.perf_counter() > self.deadline and (shift, row) != (0, 0):
                        return most
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

    def _count_draws(self, tested: ComparedCall) -> tuple[str, int, int]:
        """Return moved streams of Python and NumPy, and the number of draws for all rows and for half."""
        counts: list[int] = []
        sources: set[str] = set()
        with self._fresh(tested.call) as (_, run):
            for rows in (self.total, self.total // 2):
                part = RowPart(tuple(range(rows)), self.total)
                before = rng.capture(rng.of_process())
                run(_select_all(tested.call.inputs, tested.inputs, part), part)
                now = rng.capture(rng.of_process())
                moved = [one for one in rng.of_process() if not rng.is_same(before, now, of=(one,))]
                sources |= {"Python's random" if one is random else "NumPy" for one in moved}
                counts.append(self.bench.draws.count)
        return " and ".join(sorted(sources)), counts[0], counts[1]

    def _is_row_wise(self, tested: ComparedCall) -> bool:
        with self._fresh(tested.call) as (_, run):
            before = run(tested.call.inputs, self._whole)
            for rows in dict.fromkeys((self.total - 1, (self.total + 1) // 2)):
                part = RowPart(tuple(range(rows)), self.total)
                after = run(_select_all(tested.call.inputs, tested.inputs, part), part)
                if not self._are_same(before, after, part):
                    return False
            for row in range(self.total):
                if time.perf_counter() > self.deadline:
                    break
                alone = RowPart((row,) * self.total, self.total)  # this row in all places
                after = run(_select_all(tested.call.inputs, tested.inputs, alone), self._whole)
                if self._differing(tested, before, after, [row]):
                    return False
        return True

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleSearch:
    """A search for the innermost modules that differ."""

    bench: Bench
    parts: Sequence[RowPart]  # the micro-batches of a cut that differs from the whole
    table: Mapping[Key, Call]  # calls of the first micro-batch: their shapes tell the axes of rows
    tolerance: float  # relative error that counts as rounding
    deadline: float  # on the clock of `time.perf_counter`

    def find(self, outermost: Iterable[Call]) -> tuple[list[Finding], list[Finding]]:
        """Return a finding for each innermost module that differs, and those on pooled outputs."""
        module_test = ModuleTest(
            bench=self.bench, total=self.parts[0].total, tolerance=self.tolerance, deadline=self.deadline
        )
        found: dict[str, Finding] = {}
        pooled: dict[str, Finding] = {}
        for one in [one for call in outermost for one in self._innermost(call)]:
            table = pooled if one.fault == "pooled" else found
            name = one.call.key[0]
            if name not in table:
                table[name] = module_test.explain(one)
        return list(found.values()), list(pooled.values())

    def _innermost(self, call: Call) -> Iterator[ComparedCall]:
        tested = self._try(call)
        if not tested.fault or (time.perf_counter() > self.deadline and tested.fault == "unknown"):
            return
        inner = [one for child in call.inner for one in self._innermost(child)]
        if inner:
            yield from inner
        elif tested.fault != "unknown":
            yield tested

    def _try(self, call: Call) -> ComparedCall:
        peer = self.table.get(call.key)
        shapes = [value.shape for value in call.inputs]
        if peer is None or len(peer.inputs) != len(shapes):
            return ComparedCall(call=call, fault="unknown")
        first = self.parts[0]
        axes = [find_axis(a, b.shape, first) for a, b in zip(shapes, peer.inputs, strict=True)]
        try:
            with self.bench.draws.until(self.deadline):
                return self._compare(call, axes)
        except (Exception, OutOfTime):  # some modules cannot run outside their model
            return ComparedCall(call=call, fault="unknown")

    def _compare(self, call: Call, axes: Sequence[Axis | None]) -> ComparedCall:
        draws, whole = self.bench.draws, RowPart.whole(self.parts[0].total)
        with self.bench.fresh() as (model, _):
            draws.begin(whole, call.state)
            outputs = call.repeat(model.get_submodule(call.key[0]), _copies(call.inputs))
            unreplayed = draws.unreplayed
        pieces: list[list[Tensor]] = []
        with self.bench.fresh() as (model, _):
            module = model.get_submodule(call.key[0])
            for part in self.parts:
                draws.begin(part, call.state)
                pieces.append(call.repeat(module, _copies(_select_all(call.inputs, axes, part))))
        fault, places = self._classify_outputs(outputs, pieces)
        return ComparedCall(call=call, fault=fault, unreplayed=unreplayed, inputs=axes, outputs=places)

    def _classify_outputs(
        self, outputs: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]]
    ) -> tuple[str, list[Axis | None]]:
        if any(len(piece) != len(outputs) for piece in pieces):
            return "unknown", []
        places = [
            find_axis(whole.shape, piece.shape, self.parts[0])
            for whole, piece in zip(outputs, pieces[0], strict=True)
        ]
        faults: set[str] = set()
        for whole, *mine in zip(outputs, *pieces, strict=True):
            same = agree(whole, list(zip(mine, self.parts, strict=True)), self.tolerance)
            if same:
                continue
            if all(piece.shape == whole.shape for piece in mine):
                faults.add("pooled")
            elif same is None:
                faults.add("dropped rows" if _is_short(whole, mine) else "unknown")
            else:
                faults.add("outputs")
        order = ("dropped rows", "outputs", "pooled", "unknown")
        return next((fault for fault in order if fault in faults), ""), places


def _copies(inputs: Sequence[Tensor]) -> list[Tensor]:
    return [value.clone() for value in inputs]  # a module may write to its inputs


def _is_short(whole: Tensor, pieces: Sequence[Tensor]) -> bool:
    """Return True if the first axes of the pieces add up to less than the whole's."""
    alike = all(piece.dim() == whole.dim() and piece.shape[1:] == whole.shape[1:] for piece in pieces)
    return alike and whole.dim() > 0 and sum(piece.shape[0] for piece in pieces) < whole.shape[0]
