from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anybatch.core.errors import LossError
from anybatch.losses.cotangents import Seen, joined, part
from anybatch.losses.whole_batch import WholeBatch
from tests.losses.whole_losses import CASES, Towers, clip, encoder, take


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    """Every law is stated in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class MaybeTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = encoder()

    def forward(self, one: Tensor, other: Tensor | None = None) -> Any:
        return self.body(one) if other is None else (self.body(one), self.body(other))


def test_a_last_part_that_may_go_either_way_is_refused() -> None:
    batch = CASES["barlow twins"].batch(9)
    loss = WholeBatch(CASES["barlow twins"].function)
    for micro_batch in (None, 4):
        with pytest.raises(LossError, match="Name the parts"):
            take(MaybeTwo(), loss, tuple(batch.values()), micro_batch)
        assert take(MaybeTwo(), loss, batch, micro_batch)[0].updated


def test_wrappers_are_looked_through() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Towers()

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

    assert take(Wrapped(), WholeBatch(clip), CASES["clip"].batch(9), 4)[0].updated


@pytest.mark.parametrize(
    ("batch", "inputs", "targets"),
    [
        ((1, 2), 1, (2,)),
        ((1,), 1, ()),
        (((1, 2), 3), (1, 2), (3,)),
        ({"input": 1, "y": 2}, {"input": 1}, (2,)),
        ({"input": 1}, {"input": 1}, ()),
    ],
)
def test_what_goes_where(batch: Any, inputs: Any, targets: Any) -> None:
    assert part(nn.Linear(1, 1), batch) == (inputs, targets)


def test_a_tensor_is_the_only_input() -> None:
    assert part(nn.Linear(1, 1), torch.ones(1)) == (torch.ones(1), ())


def test_a_forward_that_needs_all_parts_gets_them() -> None:
    assert part(Towers(), (1, 2)) == ((1, 2), ())


def test_joined_rows_want_a_gradient_where_any_part_did() -> None:
    parts = [
        Seen((torch.ones(2, requires_grad=wanted), torch.ones(2)), tuple, ()) for wanted in (False, True)
    ]
    whole = joined(parts)
    assert [output.requires_grad for output in whole.outputs] == [True, False]
    assert whole.rows == 4


def test_targets_are_joined_in_their_nest() -> None:
    whole = joined([Seen((torch.ones(1),), tuple, ({"a": torch.ones(1)}, None)) for _ in range(3)])
    assert whole.targets[0]["a"].tolist() == [1, 1, 1]
    assert whole.targets[1] is None


def test_rows_of_different_lengths_are_refused() -> None:
    with pytest.raises(LossError, match="Pad them"):
        joined([Seen((torch.ones(2, length),), tuple, ()) for length in (3, 4)])


def test_running_out_of_memory_is_no_disagreement_of_shapes() -> None:
    class Starved(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.cat.default:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried")
            return func(*args, **(kwargs or {}))

    with Starved(), pytest.raises(torch.OutOfMemoryError):
        joined([Seen((torch.ones(2),), tuple, ()) for _ in range(2)])
