"""A YOLOS, whose loss is divided by the number of boxes, in every loop: the gradient of the whole batch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("host_leaves_nothing_behind")]
pl = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("scipy")  # matches boxes

import anybatch as ab  # noqa: E402
from anybatch.core import LossError  # noqa: E402
from anybatch.homes import WholeBatchTrainer  # noqa: E402
from anybatch.homes.lightning import WholeBatchCallback  # noqa: E402
from tests.homes import detector  # noqa: E402
from tests.homes.lightnings import QUIET  # noqa: E402
from tests.homes.test_transformers import host_leaves_nothing_behind as host_leaves_nothing_behind  # noqa: E402

EXACT = 1e-12


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with detector.in_float64():
        yield


def test_a_detector_whose_labels_are_lists_is_whole_to_the_bit_if_uncut_and_else_told_how(
    float64: None,
) -> None:
    model, batch = detector.detector(), detector.collate(detector.images())
    ab.BatchLoss(model, ab.ModelLoss())(batch).backward()
    assert torch.equal(detector.flat(model), detector.whole())
    with pytest.raises(LossError, match="a sum that is divided afterwards") as caught:  # by its boxes
        ab.BatchLoss(model, ab.ModelLoss(), micro_batch=2)(batch)
    assert 'return {"boxes": ab.Total(' in str(caught.value)
    assert "ab.Terms(loss, coefficients=" in str(caught.value)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_detector_is_exact_by_its_named_totals(micro_batch: int) -> None:
    batch, runs = detector.collate(detector.images()), []
    for way in ("step", "window", "batch_loss", "trainer"):
        model = detector.detector()
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        step = ab.Step(
            model, detector.TERMS, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=micro_batch
        )
        if way == "step":
            assert step(batch).weights["loss_bbox"] == 8
        elif way == "window":
            with step.window() as window:
                for rows in (slice(0, 1), slice(1, 3), slice(3, 6)):
                    window.add({name: column[rows] for name, column in batch.items()})
        elif way == "batch_loss":
            ab.BatchLoss(model, detector.TERMS, micro_batch=micro_batch)(batch).backward()
        else:
            trained(model, WholeBatchTrainer, 6, 1, micro_batch=micro_batch, loss=detector.TERMS)
        after = nn.utils.parameters_to_vector(model.parameters()).detach()
        runs.append(detector.off(detector.flat(model) if way == "batch_loss" else before - after))
    assert max(runs) <= EXACT
    model = detector.detector()
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    trained(model, None, 2, 3)  # the Trainer's own accumulation
    assert detector.off(before - nn.utils.parameters_to_vector(model.parameters()).detach()) > 0.1


def trained(model: nn.Module, home: type | None, rows: int, times: int, **options: Any) -> None:
    """Make one update by SGD with lr 1 in transformers' Trainer."""
    arguments = transformers.TrainingArguments(
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=times,
        max_steps=1,
        max_grad_norm=0.0,
        remove_unused_columns=False,
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        report_to=[],
    )
    kind = type("Made", (home, transformers.Trainer), {}) if home else transformers.Trainer
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    kind(
        model,
        arguments,
        data_collator=detector.collate,
        train_dataset=detector.images(),
        optimizers=(sgd, torch.optim.lr_scheduler.ConstantLR(sgd, factor=1.0)),
        **options,
    ).train()


class Detects(pl.LightningModule):
    """A YOLOS that computes its own loss; `apart` computes it from its outputs in `training_step`."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart, self.net = apart, detector.detector()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.apart:
            return self.net(**batch).loss
        found, labels = self.net(batch["pixel_values"]), batch["labels"]
        return self.net.loss_function(found.logits, labels, self.device, found.pred_boxes, self.net.config)[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def detects(apart: bool, **options: Any) -> Tensor:
    module = Detects(apart)
    before = nn.utils.parameters_to_vector(module.parameters()).detach()
    loader = torch.utils.data.DataLoader(detector.images(), 6, collate_fn=detector.collate)
    home = WholeBatchCallback(**options)
    trainer = pl.Trainer(
        callbacks=[home], precision="64-true", max_epochs=1, logger=False, enable_checkpointing=False, **QUIET
    )
    trainer.fit(module, loader)
    assert home.report.terms
    return before - nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_detector_is_exact_by_its_totals_or_by_its_outputs(micro_batch: int) -> None:
    terms = ab.Terms(lambda module, rows: detector.parts(module.net, rows), detector.TERMS.coefficients)
    assert detector.off(detects(False, micro_batch=micro_batch, loss=terms)) <= EXACT
    assert detector.off(detects(True, micro_batch=micro_batch, rows_meet=True)) <= EXACT
    for meets in (True, False):  # the loss is a module's
        with pytest.raises(LossError) as caught:
            detects(False, micro_batch=micro_batch, rows_meet=meets)
        assert "loss=...) takes the place" in str(vars(caught.value).get("__notes__"))
