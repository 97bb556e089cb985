"""What a forward may change is noted and put back, of a step and a micro-batch; random streams come again."""

import copy
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anybatch.engine import is_due
from anybatch.state import Effects, ModuleState, Snapshot, evaluating, rng


class Restless(nn.Module):
    """Its forward changes whatever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inside", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("nothing", None)
        self.weight = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.plain = torch.zeros(2)
        self.calls, self.log, self.table, self.names = 0, [0], {"rows": 0}, {"first"}
        self.recent = deque([0], maxlen=1)
        self.generator = torch.Generator()


EFFECTS: dict[str, Callable[[Restless], Any]] = {
    "buffer": lambda model: model.inside.add_(1),
    "buffer that no version tells": lambda model: model.inside.data.add_(1),
    "buffer of another shape": lambda model: setattr(model.inside, "data", torch.ones(3)),
    "buffer in the place of another": lambda model: setattr(model, "replaced", torch.ones(2)),
    "buffer in the place of none": lambda model: setattr(model, "nothing", torch.ones(2)),
    "new buffer": lambda model: model.register_buffer("new", torch.ones(2)),
    "attribute": lambda model: setattr(model, "calls", model.calls + 1),
    "new attribute": lambda model: setattr(model, "new", 1),
    "attribute taken away": lambda model: delattr(model, "calls"),
    "list": lambda model: model.log.append(1),
    "item of a list": lambda model: model.log.__setitem__(0, 7),
    "dict": lambda model: model.table.update(rows=7),
    "key of a dict": lambda model: model.table.pop("rows"),
    "set": lambda model: model.names.add("second"),
    "deque": lambda model: model.recent.append(1),
    "mode": lambda model: model.train(not model.training),
}
DRAWS: dict[str, Callable[[Restless], Any]] = {
    "torch": lambda model: torch.rand(2),
    "Python": lambda model: random.random(),
    "NumPy": lambda model: np.random.rand(),
    "generator": lambda model: torch.rand(2, generator=model.generator),
}
ALL = EFFECTS | DRAWS


def state(model: Restless) -> dict[str, Any]:
    values = {name: value for name, value in vars(model).items() if name[0] != "_" and name != "generator"}
    return copy.deepcopy(values) | {
        "mode": model.training,
        "buffers": [(name, None if one is None else one.tolist()) for name, one in model._buffers.items()],
        "identity": id(model.replaced),
        "streams": [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()],
        "generator": model.generator.get_state().tolist(),
        "plain": model.plain.tolist(),
    }


def snapshot(model: nn.Module, effects: Effects, *, begun: bool = True) -> Snapshot:
    made = Snapshot(ModuleState([model]), effects, parameters=[*model.parameters()])
    if begun and made.notes:
        made.begin()
    return made


def looking(model: nn.Module, steps: int = 1) -> Effects:
    """In so many steps; later ones do not compare."""
    effects = Effects()
    for step in range(1, steps + 1):
        effects.begin([model], looks=is_due(step))
    return effects


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("effect", [*EFFECTS, "torch", "generator"])
def test_a_step_is_put_back(effect: str, steps: int) -> None:
    model = Restless()
    found = state(model)
    before = snapshot(model, looking(model, steps))
    ALL[effect](model)
    assert state(model) != found
    before.put_back()
    assert state(model) == found


@pytest.mark.parametrize("effect", ALL)
def test_a_looking_step_undoes_a_micro_batch_or_says_that_it_cannot(effect: str) -> None:
    model, change = Restless(), ALL[effect]
    before = snapshot(model, looking(model))
    found = state(model)
    change(model)
    is_complete = before.undo_micro_batch()
    assert is_complete is (state(model) == found)
    # Nobody knew that these change where they lie.
    unknown = "buffer", "buffer that no version tells", "buffer of another shape"
    assert is_complete is (effect not in unknown)
    before.put_back()
    assert state(model) == found


@pytest.mark.parametrize("effect", sorted(ALL.keys() - {"attribute taken away", "key of a dict"}))
def test_what_was_seen_to_change_is_noted_before_each_micro_batch(effect: str) -> None:
    model = Restless()
    change, effects = ALL[effect], looking(model)
    before = snapshot(model, effects)
    change(model)
    before.look()
    effects.begin([model], looks=False)
    before = snapshot(model, effects, begun=False)
    for _ in range(2):  # the first one is accepted
        if before.notes:
            before.begin()
        found = state(model)
        change(model)
    assert before.undo_micro_batch()
    assert state(model) == found


def test_an_evaluation_leaves_no_trace() -> None:
    model = Restless()
    model.eval()
    gradient = model.weight.grad = torch.ones(2)
    found, streams = state(model), rng.capture(rng.of_process())
    with suppress(KeyError), evaluating([model]):
        assert not model.training
        assert not torch.is_grad_enabled()
        for change in (*[EFFECTS[one] for one in EFFECTS if "new" not in one], *DRAWS.values()):
            change(model)
        model.weight.grad = None
        raise KeyError
    assert torch.is_grad_enabled()
    assert state(model) == found
    assert model.weight.grad is gradient
    assert rng.is_same(streams, rng.capture(rng.of_process()))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_an_evaluation_leaves_modes_and_buffers_of_torchscript(is_frozen: bool) -> None:
    model: Any = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    model = torch.jit.freeze(model.eval()) if is_frozen else model
    modes = [getattr(one, "training", None) for one in model.modules()]
    found = copy.deepcopy([*model.buffers()])
    with evaluating([*model.modules()]):
        assert not any(one.training for one in model.modules())
        for one in model.buffers():
            one.add_(1)
    assert [getattr(one, "training", None) for one in model.modules()] == modes
    assert all(map(torch.equal, model.buffers(), found))


def test_preserved_gives_the_stream_back_also_after_an_error() -> None:
    before = torch.get_rng_state()
    for error in (None, KeyboardInterrupt):
        with suppress(KeyboardInterrupt), rng.preserved():
            torch.rand(3)
            if error:
                raise error
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("capture", [rng.capture, rng.capture_process])
def test_replay_repeats_the_streams(capture: Callable[[], Any]) -> None:
    def draw_all() -> list[float]:
        others = [random.random(), np.random.rand()] if capture is rng.capture_process else []
        return [*torch.rand(3).tolist(), *nn.functional.dropout(torch.ones(20)).tolist(), *others]

    draw_all()
    before = torch.get_rng_state()
    state = capture()
    assert torch.equal(torch.get_rng_state(), before)  # and it moves nothing
    first, second = draw_all(), draw_all()
    assert first != second
    (rng.restore if capture is rng.capture else rng.restore_process)(state)
    assert [draw_all(), draw_all()] == [first, second]
