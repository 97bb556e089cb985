"""A tiny YOLOS, images with 2, 0, 1, 3, 1 and 1 boxes, and its loss as named totals."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import anybatch as ab


@contextmanager
def in_float64() -> Iterator[None]:
    """A context with float64 as default dtype: the heads of DETR make class weights of that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def detector() -> Any:
    torch.manual_seed(0)
    sizes = {"image_size": [32, 32], "patch_size": 16, "num_detection_tokens": 4, "num_labels": 3}
    width = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.YolosForObjectDetection(transformers.YolosConfig(**sizes, **width, **quiet)).double()


def images() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(1)

    def image(boxes: int) -> dict[str, Any]:
        places = torch.rand(boxes, 4, generator=draw, dtype=torch.float64) * 0.4 + 0.2
        pixels = torch.randn(3, 32, 32, generator=draw, dtype=torch.float64)
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
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([one.flatten() for one in found])


def whole() -> Tensor:
    model = detector()
    model(**collate(images())).loss.backward()
    return flat(model)


def off(found: Tensor) -> float:
    return float((found - whole()).norm() / whole().norm())
