"""The models of the sections, at a card's size and a hundred times smaller, and updates by hand."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

import anybatch as ab
from anybatch.core import tree
from benchmarks import zoo

ROWS = {"gpt2": 32, "bert": 32, "resnet50": 48, "resnet50-bn": 32, "vit": 32, "bert-large": 16, "lstm": 128}


def make(name: str, *, small: bool, dropout: bool = False) -> tuple[nn.Module, Any, zoo.BatchOf]:
    """Return a model with its loss and a function that makes batches; on the CPU, the same each time."""
    scale = "small" if small else "full"
    if name == "bert-large" and not small:
        made = _bert_large()
    else:
        entry = zoo.find("lenet5" if name == "lenet5" else name.partition("-")[0])
        made = entry.build(scale)
    model, loss, batch_of = made
    if name == "resnet50":
        model = ab.batch_norm_to_group_norm(model, groups=8)
    for module in model.modules():
        for slot in ("dropout", "p", "dropout_prob") if not dropout else ():
            if isinstance(getattr(module, slot, None), float):
                setattr(module, slot, 0.0)
    return model.train(), loss, batch_of


def _bert_large() -> zoo.Made:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
    )

    def batch_of(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "input_ids": torch.randint(config.vocab_size, (rows, 128), generator=generator),
            "labels": torch.randint(2, (rows,), generator=generator),
        }

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return zoo.Made(BertForSequenceClassification(config), ab.ModelLoss(), batch_of)


def split(batch: Any, size: int) -> list[Any]:
    """Return the micro-batches of a batch."""
    leaves = list(batch.values() if isinstance(batch, dict) else batch)
    parts = list(zip(*(leaf.split(size) for leaf in leaves), strict=True))
    return [dict(zip(batch, part, strict=True)) if isinstance(batch, dict) else part for part in parts]


def mean(model: nn.Module, loss: Any, part: Any) -> Tensor:
    """Return the mean loss of some rows, as a user writes it; here each row weighs the same."""
    if isinstance(loss, ab.ModelLoss):
        return model(**part).loss
    if isinstance(loss, nn.Module):
        inputs = part[0] if isinstance(part[0], tuple) else part[:1]
        return loss(model(*inputs), part[1])
    total = loss(model, part)
    return total.sum / total.weight


class Training:
    """A model in training on a device: by hand, or with what is asked of `ab.Step`."""

    def __init__(self, name: str, device: torch.device, *, small: bool, dropout: bool = False) -> None:
        self.model, self.loss, batch_of = make(name, small=small, dropout=dropout)
        self.model.to(device)
        self.rows = 8 if small else ROWS.get(name, 256)
        batch = batch_of(self.rows, torch.Generator().manual_seed(1))
        self.batch = tree.map_leaves(lambda one: one.to(device), batch)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-4)

    def step(self, *, options: Any = None, **asked: Any) -> ab.Step:
        return ab.Step(self.model, self.loss, self.optimizer, options=options or ab.Options(), **asked)

    def by_hand(self, size: int) -> None:
        """Make one update with micro-batches of `size`."""
        for part in split(self.batch, size):
            rows = len(next(iter(part.values())) if isinstance(part, dict) else part[0])
            (mean(self.model, self.loss, part) * (rows / self.rows)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sizes(self) -> list[int]:
        """Return the sizes of micro-batches by halves."""
        return [self.rows >> shift for shift in range(self.rows.bit_length())]


def leaves(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch."""
    return list(batch.values() if isinstance(batch, dict) else batch)


def shortened(batch: Any, length: int) -> Any:
    """Return rows of text, cut to a length."""
    return tree.map_leaves(lambda one: one[:, :length].contiguous(), batch)
