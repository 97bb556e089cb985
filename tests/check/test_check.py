"""The self-test: each kind of finding, and what it says."""

import json
import random
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anybatch.check.check import check, explain, explain_padding
from anybatch.check.compare import name_of
from anybatch.check.draws import OutOfTime
from anybatch.check.finding import Finding
from anybatch.check.padding import find_padding, trimmed
from anybatch.core.errors import BatchError, LossError, PlanError
from anybatch.core.total import Total
from anybatch.losses.terms import Terms
from anybatch.losses.whole_batch import WholeBatch
from anybatch.testing import Perceptron
from tests.check.benches import ROWS as FEW
from tests.check.benches import comparison
from tests.check.layers import Centred, Pooled

ROWS = 12


def rows(outputs: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 5), torch.randn(ROWS, outputs)


def mean_of_means(model: nn.Module, micro: Any) -> Total:
    x, y = micro
    return Total(F.cross_entropy(model(x), y, ignore_index=0), 1)


def sum_of_squares(model: nn.Module, micro: Any) -> Total:
    x, y = micro
    errors = (model(x) - y).square()
    return Total(errors.sum(), errors.numel())


class Noisy(nn.Module):
    """Draws in every way that torch's default stream knows."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, features) to the same."""
        x = F.dropout(x, 0.3) + torch.randn_like(x) + torch.rand(x.shape) + torch.normal(0.0, 1.0, x.shape)
        heads = x.repeat(1, 2).view(len(x) * 2, -1)  # (rows * heads, features)
        times = x.repeat(3, 1, 1)  # (time, rows, features)
        return x + F.dropout(heads, 0.5).view(len(x), 2, -1).sum(1) + F.dropout(times, 0.5).sum(0)


@pytest.mark.parametrize("batch_there", [True, False])
def test_shapes_without_values_are_refused(batch_there: bool) -> None:
    with torch.device("meta"):
        model, there = nn.Sequential(nn.Linear(5, 2)), rows()
    with pytest.raises(PlanError, match=r"^Expected a model with values .* of them 0\.weight\. Make it on"):
        check(model, nn.MSELoss(), there if batch_there else rows())


def test_dropout_and_other_draws_are_replayed() -> None:
    report = check(nn.Sequential(Noisy(), Perceptron(5, 2)), nn.MSELoss(), rows())
    assert report.exact, str(report)
    assert report.dtype == "float64"
    assert report.error <= report.limit
    assert report.cuts == ("3+3+2", "5+3", "1 by 1")


def test_checkpointed_forward_finds_its_draws_again() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    report = check(Checkpointed(), nn.MSELoss(), rows())
    assert report.exact, str(report)


def test_right_denominator_is_named() -> None:
    x, _ = rows()
    y = torch.arange(ROWS) % 3
    report = check(Perceptron(5, 3), mean_of_means, (x, y))
    (finding,) = report.findings
    assert not report.exact
    assert finding.kind == "denominator"
    assert "mean_of_means" in finding.culprit
    assert "(micro[1] != 0).sum()" in finding.ways_out[0]
    right = Terms(
        lambda model, micro: Total(mean_of_means(model, micro).sum * (n := (micro[1] != 0).sum()), n)
    )
    single = check(Perceptron(5, 3), right, (x[y != 0], y[y != 0]))
    assert single.exact, str(single)


def test_bare_mean_is_never_exact() -> None:
    def bare(model: nn.Module, micro: Any) -> Tensor:
        return F.mse_loss(model(micro[0]), micro[1])

    report = check(Perceptron(5, 2), bare, rows())
    assert [finding.kind for finding in report.findings] == ["denominator"]
    assert "the rows" in report.findings[0].what


def test_every_batch_norm_is_named_with_its_ways_out() -> None:
    model = nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Sequential(nn.BatchNorm1d(4)), nn.Linear(4, 2)
    )
    report = check(model, nn.MSELoss(), rows())
    assert [(finding.kind, finding.culprit) for finding in report.findings] == [
        ("meeting", "1 (BatchNorm1d)"),
        ("meeting", "3.0 (BatchNorm1d)"),
    ]
    assert "batch_norm_to_group_norm" in report.findings[0].ways_out[0]
    assert check(model, nn.MSELoss(), rows(), batch_norm="frozen").exact


def test_whole_batch_loss_is_exact_over_a_model_that_draws() -> None:
    def contrast(outputs: Tensor) -> Tensor:
        near = F.normalize(outputs, dim=1)
        return F.cross_entropy(near @ near.T, torch.arange(len(near)))

    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(0.2), nn.Linear(4, 3))
    report = check(model, WholeBatch(contrast), (torch.randn(ROWS, 5),))
    assert report.exact, str(report)


def test_trained_model_raises_no_alarm() -> None:
    """Where the gradients of the rows cancel, what is left of them is rounding."""
    x = torch.randn(6, 5, dtype=torch.float64)
    y = torch.randn(6, 1, dtype=torch.float64)
    model = nn.Linear(5, 1).double()
    with torch.no_grad():
        solution = torch.linalg.lstsq(torch.cat([x, torch.ones_like(y)], 1)[:], y).solution
        model.weight.copy_(solution[:5].T)
        model.bias.copy_(solution[5])
    batch = torch.cat([x, x]), torch.cat([y + 1, y - 1])
    report = check(model, nn.MSELoss(), batch)
    assert report.exact, str(report)


class Held(nn.Module):
    """Keeps what it gave back, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 2), nn.BatchNorm1d(5)
        self.last: Tensor | None = None
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 5) to (rows, 2)."""
        self.calls.append(len(x))
        self.last = self.layer(self.norm(x))
        return self.last


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_changed(fails: bool) -> None:
    model = Held()
    batch = rows()
    model.layer.weight.grad = torch.ones(2, 5)
    gradient = model.layer.weight.grad
    state = {k: v.clone() for k, v in model.state_dict().items()}
    given = [leaf.clone() for leaf in batch]
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    seen: list[int] = []

    def loss(model: nn.Module, micro: Any) -> Total:
        seen.append(len(micro[0]))
        micro[0].mul_(2)
        if fails:
            raise RuntimeError("no")
        torch.rand(1), random.random(), np.random.rand()
        return sum_of_squares(model, micro)

    if fails:
        with pytest.raises(RuntimeError, match="no"):
            check(model, loss, batch)
    else:
        report = check(model, loss, batch)
        assert [finding.culprit for finding in report.findings] == ["norm (BatchNorm1d)"]
        assert report.dtype == "float64"
        assert report.notes == ()
    assert model.last is None
    assert model.calls == []
    assert model.layer.weight.grad is gradient
    assert gradient.equal(torch.ones(2, 5))
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert all(a.equal(b) for a, b in zip(batch, given, strict=True))
    assert torch.get_rng_state().equal(streams[0])
    assert random.getstate() == streams[1]
    assert np.random.get_state()[1].tolist() == streams[2]
    assert seen == []  # the cells of the loss were copied too


def test_report_in_words_and_in_json() -> None:
    exact = check(Perceptron(5, 2), nn.MSELoss(), rows(), rows=5)
    assert str(exact).startswith("exact: split equals whole on 5 rows, cut as 2+2+1, 3+2 and 1 by 1")
    broken = check(nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 2)), nn.MSELoss(), rows())
    summaries = json.loads(broken.to_json())
    assert summaries["exact"] is False
    assert summaries["findings"][0]["kind"] == "meeting"
    assert str(broken).startswith("NOT exact: gradient error ")
    assert "meeting: 0 (BatchNorm1d)" in str(broken)


def test_cut_of_the_caller_is_tried() -> None:
    def skips_three(model: nn.Module, micro: Any) -> Total:
        total = sum_of_squares(model, micro)
        return total if len(micro[0]) != 4 else Total(0.0 * total.sum, 0)

    assert check(Perceptron(5, 2), skips_three, rows()).exact
    report = check(Perceptron(5, 2), skips_three, rows(), micro_batch=4)
    assert "4+4+1" in report.cuts
    assert not report.exact


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"batch": (torch.zeros(1, 5), torch.zeros(1, 2))}, BatchError),
        ({"rows": 1}, BatchError),
        ({"micro_batch": 0}, PlanError),
        ({"batch_norm": "half"}, PlanError),
        ({"loss": nn.Identity()}, LossError),
        ({"loss": lambda model, micro: Total(0 * model(micro[0]).sum(), 0)}, BatchError),
    ],
)
def test_what_no_step_takes_is_refused(arguments: dict[str, Any], error: type[Exception]) -> None:
    given = {"loss": nn.MSELoss(), "batch": rows()} | arguments
    with pytest.raises(error):
        check(Perceptron(5, 2), **given)


@pytest.mark.parametrize("is_masked", [True, False])
def test_padding_of_a_model_of_fixed_length(is_masked: bool) -> None:
    """It cannot be cut off, so that other content is put there."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.head = nn.Linear(4, 3), nn.Linear(3 * 5, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = self.places(x) * mask[:, :, None] if is_masked else self.places(x)
            return self.head(hidden.flatten(1))

    def loss(model: nn.Module, micro: Any) -> Total:
        return sum_of_squares(lambda x: model(x, micro["mask"]), (micro["x"], micro["y"]))

    mask = torch.arange(5) < (torch.arange(ROWS) % 5 + 1)[:, None]
    batch = {"x": torch.randn(ROWS, 5, 4), "y": torch.randn(ROWS, 2), "mask": mask}
    report = check(Fixed(), loss, batch)
    assert report.exact == is_masked, str(report)
    found = [(finding.kind, finding.culprit) for finding in report.findings]
    assert found == ([] if is_masked else [("padding", "the model (Fixed)")])


def test_modules_with_the_same_fault_are_printed_once() -> None:
    model = nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(12)], nn.Linear(4, 1))
    report = check(model, nn.MSELoss(), (torch.randn(16, 4), torch.randn(16, 1)))
    assert len(report.findings) == 12
    assert str(report).count("BatchNorm1d") == 1
    assert "0, 1, 2 and 9 more (BatchNorm1d)" in str(report)


def exact(model: nn.Module, loss: Any, batch: Any) -> bool:
    report = check(model, loss, batch)
    assert report.exact == (not report.findings)
    return report.exact


def test_hooks_on_gradients_of_parameters_count() -> None:
    model = nn.Linear(5, 2)
    model.weight.register_hook(lambda gradient: gradient / gradient.norm())
    assert not exact(model, nn.MSELoss(), rows())


def test_dropout_on_sorted_rows_is_no_false_alarm() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop = nn.Linear(5, 2), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            return self.drop(self.layer(x[order]))[order.argsort()]

    report = check(Sorted(), nn.MSELoss(), rows())
    assert report.exact, str(report)
    assert "dropout was switched off" in report.notes[0]


def test_slopes_drawn_by_rrelu_are_no_false_alarm() -> None:
    assert exact(nn.Sequential(nn.Linear(5, 8), nn.RReLU(), nn.Linear(8, 2)), nn.MSELoss(), rows())


def test_gradient_next_to_nothing_is_never_called_exact_without_a_word() -> None:
    """In a perfect fit loss and gradient are rounding of numbers that cancel inside of each row."""
    student = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 2)).double()
    x = torch.randn(ROWS, 5, dtype=torch.float64)
    with torch.no_grad():
        y = torch.stack([student(row) for row in x])
    (finding,) = check(student, nn.MSELoss(), (x, y)).findings
    assert finding.kind == "unexplained"
    assert "so small (norm " in finding.what

    def tiny(model: nn.Module, micro: Any) -> Total:
        total = sum_of_squares(model, micro)
        return Total(1e-20 * total.sum, total.weight)

    report = check(Perceptron(5, 2), tiny, rows())
    assert report.exact
    assert "so small (norm " in report.notes[0]
    labelled = torch.randn(ROWS, 5), torch.arange(ROWS) % 2
    wrong = check(Perceptron(5, 2), lambda m, b: Total(1e-20 * mean_of_means(m, b).sum, 1), labelled)
    assert not wrong.exact


def test_cast_to_float32_hides_no_denominator() -> None:
    """Untrained, every token costs about the same: only in float64 wrong sums do not seem to add up."""

    def loss(model: nn.Module, micro: Any) -> Total:
        rows = len(micro[0])
        return Total(F.cross_entropy(model(micro[0]).float(), micro[1], ignore_index=0) * rows, rows)

    model = nn.Linear(5, 7)
    with torch.no_grad():
        model.weight.mul_(1e-6), model.bias.zero_()
    (finding,) = check(model, loss, (torch.randn(ROWS, 5), torch.arange(ROWS) % 3)).findings
    assert finding.kind == "denominator"


def test_slow_check_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own, of which each row takes a fiftieth of a second."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(5, 5) for _ in range(10)])

        def forward(self, x: Tensor) -> Tensor:
            now[0] += 0.02 * len(x)
            x = self.layers(x)
            return x - x.mean(0)

    report = check(Slow(), nn.MSELoss(), rows(5))
    assert now[0] < 10
    assert [finding.kind for finding in report.findings] == ["meeting"]


class Nodes(nn.Module):
    """Rows are graphs, whose nodes stand in a line; they meet in a mean over all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor, graph: Tensor, graphs: int) -> Tensor:
        """A sum for each graph."""
        h = self.inner(x)
        return h.new_zeros(graphs, 3).index_add(0, graph, torch.tanh(h - h.mean(0)))


def test_model_is_not_said_to_be_given_other_rows_where_only_samples_can_be_cut() -> None:
    samples = [(torch.randn(nodes, 3), torch.randn(3)) for nodes in (3, 5, 2, 7, 4, 3, 6, 2)]

    def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        graph = torch.cat([torch.full((len(x),), index) for index, (x, _) in enumerate(rows)])
        return {"x": torch.cat([x for x, _ in rows]), "graph": graph, "y": torch.stack([y for _, y in rows])}

    def loss(model: nn.Module, micro: Any) -> Total:
        outputs = model(micro["x"], micro["graph"], len(micro["y"]))
        return Total((outputs - micro["y"]).square().sum(), len(outputs))

    report = check(Nodes(), loss, samples, collate=collate)
    assert not report.exact
    assert not any("What goes into" in finding.what for finding in report.findings)


def test_a_batch_norm_is_named_even_when_there_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every experiment is over before it begins."""

    def late(*given: Any, **named: Any) -> Any:
        raise OutOfTime

    monkeypatch.setattr(sys.modules[check.__module__], "_terms", late)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    report = check(model, nn.MSELoss(), (torch.randn(9, 3), torch.randn(9, 1)))
    assert [(finding.kind, finding.culprit) for finding in report.findings] == [
        ("meeting", "1 (BatchNorm1d)")
    ]
    assert "No time" in report.findings[0].what


# ---- from cuts that differ to findings


BATCH = torch.randn(FEW, 4, generator=torch.Generator().manual_seed(0)), torch.ones(FEW, 1)


def fit(model: nn.Module, micro: Any) -> Total:
    errors = (model(micro[0]) - micro[1]).square()
    return Total(errors.sum(), errors.numel())


def explained(model: nn.Module, loss: Any) -> list[Finding]:
    ours = comparison(model, loss, BATCH)
    return explain(ours, [ours.cut_by(size) for size in (3, 5)], "mine")


def test_modules_and_terms_are_both_found() -> None:
    def means(model: nn.Module, micro: Any) -> Total:
        return Total(fit(model, micro).mean(), 1)

    both = explained(nn.Sequential(Centred(), Perceptron(4, 1)), means)
    assert [(finding.kind, finding.culprit) for finding in both] == [
        ("meeting", "0 (Centred)"),
        ("denominator", "term 'loss' of mine"),
    ]
    assert [finding.kind for finding in explained(Perceptron(4, 1), means)] == ["denominator"]


def test_what_the_loss_does_before_the_model_is_found() -> None:
    def centred(model: nn.Module, micro: Any) -> Total:
        return fit(model, (micro[0] - micro[0].mean(0), micro[1]))

    (finding,) = explained(Perceptron(4, 1), centred)
    assert (finding.kind, finding.culprit) == ("meeting", "mine")


def test_value_that_a_module_makes_of_all_rows_is_found() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), Pooled())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows, size = self.layers(x)
            return rows.sum(1, keepdim=True) * size

    (finding,) = explained(Own(), fit)
    assert finding.culprit == "layers.1 (Pooled)" or finding.culprit == "the model (Own)"
    assert finding.kind == "meeting"


def test_what_cannot_be_explained_is_said() -> None:
    def whole_only(model: nn.Module, micro: Any) -> Total:
        if len(micro[0]) < FEW:
            raise RuntimeError("too few rows")
        return fit(model, micro)

    (finding,) = explained(Perceptron(4, 1), whole_only)
    assert finding.kind == "unexplained"
    assert "too few rows" in finding.what


def test_loss_that_counts_padding_is_told_from_a_module() -> None:
    mask = torch.arange(5) < torch.tensor([5, 3, 4, 1, 2, 5, 3, 2])[:, None]
    batch = {"x": torch.randn(FEW, 5, 4), "y": torch.ones(FEW, 5, 1), "mask": mask}

    def counts(model: nn.Module, micro: Any) -> Total:
        return fit(model, (micro["x"], micro["y"]))

    for model, culprit in (
        (Perceptron(4, 1), "mine"),
        (
            nn.Sequential(Perceptron(4, 1), nn.Flatten(1), nn.Softmax(1), nn.Unflatten(1, (-1, 1))),
            "2 (Softmax)",
        ),
    ):
        ours = comparison(model, counts, batch)
        padding = find_padding(batch, model)
        assert padding is not None
        padded = ours.cut_by(1)
        short = ours.compare(trimmed(ours.whole, padding, 1), padded.result)
        finding = explain_padding(ours, padded, short, padding.source, "mine")
        assert (finding.kind, finding.culprit) == ("padding", culprit)
        assert "batch['mask']" in finding.what


def test_names_of_losses() -> None:
    assert [name_of(loss) for loss in (fit, partial(fit), Terms(fit), nn.MSELoss(), Centred())] == [
        *["fit"] * 3,
        "MSELoss",
        "Centred",
    ]
