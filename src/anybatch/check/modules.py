"""Which module makes split and whole differ, and how: each is run by itself, on the same inputs, cut."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anybatch.check.calls import Call, Key
from anybatch.check.draws import OutOfTime
from anybatch.check.finding import Finding
from anybatch.check.nature import Nature, Tried
from anybatch.check.passes import Bench
from anybatch.check.rows import Axis, Part, agree, find_axis, select, take


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Search:
    """Looks for the innermost modules that differ.

    Args:
        bench: where modules are run.
        parts: the micro-batches of a cut that differs from the whole.
        table: the calls of the first micro-batch: their shapes tell on which axes rows lie.
        tolerance: relative error that counts as rounding.
        deadline: when to look no further, on the clock of `time.perf_counter`.
    """

    bench: Bench
    parts: Sequence[Part]
    table: Mapping[Key, Call]
    tolerance: float
    deadline: float

    def find(self, outermost: Iterable[Call]) -> tuple[list[Finding], list[Finding]]:
        """A finding for each innermost module that differs, in the order in which they run.

        Args:
            outermost: the calls of a pass over the whole batch.

        Returns:
            Those whose rows differ, and those that only return a value for all rows which differs: that may
            be meant so.
        """
        calls = list(outermost)
        tried = [one for call in calls for one in self._innermost(call, gradients=False)]
        if all(one.fault == "pooled" for one in tried):  # else enough is found, and backward costs the most
            tried += [one for call in calls for one in self._innermost(call, gradients=True)]
        nature = Nature(
            bench=self.bench, total=self.parts[0].total, tolerance=self.tolerance, deadline=self.deadline
        )
        found: dict[str, Finding] = {}
        pooled: dict[str, Finding] = {}
        for one in tried:
            table = pooled if one.fault == "pooled" else found
            name = one.call.key[0]
            if name not in table:
                table[name] = nature.explain(one)
        return list(found.values()), list(pooled.values())

    def _innermost(self, call: Call, *, gradients: bool) -> Iterator[Tried]:
        tried = self._try(call, gradients)
        if not tried.fault or (time.perf_counter() > self.deadline and tried.fault == "unknown"):
            return
        inner = [one for child in call.inner for one in self._innermost(child, gradients=gradients)]
        if inner:
            yield from inner
        elif tried.fault != "unknown":
            yield tried

    def _try(self, call: Call, gradients: bool) -> Tried:
        """Run a module on all rows at once, and on the same rows cut."""
        peer = self.table.get(call.key)
        shapes = [value.shape for value in call.inputs]
        if peer is None or len(peer.inputs) != len(shapes):
            return Tried(call=call, fault="unknown")
        first = self.parts[0]
        axes = [find_axis(a, b.shape, first) for a, b in zip(shapes, peer.inputs, strict=True)]
        try:
            with self.bench.draws.until(self.deadline):
                return self._compare(call, axes, gradients)
        except (Exception, OutOfTime):  # not every module can be run outside its model
            return Tried(call=call, fault="unknown")

    def _compare(self, call: Call, axes: Sequence[Axis | None], gradients: bool) -> Tried:
        draws, whole = self.bench.draws, Part.whole(self.parts[0].total)
        with self.bench.fresh() as (model, _):
            module = model.get_submodule(call.key[0])
            leaves = _leaves(call.inputs, gradients)
            draws.begin(whole, call.states)
            outputs = call.repeat(module, [leaf * 1 if leaf.requires_grad else leaf for leaf in leaves])
            strangers = draws.strangers
            parameters = list(module.parameters())
        pieces: list[list[Tensor]] = []
        flows: list[list[Tensor | None]] = []
        with self.bench.fresh() as (model, _):
            module = model.get_submodule(call.key[0])
            for part in self.parts:
                mine = _leaves(
                    [select(v, a, part) for v, a in zip(call.inputs, axes, strict=True)], gradients
                )
                draws.begin(part, call.states)
                piece = call.repeat(module, [leaf * 1 if leaf.requires_grad else leaf for leaf in mine])
                if gradients:
                    back = _cotangents(outputs, piece, part)
                    flows.append(_pull(piece, back, mine, list(module.parameters())))
                pieces.append([value.detach() for value in piece])
            fault, places = self._judge([value.detach() for value in outputs], pieces)
            if gradients and fault in ("", "pooled"):
                draws.begin(whole, call.states)
                pulled = _pull(outputs, _cotangents(outputs, pieces[0], whole), leaves, parameters)
                fault = self._judge_gradients(pulled, flows, axes)
        return Tried(call=call, fault=fault, strangers=strangers, inputs=axes, outputs=places)

    def _judge(
        self, outputs: Sequence[Tensor], pieces: Sequence[Sequence[Tensor]]
    ) -> tuple[str, list[Axis | None]]:
        if any(len(piece) != len(outputs) for piece in pieces):
            return "unknown", []
        first = self.parts[0]
        places = [find_axis(v.shape, p.shape, first) for v, p in zip(outputs, pieces[0], strict=True)]
        faults: set[str] = set()
        for index, whole in enumerate(outputs):
            mine = [piece[index] for piece in pieces]
            if all(piece.shape == whole.shape for piece in mine):
                same = agree(whole, list(zip(mine, self.parts, strict=True)), self.tolerance)
                faults |= set() if same else {"pooled"}
                continue
            same = agree(whole, list(zip(mine, self.parts, strict=True)), self.tolerance)
            if same is None:
                faults.add("dropped rows" if _is_short(whole, mine) else "unknown")
            elif not same:
                faults.add("outputs")
        order = ("dropped rows", "outputs", "pooled", "unknown")
        return next((fault for fault in order if fault in faults), ""), places

    def _judge_gradients(
        self,
        whole: Sequence[Tensor | None],
        pieces: Sequence[Sequence[Tensor | None]],
        axes: Sequence[Axis | None],
    ) -> str:
        """Gradients of inputs stand row by row, those of what rows share add up."""
        difference = size = 0.0
        for index, wanted in enumerate(whole):
            mine = [piece[index] for piece in pieces]
            like = next((value for value in (wanted, *mine) if value is not None), None)
            if like is None:
                continue
            axis = axes[index] if index < len(axes) else None
            wanted = torch.zeros_like(like) if wanted is None else wanted
            if axis is None:
                got = sum((value for value in mine if value is not None), start=torch.zeros_like(wanted))
            else:
                shares = [select(wanted, axis, part) for part in self.parts]
                there = [torch.zeros_like(s) if v is None else v for s, v in zip(shares, mine, strict=True)]
                got = torch.cat(there, axis.place)
                wanted = torch.cat(shares, axis.place)
            difference += (got - wanted).norm().item() ** 2
            size += wanted.norm().item() ** 2 + got.norm().item() ** 2
        return "gradients" if difference**0.5 > self.tolerance * size**0.5 else ""


def _leaves(values: Sequence[Tensor], gradients: bool) -> list[Tensor]:
    """Tensors of their own; where no gradient is asked for, a module may switch it on for its inputs."""
    return [value.clone().requires_grad_(gradients and value.is_floating_point()) for value in values]


def _cotangents(whole: Sequence[Tensor], pieces: Sequence[Tensor], part: Part) -> list[Tensor | None]:
    """What flows back into each output: numbers that a row keeps in every cut.

    Nothing into outputs that belong to no row: their gradient would be counted once per micro-batch.
    """
    found: list[Tensor | None] = []
    for like, piece in zip(whole, pieces, strict=True):
        pattern = torch.cos(torch.arange(like.numel(), device=like.device)).view(like.shape).to(like.dtype)
        is_row_wise = piece.shape != like.shape
        found.append(
            take(pattern, pattern.shape if part.is_whole else piece.shape, part) if is_row_wise else None
        )
    return found


def _pull(
    outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parameters: Sequence[nn.Parameter],
) -> list[Tensor | None]:
    """Gradients of inputs and parameters."""
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad and c is not None]
    wanted = [leaf for leaf in (*inputs, *parameters) if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * (len(inputs) + len(parameters))
    flowing, arriving = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(flowing, wanted, arriving, allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in (*inputs, *parameters)]


def _is_short(whole: Tensor, pieces: Sequence[Tensor]) -> bool:
    """Whether the first axes of the pieces add up to less than the whole's, all else being equal."""
    alike = all(piece.dim() == whole.dim() and piece.shape[1:] == whole.shape[1:] for piece in pieces)
    return alike and whole.dim() > 0 and sum(piece.shape[0] for piece in pieces) < whole.shape[0]
