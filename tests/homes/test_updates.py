"""One update in each loop has the gradient of the whole batch: programs of the task pages, and a YOLOS."""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector as vector

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("host_leaves_nothing_behind")]
pl = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")

import anybatch as ab  # noqa: E402
from anybatch.core import LossError  # noqa: E402
from anybatch.homes import WholeBatchTrainer  # noqa: E402
from anybatch.homes.lightning import WholeBatchCallback  # noqa: E402
from tests.homes.lightnings import QUIET  # noqa: E402


def in_trainer(
    model: nn.Module, rows: Any, collate: Any, *bases: type, times: int = 1, usual: Any = None, **options: Any
) -> None:
    """Update by SGD with lr 1 in transformers' Trainer, in so many parts by its own accumulation."""
    arguments = transformers.TrainingArguments(
        per_device_train_batch_size=len(rows) // times, gradient_accumulation_steps=times, max_steps=1,
        max_grad_norm=0.0, remove_unused_columns=False, save_strategy="no", disable_tqdm=True, use_cpu=True,
        report_to=[],
    )  # fmt: skip
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    own = {"compute_loss": lambda self, model, inputs, *_, **__: usual(model, inputs)} if usual else {}
    host = type("Host", (*bases, transformers.Trainer), own)
    scheduler = torch.optim.lr_scheduler.ConstantLR(sgd, factor=1.0)
    data = {"data_collator": collate, "train_dataset": rows}
    host(model, arguments, optimizers=(sgd, scheduler), **data, **options).train()


def in_lightning(net: nn.Module, usual: Callable[..., Any], batches: Any, **options: Any) -> ab.StepReport:
    """Update in Lightning's Trainer; `options` are those of the callback."""
    own = {
        "training_step": lambda self, batch, batch_idx: usual(self.net, batch),
        "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=1.0),
    }
    module = type("Module", (pl.LightningModule,), own)()
    module.net = net
    home, quiet = WholeBatchCallback(**options), {"logger": False, "enable_checkpointing": False, **QUIET}
    pl.Trainer(callbacks=[home], precision="64-true", max_epochs=1, **quiet).fit(module, batches)
    assert home.report is not None
    return home.report


# ---- programs of the task pages

DOCS, EXACT = Path(__file__).parents[2] / "docs", 1e-12
MEANS = ("distillation", "diffusion", "packing", "mixup")  # their loss is one of means over rows
MEETING = ("preference", "segmentation", "contrastive", "moe")  # their loss needs all rows
TOTALS = ("multitask",)  # their loss is a function of named totals


def program(page: str) -> dict[str, Any]:
    block = re.search(r"^```python\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": page}
    exec(block[1], names)
    names["net"] = copy.deepcopy(names["step"].model)
    return names


def error(before: Any, batch: Any, usual: Callable[..., Tensor], found: Any) -> float:
    """How far an update, or a gradient, is from that of the usual loss over the whole batch."""
    whole = vector(torch.autograd.grad(usual(before, batch), [*before.parameters()], materialize_grads=True))
    if isinstance(found, nn.Module):
        found = vector(before.parameters()) - vector(found.parameters())
    return float((found - whole).norm() / whole.norm())


def assert_right(names: dict[str, Any], after: nn.Module) -> None:
    assert error(names["net"], names["batch"], names["usual"], after) < 1e-10


@pytest.mark.parametrize("page", [*MEANS, *MEETING, *TOTALS])
def test_in_lightning(page: str) -> None:
    names = program(page)
    net, loader = copy.deepcopy(names["net"]), torch.utils.data.DataLoader([names["batch"]], batch_size=None)
    given = (lambda found, micro: names["loss"](found.net, micro)) if page in TOTALS else None
    options = {"micro_batch": 3, "rows_meet": page in MEETING, "loss": given}
    assert in_lightning(net, names["usual"], loader, **options).micro_batches > 1
    assert_right(names, net)


@pytest.mark.parametrize("page", [*MEANS, *MEETING, *TOTALS])
def test_in_transformers_trainer(page: str) -> None:
    names = program(page)
    net, batch = copy.deepcopy(names["net"]), names["batch"]
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    loss = None if page in MEANS else names["step"].loss
    collate, usual = torch.utils.data.default_collate, names["usual"]
    in_trainer(net, rows, collate, WholeBatchTrainer, usual=usual, micro_batch=3, loss=loss)
    assert_right(names, net)


# ---- a YOLOS, whose loss is divided by the number of boxes


@pytest.fixture
def float64() -> Iterator[None]:
    """The heads of DETR make class weights of the default dtype."""
    pytest.importorskip("scipy")  # matches boxes
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def detector() -> Any:
    torch.manual_seed(0)
    sizes = {"image_size": [32, 32], "patch_size": 16, "num_detection_tokens": 4, "num_labels": 3}
    width = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.YolosForObjectDetection(transformers.YolosConfig(**sizes, **width, **quiet))


def images() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)

    def image(boxes: int) -> dict[str, Any]:
        places = torch.rand(boxes, 4, generator=draw) * 0.4 + 0.2
        pixels = torch.randn(3, 32, 32, generator=draw)
        return {"pixel_values": pixels, "labels": {"class_labels": torch.arange(boxes) % 3, "boxes": places}}

    return [image(boxes) for boxes in (2, 0, 1, 3, 1, 1)]


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    pixels = torch.stack([one["pixel_values"] for one in samples])
    return {"pixel_values": pixels, "labels": [one["labels"] for one in samples]}


def parts(model: nn.Module, micro: Any) -> dict[str, ab.Total]:
    """The sums of a DETR-like head of transformers, each with its divisor: boxes, and weights of classes."""
    found, config = model(**micro), model.config
    boxes = sum(len(label["boxes"]) for label in micro["labels"])
    weights = boxes + config.eos_coefficient * (found.logits.shape[:2].numel() - boxes)
    counts = {"loss_ce": weights, "loss_bbox": boxes, "loss_giou": boxes}
    return {name: ab.Total(found.loss_dict[name] * count, count) for name, count in counts.items()}


TERMS = ab.Terms(parts, coefficients={"loss_bbox": 5.0, "loss_giou": 2.0})  # those of its config


def own(net: Any, batch: Any) -> Tensor:
    return net(**batch).loss


def off(found: Any) -> float:
    return error(detector(), collate(images()), own, found)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_detector_is_exact_by_its_named_totals(micro_batch: int) -> None:
    batch, model = collate(images()), detector()
    ab.BatchLoss(model, TERMS, micro_batch=micro_batch)(batch).backward()
    errors = [off(vector([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]))]
    for way in ("step", "window", "trainer"):
        model = detector()
        step = ab.Step(model, TERMS, torch.optim.SGD(model.parameters(), lr=1.0), micro_batch=micro_batch)
        if way == "step":
            assert step(batch).weights["loss_bbox"] == 8
        elif way == "window":
            with step.window() as window:
                for rows in (slice(0, 1), slice(1, 3), slice(3, 6)):
                    window.add({name: column[rows] for name, column in batch.items()})
        else:
            in_trainer(model, images(), collate, WholeBatchTrainer, micro_batch=micro_batch, loss=TERMS)
        errors.append(off(model))
    assert max(errors) <= EXACT
    model = detector()
    in_trainer(model, images(), collate, times=3)  # the Trainer's own accumulation
    assert off(model) > 0.1


def apart(net: Any, batch: Any) -> Tensor:
    found = net(batch["pixel_values"])
    return net.loss_function(found.logits, batch["labels"], net.device, found.pred_boxes, net.config)[0]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_detector_is_exact_by_its_totals_or_by_its_outputs(micro_batch: int) -> None:
    def cut(usual: Any, **options: Any) -> float:
        loader, net = torch.utils.data.DataLoader(images(), 6, collate_fn=collate), detector()
        assert in_lightning(net, usual, loader, micro_batch=micro_batch, **options).terms
        return off(net)

    terms = ab.Terms(lambda module, rows: parts(module.net, rows), TERMS.coefficients)
    assert cut(own, loss=terms) <= EXACT
    assert cut(apart, rows_meet=True) <= EXACT
    for meets in (True, False):  # the loss is a module's
        with pytest.raises(LossError) as caught:
            cut(own, rows_meet=meets)
        assert "loss=...) takes the place" in str(vars(caught.value).get("__notes__"))
