"""The gradient fold: its law, sums in the right dtype, one division, nothing left hanging."""

import gc
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from anybatch import Step, Total
from anybatch.core import NonFinite
from anybatch.engine import Apart, Gradients, accumulation_dtype
from anybatch.engine.gradients import InPlace
from anybatch.testing import relative_error, tolerance

Ways = InPlace | Apart


def apart(
    parameters: Sequence[nn.Parameter],
    *,
    dtype: torch.dtype | None = None,
    compensated: bool = False,
    names: Sequence[str] = ("loss",),
    is_looked_at: bool = False,
    is_whole: bool = True,
) -> Apart:
    return Apart(
        parameters,
        dtype=dtype,
        names=names,
        compensated=compensated,
        is_looked_at=is_looked_at,
        is_whole=is_whole,
    )


# Each way to accumulate; those that are not whole take a gradient as soon as it is finished.
WAYS: dict[str, Callable[..., Ways]] = {
    "in place": lambda parameters: InPlace(parameters, "loss"),
    "apart, one by one": lambda parameters: apart(parameters, is_whole=False),
    "apart, as a whole": apart,
    "looked at": lambda parameters: apart(parameters, is_looked_at=True),
    "compensated": lambda parameters: apart(parameters, compensated=True),
}


def add(gradients: Ways, value: Tensor) -> None:
    gradients.begin()
    gradients.add([value], [torch.ones((), dtype=value.dtype)])


def found(gradients: Ways, factors: Mapping[str, float] | None = None) -> dict[nn.Parameter, Tensor]:
    return gradients.gradients().finish(factors or {})


# ---- the law of the fold

PARAMETERS = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
BANKS = ["fit", "size"]
SUMS = st.dictionaries(
    st.sampled_from(BANKS),
    st.dictionaries(st.sampled_from(range(len(PARAMETERS))), st.integers(-64, 64), max_size=3),
    max_size=2,
)


def fold(values: Mapping[str, Mapping[int, int]]) -> Gradients:
    return Gradients(
        {
            name: {PARAMETERS[index]: torch.full((2,), float(value)) for index, value in bank.items()}
            for name, bank in values.items()
        }
    )


def plain(gradients: Gradients) -> dict[str, dict[int, list[float]]]:
    """Banks without anything in them are as none."""
    return {
        name: {id(one): value.tolist() for one, value in bank.items()}
        for name, bank in gradients.banks.items()
        if bank
    }


@given(SUMS, SUMS, SUMS)
def test_merge_is_associative_and_commutative_with_an_identity(a: Any, b: Any, c: Any) -> None:
    one, two, three = fold(a), fold(b), fold(c)
    assert plain(one.merge(two).merge(three)) == plain(one.merge(two.merge(three)))
    assert plain(one.merge(two)) == plain(two.merge(one))
    assert plain(one.merge(Gradients({}))) == plain(Gradients({}).merge(one)) == plain(one)
    assert [plain(fold(each)) for each in (a, b, c)] == [plain(one), plain(two), plain(three)]  # unchanged


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from([*WAYS]))
def test_rows_cut_anywhere_give_sums_that_merge_to_those_of_all_rows(sizes: list[int], way: str) -> None:
    rows = torch.arange(2.0 * sum(sizes), dtype=torch.float64).view(-1, 2)

    def summed(parts: Sequence[Tensor]) -> Gradients:
        weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        gradients = WAYS[way]([weight])
        for part in parts:
            add(gradients, (part * weight).sum())
        gradients.close()
        return Gradients({"loss": {PARAMETERS[0]: found(gradients)[weight]}})

    parts = rows.split(sizes)
    merged = Gradients({})
    for part in parts:
        merged = merged.merge(summed([part]))
    assert plain(merged) == plain(summed(parts)) == plain(summed([rows]))


# ---- dtypes of sums


@pytest.mark.parametrize(
    ("parameter", "chosen", "expected"),
    [
        (torch.float16, None, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.complex128, None, torch.complex128),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64, torch.float64),
        (torch.complex64, torch.float64, torch.complex128),
    ],
)
def test_accumulation_dtype(
    parameter: torch.dtype, chosen: torch.dtype | None, expected: torch.dtype
) -> None:
    assert accumulation_dtype(parameter, chosen) is expected


@pytest.mark.parametrize(
    ("dtype", "values", "options", "expected"),
    [
        (torch.bfloat16, [2.0**-10] * 1024, {}, 1.0),
        (torch.float32, [1.0] + [2.0**-25] * 1024, {}, 1.0),
        (torch.float32, [1.0] + [2.0**-25] * 1024, {"compensated": True}, 1.0 + 2.0**-15),
        (torch.float32, [1.0, 2.0**-30, -1.0], {"dtype": torch.float64}, 2.0**-30),
        (torch.complex64, [1.0, 2.0**-30, -1.0], {"dtype": torch.float64}, 2.0**-30),
    ],
)
def test_sums_have_the_digits_that_were_asked_for(
    dtype: torch.dtype, values: Sequence[float], options: Any, expected: float
) -> None:
    parameter = nn.Parameter(torch.zeros((), dtype=dtype))
    gradients = apart([parameter], **options)
    for value in values:
        add(gradients, (parameter * torch.tensor(value, dtype=dtype)).real.sum())
    total = found(gradients)[parameter]
    assert total.dtype == accumulation_dtype(dtype, options.get("dtype"))
    assert total.item() == expected


@pytest.mark.parametrize("way", WAYS)
def test_each_gradient_is_added_to_its_own_sum_in_whatever_order_they_come(way: str) -> None:
    """Tied ones once per backward; the first micro-batch does not reach all, and one is never reached."""
    first, second, tied, unused = (nn.Parameter(torch.full((1,), 3.0)) for _ in range(4))
    gradients = WAYS[way]([first, second, tied, unused])
    for one, other in ((0, 1), (2, 3), (4, 5)):
        part = (second * other).sum() + (tied * tied).sum()
        add(gradients, (first * one).sum() + part if one else part)
    assert {one: total.item() for one, total in found(gradients).items()} == {
        first: 6.0,
        second: 9.0,
        tied: 18.0,
    }
    gradients.close()
    first.grad = None
    (2 * first).sum().backward()  # hooks are taken off
    assert first.grad is not None


@pytest.mark.parametrize("is_whole", [False, True])
def test_gradients_that_are_taken_one_by_one_are_freed_at_once(is_whole: bool) -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    gradients = apart([first, second], is_whole=is_whole)
    held: list[bool] = []
    hidden = first * 1  # backward reaches `second` before this
    hidden.register_hook(lambda gradient: held.append(second.grad is not None))
    add(gradients, (hidden * second).sum())
    assert held == [is_whole]
    assert first.grad is second.grad is None


# ---- banks


def add_each(gradients: Apart, values: Mapping[str, Tensor], unscale: float = 1.0) -> None:
    gradients.begin()
    gradients.add_each(
        values, {name: torch.ones((), dtype=one.dtype) for name, one in values.items()}, unscale
    )


def test_the_last_backward_frees_the_graph() -> None:
    parameter = nn.Parameter(torch.ones(()))
    hidden = parameter.exp()
    add_each(apart([parameter], names=["a", "b"]), {"a": 2 * hidden, "b": 3 * hidden})
    with pytest.raises(RuntimeError, match="a second time"):
        hidden.backward()


def test_each_term_has_its_own_divisor() -> None:
    shared, only = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    gradients = apart([shared, only], names=["a", "b", "c"])
    for scale in (1.0, 2.0):
        hidden = shared * scale  # one graph, three backward passes
        add_each(gradients, {"a": 3 * hidden, "b": 5 * hidden * only, "c": 100 * hidden})
    total = found(gradients, {"a": 1 / 2, "b": 1 / 4, "c": 0.0})
    assert total[shared].item() == 3 * 3 / 2 + 3 * 5 / 4
    assert total[only].item() == 3 * 5 / 4
    assert shared.grad is None


@pytest.mark.parametrize("way", WAYS)
def test_sparse_gradients_add_up(way: str) -> None:
    table = nn.Parameter(torch.zeros(5, 2))
    gradients = WAYS[way]([table])
    for rows in ([0, 1], [1, 4]):
        add(gradients, nn.functional.embedding(torch.tensor(rows), table, sparse=True).sum())
    total = found(gradients, {"loss": 0.5})[table]
    assert total.is_sparse
    assert total.to_dense()[:, 0].tolist() == [0.5, 1.0, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("mode", [{"compensated": True}, {"accumulate": torch.float64}], ids=str)
def test_an_abandoned_window_leaves_parameters_as_anybody_finds_them(mode: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    batch = (torch.randn(4, 3), torch.randn(4, 2))

    def make_step() -> Step:
        return Step(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), **mode)

    window = make_step().window()
    window.add(batch)
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()  # somebody else's, while it is open
    expected = torch.autograd.grad(nn.functional.mse_loss(model(batch[0]), batch[1]), model.weight)[0]
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, expected)
    model.zero_grad()
    assert make_step()(batch).updated  # another step on the same parameters
    gone = weakref.ref(window)
    del window
    gc.collect()
    assert gone() is None
    assert not model.weight._post_accumulate_grad_hooks


# ---- what was accepted, and what is looked at


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    ("way", "expected"), [("in place", True), ("apart, one by one", True), ("apart, as a whole", False)]
)
def test_whether_a_failed_backward_has_reached_the_sums_is_known(
    way: str, expected: bool, is_first: bool
) -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    gradients = WAYS[way]([first, second])
    if not is_first:
        add(gradients, (first * second).sum())
        gradients.begin()
        assert not gradients.has_accepted
    hidden = first * 1

    def fail(_: Tensor) -> None:
        raise RuntimeError("half-way")

    hidden.register_hook(fail)  # backward reaches `second` before this
    value = (hidden * second).sum()
    with pytest.raises(RuntimeError, match="half-way"):
        add(gradients, value)
    assert gradients.has_accepted is expected
    if not expected:  # what waited is let go
        add(gradients, (first * second).sum())
        times = 1.0 if is_first else 2.0
        assert [found(gradients)[one].tolist() for one in (first, second)] == [[times] * 2] * 2


@pytest.mark.parametrize("options", [{}, {"compensated": True}, {"dtype": torch.float64}], ids=str)
@pytest.mark.parametrize("is_whole", [False, True])
def test_scaled_gradients_add_up_without_their_scale(is_whole: bool, options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    gradients = apart([weight], is_whole=is_whole, **options)
    for scale, value in ((2.0**10, 3.0), (2.0**4, 5.0), (1.0, 0.5)):
        gradients.begin()
        part = (weight * value).sum()
        gradients.add([part], [torch.full_like(part, scale)], unscale=1 / scale)
    assert found(gradients)[weight].tolist() == [8.5, 8.5]


@pytest.mark.parametrize("options", [{}, {"compensated": True}], ids=str)
def test_what_is_not_finite_never_gets_into_the_sums(options: dict[str, Any]) -> None:
    """Of two parameters the second one overflows: neither is added before both are finite."""
    first, second = (nn.Parameter(torch.zeros(1, dtype=torch.float16)) for _ in range(2))
    gradients = apart([first, second], is_looked_at=True, **options)

    def send(scale: float) -> None:
        parts = [(first * 1).sum(), (second * 1000).sum()]
        gradients.begin()
        gradients.add(parts, [torch.full_like(part, scale) for part in parts], unscale=1 / scale)

    send(1.0)
    for scale in (512.0, 256.0):
        with pytest.raises(NonFinite, match="gradient"):
            send(scale)
        assert not gradients.has_accepted
    send(16.0)
    total = found(gradients)
    assert (total[first].item(), total[second].item()) == (2.0, 2000.0)


def test_gradients_larger_than_a_bucket_are_added_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no second set of them exists; and that a part of them was added is known."""
    monkeypatch.setattr("anybatch.engine.gradients.BUCKET", 1)
    first, second = (nn.Parameter(torch.ones(1)) for _ in range(2))
    gradients = apart([first, second], is_looked_at=True, is_whole=False)
    hidden = first * 1
    hidden.register_hook(lambda gradient: gradient * math.inf)  # backward reaches `second` before this
    value = (hidden * second * 5).sum()
    with pytest.raises(NonFinite):
        add(gradients, value)
    assert gradients.has_accepted
    assert {one: total.item() for one, total in found(gradients).items()} == {second: 5.0}


def test_sums_that_are_absorbed_are_as_merged() -> None:
    """As in a window; of the sums, and of their rounding errors."""
    weight = nn.Parameter(torch.zeros(()))
    window = apart([weight], compensated=True)
    for value in [1.0] + [2.0**-25] * 64:
        part = apart([weight], compensated=True)
        add(part, weight * value)
        window.absorb(part.gradients())
    assert found(window)[weight].item() == 1.0 + 2.0**-19


class Conjugated(nn.Module):
    """Its gradient carries torch's conjugate bit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        return torch.dot(self.weight.conj(), x.sum(0).cfloat()).real


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}, {"micro_batch": 2, "non_finite": "drop"}])
def test_conjugated_gradients(options: dict[str, Any]) -> None:
    model, plain_model = Conjugated(), Conjugated()
    loss = lambda model, rows: Total(model(rows), len(rows))  # noqa: E731
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), check=False, **options)
    step(torch.ones(8, 3))
    (plain_model(torch.ones(8, 3)) / 8).backward()
    torch.optim.SGD(plain_model.parameters(), lr=0.1).step()
    assert relative_error(model.weight, plain_model.weight) <= tolerance(torch.float32, terms=8)
