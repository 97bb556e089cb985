"""The self-test: what it finds and says, what it replays; from cuts that differ to findings."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch import ModelLoss, Total, check
from anybatch.check import bench
from anybatch.core import BatchError, LossError, PlanError
from tests.corpus.case import layer
from tests.options import flat
from tests.zoo import Perceptron

ROWS = 12
ASKED: Any = [({"rows": 5}, 5), ({"micro_batch": 7}, 20), ({"rows": 100}, 20), ({}, 20)]


def rows(outputs: int = 2, count: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 5), torch.randn(count, outputs)


def computed(function: Callable[[Tensor], Any] = lambda x: x - x.mean(0)) -> nn.Module:
    return layer("Computed", function)


def kinds(model: nn.Module) -> list[tuple[str, str]]:
    """Of each finding its kind and its culprit."""
    report = check(model, nn.MSELoss(), rows())
    assert report.exact == (not report.findings)
    return [(finding.kind, finding.culprit) for finding in report.findings]


def test_report_in_words_and_in_json() -> None:
    exact = check(Perceptron(5, 2), nn.MSELoss(), rows(), rows=5)
    assert str(exact).startswith("exact: split equals whole on 5 rows, cut as 2+2+1, 3+2 and 1 by 1")
    broken = check(nn.Sequential(*[nn.BatchNorm1d(5) for _ in range(12)]), nn.MSELoss(), rows(5))
    told = json.loads(broken.to_json())
    assert (told["exact"], told["findings"][0]["kind"], len(told["findings"])) == (False, "meeting", 1)
    assert str(broken).startswith("NOT exact: gradient error ")
    assert "\n  meeting: 0, 1, 2 and 9 more (BatchNorm1d)\n    `0` normalises by mean" in str(broken)


def test_own_dtype_where_a_tensor_has_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(value: Tensor, dtype: torch.dtype | None) -> Tensor:
        if dtype is not None and value.dim() == 1:  # a bias, after a weight
            raise TypeError("Cannot convert a MPS Tensor to float64")
        return value if dtype is None else value.to(dtype)

    monkeypatch.setattr(bench, "widen", refused)
    model = Perceptron(5, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = check(model, nn.MSELoss(), rows())
    assert (report.exact, report.dtype) == (True, "float32")
    assert "it does not run in float64 (TypeError: Cannot convert a MPS Tensor to float64)" in report.notes
    assert all(
        value.dtype == torch.float32 and value.equal(before[name])
        for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize(("options", "count"), ASKED)
def test_rows_as_asked(options: dict[str, Any], count: int) -> None:
    assert check(Perceptron(5, 2), nn.MSELoss(), rows(2, 20), **options).rows == count


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"batch": (torch.zeros(1, 5), torch.zeros(1, 2))}, BatchError, "at least 2 rows"),
    ({"batch": (torch.zeros(3), torch.zeros(2))}, BatchError, "rows"),
    ({"micro_batch": 0}, PlanError, "micro_batch"),
    ({"batch_norm": "half"}, PlanError, "batch_norm"),
    ({"loss": nn.Identity()}, LossError, "Identity"),
    ({"loss": lambda m, micro: Total(0 * m(micro[0]).sum(), 0)}, BatchError, "whose weight is 0"),
    ({"model": nn.Identity()}, PlanError, "trainable parameters"),
    ({"model": nn.Sequential(nn.Linear(5, 2), torch.jit.ScriptModule())}, PlanError, "TorchScript at 1"),
])  # fmt: skip
def test_what_no_step_takes_is_refused(arguments: Any, error: Any, message: str) -> None:
    given = {"model": Perceptron(5, 2), "loss": nn.MSELoss(), "batch": rows()} | arguments
    with pytest.raises(error, match=message):
        check(**flat(given))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout and noise": lambda x: F.dropout(x, 0.3) + torch.randn_like(x) + torch.rand(x.shape),
    "dropout of heads": lambda x: F.dropout(x.repeat_interleave(3, 0), 0.5).view(len(x), -1),
    "dropout by time": lambda x: F.dropout(x.repeat(3, 1, 1), 0.5).transpose(0, 1),
    "normal": lambda x: x.clone().normal_() + torch.normal(x, 1.0),
    "whole numbers": lambda x: torch.randint(0, 1000, x.shape),
    "coins": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "classes": lambda x: torch.multinomial(torch.ones(len(x), 50), 5),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[:, None].double()] * 3, dropout_p=0.5),
    "noise of a distribution": lambda x: torch.distributions.Gamma(torch.ones_like(x), 1.0).sample(),
    "one number for all": lambda x: x * torch.rand(()),
    "in one kernel": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "slopes": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_rows_keep_the_numbers_that_were_drawn_for_them(draw: Callable[[Tensor], Tensor]) -> None:
    noise = computed(lambda x: x + draw(x).to(x.dtype).flatten(1)[:, :5])
    report = check(nn.Sequential(nn.Linear(5, 5), noise, Perceptron(5, 2)), nn.MSELoss(), rows())
    assert report.exact, str(report)
    assert report.notes == ()
    assert (report.dtype, report.cuts) == ("float64", ("5+5+2", "7+5", "1 by 1"))
    assert report.error <= report.limit


# ---- from cuts that differ to findings: state, padding, losses, gradients next to nothing


def test_a_saved_buffer_that_depends_on_the_cut_is_a_finding() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.average = self.average.lerp(x.detach().mean(0), 0.1)
        self.total += x.detach().sum(0)  # does not depend on it
        return x

    remembering = layer("Remembering", forward, average=torch.zeros(5), total=torch.zeros(5))
    report = check(nn.Sequential(remembering, nn.Linear(5, 2)), nn.MSELoss(), rows())
    (finding,) = report.findings
    assert (finding.kind, finding.culprit) == ("buffer", "0 (Remembering)")
    assert finding.what.endswith("by the number of micro-batches: `0.average`.")
    assert (report.exact, report.error <= report.limit) == (False, True)
    assert str(report).startswith("NOT exact: the update is, saved buffers are not: gradient error ")


def leaving(x: Tensor) -> Tensor:
    """Rows decide together: scales where their mean is small, as it is for one of them alone."""
    return x if x.square().mean() > x.square().mean(1).min() * 1.01 else 2 * x


def fixed(x: Tensor) -> Tensor:
    """Another result in small micro-batches, and not to be run on a row that comes twice."""
    if len(x.unique(dim=0)) < len(x):
        raise ValueError("no")
    return x * (len(x) > 5)


@pytest.mark.parametrize(("function", "kind", "said"), [
    (leaving, "meeting", "other rows are missing"),
    (lambda x: x * torch.arange(1, len(x) + 1)[:, None], "position", "at another place"),
    (lambda x: torch.stack([row + torch.rand(()) for row in x]), "position", "another output for a row"),
    (fixed, "unexplained", "fails with ValueError"),
])  # fmt: skip
def test_modules_say_why_they_differ(function: Any, kind: str, said: str) -> None:
    (finding,) = check(nn.Sequential(computed(function), nn.Linear(5, 2)), nn.MSELoss(), rows()).findings
    assert (finding.kind, finding.culprit) == (kind, "0 (Computed)")
    assert said in finding.what
    assert "torch.rand(len(x))" in finding.ways_out[0] or kind != "position"


def test_the_first_module_is_found_at_any_depth_and_sound_ones_are_not() -> None:
    inner = nn.Sequential(nn.Dropout(0.5), nn.Sequential(computed(), nn.Tanh()))
    model = nn.Sequential(nn.Linear(5, 5), inner, nn.LayerNorm(5), computed(), nn.Linear(5, 2))
    assert kinds(model) == [("meeting", "1.1.0 (Computed)")]
    model[1] = nn.Identity()
    assert kinds(model) == [("meeting", "3 (Computed)")]
    model = nn.Linear(5, 2)
    model.weight.register_hook(lambda gradient: gradient / gradient.norm())  # a gradient's hook counts
    assert kinds(model)


def test_a_loss_that_a_step_refuses_is_told_first() -> None:
    def masked(model: nn.Module, micro: Any) -> Tensor:
        return (model(micro[0]) * micro[1]).sum() / micro[1].sum()

    report = check(nn.Linear(5, 2), ModelLoss(call=masked), rows())
    (finding,) = report.findings
    assert (finding.kind, finding.culprit, finding.ways_out) == ("refused", "masked", ())
    assert finding.what.startswith("Expected the loss of Linear to be made of means")
    assert str(report).startswith("NOT exact: a step refuses this loss, on 12 rows cut as ")


def test_gradient_next_to_nothing_is_never_called_exact_without_a_word() -> None:
    """In a perfect fit loss and gradient are rounding of numbers that cancel inside of each row."""
    student = Perceptron(5, 2, width=64).double()
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    with torch.no_grad():
        y = torch.stack([student(row) for row in x])
    (finding,) = check(student, nn.MSELoss(), (x, y)).findings
    assert finding.kind == "unexplained"
    assert "so small (norm " in finding.what

    def tiny(model: nn.Module, micro: Any) -> Total:
        return Total(1e-20 * F.mse_loss(model(micro[0]), micro[1], reduction="sum"), micro[1].numel())

    report = check(Perceptron(5, 2), tiny, rows())
    assert report.exact
    assert "so small (norm " in report.notes[0]


@pytest.mark.parametrize("is_noisy", [False, True])
def test_samples_are_collated_once_where_that_draws_numbers(is_noisy: bool) -> None:
    samples = [torch.ones(length, 5) for length in (3, 1, 2, 3, 4, 1)]

    def collate(chosen: list[Tensor]) -> Any:
        padded = nn.utils.rnn.pad_sequence(chosen, batch_first=True)
        return padded + torch.rand_like(padded) * is_noisy, torch.ones(len(chosen), 1, 2)

    model = nn.Sequential(computed(lambda x: x.sum(1, keepdim=True)), nn.Linear(5, 2))
    report = check(model, nn.MSELoss(), samples, collate=collate)
    assert report.exact, str(report)
    assert [("random" in note) for note in report.notes] == [True] * is_noisy
    assert any("as `collate` makes it" in words for words in report.cuts) != is_noisy


def test_a_lazy_model_is_refused_and_stays_lazy() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))
    with pytest.raises(PlanError, match="got LazyLinear"):
        check(model, nn.MSELoss(), (torch.randn(8, 3), torch.randn(8, 2)))
    assert type(model[1]) is nn.LazyLinear
    assert model(torch.randn(8, 3)).shape == (8, 2)
