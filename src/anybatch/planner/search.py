"""The search for the fastest plan within a budget."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

from anybatch.planner.candidates import Candidates, Request, without_single_rows
from anybatch.planner.cost import KEEP, Costs
from anybatch.planner.report import Option, PlanReport, refusal

SHOWN = 6  # options in a report
EVEN = 1.1  # estimates within this factor of the fastest count as equal
SUMS = 1.5  # upper bound on the memory added by separate gradient sums, relative to an uncut step
TRIES = 3  # traces of plans composed to fit, before another size is taken
TRACED = 3  # sizes traced by themselves if nothing can be composed
OFF = 0.005  # relative error at which the composition, linear in rows, is given up
RERUN = ("selective", "recompute")


def choose(request: Request) -> PlanReport:
    """Return the fastest plan of a request, verified by a trace; raise BudgetError if none fits."""
    return _Search(without_single_rows(request) if request.depends_on_cut else request).best()


class _Search:
    def __init__(self, request: Request) -> None:
        self._request = request
        self._candidates = Candidates(request)
        self._limit = 2**62 if request.budget is None else request.budget

    def best(self) -> PlanReport:
        options = self._options()
        for index, option in enumerate(options):
            verified = self._verified(option)
            options[index] = verified
            composed = option.source == "composed"
            is_plain = not option.plan.blocks and option.plan.is_cut
            if composed and is_plain and abs(verified.peak - option.peak) > OFF * verified.peak:
                self._candidates.is_composed = False  # bytes are not linear in the rows
                return self.best()
            # More may have to be recomputed; or less, if the composition was too high.
            is_loose = self._request.blocks and option.plan.blocks and verified.peak < option.peak
            if composed and (verified.peak > self._limit or is_loose):
                verified = self._fitted(verified) or verified
            if verified.peak <= self._limit:
                return self._report(verified, [one for one in options if one.plan != verified.plan])
        least = self._least()
        if least.peak <= self._limit:
            return self._report(least, [])
        raise refusal(least, self._limit, self._request.task.network.batch_norms, self._request.cut_refused)

    def _options(self) -> list[Option]:
        candidates = self._candidates
        found = self._composed_options() if candidates.is_composed else []
        for policies in (("offload",), RERUN):  # offload is cheaper to record, and to run
            left = [one for one in policies if one in candidates.unrecorded]
            if not (candidates.is_composed and left):
                continue
            least = min(candidates.costs(size).kept_s for size in self._request.all_sizes)
            if not any(one.seconds <= EVEN * least for one in found):  # otherwise no policy is much faster
                candidates.add_policies(left)
                found = self._composed_options() if candidates.is_composed else []
        if not candidates.is_composed:
            found = self._traced_options()
        return _ordered(found, self._request.device.kind)

    def _composed_options(self) -> list[Option]:
        found: list[Option] = []
        for size in self._request.all_sizes:
            wrong = 0
            # The uncut batch, or one `add`: its loss may have another form, and it is the likeliest.
            if size == self._request.largest:
                whole = self._option(self._candidates.costs(size), size, {})
                if whole.peak <= SUMS * self._limit:
                    verified = self._verified(whole)
                    if verified.peak <= self._limit:
                        found.append(verified)
                        continue
                    wrong = max(0, verified.peak - whole.peak)
            for foreach in self._candidates.updates(size):
                option = self._fastest(size, self._limit - wrong, foreach)
                if option is not None:
                    found.append(option)
                    break
        return found

    def _fastest(self, size: int, budget: int, foreach: bool | None) -> Option | None:
        costs = self._candidates.costs(size, foreach)
        choice = costs.fastest(budget)
        return None if choice is None else self._option(costs, size, choice, foreach)

    def _option(
        self, costs: Costs, size: int, choice: Mapping[str, str], foreach: bool | None = None
    ) -> Option:
        like = self._request.like
        plan = replace(like, micro_batch=size, blocks=tuple(choice.items()) or like.blocks, foreach=foreach)
        return Option(plan=plan, peak=costs.peak(choice), seconds=costs.seconds(choice), source="composed")

    def _traced_options(self) -> list[Option]:
        """Return the largest sizes that fit, each traced by itself, all blocks under one policy."""
        sizes = self._request.all_sizes
        for policy in (KEEP, *reversed(self._request.policies)):
            # More rows use more bytes: bisect. The uncut batch is tried separately.
            low, high = 1, len(sizes)
            while low < high:
                middle = (low + high) // 2
                if self._traced_option(policy, sizes[middle]).peak <= self._limit:
                    high = middle
                else:
                    low = middle + 1
            near = [sizes[0], *sizes[low : low + TRACED]][:TRACED]
            found = [self._traced_option(policy, size) for size in near]
            fitting = [option for option in found if option.peak <= self._limit]
            if fitting:
                return fitting
        return []

    def _traced_option(self, policy: str, size: int) -> Option:
        plan = self._request.uniform(size, policy)
        option = self._verified(Option(plan=plan, peak=0, seconds=0.0, source="composed"))
        if option.peak > self._limit and self._request.may_disable_foreach:
            return self._verified(replace(option, plan=replace(plan, foreach=False), seconds=0.0))
        return option

    def _verified(self, option: Option) -> Option:
        found = self._candidates.trace(option.plan)
        seconds = option.seconds or self._candidates.seconds(found)
        return replace(option, peak=found.peak, seconds=seconds, source="predicted", ledger=found.ledger)

    def _fitted(self, found: Option) -> Option | None:
        """Return the fastest option of the same size that fits, corrected by the error of the composition."""
        size, foreach = found.plan.micro_batch, found.plan.foreach
        choice = dict(found.plan.blocks) if self._request.blocks else {}  # otherwise in all recordings
        wrong = found.peak - self._candidates.costs(size, foreach).peak(choice)
        tried = {found.plan}
        for _ in range(TRIES):
            option = self._fastest(size, self._limit - wrong, foreach)
            if option is None or option.plan in tried:
                return None
            tried.add(option.plan)
            verified = self._verified(option)
            if verified.peak <= self._limit:
                return verified
            wrong = max(wrong + (verified.peak - self._limit), verified.peak - option.peak)
        return None

    def _least(self) -> Option:
        self._candidates.add_policies(self._candidates.unrecorded)
        sizes = self._request.all_sizes[::-1]
        tried = [self._least_at(sizes[0])]
        for size in sizes[1:]:  # each micro-batch leaves a few bytes, so single rows may use more
            tried.append(self._least_at(size))
            if tried[-1].peak >= tried[-2].peak:
                break
        # An uncut batch has no separate gradient sums, which rarely decides.
        tried.append(self._least_at(sizes[-1], most=SUMS * tried[0].peak))
        fitting = [option for option in tried if option.peak <= self._limit]
        return min(fitting or tried, key=lambda option: option.seconds if fitting else option.peak)

    def _least_at(self, size: int, *, most: float = inf) -> Option:
        request = self._request
        if not self._candidates.is_composed:
            tried = [self._traced_option(policy, size) for policy in (KEEP, *request.policies)]
            return min(tried, key=lambda option: option.peak)
        foreach = False if request.may_disable_foreach else None
        costs = self._candidates.costs(size, foreach)
        option = self._option(costs, size, costs.smallest(), foreach)
        return self._verified(option) if option.peak <= most else option

    def _report(self, best: Option, others: Sequence[Option]) -> PlanReport:
        assert best.ledger is not None  # noqa: S101, every best option is traced
        return PlanReport(
            plan=best.plan,
            ledger=best.ledger,
            seconds=best.seconds,
            budget=self._request.budget,
            device=self._request.device.name,
            options=tuple([replace(one, ledger=None) for one in others if one.peak <= self._limit][:SHOWN]),
        )


def _ordered(options: list[Option], kind: str) -> list[Option]:
    """Sort fastest first; on the host, options equally fast by estimate smallest first."""
    found = sorted(options, key=lambda option: (option.seconds, -option.plan.micro_batch))
    if kind != "cpu" or not found:
        return found
    # Allocations too large for the host's allocator to keep come in fresh pages each time.
    even = [one for one in found if one.seconds <= EVEN * found[0].seconds]
    return sorted(even, key=lambda option: option.peak) + [one for one in found if one not in even]
