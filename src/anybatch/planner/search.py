"""The ladder on traced numbers: fewer rows at once, then blocks that run again, then the smallest budget."""

import sys
from dataclasses import replace
from math import ceil, inf
from time import monotonic

from torch import nn

from anybatch.core import counted, format_bytes
from anybatch.engine import Plan
from anybatch.memory import Ledger
from anybatch.planner.report import Option, PlanReport, refusal
from anybatch.planner.request import Request, computes_in_half, without_single_rows
from anybatch.planner.trace import trace

KEEP = "keep"
SHOWN = 6  # options in a report
EVEN = 1.1  # estimates within this factor of the fastest count as equal
CLOSE = 1.02  # guesses further over the budget than this factor are not traced
NEAR = 3  # sizes that are traced of those that fit, the largest first
TRIES = 4  # traces of plans with blocks that run again
SILENT_S = 2.0  # seconds before a line says that planning goes on


def choose(request: Request) -> PlanReport:
    """Return the fastest plan that was traced within the budget; raise BudgetError if there is none."""
    return _Search(without_single_rows(request) if request.depends_on_cut else request).best()


class _Search:
    def __init__(self, request: Request) -> None:
        self._request, self._sizes = request, request.all_sizes
        self._limit = 2**62 if request.budget is None else request.budget
        self._half = request.like.precision.is_short or computes_in_half(request.task)
        self._traced: dict[Plan, Option] = {}
        self._ledgers: dict[Plan, Ledger] = {}  # of the traced plans
        self._known: dict[str, dict[int, Option]] = {}  # by policy of all blocks and by size
        self._idle: frozenset[nn.Parameter] = frozenset()  # parameters that get no gradient
        self._tell_at, self._one_by_one = monotonic() + SILENT_S, False

    def best(self) -> PlanReport:
        """Climb until nothing can be much faster; fall back to the plan of the fewest bytes."""
        request, sizes, at = self._request, self._sizes, self._largest()
        found = [self._option(size, KEEP) for size in sizes[at : at + 1]]
        enough = EVEN * self._known[KEEP][sizes[0]].seconds  # of the batch at once, were there room
        if request.policies and not (found and found[0].seconds <= enough):
            found += self._with_blocks(min([option.seconds for option in found], default=inf))
        else:
            found += [self._option(size, KEEP) for size in sizes[at + 1 : at + NEAR]]
        found = [option for option in found if option.peak <= self._limit] or [self._least()]
        if found[0].peak > self._limit:
            ledger, batch_norms = self._ledgers[found[0].plan], request.task.network.batch_norms
            raise refusal(found[0], ledger, self._limit, batch_norms, request.cut_refused)
        return self._report(found)

    def _largest(self) -> int:
        """Return the index of the largest size that fits as it is; the number of sizes if none does."""
        low, high, at = 0, len(self._sizes), 0  # sizes before `low` do not fit, those from `high` on do
        while low < high:
            option = self._option(self._sizes[at], KEEP)
            low, high = (low, at) if option.peak <= self._limit else (at + 1, high)
            guesses = [self._guess(size, KEEP) for size in self._sizes[:high]]
            at = next((at for at in range(low, high) if guesses[at] <= self._limit), high - 1)
            if low < high < len(self._sizes) and guesses[at] > CLOSE * self._limit:
                break
        return high

    def _guess(self, size: int, policy: str) -> float:
        """Estimate the peak of a size by the nearest traced one: activations grow with the rows."""
        near = min(self._known[policy].values(), key=lambda option: abs(option.plan.micro_batch - size))
        ledger, scale = self._ledgers[near.plan], size / near.plan.micro_batch
        gradients, peaks = max(moment.bytes[1] for moment in ledger.moments), list[float]()
        for phase, moment in ledger.phases().items():
            parameters, _, state, activations, workspace, inputs, other = moment.bytes
            grown = parameters + gradients + state + inputs + scale * (activations + workspace + other)
            peaks.append(moment.total if phase == "update" else grown)
        return near.peak if scale == 1 else max(peaks)

    def _with_blocks(self, fastest: float) -> list[Option]:
        """Return plans whose first blocks run again, until no other can take less than `fastest` seconds."""
        request, sizes, blocks = self._request, self._sizes, len(self._request.blocks)
        whole, *cuts = sorted(self._known[KEEP].values(), key=lambda option: -option.plan.micro_batch)
        per_cut = [(cut.seconds - whole.seconds) / (cut.plan.micro_batches - 1) for cut in cuts]
        guesses: list[tuple[float, int, str, int]] = []
        for policy in request.policies:
            rebuilding = self._option(sizes[0], policy).seconds - whole.seconds
            for size in sizes:
                every, none = self._guess(size, policy), self._guess(size, KEEP)
                if every < none and every <= CLOSE * self._limit:
                    again = max(1, min(blocks, ceil(blocks * (none - self._limit) / (none - every))))
                    cut_s = max(per_cut, default=0) * (request.uniform(size, KEEP).micro_batches - 1)
                    guesses.append((whole.seconds + cut_s + rebuilding * again / blocks, size, policy, again))
        found, tries = list[Option](), TRIES
        for seconds, size, policy, again in sorted(guesses):
            while 0 < again <= blocks and seconds < fastest and (tries := tries - 1) >= 0:
                option = self._option(size, policy, again)  # the line is a guess until it is traced
                room = self._limit - option.peak
                found += [option] * (room >= 0)
                if 0 <= room < (self._guess(size, KEEP) - option.peak) / again:  # of one block
                    break
                again += -1 if room >= 0 else 1
            fastest = min([fastest, *[option.seconds for option in found]])
        return found

    def _least(self) -> Option:
        """Return the fastest plan that fits of those with the fewest bytes, or the one with the fewest."""
        sizes, known = self._sizes, (KEEP, *self._request.policies)
        policy = min(known, key=lambda one: self._option(sizes[0], one).peak)
        tried = [self._option(size, policy) for size in (sizes[0], sizes[-1])]  # uncut: no separate sums
        for size in sizes[-2::-1]:  # each micro-batch leaves a few bytes, so single rows may use more
            tried.append(self._option(size, policy))
            if tried[-1].peak >= min(option.peak for option in tried[:-1]):
                break
        return min(tried, key=lambda one: (0, one.seconds) if one.peak <= self._limit else (1, one.peak))

    def _option(self, size: int, policy: str, again: int | None = None) -> Option:
        """Trace a plan; from an update that does not fit on, updates are made parameter by parameter."""
        plan = self._request.uniform(size, policy, again)
        option = self._trace(replace(plan, foreach=False) if self._one_by_one else plan)
        update = self._ledgers[option.plan].phases().get("update")
        if update and update.total > self._limit and self._request.may_disable_foreach > self._one_by_one:
            self._one_by_one = True
            return self._option(size, policy, again)
        if again is None:
            self._known.setdefault(policy, {})[size] = option
        return option

    def _trace(self, plan: Plan) -> Option:
        if plan not in self._traced:
            if monotonic() > self._tell_at:  # once
                self._tell_at = inf
                traced = counted(len(self._traced), "plan")
                sys.stderr.write(f"anybatch is planning; {traced} traced so far\n")
            asked, device = self._request, self._request.device
            found = trace(plan, asked.task, asked.batch, device=device.kind, idle=self._idle)
            last, self._idle = found.marks[-1], found.idle
            seconds = device.seconds(last.operations, last.flops, last.moved, half=self._half)
            self._traced[plan] = Option(plan=plan, peak=found.peak, seconds=seconds)
            self._ledgers[plan] = found.ledger
        return self._traced[plan]

    def _report(self, found: list[Option]) -> PlanReport:
        """Report the fastest; on the host, where large allocations are slow, the smallest of the even."""
        order = sorted(dict.fromkeys(found), key=lambda one: (one.seconds, -one.plan.micro_batch))
        margin = EVEN if self._request.device.kind == "cpu" else 0.0
        even = [option for option in order if option.seconds <= margin * order[0].seconds]
        best = min(even or order[:1], key=lambda option: option.peak)
        note = f"The fastest plan by estimate gains at most 10 % and takes {format_bytes(order[0].peak)}."
        return PlanReport(
            plan=best.plan,
            ledger=self._ledgers[best.plan],
            seconds=best.seconds,
            budget=self._request.budget,
            device=self._request.device.name,
            options=tuple([option for option in order if option is not best][:SHOWN]),
            notes=(note,) if best is not order[0] else (),
        )
