"""The ladder on traced numbers: the most rows that fit on the first rung of a step, or a smallest budget."""

import sys
from dataclasses import replace
from math import inf
from time import monotonic

from torch import nn, strided

from anybatch.core import counted, local, tensors_in
from anybatch.engine import Plan
from anybatch.memory import OWNERS
from anybatch.planner.ladder import update_to_come
from anybatch.planner.report import Option, PlanReport, below_floor, refusal
from anybatch.planner.request import Request
from anybatch.planner.trace import Trace, trace
from anybatch.recompute import WHOLE, Choice

SHOWN = 6  # options in a report
CLOSE = 1.02  # guesses further over the budget than this factor are not traced
NEAR = 2  # sizes that are traced of those that fit, the largest first
ACTIVATIONS = OWNERS.index("activations")
SILENT_S = 2.0  # seconds before a line says that planning goes on


def choose(request: Request) -> PlanReport:
    """Return the plan of the first rung that fits, as a step climbs them; raise BudgetError if none does."""
    return _Search(request).best()


class _Search:
    def __init__(self, request: Request) -> None:
        self._request, self._sizes = request, request.all_sizes
        self._limit = 2**62 if request.budget is None else request.budget
        self._traced: dict[Plan, Trace] = {}
        self._known: dict[Choice, dict[int, Trace]] = {}  # by policies of blocks and by size
        self._idle: frozenset[nn.Parameter] = frozenset()  # parameters that get no gradient
        self._tell_at, self._foreach = monotonic() + SILENT_S, request.like.foreach

    def best(self) -> PlanReport:
        """Climb; refuse a budget below parameters, gradients and optimizer state before any trace."""
        request, sizes, rung = self._request, self._sizes, self._request.like.blocks
        network = request.task.network
        held = [*network.everyone, *network.parameters, *request.task.masters.tensors]
        held += tensors_in([[*one.state.values()] for one in request.task.optimizers])
        floor = (
            sum(local(one).nbytes for one in held if one.layout is strided) + update_to_come(request.task)[0]
        )
        if floor > self._limit:
            raise below_floor(floor, self._limit)
        for rung in request.rungs:
            is_again = rung != request.like.blocks and WHOLE not in rung
            choice = self._fewest_blocks(rung) if is_again else rung
            at = self._largest(choice)
            if at < len(sizes):
                best, *others = [self._option(size, choice) for size in sizes[at : at + NEAR]]
                return self._report(best, others)
            if not self._may_free(self._option(sizes[-1], rung)):
                break
        least = self._least(rung)
        if least.peak <= self._limit:
            return self._report(least, [])
        raise refusal(least.plan, least.ledger, self._limit, network.batch_norms, request.cut_refused)

    def _largest(self, choice: Choice) -> int:
        """Return the index of the largest size that fits on a rung; the number of sizes if none does.

        The first rung begins with the whole batch, the others with the smallest size: few of it fit there.
        """
        low, high = 0, len(self._sizes)
        at = 0 if choice == self._request.like.blocks else high - 1
        while low < high:  # sizes before `low` do not fit, those from `high` on do
            option = self._option(self._sizes[at], choice)
            low, high = (low, at) if option.peak <= self._limit else (at + 1, high)
            guesses = [self._guess(size, choice) for size in self._sizes[:high]]
            at = next((at for at in range(low, high) if guesses[at] <= self._limit), high - 1)
            if low < high < len(self._sizes) and guesses[at] > CLOSE * self._limit:
                break
        return high

    def _guess(self, size: int, choice: Choice) -> float:
        """Estimate the peak of a size by the nearest traced one: activations grow with the rows."""
        known = self._known[choice].values()
        near = min(known, key=lambda one: abs(one.plan.micro_batch - size))
        ledger, scale = near.ledger, size / near.plan.micro_batch
        is_late = self._foreach is False and near.plan.foreach is None  # updates will take less
        gradients, peaks = max(moment.bytes[1] for moment in ledger.moments), list[float]()
        kept = self._request.device.workspace
        for phase, moment in ledger.phases().items():
            parameters, _, state, activations, workspace, inputs, other = moment.bytes
            fixed = parameters + gradients + state + inputs + kept
            grown = fixed + scale * (activations + workspace + other - kept)
            peaks.append(moment.total * (not is_late) if phase == "update" else grown)
        return near.peak if scale == 1 else max(peaks)

    def _fewest_blocks(self, choice: Choice) -> Choice:
        """Return the first blocks that must run again in the smallest micro-batch, by a line, or all."""
        most, size = len(choice), self._sizes[-1]
        more, less = self._option(size, self._request.like.blocks).peak, self._option(size, choice).peak
        again = most - int((self._limit - less) / max(1.0, (more - less) / most))
        fits = 0 < again < most and self._option(size, choice[:again]).peak <= self._limit
        return choice[:again] if fits else choice

    def _may_free(self, option: Trace) -> bool:
        """Return True if a lower rung may fit or take clearly less: those free activations, nothing else."""
        rest = max(one.total - one.bytes[ACTIVATIONS] for one in option.ledger.moments)
        return rest <= self._limit or CLOSE * rest < option.peak

    def _least(self, choice: Choice) -> Trace:
        """Return the fastest plan that fits of those with the fewest bytes, or the one with the fewest.

        A few rows may use less than one, as each micro-batch leaves some bytes; the whole batch may use less
        than a cut, as its gradients need no second copy to be added to.
        """
        sizes = self._sizes
        least = self._option(sizes[-1], choice)
        copied = max(moment.bytes[1] for moment in least.ledger.moments)
        if self._guess(sizes[0], choice) - copied <= CLOSE * least.peak:
            self._option(sizes[0], choice)
        for size in sizes[-2::-1]:
            near = self._guess(size, choice) <= CLOSE * least.peak
            if not near or self._option(size, choice).peak >= least.peak:
                break
            least = self._option(size, choice)
        tried = [option for one in self._known.values() for option in one.values()]
        return min(tried, key=lambda one: (0, one.seconds) if one.peak <= self._limit else (1, one.peak))

    def _option(self, size: int, choice: Choice) -> Trace:
        """Trace a plan; from an update that does not fit on, updates are made parameter by parameter."""
        asked = self._request
        plan = replace(asked.like, micro_batch=size, blocks=choice, foreach=self._foreach)
        if plan not in self._traced:
            if monotonic() > self._tell_at:  # once
                self._tell_at = inf
                traced = counted(len(self._traced), "plan")
                sys.stderr.write(f"anybatch is planning; {traced} traced so far\n")
            found = trace(plan, asked.task, asked.batch, device=asked.device, idle=self._idle)
            self._traced[plan], self._idle = found, found.idle
        option = self._traced[plan]
        phases = option.ledger.phases()
        update = phases.pop("update", None)
        may_change = self._foreach is not False and asked.may_disable_foreach
        if update and update.total > self._limit and may_change:
            self._foreach = False
            if all(moment.total <= self._limit for moment in phases.values()):
                return self._option(size, choice)
        self._known.setdefault(choice, {})[size] = option
        return option

    def _report(self, best: Trace, others: list[Trace]) -> PlanReport:
        fitting = {one.plan: one for one in (*others, *self._traced.values()) if one.peak <= self._limit}
        order = sorted(fitting.values(), key=lambda one: (one.seconds, -one.plan.micro_batch))
        return PlanReport(
            plan=best.plan,
            ledger=best.ledger,
            seconds=best.seconds,
            budget=self._request.budget,
            device=self._request.device.name,
            options=tuple(
                [
                    Option(plan=one.plan, peak=one.peak, seconds=one.seconds)
                    for one in [one for one in order if one is not best][:SHOWN]
                ]
            ),
            notes=tuple([f"attention: {kernel}" for kernel in sorted(best.attention)]),
        )
