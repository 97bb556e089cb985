"""Lightning's Trainer with WholeBatchCallback: gradient, logs and checkpoints of the whole batch."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice
pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from torchmetrics import SumMetric  # noqa: E402

import anybatch as ab  # noqa: E402
from anybatch.core.errors import LossError, PlanError  # noqa: E402
from anybatch.homes.lightning import WholeBatchCallback  # noqa: E402
from anybatch.testing import relative_error, tolerance  # noqa: E402
from tests.homes.lightnings import Module, cutting, fit  # noqa: E402
from tests.homes.tasks import MOST, OURS, ROWS, UPDATES, data  # noqa: E402

EXACT = 1e-12


def parameters(module: nn.Module) -> list[Tensor]:
    return [*module.parameters()]


@pytest.mark.parametrize("kind", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_of_the_host(kind: str) -> None:
    dtype = torch.float16 if kind == "16-mixed" else torch.bfloat16
    long = Module("tokens")
    fit(long, precision="32-true", data=data("tokens", dtype=torch.float32))
    runs = []
    for home in ([], [cutting("tokens")]):
        scaler = torch.amp.GradScaler("cpu") if kind == "16-mixed" else None
        module = Module("tokens")
        fit(
            module,
            *home,
            precision=None,
            plugins=[MixedPrecision(kind, "cpu", scaler)],
            data=data("tokens", dtype=torch.float32),
        )
        runs.append(module)
    assert len(runs[0].gradients) == len(runs[1].gradients)
    errors = [relative_error(one.gradients[0], long.gradients[0]) for one in runs]
    assert 0 < errors[1] <= tolerance(dtype, ROWS)
    assert relative_error(runs[1].gradients[0], runs[0].gradients[0]) <= tolerance(dtype, ROWS)


class Talkative(Module):
    """Logs and returns more than the loss."""

    def __init__(self, *args: Any) -> None:
        super().__init__("tokens", *args)
        self.tokens = SumMetric()
        self.returned: list[Any] = []
        self.appended = 0

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self.net(x)
        loss = nn.functional.cross_entropy(scores.transpose(1, 2), y)
        self.tokens((y >= 0).sum())
        self.log_dict({"detached": loss.detach(), "rows": float(len(x))}, reduce_fx="sum", on_step=True)
        self.log("mean", x.mean(), on_step=True)
        self.log("tokens", self.tokens, on_step=False, on_epoch=True)
        self.appended += 1
        return {"loss": loss, "scores": scores, "mean": x.mean()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(outputs)


@pytest.mark.parametrize("most", [ROWS, MOST])
@pytest.mark.parametrize("meets", [True, False])
def test_logs_metrics_and_returned_values_come_once_per_batch(meets: bool, most: int) -> None:
    whole, cut = Talkative(), Talkative(most)
    host = fit(whole, max_steps=4)
    ours = fit(cut, WholeBatchCallback(micro_batch=7, rows_meet=meets), max_steps=4)
    assert whole.appended == 4
    assert (cut.appended == 4) is meets
    assert [step for step, _ in ours.logger.rows] == [step for step, _ in host.logger.rows]
    for name in ("detached", "rows", "mean", "tokens"):
        found, expected = ours.logger.values(name), host.logger.values(name)
        assert len(found) == len(expected) > 0
        assert relative_error(torch.tensor(found), torch.tensor(expected)) <= EXACT
    for found, expected in zip(cut.returned, whole.returned, strict=True):
        assert relative_error(found, {name: one.detach() for name, one in expected.items()}) <= EXACT


class Named(Module):
    """Its batches have strings, some of each row and one of all."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {
            "x": batch[0],
            "y": batch[1],
            "names": [str(float(row.sum())) for row in batch[0]],
            "kind": "train",
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch["names"] == [str(float(row.sum())) for row in batch["x"]]
        assert batch["kind"] == "train"
        return super().training_step((batch["x"], batch["y"]), batch_idx)


@pytest.mark.parametrize("meets", [True, False])
def test_strings_go_with_their_rows_and_the_callback_to_other_processes(meets: bool) -> None:
    whole, cut = Named("tokens"), Named("tokens")
    fit(whole)
    fit(cut, pickle.loads(pickle.dumps(WholeBatchCallback(micro_batch=7, rows_meet=meets))))
    assert relative_error(cut.gradients[0], whole.gradients[0]) <= EXACT


class Center(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(()))

    def forward(self, scores: Tensor) -> Tensor:
        self.value.lerp_(scores.detach().mean(), 0.1)
        return scores - self.value


class Counting(Module):
    """Scales its loss by an attribute, an entry, a buffer and a module's that every call moves."""

    def __init__(self, task: str) -> None:
        super().__init__(task)
        self.calls, self.seen, self.center = 0, {"scale": 1.0}, Center()
        self.register_buffer("size", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.net(batch[0])
        self.calls += 1
        self.seen["scale"] *= 1.1
        self.size.lerp_(scores.detach().std(), 0.1)
        return (
            (self.center(scores).mean(1) / (self.calls * self.seen["scale"] * self.size)).logsumexp(0).mean()
        )


def test_what_moves_in_training_step_moves_once_per_batch_where_rows_meet() -> None:
    whole, cut = Counting("tokens"), Counting("tokens")
    fit(whole)
    fit(cut, WholeBatchCallback(micro_batch=7, rows_meet=True))
    assert cut.calls == whole.calls == UPDATES
    for found, expected in zip(cut.gradients, whole.gradients, strict=True):
        assert relative_error(found, expected) <= EXACT


class Twice(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return ab.BatchLoss(self.net, OURS["tokens"], micro_batch=2)(batch)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__("tokens")
        self.automatic_optimization = False


class Drawing(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.randn_like(batch[0])
        return (self.net(batch[0] + noise).mean(-1) - noise.mean(-1)).square().mean()


class Nothing(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("module", "options", "homes", "error", "said"),
    [
        (Manual, {}, 1, PlanError, "got manual"),
        (Module, {"accumulate_grad_batches": 2}, 1, PlanError, "accumulate_grad_batches=2"),
        (Module, {}, 2, PlanError, "got 2"),
        (Module, {"task": "weighted"}, 1, LossError, "divided afterwards"),
        (Twice, {}, 1, PlanError, "cut twice"),
        (Drawing, {"rows_meet": True}, 1, LossError, "random numbers"),
        (Nothing, {}, 1, LossError, "got None"),
    ],
)
def test_what_cannot_be_is_refused(module: Any, options: Any, homes: int, error: type, said: str) -> None:
    task = options.pop("task", "tokens")
    meets = options.pop("rows_meet", False)
    made = module() if module is Manual else module(task)
    if module is Manual:
        options["gradient_clip_val"] = None
    before = [p.clone() for p in made.parameters()]
    with pytest.raises(error, match=said) as caught:
        fit(made, *[WholeBatchCallback(7, rows_meet=meets) for _ in range(homes)], **options)
    assert (
        relative_error(parameters(made), [p.to(q) for p, q in zip(before, parameters(made), strict=True)])
        == 0
    )
    assert "training_step" not in vars(made)
    assert (error is LossError and not meets) == (
        "rows_meet=True" in str(vars(caught.value).get("__notes__"))
    )


class Mixed(Module):
    """Draws mixup in `training_step`."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mixed = 0.7 * batch[0] + 0.3 * batch[0][torch.randperm(len(batch[0]))]
        return nn.functional.cross_entropy(self.net(mixed).transpose(1, 2), batch[1])


def test_mixup_in_training_step_is_told_where_to_draw() -> None:
    with pytest.raises(LossError, match="mixes rows by them") as caught:
        fit(Mixed("tokens"), WholeBatchCallback(7))
    assert "on_after_batch_transfer" in caught.value.__notes__[-1]


class Odd(Module):
    """Adds what no row has to its batch."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"rows": batch, "edges": torch.zeros(2, 5), "graph": object()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch["edges"].shape == (2, 5)
        return super().training_step(batch["rows"], batch_idx)


def test_an_uncut_batch_passes_whatever_it_is_made_of() -> None:
    whole, uncut = Odd("tokens"), Odd("tokens")
    fit(whole)
    fit(uncut, WholeBatchCallback())
    for found, expected in zip(uncut.gradients, whole.gradients, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ab.errors.BatchError):
        fit(Odd("tokens"), WholeBatchCallback(7))
