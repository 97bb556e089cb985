"""How a module makes split and whole differ: rows meet, a state goes on, a place counts, numbers fall."""

import math
import random
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anybatch.check.calls import Call
from anybatch.check.finding import WAYS_OUT, Finding, module_finding
from anybatch.check.passes import Bench
from anybatch.check.rows import Axis, Part, agree, select
from anybatch.core import torch_private as private

BY_TURNS = (
    "draws random numbers for one row after the other ({} times for {} rows, {} for half of them), which "
    "cannot be replayed: a row gets others in another micro-batch"
)
BY_TURNS_WAYS_OUT = (
    "Draw for all rows at once, one entry for each: torch.rand(len(x)).",
    "Where rows may have any numbers, as in augmentation, this is no fault: check the rest in .eval().",
)
Run = Callable[[Sequence[Tensor], Part], list[Tensor]]
GIVE = WAYS_OUT["position"][-1]  # the other one is about random numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tried:
    """How a module's cut calls compare with its whole one.

    Attributes:
        call: the whole call.
        fault: "" where they agree, "outputs", "pooled", "gradients", "dropped rows", or "unknown".
        strangers: random draws of the whole call that are not replayed.
        inputs: on which axis rows lie in each tensor that goes in.
        outputs: the same for what comes out.
    """

    call: Call
    fault: str
    strangers: int = 0
    inputs: Sequence[Axis | None] = ()
    outputs: Sequence[Axis | None] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nature:
    """Tells how a module differs, by running it on other inputs.

    Args:
        bench: where it is run.
        total: rows of the batch.
        tolerance: relative error that counts as rounding.
        deadline: when no more rows are changed, on the clock of `time.perf_counter`.
    """

    bench: Bench
    total: int
    tolerance: float
    deadline: float = math.inf

    def explain(self, tried: Tried) -> Finding:
        """The finding about a module that differs."""
        name = tried.call.key[0]
        with self.bench.fresh() as (model, _):
            module = model.get_submodule(name)
        try:
            kind, what, *ways_out = self._classify(tried)
        except Exception as error:  # not every module can be run on other rows than its own
            kind, what = "unexplained", f"differs, and fails with {type(error).__name__} on other rows"
            ways_out = list[str]()
        place = name or type(module).__name__
        return module_finding(kind, name, module, f"`{place}` {what}.", tuple(ways_out))

    def _classify(self, tried: Tried) -> tuple[str, ...]:
        """The kind, what is wrong, and ways out other than those of the kind."""
        if tried.fault == "gradients" and self._goes_on(tried):
            return "state", "changes its buffers when it is called, and its gradient with them"
        if tried.fault == "gradients":
            return "detached", "gives rows the same output, cut or not, but another gradient when it is cut"
        if tried.fault == "dropped rows":
            return "dropped rows", "returns fewer rows for micro-batches than for the whole batch"
        if tried.strangers:
            return "position", (
                "draws random numbers by position: from a generator of its own, or after setting a seed, "
                "so a row gets other numbers in another micro-batch"
            )
        if not self._repeats(tried):
            return "state", "gives another output when it is called again with the same rows"
        if tried.fault == "pooled":
            return "meeting", "returns one value for all rows, which is another one for each micro-batch"
        changed = self._changed(tried)
        if changed:
            return "meeting", (
                f"changes its output for {changed} other rows of {self.total} when one row is changed"
            )
        sources, draws, draws_of_half = self._drawn(tried)
        if sources:
            return "position", (
                f"draws random numbers from {sources}, which go by position: a row gets other numbers in "
                "another micro-batch"
            )
        if not self._holds_without_others(tried):
            return "meeting", "gives a row another output at the same place among fewer or other rows"
        if draws > draws_of_half:
            return "position", BY_TURNS.format(draws, self.total, draws_of_half), *BY_TURNS_WAYS_OUT
        if not self._moves(tried):
            return "position", "gives a row another output at another place in the batch", GIVE
        return "unexplained", "gives rows another output in a micro-batch than in the whole batch"

    @contextmanager
    def _fresh(self, call: Call) -> Generator[Run]:
        """Runs of a fresh copy, one after the other, from where the streams stood."""
        with self.bench.fresh() as (model, _), torch.no_grad():
            module = model.get_submodule(call.key[0])

            def run(inputs: Sequence[Tensor], part: Part) -> list[Tensor]:
                self.bench.draws.begin(part, call.states)
                return [value.clone() for value in call.repeat(module, [value.clone() for value in inputs])]

            yield run

    def _repeats(self, tried: Tried) -> bool:
        """Whether it returns the same when it is called twice."""
        whole = Part.whole(self.total)
        with self._fresh(tried.call) as run:
            one, two = run(tried.call.inputs, whole), run(tried.call.inputs, whole)
        return all(agree(a, [(b, whole)], self.tolerance) for a, b in zip(one, two, strict=True))

    def _changed(self, tried: Tried) -> int:
        """How many other rows change with one row, whichever it is: other numbers in it, or another row."""
        whole = Part.whole(self.total)
        most = 0
        with self._fresh(tried.call) as run:
            before = run(tried.call.inputs, whole)
            for shift in range(self.total):  # with 0, other numbers
                for row in whole.rows:
                    if time.perf_counter() > self.deadline and (shift, row) != (0, 0):
                        return most
                    changed = _change_row(tried.call.inputs, tried.inputs, row, shift, self.total)
                    others = [other for other in whole.rows if other != row]
                    most = max(most, self._differing(tried, before, run(changed, whole), others))
                if most:
                    return most
        return most

    def _differing(
        self, tried: Tried, before: Sequence[Tensor], after: Sequence[Tensor], rows: Sequence[int]
    ) -> int:
        """How many of some rows have another output."""
        whole = Part.whole(self.total)
        pairs = [
            (a, b, axis) for a, b, axis in zip(before, after, tried.outputs, strict=True) if axis is not None
        ]

        def differs(other: Part) -> bool:
            return any(
                not agree(select(a, axis, other), [(select(b, axis, other), whole)], self.tolerance)
                for a, b, axis in pairs
            )

        return sum(differs(Part((row,), self.total)) for row in rows)

    def _drawn(self, tried: Tried) -> tuple[str, int, int]:
        """Streams that are not torch's and move; how often it draws for all rows, and for half of them."""
        counts: list[int] = []
        sources: set[str] = set()
        with self._fresh(tried.call) as run:
            for rows in (self.total, self.total // 2):
                part = Part(tuple(range(rows)), self.total)
                before = _other_streams()
                with _Counting() as counting:
                    run(_select_all(tried.call.inputs, tried.inputs, part), part)
                sources |= {name for name, state in _other_streams().items() if before.get(name) != state}
                counts.append(counting.draws)
        return " and ".join(sorted(sources)), counts[0], counts[1]

    def _goes_on(self, tried: Tried) -> bool:
        """Whether a call changes numbers that the module holds."""
        with self.bench.fresh() as (model, _), torch.no_grad():
            module = model.get_submodule(tried.call.key[0])
            before = {name: buffer.clone() for name, buffer in module.named_buffers()}
            self.bench.draws.begin(Part.whole(self.total), tried.call.states)
            tried.call.repeat(module, [value.clone() for value in tried.call.inputs])
            return any(
                buffer.is_floating_point() and not torch.equal(buffer, before.get(name, buffer))
                for name, buffer in module.named_buffers()
            )

    def _holds_without_others(self, tried: Tried) -> bool:
        """Whether rows keep their outputs, at the same places, when others are missing or all alike."""
        with self._fresh(tried.call) as run:
            before = run(tried.call.inputs, Part.whole(self.total))
            for rows in dict.fromkeys((self.total - 1, (self.total + 1) // 2)):
                part = Part(tuple(range(rows)), self.total)
                after = run(_select_all(tried.call.inputs, tried.inputs, part), part)
                if not all(agree(a, [(b, part)], self.tolerance) for a, b in zip(before, after, strict=True)):
                    return False
            for row in range(self.total):
                if time.perf_counter() > self.deadline:
                    break
                alone = Part((row,) * self.total, self.total)  # nobody but this row
                after = run(_select_all(tried.call.inputs, tried.inputs, alone), Part.whole(self.total))
                if self._differing(tried, before, after, [row]):
                    return False
        return True

    def _moves(self, tried: Tried) -> bool:
        """Whether outputs move with the rows."""
        turned = Part(tuple(range(self.total))[::-1], self.total)
        with self._fresh(tried.call) as run:
            before = run(tried.call.inputs, Part.whole(self.total))
            after = run(_select_all(tried.call.inputs, tried.inputs, turned), turned)
        return all(
            agree(select(a, axis, turned), [(b, turned)], self.tolerance)
            for a, b, axis in zip(before, after, tried.outputs, strict=True)
        )


class _Counting(private.TorchDispatchMode):
    """Counts draws from torch's streams."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.draws += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _other_streams() -> dict[str, str]:
    """Where the streams stand that are not torch's."""
    numpy = sys.modules.get("numpy")
    found = {"Python's random": str(random.getstate())}
    return found if numpy is None else found | {"NumPy": str(numpy.random.get_state()[1:4])}


def _select_all(inputs: Sequence[Tensor], axes: Sequence[Axis | None], part: Part) -> list[Tensor]:
    return [select(value, axis, part) for value, axis in zip(inputs, axes, strict=True)]


def _change_row(
    inputs: Sequence[Tensor], axes: Sequence[Axis | None], row: int, shift: int, total: int
) -> list[Tensor]:
    """What stands in another row, so many rows on; for 0 other numbers, or the next row if none is real."""
    pairs = list(zip(inputs, axes, strict=True))
    real = not shift and any(axis is not None and value.is_floating_point() for value, axis in pairs)
    order = [(other + (shift or 1)) % total if other == row else other for other in range(total)]
    changed: list[Tensor] = []
    for value, axis in pairs:
        if axis is None or (real and not value.is_floating_point()):
            changed.append(value)
        elif real:
            wave = (
                torch.cos(torch.arange(value.numel(), device=value.device)).view(value.shape).to(value.dtype)
            )
            moved = value + wave * (1 + value.abs().mean())
            rows = torch.zeros(total, device=value.device, dtype=torch.bool)
            rows[row] = True
            shape = [1] * value.dim()
            shape[axis.place] = value.shape[axis.place]
            changed.append(torch.where(rows.repeat_interleave(axis.per_row).view(shape), moved, value))
        else:
            changed.append(select(value, axis, Part(tuple(order), total)))
    return changed
