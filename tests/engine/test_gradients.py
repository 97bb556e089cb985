"""The gradient fold: sums in the right dtype, one division, nothing left hanging."""

import gc
import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anybatch import Step, Total
from anybatch.core.finite import NonFinite
from anybatch.engine.gradients import Gradients, accumulation_dtype, hand_over
from anybatch.testing import relative_error, tolerance


def make(
    parameters: Sequence[nn.Parameter],
    *,
    dtype: torch.dtype | None = None,
    compensated: bool = False,
    banks: Sequence[str] = ("loss",),
    bucket: float | None = None,
) -> Gradients:
    return Gradients(parameters, dtype=dtype, compensated=compensated, banks=banks, bucket=bucket)


def one(like: Tensor) -> Tensor:
    return torch.ones((), dtype=like.dtype)


def add(gradients: Gradients, value: Tensor) -> None:
    gradients.add([value], [one(value)])


@pytest.mark.parametrize(
    ("parameter", "chosen", "expected"),
    [
        (torch.float16, None, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.complex64, None, torch.complex64),
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


def summed(parameter: nn.Parameter, gradients: Gradients, values: Sequence[float]) -> Tensor:
    """The sum of these gradients of a scalar parameter."""
    for value in values:
        add(gradients, (parameter * torch.tensor(value, dtype=parameter.dtype)).sum())
    return gradients.finish({})[parameter]


def test_where_autograd_is_exact_its_own_accumulator_is_used() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    gradients = make([parameter])
    add(gradients, parameter.sum())
    own = parameter.grad
    add(gradients, (2 * parameter).sum())
    assert gradients.finish({})[parameter] is own
    assert own is not None
    assert own.tolist() == [3.0] * 3


def test_half_precision_gradients_are_summed_in_float32() -> None:
    values = [0.0009765625] * 1024  # 1.0 in all; each is a power of 2
    parameter = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
    total = summed(parameter, make([parameter]), values)
    assert total.dtype == torch.float32
    assert total.item() == 1.0
    for value in values:  # what would have happened in .grad
        (parameter * torch.tensor(value, dtype=torch.bfloat16)).backward()
    assert parameter.grad is not None
    assert parameter.grad.item() < 0.5


@pytest.mark.parametrize("compensated", [False, True])
def test_compensated_sum_keeps_what_a_plain_one_loses(compensated: bool) -> None:
    values = [1.0] + [2.0**-25] * 1024
    parameter = nn.Parameter(torch.zeros(()))
    total = summed(parameter, make([parameter], compensated=compensated), values)
    assert total.item() == (1.0 + 2.0**-15 if compensated else 1.0)


def test_chosen_dtype_is_used() -> None:
    values = [1.0, 2.0**-30, -1.0]
    parameter = nn.Parameter(torch.zeros(()))
    assert summed(parameter, make([parameter], dtype=torch.float64), values).item() == 2.0**-30


def test_accumulators_of_complex_parameters_stay_complex() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    gradients = make([parameter], dtype=torch.float64)
    add(gradients, (parameter * 1j).real.sum())
    total = gradients.finish({})[parameter]
    assert total.dtype == torch.complex128
    assert total.tolist() == [-1j, -1j]


@pytest.mark.parametrize(("dtype", "is_held"), [(torch.bfloat16, False), (torch.float32, True)])
def test_gradients_that_move_are_freed_at_once(dtype: torch.dtype, is_held: bool) -> None:
    first, second = (nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2))
    gradients = make([first, second])
    held: list[bool] = []
    hidden = first * 1  # backward reaches `second` before this
    hidden.register_hook(lambda gradient: held.append(second.grad is not None))
    add(gradients, (hidden * second).sum())
    assert held == [is_held]
    assert (first.grad is not None) == is_held


def test_tied_parameters_are_added_once_per_backward() -> None:
    tied = nn.Parameter(torch.full((2,), 3.0, dtype=torch.bfloat16))
    gradients = make([tied])
    for _ in range(2):
        add(gradients, (tied * tied).sum())
    assert gradients.finish({})[tied].tolist() == [12.0, 12.0]


def test_each_term_has_its_own_divisor() -> None:
    shared, only = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    gradients = make([shared, only], banks=["a", "b", "c"])
    for scale in (1.0, 2.0):
        hidden = shared * scale  # one graph, three backward passes
        gradients.add_each({"a": 3 * hidden, "b": 5 * hidden * only, "c": 100 * hidden})
    found = gradients.finish({"a": 1 / 2, "b": 1 / 4, "c": 0.0})
    assert found[shared].item() == 3 * 3 / 2 + 3 * 5 / 4
    assert found[only].item() == 3 * 5 / 4
    assert shared.grad is None


def test_the_last_backward_frees_the_graph() -> None:
    parameter = nn.Parameter(torch.ones(()))
    gradients = make([parameter], banks=["a", "b"])
    hidden = parameter.exp()
    gradients.add_each({"a": 2 * hidden, "b": 3 * hidden})
    with pytest.raises(RuntimeError, match="a second time"):
        hidden.backward()


def test_terms_may_be_missing_from_a_backward() -> None:
    parameter = nn.Parameter(torch.ones(()))
    gradients = make([parameter], banks=["a", "b"])
    gradients.add_each({"b": 7 * parameter})
    assert gradients.finish({"a": 1.0, "b": 0.5})[parameter].item() == 3.5


def test_parameters_that_got_no_gradient_are_left_out() -> None:
    used, unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    for banks in (["a"], ["a", "b"]):
        gradients = make([used, unused], banks=banks)
        gradients.add_each({"a": 2 * used})
        found: Mapping[nn.Parameter, Tensor] = gradients.finish({"a": 1.0})
        assert set(found) == {used}
        used.grad = None


@pytest.mark.parametrize("options", [{}, {"dtype": torch.float64}, {"compensated": True}], ids=str)
def test_sparse_gradients_add_up(options: dict[str, object]) -> None:
    table = nn.Parameter(torch.zeros(5, 2))
    gradients = make([table], **options)  # type: ignore[arg-type]
    for rows in ([0, 1], [1, 4]):
        picked = nn.functional.embedding(torch.tensor(rows), table, sparse=True)
        add(gradients, picked.sum())
    total = gradients.finish({"loss": 0.5})[table]
    assert total.is_sparse
    assert total.to_dense()[:, 0].tolist() == [0.5, 1.0, 0.0, 0.0, 0.5]


@pytest.mark.parametrize("end", ["close", "finish"])
def test_hooks_are_taken_off(end: str) -> None:
    parameter = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    gradients = make([parameter])
    add(gradients, 2 * parameter)
    _ = gradients.close() if end == "close" else gradients.finish({})  # type: ignore[func-returns-value]
    (2 * parameter).backward()
    assert parameter.grad is not None
    assert parameter.grad.item() == 2.0


def test_hand_over_is_in_the_parameters_dtype() -> None:
    half, single = nn.Parameter(torch.zeros((), dtype=torch.bfloat16)), nn.Parameter(torch.zeros(()))
    ready = {half: torch.tensor(1 + 2.0**-20), single: torch.tensor(math.pi)}
    hand_over(ready)
    assert half.grad is not None
    assert (half.grad.dtype, half.grad.item()) == (torch.bfloat16, 1.0)
    assert single.grad is ready[single]


MODES_WITH_HOOKS: list[dict[str, Any]] = [{"compensated": True}, {"accumulate": torch.float64}]


@pytest.mark.parametrize("mode", MODES_WITH_HOOKS, ids=["compensated", "float64"])
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
    sums = weakref.ref(window._run.gradients)
    del window
    gc.collect()
    assert sums() is None
    assert not model.weight._post_accumulate_grad_hooks


# ---- looked at before they are added


@pytest.mark.parametrize("options", [{}, {"compensated": True}, {"dtype": torch.float64}], ids=str)
@pytest.mark.parametrize("bucket", [1, 8, math.inf])
def test_scaled_gradients_add_up_without_their_scale(bucket: float, options: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    gradients = make([weight], bucket=bucket, **options)
    for scale, value in ((2.0**10, 3.0), (2.0**4, 5.0), (1.0, 0.5)):
        gradients.begin()
        part = (weight * value).sum()
        gradients.add([part], [torch.full_like(part, scale)], unscale=1 / scale)
    assert gradients.finish({})[weight].tolist() == [8.5, 8.5]


@pytest.mark.parametrize("options", [{}, {"compensated": True}], ids=str)
@pytest.mark.parametrize("bucket", [1, 4, math.inf])
def test_what_is_not_finite_never_gets_into_the_sums(bucket: float, options: dict[str, Any]) -> None:
    """Of two parameters the second one overflows: the first is added once, the second when it is finite."""
    first, second = (nn.Parameter(torch.zeros(1, dtype=torch.float16)) for _ in range(2))
    gradients = make([first, second], bucket=bucket, **options)

    def send(scale: float, *, again: bool = False) -> None:
        parts = [(first * 1).sum(), (second * 1000).sum()]
        cotangents = [torch.full_like(part, scale) for part in parts]
        gradients.add(parts, cotangents, again=again, unscale=1 / scale)

    send(1.0)
    gradients.begin()
    with pytest.raises(NonFinite, match="gradient"):
        send(512.0)
    assert gradients.holds_part == (bucket < 4)
    with pytest.raises(NonFinite):
        send(256.0, again=gradients.holds_part)
    send(16.0, again=gradients.holds_part)
    found = gradients.finish({})
    assert (found[first].item(), found[second].item()) == (2.0, 2000.0)


@pytest.mark.parametrize("bucket", [1, math.inf])
def test_banks_take_what_they_miss_only(bucket: float) -> None:
    shared, only = (nn.Parameter(torch.ones(1, dtype=torch.float16)) for _ in range(2))
    gradients = make([shared, only], banks=["a", "b"], bucket=bucket)

    def send(scale: float, *, again: bool = False) -> None:
        sums = {"a": 3 * shared.sum(), "b": (7 * shared * 1000 * only).sum() / 1000}
        gradients.add_each(sums, again=again, unscale=1 / scale)

    with pytest.raises(NonFinite):
        send(2.0**14)
    assert gradients.holds_part == (bucket == 1)
    send(8.0, again=gradients.holds_part)
    found = gradients.finish({"a": 1.0, "b": 0.5})
    assert round(found[shared].item(), 2) == 6.5
    assert round(found[only].item(), 2) == 3.5


@pytest.mark.parametrize("bucket", [1, math.inf])
def test_each_gradient_is_added_to_its_own_sum_in_whatever_order_they_come(bucket: float) -> None:
    """The first micro-batch reaches the second parameter only."""
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    gradients = make([first, second], bucket=bucket)
    for one, other in ((0, 1), (2, 3), (4, 5)):
        gradients.begin()
        add(gradients, ((first * one).sum() if one else 0) + (second * other).sum())
    found = gradients.finish({})
    assert (found[first].item(), found[second].item()) == (6.0, 9.0)


def test_gradients_of_another_dtype_are_added_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one go memory could run out half-way, and nobody would know which are in the sums."""
    weights = [nn.Parameter(torch.ones(2, dtype=torch.float16)) for _ in range(2)]
    gradients = make(weights, bucket=math.inf)
    monkeypatch.setattr(torch, "_foreach_add_", None)
    for _ in range(2):
        gradients.begin()
        add(gradients, sum((3 * one).sum() for one in weights))
    found = gradients.finish({})
    assert [found[one].tolist() for one in weights] == [[6.0, 6.0]] * 2


def test_a_sum_that_is_not_finite_is_seen_where_its_gradient_is() -> None:
    weight = nn.Parameter(torch.zeros(1))
    gradients = make([weight], bucket=math.inf)
    with pytest.raises(NonFinite):
        add(gradients, weight.sum() + math.inf)
    assert not gradients.holds_part


def test_where_nobody_looks_what_is_not_finite_is_added() -> None:
    weight = nn.Parameter(torch.zeros(1))
    gradients = make([weight])
    add(gradients, (weight * math.inf).sum())
    assert gradients.finish({})[weight].item() == math.inf


def test_waiting_gradients_of_a_failed_backward_are_let_go() -> None:
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    gradients = make([first, second], bucket=math.inf)
    hidden = first * 1

    def fail(_: Tensor) -> None:
        raise RuntimeError("half-way")

    handle = hidden.register_hook(fail)  # backward reaches `second` before this
    with pytest.raises(RuntimeError, match="half-way"):
        add(gradients, (hidden * second).sum())
    handle.remove()
    assert not gradients.holds_part
    assert not gradients._waiting.banks
    add(gradients, (first * second).sum())
    found = gradients.finish({})
    assert [found[one].tolist() for one in (first, second)] == [[1.0, 1.0]] * 2


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
    model, plain = Conjugated(), Conjugated()
    loss = lambda model, rows: Total(model(rows), len(rows))  # noqa: E731
    step = Step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), check=False, **options)
    step(torch.ones(8, 3))
    (plain(torch.ones(8, 3)) / 8).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert relative_error(model.weight, plain.weight) <= tolerance(torch.float32, terms=8)
