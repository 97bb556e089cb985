"""A race in real steps: everyone gets a turn, the hopeless are dropped, the fastest stays."""

from anybatch import Plan
from anybatch.planner.cache import ROUNDS, Contest

PLANS = [Plan(rows=12, micro_batch=size) for size in (12, 6, 4, 3)]


def run(seconds: dict[Plan, float], *, warm_up: float = 0.0) -> tuple[Contest, list[Plan]]:
    """The contest until it is settled, and what was carried out."""
    contest, made = Contest(PLANS), list[Plan]()
    while not contest.is_settled:
        plan = contest.plan
        contest.note(plan, seconds[plan] + warm_up * (plan not in made))
        made.append(plan)
    return contest, made


def test_the_fastest_stays_and_all_are_tried() -> None:
    contest, made = run(dict(zip(PLANS, (1.0, 0.9, 1.1, 1.15), strict=True)))
    assert contest.plan == contest.fastest == PLANS[1]
    assert made[:4] == PLANS
    assert len(made) == 4 * ROUNDS


def test_the_first_step_of_each_does_not_count() -> None:
    contest, _ = run(dict(zip(PLANS, (1.0, 0.9, 1.1, 1.2), strict=True)), warm_up=100.0)
    assert contest.plan == PLANS[1]


def test_the_hopeless_are_not_tried_to_the_end() -> None:
    contest, made = run(dict(zip(PLANS, (1.0, 9.0, 9.0, 9.0), strict=True)))
    assert contest.plan == PLANS[0]
    assert max(made.count(plan) for plan in PLANS[1:]) == 2


def test_one_plan_needs_no_contest() -> None:
    contest = Contest(PLANS[:1])
    assert contest.is_settled
    contest.note(PLANS[1], 0.0)  # of another
    assert contest.plan == PLANS[0]


def test_the_likeliest_leads_while_nothing_is_known() -> None:
    assert Contest(PLANS).fastest == PLANS[0]
