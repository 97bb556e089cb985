"""Calls noted: in their order, nested, as they were before anything wrote into them."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anybatch.check.passes import Calls, tensors
from anybatch.check.rows import Part


class Twice(nn.Module):
    """Calls one layer twice, with a keyword, and writes into what came back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x: Tensor, *, flag: bool) -> dict[str, Tensor]:
        """(rows, 2) twice through the same layer."""
        return {"out": self.inner(self.inner(x)).detach().mul_(0)}


def test_calls_are_noted_as_they_ended() -> None:
    model, calls, part = Twice(), Calls(), Part.whole(3)
    calls(model)(part)
    model(torch.ones(3, 2), flag=True)
    (outer,) = calls.parts[part]
    names = ["inner.0", "inner.1", "inner"] * 2 + [""]
    assert [call.key[0] for call in outer.flat()] == names
    assert [call.key[1] for call in outer.flat()] == [0, 0, 0, 1, 1, 1, 0]
    assert calls.table(part)["inner", 1].outputs[0].any()  # noted before it was written into
    assert calls.table(part)["inner", 1].inputs[0].equal(calls.table(part)["inner", 0].outputs[0])


def test_call_can_be_repeated_with_other_tensors() -> None:
    model, calls, part = Twice(), Calls(), Part.whole(3)
    calls(model)(part)
    model(torch.ones(3, 2), flag=True)
    call = calls.table(part)["inner", 0]
    again = call.repeat(model.inner, [torch.zeros(5, 2)])
    assert again[0].equal(model.inner(torch.zeros(5, 2)))


def test_what_is_computed_anew_in_backward_is_not_noted_twice() -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model, calls, part = Saving(), Calls(), Part.whole(3)
    calls(model)(part)
    model(torch.ones(3, 2)).sum().backward()
    assert list(calls.table(part)) == [("inner", 0), ("", 0)]


def test_tensors_of_any_nest() -> None:
    assert len(tensors([torch.ones(1), {"a": (torch.ones(1), "b", None)}])) == 2
