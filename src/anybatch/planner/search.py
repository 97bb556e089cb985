"""The fastest Plan within a budget of bytes, or why there is none."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf

from anybatch.core import OutOfMemoryError
from anybatch.engine import Plan
from anybatch.memory import Device
from anybatch.planner.candidates import LOW, Candidates, Request, takes_single_rows
from anybatch.planner.measure import seconds_per_row
from anybatch.planner.mixture import KEEP, Mixture, fastest, smallest
from anybatch.planner.report import Option, PlanReport, refusal

MEASURE_S = 2.0  # for all measured runs of one planning
SHOWN = 6  # options in a report
GOOD = 1.05  # times the fastest estimate: what a race on a card that is here may tell apart
EVEN = 1.1  # times the fastest estimate: what no estimate tells apart, on the host or for a card elsewhere
SUMS = 1.5  # times the bytes of an uncut step: what sums beside its gradients add at most
RIVALS = 5  # plans that are raced in real steps
NEAR = 2.0  # times the fastest estimate: what a race may turn round
TRIES = 3  # traces of plans that were composed to fit, before another size is taken
RACED = 3  # sizes that are traced by themselves, where each has to be
OFF = 0.005  # of the bytes: what a composition may be wrong by before it is given up
RERUN = ("selective", "recompute")
_CHEAP_FIRST = ("offload", *RERUN)


def choose(request: Request) -> PlanReport:
    """Answer a request.

    At every size of the micro-batch, blocks free bytes where that costs the fewest seconds per byte. The
    plan that is chosen is traced as it is, and the next one taken if it is over the budget. What cannot be
    traced is really run, and no run is made that is known beforehand to go over the budget.
    """
    if request.depends_on_cut and not takes_single_rows(request):
        request = replace(request, fewest=2)
    return _Search(request).best()


class _Search:
    """Finds the options of one request, sorts them and traces the best."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._candidates = Candidates(request)
        self._scale = 1.0  # of estimated seconds, once some were measured
        self._limit = 2**62 if request.budget is None else request.budget

    def best(self) -> PlanReport:
        """The fastest that fits, made sure of."""
        options = self._timed(self._options())
        for index, option in enumerate(options):
            verified = self._verified(option)
            options[index] = verified
            composed = option.source == "composed"
            is_plain = not option.plan.blocks and option.plan.is_cut
            if composed and is_plain and abs(verified.peak - option.peak) > OFF * verified.peak:
                self._candidates.disable_mixtures("bytes do not grow in a straight line with the rows")
                return self.best()
            # Perhaps more has to be rebuilt; or less, where it was composed too high.
            is_loose = self._request.blocks and option.plan.blocks and verified.peak < option.peak
            if composed and (verified.peak > self._limit or is_loose):
                verified = self._fitted(verified) or verified
            if verified.peak <= self._limit:
                return self._report(verified, [one for one in options if one.plan != verified.plan])
        least = self._least()
        if least.peak <= self._limit:
            return self._report(least, [])
        request = self._request
        raise refusal(least, self._limit, request.task.batch_norms, request.cut_refused)

    def _options(self) -> list[Option]:
        """Plans that should fit, fastest first."""
        sizes = self._request.all_sizes
        candidates = self._candidates
        found = self._composed_options() if candidates.is_composed else []
        for policies in (("offload",), RERUN):  # moving is the cheaper to record, and to carry out
            left = [one for one in policies if one in candidates.unrecorded]
            if not (candidates.is_composed and left):
                continue
            least = min(self._scale * candidates.least_seconds(size) for size in sizes)
            if not _is_good(found, least, self._request.device):
                candidates.add_policies(left)
                found = self._composed_options() if candidates.is_composed else []
        if not candidates.is_composed:
            found = self._traced_options()
        return _ordered(found, self._request.device.kind)

    def _composed_options(self) -> list[Option]:
        found: list[Option] = []
        for size in self._request.all_sizes:
            wrong = 0
            # Whose loss has another form, or which an `add` need not cut; and which is likeliest.
            if size == self._request.like.rows // self._request.parts:
                whole = self._option(self._candidates.mixture(size, None), size, {})
                most = self._limit if self._candidates.is_measured else SUMS * self._limit
                if whole.peak <= most:
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
        mixture = self._candidates.mixture(size, foreach)
        choice = fastest(mixture, budget)
        return None if choice is None else self._option(mixture, size, choice, foreach)

    def _option(
        self, mixture: Mixture, size: int, choice: Mapping[str, str], foreach: bool | None = None
    ) -> Option:
        like = self._request.like
        plan = replace(like, micro_batch=size, blocks=tuple(choice.items()) or like.blocks, foreach=foreach)
        peak, seconds = mixture.peak(choice), self._scale * mixture.seconds(choice)
        return Option(plan=plan, peak=peak, seconds=seconds, source="composed")

    def _traced_options(self) -> list[Option]:
        """The largest sizes that fit, each traced by itself, all blocks under one policy."""
        sizes = self._request.all_sizes
        self._traced_option(KEEP, min(LOW, sizes[-1]))  # tells whether it can be traced at all
        for policy in (KEEP, *sorted(self._request.policies, key=_CHEAP_FIRST.index)):
            if self._candidates.is_measured:
                fitting = _measured(self._request, self._limit, partial(self._traced_option, policy))
                if fitting:
                    return fitting[:RACED]
                continue
            # More rows take more bytes: halving the list finds the border. Uncut is a case of its own.
            low, high = 1, len(sizes)
            while low < high:
                middle = (low + high) // 2
                if self._traced_option(policy, sizes[middle]).peak <= self._limit:
                    high = middle
                else:
                    low = middle + 1
            near = [sizes[0], *sizes[low : low + RACED]][:RACED]
            found = [self._traced_option(policy, size) for size in near]
            fitting = [option for option in found if option.peak <= self._limit]
            if fitting:
                return fitting
        return []

    def _traced_option(self, policy: str, size: int, *, rows: int | None = None) -> Option:
        plan = self._request.uniform(size, policy)
        plan = plan if rows is None else replace(plan, rows=rows)
        option = self._verified(Option(plan=plan, peak=0, seconds=0.0, source="composed"))
        if option.peak > self._limit and self._request.may_disable_foreach:
            return self._verified(replace(option, plan=replace(plan, foreach=False), seconds=0.0))
        return option

    def _verified(self, option: Option) -> Option:
        """The same option with the bytes of a trace of exactly this plan."""
        try:
            found = self._candidates.trace(option.plan)
        except OutOfMemoryError:  # measured where the allocator keeps to the budget
            if self._request.budget is None:
                raise
            return replace(option, peak=max(option.peak, self._limit + 1), source="measured")
        seconds = option.seconds or self._scale * self._candidates.seconds(found)
        return replace(option, peak=found.peak, seconds=seconds, source=found.source, ledger=found.ledger)

    def _fitted(self, found: Option) -> Option | None:
        """The fastest at the same size that fits, the budget moved by what the composition is off by."""
        size, foreach = found.plan.micro_batch, found.plan.foreach
        choice = dict(found.plan.blocks) if self._request.blocks else {}  # else all recordings have them
        wrong = found.peak - self._candidates.mixture(size, foreach).peak(choice)
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
        """What takes fewest bytes."""
        self._candidates.add_policies(self._candidates.unrecorded)
        sizes = self._request.all_sizes[::-1]
        tried = [self._least_at(sizes[0])]
        if self._candidates.is_measured:
            return tried[0]
        for size in sizes[1:]:  # each micro-batch leaves a few bytes, so a row at a time may take more
            tried.append(self._least_at(size))
            if tried[-1].peak >= tried[-2].peak:
                break
        # Uncut there are no sums beside the gradients, which is seldom what decides.
        tried.append(self._least_at(sizes[-1], most=SUMS * tried[0].peak))
        fitting = [option for option in tried if option.peak <= self._limit]
        return min(fitting or tried, key=lambda option: option.seconds if fitting else option.peak)

    def _least_at(self, size: int, *, most: float = inf) -> Option:
        request, may_run = self._request, self._candidates.may_run
        if not self._candidates.is_composed:
            policies, over = (KEEP, *request.policies), self._limit + 1
            able = [policy for policy in policies if may_run(request.uniform(size, policy), over)]
            tried = [self._traced_option(policy, size) for policy in able]
            unknown = Option(plan=request.uniform(size, KEEP), peak=over, seconds=0.0, source="measured")
            return min(tried or [unknown], key=lambda option: option.peak)
        foreach = False if request.may_disable_foreach else None
        mixture = self._candidates.mixture(size, foreach)
        option = self._option(mixture, size, smallest(mixture), foreach)
        return self._verified(option) if option.peak <= most and may_run(option.plan, option.peak) else option

    def _timed(self, options: list[Option]) -> list[Option]:
        """The fastest by estimate, measured in turn; the others in proportion."""
        request = self._request
        if not (request.measure and request.device.is_here and options):
            return options
        rows = request.like.rows
        near = _spread([one for one in options if one.seconds <= NEAR * options[0].seconds], 8)
        near = [one for one in near if one.seconds * one.plan.micro_batch / rows < MEASURE_S]
        took = seconds_per_row([one.plan for one in near], request.task, request.batch, limit_s=MEASURE_S)
        measured = {
            option.plan: replace(option, seconds=rows * per_row, measured=True)
            for option, per_row in zip(near, took, strict=True)
            if per_row is not None
        }
        if not measured:
            return options
        ratios = sorted(measured[one.plan].seconds / one.seconds for one in near if one.plan in measured)
        ratio = ratios[len(ratios) // 2]
        self._scale *= ratio
        scaled = [measured.get(one.plan) or replace(one, seconds=ratio * one.seconds) for one in options]
        return _ordered(scaled, self._request.device.kind)

    def _rivals(self, best: Option, others: Sequence[Option]) -> list[Plan]:
        """Plans of other sizes that may be as fast; each is made sure of."""
        if not self._request.rivals:
            return []
        near = [one for one in others if one.seconds <= NEAR * best.seconds]
        return [one.plan for one in _spread(near, RIVALS - 1) if self._verified(one).peak <= self._limit]

    def _report(self, best: Option, others: Sequence[Option]) -> PlanReport:
        request = self._request
        assert best.ledger is not None  # noqa: S101, every best option is traced
        return PlanReport(
            plan=best.plan,
            ledger=best.ledger,
            seconds=best.seconds,
            measured=best.measured,
            budget=request.budget,
            device=request.device.name,
            options=tuple([replace(one, ledger=None) for one in others if one.peak <= self._limit][:SHOWN]),
            rivals=(best.plan, *self._rivals(best, others)),
            notes=tuple(self._candidates.notes),
        )


def _measured(request: Request, limit: int, measure: Callable[..., Option]) -> list[Option]:
    """What fits of what has to be really run: the uncut batch, which needs no sums, and the largest cuts."""
    sizes, rows = request.all_sizes, request.like.rows
    if request.budget is None:
        return [measure(sizes[0])]
    whole = _grown([one for one in sizes if one == rows], limit, lambda size: measure(size, rows=size))
    return whole + _grown([one for one in sizes if one != rows], limit, measure)


def _grown(sizes: Sequence[int], limit: int, measure: Callable[[int], Option]) -> list[Option]:
    """What fits, largest first, really run from the smallest size on, each next at most twice as large."""
    fitting: list[Option] = []
    steps, step = list(sizes), LOW
    while sizes and step < min(sizes):
        steps.append(step)
        step *= 2
    steps.sort()
    ahead = steps[:1]
    while ahead:
        option = measure(ahead[-1])
        if option.peak > limit:
            break
        fitting.insert(0, option)
        size = option.plan.micro_batch
        ahead = [one for one in steps if size < one <= 2 * size and _ahead(fitting, one) <= limit]
    return [option for option in fitting if option.plan.micro_batch in sizes]


def _ahead(measured: Sequence[Option], size: int) -> float:
    """Bytes of a larger size by the steepest line so far; of one run only that it fitted is known."""
    slopes = [
        (large.peak - small.peak) / (large.plan.micro_batch - small.plan.micro_batch)
        for large, small in pairwise(measured)
    ]
    return measured[0].peak + max(slopes, default=0.0) * (size - measured[0].plan.micro_batch)


def _is_good(found: Sequence[Option], least: float, device: Device) -> bool:
    """Whether one is about as fast as any could be whose blocks are rebuilt or moved, at any size."""
    even = GOOD if device.is_here and device.kind != "cpu" else EVEN
    return least < inf and any(one.seconds <= even * least for one in found)


def _ordered(options: list[Option], kind: str) -> list[Option]:
    """Fastest first. On the host, of those that no estimate can tell apart, the smallest first.

    What is too large for the allocator to keep there comes in fresh pages each time.
    """
    found = sorted(options, key=lambda option: (option.seconds, -option.plan.micro_batch))
    if kind != "cpu" or not found or found[0].measured:
        return found
    even = [one for one in found if not one.measured and one.seconds <= EVEN * found[0].seconds]
    return sorted(even, key=lambda option: option.peak) + [one for one in found if one not in even]


def _spread(options: Sequence[Option], count: int) -> list[Option]:
    """So many of them, the first and then evenly from the largest micro-batch to the smallest."""
    if len(options) <= count:
        return list(options)
    by_size = sorted(options[1:], key=lambda option: -option.plan.micro_batch)
    places = [round(index * (len(by_size) - 1) / max(1, count - 2)) for index in range(count - 1)]
    return [options[0], *[by_size[place] for place in dict.fromkeys(places)]]
