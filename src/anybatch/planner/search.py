"""The ladder on traced numbers: fewer rows at once, then blocks that run again, then the smallest budget."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from anybatch.engine import Plan
from anybatch.planner.report import Option, PlanReport, refusal
from anybatch.planner.request import Request, computes_in_half, without_single_rows
from anybatch.planner.trace import trace

KEEP = "keep"
SHOWN = 6  # options in a report
EVEN = 1.1  # estimates within this factor of the fastest count as equal
NEAR = 3  # sizes that are traced of those that fit, the largest first
TRIES = 3  # further traces for the number of blocks that run again


def choose(request: Request) -> PlanReport:
    """Return the fastest plan that was traced within the budget; raise BudgetError if there is none."""
    return _Ladder(without_single_rows(request) if request.depends_on_cut else request).best()


class _Ladder:
    def __init__(self, request: Request) -> None:
        self._request = request
        self._limit = 2**62 if request.budget is None else request.budget
        self._half = request.like.precision.is_short or computes_in_half(request.task)
        self._traced: dict[Plan, Option] = {}
        self._idle: frozenset[nn.Parameter] = frozenset()  # parameters that get no gradient

    def best(self) -> PlanReport:
        """Climb until nothing can be much faster; fall back to the plan of the fewest bytes."""
        request, sizes = self._request, self._request.all_sizes
        found = self._largest(KEEP)
        if request.policies and self._limit < 2**62:
            fastest = self._option(sizes[0], KEEP).seconds  # were there room
            for policy in (*[one for one in request.policies if one == "offload"], *self._that_run_again):
                if any(option.seconds <= EVEN * fastest for option in found):
                    break
                found += self._with_blocks(policy)
        if not found:
            least = self._least()
            if least.peak > self._limit:
                norms = request.task.network.batch_norms
                raise refusal(least, self._limit, norms, request.cut_refused)
            found = [least]
        first, *others = _ordered(found, request.device.kind)
        return self._report(first, others)

    @property
    def _that_run_again(self) -> list[str]:
        return [one for one in ("selective", "recompute") if one in self._request.policies]

    def _largest(self, policy: str) -> list[Option]:
        """Return the largest sizes that fit with all blocks under one policy, and a few smaller ones.

        More rows take more bytes, nearly in a straight line: so the next size to trace is where the line
        through the last two crosses the budget.
        """
        sizes = self._request.all_sizes
        low, high, at = 0, len(sizes), 0  # sizes before `low` do not fit, those from `high` on do
        known: list[tuple[int, int]] = []
        while low < high:
            option = self._option(sizes[at], policy)
            known = [*known[-1:], (sizes[at], option.peak)]
            low, high = (low, at) if option.peak <= self._limit else (at + 1, high)
            at = (low + high) // 2 if len(known) < 2 else self._crossing(known, low, high)
        found = [self._option(size, policy) for size in sizes[low : low + NEAR]]
        return [option for option in found if option.peak <= self._limit]

    def _crossing(self, known: Sequence[tuple[int, int]], low: int, high: int) -> int:
        """Return the index from `low` to `high` of the largest size that fits by a line, or the middle."""
        (one, less), (other, more) = sorted(known)
        if low >= high or more <= less:
            return (low + high) // 2
        rows = one + (self._limit - less) * (other - one) / (more - less)
        sizes = self._request.all_sizes
        return next((index for index in range(low, high) if sizes[index] <= rows), high - 1)

    def _with_blocks(self, policy: str) -> list[Option]:
        """Return plans with blocks under a policy: all of them, and as few as fit.

        The last blocks are kept: backward frees them first.
        """
        found = self._largest(policy)
        kept = max([one.plan.micro_batch for one in self._largest(KEEP)], default=0)
        fitting = max([one.plan.micro_batch for one in found], default=0)
        over = [size for size in self._request.all_sizes if kept < size <= fitting]
        for size in dict.fromkeys((*over[:1], *over[-1:])):
            every, none = self._option(size, policy), self._option(size, KEEP)
            per_block = (none.peak - every.peak) / len(self._request.blocks)
            again = len(self._request.blocks) - int((self._limit - every.peak) / max(1.0, per_block))
            for _ in range(TRIES):  # the line is a guess until it is traced
                option = self._option(size, policy, max(1, again))
                fits = option.peak <= self._limit
                found += [option] * fits
                again += -1 if fits else 1
                if again < 1 or self._request.uniform(size, policy, again) in self._traced:
                    break
        return found

    def _least(self) -> Option:
        """Return the fastest plan that fits of those with the fewest bytes, or the one with the fewest."""
        sizes = self._request.all_sizes
        tried = self._under_all(sizes[-1])
        least = min(option.peak for option in tried)
        for size in sizes[-2::-1]:  # each micro-batch leaves a few bytes, so single rows may use more
            found = self._under_all(size)
            tried += found
            if least <= (least := min(option.peak for option in found)):
                break
        tried += self._under_all(sizes[0])  # an uncut batch has no separate gradient sums
        fitting = [option for option in tried if option.peak <= self._limit]
        return min(fitting or tried, key=lambda option: option.seconds if fitting else option.peak)

    def _under_all(self, size: int) -> list[Option]:
        return [self._option(size, policy) for policy in (KEEP, *self._request.policies)]

    def _option(self, size: int, policy: str, again: int | None = None) -> Option:
        """Trace a plan; if it does not fit, with an update that is made parameter by parameter as well."""
        plan = self._request.uniform(size, policy, again)
        option = self._trace(plan)
        if option.peak > self._limit and self._request.may_disable_foreach:
            return self._trace(replace(plan, foreach=False))
        return option

    def _trace(self, plan: Plan) -> Option:
        if plan not in self._traced:
            request = self._request
            device = request.device
            found = trace(plan, request.task, request.batch, device=device.kind, idle=self._idle)
            last, self._idle = found.marks[-1], found.idle
            seconds = device.seconds(last.operations, last.flops, last.moved, half=self._half)
            self._traced[plan] = Option(plan=plan, peak=found.peak, seconds=seconds, ledger=found.ledger)
        return self._traced[plan]

    def _report(self, best: Option, others: Sequence[Option]) -> PlanReport:
        assert best.ledger is not None  # noqa: S101, every option is traced
        return PlanReport(
            plan=best.plan,
            ledger=best.ledger,
            seconds=best.seconds,
            budget=self._request.budget,
            device=self._request.device.name,
            options=tuple([replace(one, ledger=None) for one in others][:SHOWN]),
        )


def _ordered(options: Sequence[Option], kind: str) -> list[Option]:
    """Sort fastest first; on the host, options equally fast by estimate smallest first."""
    by_plan: Mapping[Plan, Option] = {option.plan: option for option in options}
    found = sorted(by_plan.values(), key=lambda option: (option.seconds, -option.plan.micro_batch))
    if kind != "cpu":
        return found
    # Allocations too large for the host's allocator to keep come in fresh pages each time.
    even = [one for one in found if one.seconds <= EVEN * found[0].seconds]
    return sorted(even, key=lambda option: option.peak) + [one for one in found if one not in even]
