"""A YOLOS, whose loss is divided by the number of boxes, in every loop: the gradient of the whole batch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector as vector

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("host_leaves_nothing_behind")]
pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("scipy")  # matches boxes

import anybatch as ab  # noqa: E402
from anybatch.core import LossError  # noqa: E402
from anybatch.homes import WholeBatchTrainer  # noqa: E402
from tests.homes.updates import in_lightning, in_trainer  # noqa: E402

EXACT = 1e-12


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """The heads of DETR make class weights of the default dtype."""
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


def flat(model: nn.Module) -> Tensor:
    return vector([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])


def whole() -> Tensor:
    model = detector()
    model(**collate(images())).loss.backward()
    return flat(model)


def off(found: Tensor) -> float:
    return float((found - whole()).norm() / whole().norm())


def moved(model: nn.Module) -> float:
    """The relative error of an update."""
    return off(vector(detector().parameters()) - vector(model.parameters()))


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_detector_is_exact_by_its_named_totals(micro_batch: int) -> None:
    batch, model = collate(images()), detector()
    ab.BatchLoss(model, TERMS, micro_batch=micro_batch)(batch).backward()
    errors = [off(flat(model))]
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
        errors.append(moved(model))
    assert max(errors) <= EXACT
    model = detector()
    in_trainer(model, images(), collate, times=3)  # the Trainer's own accumulation
    assert moved(model) > 0.1


def apart(net: Any, batch: Any) -> Tensor:
    found = net(batch["pixel_values"])
    return net.loss_function(found.logits, batch["labels"], net.device, found.pred_boxes, net.config)[0]


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_detector_is_exact_by_its_totals_or_by_its_outputs(micro_batch: int) -> None:
    def error(loss: Any, **options: Any) -> float:
        loader, net = torch.utils.data.DataLoader(images(), 6, collate_fn=collate), detector()
        assert in_lightning(net, loss, loader, micro_batch=micro_batch, **options).terms
        return moved(net)

    own = lambda net, batch: net(**batch).loss  # noqa: E731
    terms = ab.Terms(lambda module, rows: parts(module.net, rows), TERMS.coefficients)
    assert error(own, loss=terms) <= EXACT
    assert error(apart, rows_meet=True) <= EXACT
    for meets in (True, False):  # the loss is a module's
        with pytest.raises(LossError) as caught:
            error(own, rows_meet=meets)
        assert "loss=...) takes the place" in str(vars(caught.value).get("__notes__"))
