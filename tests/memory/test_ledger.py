"""Tests of the ledger: its figures, its table and its JSON."""

from anybatch.memory.ledger import OWNERS, PHASES, Holding, Ledger, Moment


def moment(phase: str, *sizes: int, micro_batch: int = 0, module: str = "") -> Moment:
    filled = (*sizes, *[0] * (len(OWNERS) - len(sizes)))
    return Moment(phase=phase, micro_batch=micro_batch, module=module, bytes=filled)


MOMENTS = (
    moment("start", 10, micro_batch=-1),
    moment("forward", 10, 0, 0, 5),
    moment("forward", 10, 0, 0, 7, module="1"),
    moment("backward", 10, 4, 0, 7, 3, module="0"),
    moment("update", 10, 4, 0, 0, 6),
)
HELD = (Holding("0", "parameters", 10), Holding("1", "activations", 7), Holding("", "gradients", 4))


def ledger(**changes: object) -> Ledger:
    values = {"moments": MOMENTS, "source": "predicted", "device": "cpu", "by_module": HELD} | changes
    return Ledger(**values)


def test_the_peak_and_each_phase_are_those_of_their_highest_moment() -> None:
    found = ledger()
    assert found.peak == 24
    assert found.peak_moment is MOMENTS[3]
    assert found.at_peak == dict(zip(OWNERS, (10, 4, 0, 7, 3, 0, 0), strict=True))
    assert list(found.phases()) == [phase for phase in PHASES if phase in found.phases()]
    assert found.phases()["forward"] is MOMENTS[2]
    assert "loss" not in found.phases()
    assert found.by_module == HELD
