"""The first module that makes split and whole differ, and why: it runs by itself on changed inputs"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anybatch.batchnorm import find_batch_norms
from anybatch.check.bench import CheckBench
from anybatch.check.finding import Finding, module_finding
from anybatch.check.passes import Call
from anybatch.check.rows import is_close
from anybatch.check.splits import Pieces
from anybatch.state import rng
from anybatch.trial import Axis, RowPart, select


def explain_module(bench: CheckBench, pieces: Pieces, call: Call, fault: str) -> Finding:
    """Return the finding about a module, a call of which differs in the pieces."""
    name = call.key[0]
    module = bench.model.get_submodule(name)
    if find_batch_norms([module]):
        alike = [key for key, one in bench.model.named_modules() if type(one) is type(module)]
        what = "normalises by mean and variance over the micro-batch."
        more = " The others do the same." * (len(alike) > 1)
        return module_finding("meeting", name, module, what + more, alike)
    try:
        found = bench.in_time(lambda: ModuleTest(bench, pieces, call, module).classify(fault))
    except Exception as error:  # some modules cannot run on other rows
        found = "unexplained", f"differs, and fails with {type(error).__name__} on other rows"
    kind, what = found or ("unexplained", "differs; there was no time to look for the reason")
    return module_finding(kind, name, module, f"{what}.")


class ModuleTest:
    """A module that runs by itself, with the inputs and the random numbers of a call on all rows."""

    def __init__(self, bench: CheckBench, pieces: Pieces, call: Call, module: nn.Module) -> None:
        self.bench, self.call, self.module, self.tolerance = bench, call, module, pieces.tolerance
        self.inputs, self.outputs = pieces.axes(call, "inputs"), pieces.axes(call, "outputs")
        self.whole = RowPart.whole(pieces.parts[0].total)

    def classify(self, fault: str) -> tuple[str, str]:
        """Return the kind of a finding, and what the module does."""
        if fault == "dropped rows":
            return fault, "returns fewer rows for micro-batches than for the whole batch"
        with self.bench.fresh(), torch.no_grad():
            inputs, draws = self.call.inputs, self.bench.draws
            outputs = self._run(inputs, self.whole)
            now = rng.capture(rng.of_process())
            if draws.unreplayed:
                return "position", (
                    "draws random numbers by position, from a generator of its own or after setting a seed: "
                    "a row gets other numbers in another micro-batch"
                )
            if not self._are_same(outputs, self._run(inputs, self.whole)):
                return "state", "returns another output when it is called again with the same rows"
            if fault == "pooled":
                return "meeting", "returns one value for all rows, and each micro-batch gets another"
            if changed := self._count_changed(inputs, outputs):
                total = self.whole.total
                return "meeting", f"mixes rows: when one is changed, {changed} other rows of {total} change"
            streams = rng.of_process()
            if moved := [one for one in streams if not rng.is_same(draws.recorded.start, now, of=(one,))]:
                sources = " and ".join(["Python's random" if one is random else "NumPy" for one in moved])
                return "position", (
                    f"draws random numbers from {sources}, by position: a row gets other numbers in another "
                    "micro-batch"
                )
            turned = RowPart(self.whole.rows[::-1], self.whole.total)
            after = self._run(_select(inputs, self.inputs, turned), turned)
            if not self._are_same(_select(outputs, self.outputs, turned), after):
                return "position", "returns another output for a row at another place in the batch"
            return "meeting", "returns another output for a row when other rows are missing"

    def _run(self, inputs: Sequence[Tensor], part: RowPart) -> list[Tensor]:
        self.bench.draws.begin(part, self.call.state)
        return self.call.repeat(self.module, inputs)

    def _are_same(self, one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
        return all(is_close(b, a, self.tolerance) for a, b in zip(one, other, strict=True))

    def _count_changed(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
        """Replace each row by other numbers, then by each other row; count rows that change with it."""
        total, axes = self.whole.total, self.inputs
        both = [
            value if axis is None else _doubled(value, axis) for value, axis in zip(inputs, axes, strict=True)
        ]

        def count(row: int, shift: int) -> int:
            order = [*self.whole.rows]
            order[row] = (row + shift) % total if shift else total + row
            after = self._run(_select(both, axes, RowPart(tuple(order), 2 * total)), self.whole)
            return len(self._moved(outputs, after) - {row})

        counts = (max(count(row, shift) for row in range(total)) for shift in range(total))
        return next(filter(None, counts), 0)

    def _moved(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> set[int]:
        parts = [RowPart((row,), self.whole.total) for row in self.whole.rows]
        return {
            part.rows[0]
            for a, b, axis in zip(before, after, self.outputs, strict=True)
            for part in (parts if axis else ())
            if not is_close(select(b, axis, part), select(a, axis, part), self.tolerance)
        }


def _select(values: Sequence[Tensor], axes: Sequence[Axis | None], part: RowPart) -> list[Tensor]:
    return [select(value, axis, part) for value, axis in zip(values, axes, strict=True)]


def _doubled(value: Tensor, axis: Axis) -> Tensor:
    """Return all rows, and after them as many with other numbers: a pattern is added to real ones."""
    if not value.is_floating_point():
        return torch.cat([value, value.roll(axis.per_row, axis.place)], axis.place)
    pattern = torch.cos(torch.arange(value.numel(), device=value.device)).view(value.shape)
    return torch.cat([value, value + pattern.to(value.dtype) * (1 + value.abs().mean())], axis.place)
