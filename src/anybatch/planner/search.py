"""The ladder on traced numbers: fewer rows at once, then blocks that run again, then the smallest budget."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic

from torch import nn

from anybatch.core import counted, format_bytes
from anybatch.engine import Plan
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
    return _Ladder(without_single_rows(request) if request.depends_on_cut else request).best()


class _Ladder:
    def __init__(self, request: Request) -> None:
        self._request, self._sizes = request, request.all_sizes
        self._limit = 2**62 if request.budget is None else request.budget
        self._half = request.like.precision.is_short or computes_in_half(request.task)
        self._traced: dict[Plan, Option] = {}
        self._idle: frozenset[nn.Parameter] = frozenset()  # parameters that get no gradient
        self._began, self._is_told = monotonic(), False

    def best(self) -> PlanReport:
        """Climb until nothing can be much faster; fall back to the plan of the fewest bytes."""
        request, sizes = self._request, self._sizes
        at = self._largest(KEEP)
        found = [self._option(size, KEEP) for size in sizes[at : at + 1]]
        fastest = self._option(sizes[0], KEEP).seconds  # were there room
        if request.policies and not (found and found[0].seconds <= EVEN * fastest):
            found += self._with_blocks(found)
        else:
            found += [self._option(size, KEEP) for size in sizes[at + 1 : at + NEAR]]
        found = [option for option in found if option.peak <= self._limit]
        if not found:
            least = self._least()
            if least.peak > self._limit:
                norms = request.task.network.batch_norms
                raise refusal(least, self._limit, norms, request.cut_refused)
            found = [least]
        return self._report(found)

    def _largest(self, policy: str) -> int:
        """Return the index of the largest size that fits with all blocks under one policy."""
        low, high, at = 0, len(self._sizes), 0  # sizes before `low` do not fit, those from `high` on do
        while low < high:
            fits = self._option(self._sizes[at], policy).peak <= self._limit
            low, high = (low, at) if fits else (at + 1, high)
            left = range(low, high)
            guesses = (at for at in left if self._guess(self._sizes[at], policy) <= self._limit)
            at = next(guesses, high - 1)
            if low < high < len(self._sizes) and self._guess(self._sizes[at], policy) > CLOSE * self._limit:
                break
        return high

    def _guess(self, size: int, policy: str) -> float:
        """Estimate the peak of a size by the nearest traced one: activations grow with the rows."""
        uniform = [self._request.uniform(one, policy) for one in self._sizes]
        known = [self._traced[plan] for plan in uniform if plan in self._traced]
        near = min(known, key=lambda option: abs(option.plan.micro_batch - size))
        assert near.ledger is not None  # noqa: S101, every option is traced
        held = [near.ledger.at_peak[owner] for owner in ("parameters", "optimizer state", "input")]
        grows = near.peak - sum(held) - near.ledger.at_peak["gradients"]
        gradients = max(moment.bytes[1] for moment in near.ledger.moments)
        return sum(held) + gradients + grows * size / near.plan.micro_batch

    def _with_blocks(self, kept: Sequence[Option]) -> list[Option]:
        """Return plans whose first blocks run again, as few as fit; the last ones are freed first.

        Bytes and seconds lie on lines: in the rows, in the number of micro-batches and of blocks. Plans are
        traced in the order of their estimates, until none can be faster than those found.
        """
        request, sizes, blocks = self._request, self._sizes, len(self._request.blocks)
        whole = self._option(sizes[0], KEEP)
        cuts = [option for option in self._traced.values() if option.plan.is_cut and not option.plan.blocks]
        per_cut = max(
            [(cut.seconds - whole.seconds) / (cut.plan.micro_batches - 1) for cut in cuts], default=0
        )
        guesses: list[tuple[float, int, str, int]] = []
        for policy in request.policies:
            more = self._option(sizes[0], policy).seconds - whole.seconds
            for size in sizes:
                every, none = self._guess(size, policy), self._guess(size, KEEP)
                if every < none and every <= CLOSE * self._limit < CLOSE * none:
                    again = min(blocks, max(1, -int((self._limit - none) * blocks // (none - every))))
                    parts = request.uniform(size, policy).micro_batches - 1
                    seconds = whole.seconds + parts * per_cut + more * again / blocks
                    guesses.append((seconds, size, policy, again))
        found, tries = list(kept), TRIES
        for seconds, size, policy, again in sorted(guesses):
            if not tries or any(option.seconds <= seconds for option in found):
                break
            for more in range(again, blocks + 1):
                option, tries = self._option(size, policy, more), tries - 1
                if option.peak <= self._limit or not tries:
                    found += [option] * (option.peak <= self._limit)
                    break
        return found[len(kept) :]

    def _least(self) -> Option:
        """Return the fastest plan that fits of those with the fewest bytes, or the one with the fewest."""
        sizes = self._sizes
        # An uncut batch has no separate gradient sums.
        tried = [self._option(sizes[0], policy) for policy in (KEEP, *self._request.policies)]
        order = sorted(range(len(tried)), key=lambda index: tried[index].peak)[:2]
        policies = [(KEEP, *self._request.policies)[index] for index in order]
        tried += (ends := [self._option(sizes[-1], policy) for policy in policies])
        least = min(ends, key=lambda option: option.peak)
        for size in sizes[-2::-1]:  # each micro-batch leaves a few bytes, so single rows may use more
            tried.append(option := self._option(size, policies[ends.index(least)]))
            if option.peak >= min(one.peak for one in tried[:-1]):
                break
        fitting = [option for option in tried if option.peak <= self._limit]
        return min(fitting or tried, key=lambda option: option.seconds if fitting else option.peak)

    def _option(self, size: int, policy: str, again: int | None = None) -> Option:
        """Trace a plan; if its update does not fit, with one that is made parameter by parameter as well."""
        plan = self._request.uniform(size, policy, again)
        option = self._trace(plan)
        assert option.ledger is not None  # noqa: S101, every option is traced
        in_update = option.ledger.peak_moment.phase == "update"
        if option.peak > self._limit and in_update and self._request.may_disable_foreach:
            return self._trace(replace(plan, foreach=False))
        return option

    def _trace(self, plan: Plan) -> Option:
        if plan not in self._traced:
            if not self._is_told and monotonic() - self._began > SILENT_S:
                self._is_told = True
                done = counted(len(self._traced), "plan")
                sys.stderr.write(f"anybatch looks for a plan on fake tensors: {done} traced so far.\n")
            request = self._request
            device = request.device
            found = trace(plan, request.task, request.batch, device=device.kind, idle=self._idle)
            last, self._idle = found.marks[-1], found.idle
            seconds = device.seconds(last.operations, last.flops, last.moved, half=self._half)
            self._traced[plan] = Option(plan=plan, peak=found.peak, seconds=seconds, ledger=found.ledger)
        return self._traced[plan]

    def _report(self, found: Sequence[Option]) -> PlanReport:
        """Report the fastest; on the host the smallest of those equally fast by estimate."""
        by_plan = {option.plan: option for option in found}.values()
        order = sorted(by_plan, key=lambda option: (option.seconds, -option.plan.micro_batch))
        best, notes = order[0], list[str]()
        # Allocations too large for the host's allocator to keep come in fresh pages each time.
        if self._request.device.kind == "cpu":
            even = [option for option in order if option.seconds <= EVEN * order[0].seconds]
            best = min(even, key=lambda option: option.peak)
            if best is not order[0]:
                less = format_bytes(order[0].peak - best.peak)
                notes.append(f"The fastest plan by estimate gains less than 10 % and takes {less} more.")
        assert best.ledger is not None  # noqa: S101, every option is traced
        return PlanReport(
            plan=best.plan,
            ledger=best.ledger,
            seconds=best.seconds,
            budget=self._request.budget,
            device=self._request.device.name,
            options=tuple([replace(one, ledger=None) for one in order if one is not best][:SHOWN]),
            notes=tuple(notes),
        )
