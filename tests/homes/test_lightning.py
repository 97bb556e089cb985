"""Lightning's Trainer with WholeBatchCallback: gradient, logs and checkpoints of the whole batch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice
pytest.importorskip("lightning.pytorch")

from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from torchmetrics import SumMetric  # noqa: E402

from anybatch.core.errors import LossError, PlanError  # noqa: E402
from anybatch.homes.lightning import WholeBatchCallback  # noqa: E402
from anybatch.testing import relative_error, tolerance  # noqa: E402
from tests.homes.lightnings import Module, cutting, fit  # noqa: E402
from tests.homes.tasks import MOST, ROWS, data  # noqa: E402

EXACT = 1e-12


@pytest.mark.parametrize("kind", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_of_the_host(kind: str) -> None:
    def gradient(*homes: Any, **options: Any) -> Any:
        module = Module("tokens")
        fit(module, *homes, data=data("tokens", dtype=torch.float32), **options)
        return module.gradients[0]

    def mixed() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu") if kind == "16-mixed" else None
        return {"precision": None, "plugins": [MixedPrecision(kind, "cpu", scaler)]}

    bound = tolerance(torch.float16 if kind == "16-mixed" else torch.bfloat16, ROWS)
    found = gradient(cutting("tokens"), **mixed())
    assert 0 < relative_error(found, gradient(precision="32-true")) <= bound
    assert relative_error(found, gradient(**mixed())) <= bound


class Talkative(Module):
    """Logs and returns more than the loss; each call moves an attribute and a buffer, and scales by them."""

    def __init__(self, *args: Any, is_scaled: bool) -> None:
        super().__init__("tokens", *args)
        self.tokens, self.is_scaled = SumMetric(), is_scaled
        self.returned: list[Any] = []
        self.appended = 0
        self.register_buffer("size", torch.ones(()))

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        scores = self.net(x)
        self.appended += 1
        self.size.lerp_(scores.detach().std(), 0.1)
        loss = F.cross_entropy(scores.transpose(1, 2), y)
        loss = loss / (self.appended * self.size) if self.is_scaled else loss
        self.tokens((y >= 0).sum())
        self.log_dict({"detached": loss.detach(), "rows": float(len(x))}, reduce_fx="sum", on_step=True)
        self.log("mean", x.mean(), on_step=True)
        self.log("tokens", self.tokens, on_step=False, on_epoch=True)
        return {"loss": loss, "scores": scores, "mean": x.mean()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(outputs)


@pytest.mark.parametrize("most", [ROWS, MOST])
@pytest.mark.parametrize("meets", [True, False])
def test_logs_metrics_and_returned_values_come_once_per_batch(meets: bool, most: int) -> None:
    """And what moves in `training_step` moves once, where rows meet."""
    whole, cut = Talkative(is_scaled=meets), Talkative(most, is_scaled=meets)
    host = fit(whole, max_steps=4)
    ours = fit(cut, WholeBatchCallback(micro_batch=7, rows_meet=meets), max_steps=4)
    assert whole.appended == 4
    assert (cut.appended == 4) is meets
    assert not meets or relative_error(cut.size, whole.size) <= EXACT
    assert [step for step, _ in ours.logger.rows] == [step for step, _ in host.logger.rows]
    for name in ("detached", "rows", "mean", "tokens"):
        found, expected = ours.logger.values(name), host.logger.values(name)
        assert len(found) == len(expected) > 0
        assert relative_error(torch.tensor(found), torch.tensor(expected)) <= EXACT
    for found, expected in zip(cut.returned, whole.returned, strict=True):
        assert relative_error(found, {name: one.detach() for name, one in expected.items()}) <= EXACT


def drawing(module: Any, batch: Any) -> Tensor:
    noise = torch.randn_like(batch[0])
    return (module.net(batch[0] + noise).mean(-1) - noise.mean(-1)).square().mean()


def mixup(module: Any, batch: Any) -> Tensor:
    mixed = 0.7 * batch[0] + 0.3 * batch[0][torch.randperm(len(batch[0]))]
    return F.cross_entropy(module.net(mixed).transpose(1, 2), batch[1])


@pytest.mark.parametrize(("loss", "options", "error", "said"), [
    ("manual", {"gradient_clip_val": None}, PlanError, "got manual"),
    (None, {"accumulate_grad_batches": 2}, PlanError, "accumulate_grad_batches=2"),
    (None, {"task": "weighted"}, LossError, "divided afterwards"),
    (drawing, {"rows_meet": True}, LossError, "random numbers"),
    (mixup, {}, LossError, "mixes rows by them"),
    (lambda module, batch: None, {}, LossError, "got None"),
])  # fmt: skip
def test_what_cannot_be_is_refused(loss: Any, options: Any, error: type, said: str) -> None:
    options = dict(options)
    task, meets = options.pop("task", "tokens"), options.pop("rows_meet", False)
    own = {"training_step": lambda self, batch, batch_idx: loss(self, batch)} if callable(loss) else {}
    made: Any = type("Own", (Module,), own)(task)
    made.automatic_optimization = loss != "manual"
    before = [p.detach().clone() for p in made.parameters()]
    with pytest.raises(error, match=said) as caught:
        fit(made, WholeBatchCallback(7, rows_meet=meets), **options)
    assert all(torch.equal(p, q.to(p)) for p, q in zip(made.parameters(), before, strict=True))
    assert "training_step" not in vars(made)
    notes = str(vars(caught.value).get("__notes__"))
    assert ("rows_meet=True" in notes) == (error is LossError and not meets and loss is not mixup)
    assert loss is not mixup or "on_after_batch_transfer" in notes
