"""How a module makes split and whole differ: rows meet, a state goes on, a place counts, numbers fall."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anybatch.probe.calls import Call
from anybatch.probe.finding import Finding, module_finding
from anybatch.probe.passes import Bench
from anybatch.probe.rows import Axis, Part, agree, select


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
    """

    bench: Bench
    total: int
    tolerance: float

    def explain(self, tried: Tried) -> Finding:
        """The finding about a module that differs."""
        name = tried.call.key[0]
        with self.bench.fresh() as (model, _):
            module = model.get_submodule(name)
        kind, what = self._classify(tried)
        return module_finding(kind, name, module, f"`{name or type(module).__name__}` {what}.")

    def _classify(self, tried: Tried) -> tuple[str, str]:
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
        changed = max(self._changed_by(tried, row) for row in (0, self.total - 1))
        if changed:
            return "meeting", (
                f"changes its output for {changed} other rows of {self.total} when one row is changed"
            )
        if not self._moves(tried):
            return "position", "gives a row another output at another place in the batch"
        return "unexplained", "gives rows another output in a micro-batch than in the whole batch"

    def _outputs(self, call: Call, *runs: tuple[Sequence[Tensor], Part]) -> list[list[Tensor]]:
        """Run a fresh copy on these inputs, one after the other."""
        found: list[list[Tensor]] = []
        with self.bench.fresh() as (model, _), torch.no_grad():
            module = model.get_submodule(call.key[0])
            for inputs, part in runs:
                self.bench.draws.begin(part, call.states)
                outputs = call.repeat(module, [value.clone() for value in inputs])
                found.append([value.clone() for value in outputs])
        return found

    def _repeats(self, tried: Tried) -> bool:
        """Whether it returns the same when it is called twice."""
        run = tried.call.inputs, Part.whole(self.total)
        one, two = self._outputs(tried.call, run, run)
        return all(agree(a, [(b, run[1])], self.tolerance) for a, b in zip(one, two, strict=True))

    def _changed_by(self, tried: Tried, row: int) -> int:
        """How many other rows change with this one."""
        whole = Part.whole(self.total)
        changed = _change_row(tried.call.inputs, tried.inputs, row, self.total)
        before = self._outputs(tried.call, (tried.call.inputs, whole))[0]
        after = self._outputs(tried.call, (changed, whole))[0]
        pairs = [
            (a, b, axis) for a, b, axis in zip(before, after, tried.outputs, strict=True) if axis is not None
        ]

        def differs(other: Part) -> bool:
            return any(
                not agree(select(a, axis, other), [(select(b, axis, other), whole)], self.tolerance)
                for a, b, axis in pairs
            )

        return sum(differs(Part((other,), self.total)) for other in whole.rows if other != row)

    def _moves(self, tried: Tried) -> bool:
        """Whether outputs move with the rows."""
        turned = Part(tuple(range(self.total))[::-1], self.total)
        inputs = [select(v, a, turned) for v, a in zip(tried.call.inputs, tried.inputs, strict=True)]
        before = self._outputs(tried.call, (tried.call.inputs, Part.whole(self.total)))[0]
        after = self._outputs(tried.call, (inputs, turned))[0]
        return all(
            agree(select(a, axis, turned), [(b, turned)], self.tolerance)
            for a, b, axis in zip(before, after, tried.outputs, strict=True)
        )


def _change_row(inputs: Sequence[Tensor], axes: Sequence[Axis | None], row: int, total: int) -> list[Tensor]:
    """Other numbers in one row; where no number is real, what stands in the next row."""
    pairs = list(zip(inputs, axes, strict=True))
    real = any(axis is not None and value.is_floating_point() for value, axis in pairs)
    order = [(other + 1) % total if other == row else other for other in range(total)]
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
