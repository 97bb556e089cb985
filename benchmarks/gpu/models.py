"""The models of the device benchmark: twelve small families for exactness, eight of card size."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import anybatch as ab
from anybatch.core import tree
from benchmarks.nets import ResNet
from benchmarks.tasks import IGNORE


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with random weights, its loss as anybatch takes it and as plain torch computes it, and rows."""

    make: Callable[[], nn.Module]
    loss: object
    whole: Callable[[nn.Module, Any], Tensor]  # the loss of a whole batch, by hand
    batch: Callable[[int], Any]  # random rows, the same each time
    needs: str = ""  # a package
    rows: int = 12
    dropout: bool = False
    loss_in_float32: bool = False  # whatever the dtype, as in the causal models of transformers

    def on(self, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
        """Return the model and its loss on a device, the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make().to(device, dtype)
        loss = copy.deepcopy(self.loss)
        return model, loss.to(device, dtype) if isinstance(loss, nn.Module) else loss

    def rows_on(self, device: torch.device, rows: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """Return rows on a device."""
        batch = self.batch(rows or self.rows)
        return tree.map_leaves(lambda one: one.to(device, dtype if one.is_floating_point() else None), batch)


def _seeded(rows: int) -> torch.Generator:
    return torch.Generator().manual_seed(rows)


def _images(size: int, classes: int, rows: int) -> tuple[Tensor, Tensor]:
    drawn = _seeded(rows)
    return torch.randn(rows, 3, size, size, generator=drawn), torch.randint(classes, (rows,), generator=drawn)


def _text(words: int, length: int, rows: int, *, least: int = 2, labels: int = 0) -> dict[str, Tensor]:
    """Return tokens of unequal lengths; labels are the tokens, or one of `labels` classes a row."""
    drawn = _seeded(rows)
    tokens = torch.randint(1, words, (rows, length), generator=drawn)
    is_real = torch.arange(length) < torch.randint(least, length + 1, (rows, 1), generator=drawn)
    named = {"input_ids": tokens, "attention_mask": is_real.long()}
    if labels:
        return {**named, "labels": torch.randint(labels, (rows,), generator=drawn)}
    return {**named, "labels": tokens.where(is_real, IGNORE)}


def _transformer(name: str, head: str, **sizes: Any) -> nn.Module:
    import transformers

    return getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**sizes))


def _own(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def _plain(function: Callable[..., Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    return lambda model, batch: function(model(batch[0]), batch[1])


def _contrast(outputs: Tensor) -> Tensor:
    outputs = F.normalize(outputs, dim=-1)
    return F.cross_entropy(outputs @ outputs.T / 0.2, torch.arange(len(outputs), device=outputs.device))


class Packed(nn.Module):
    """A packed LSTM over rows of unequal lengths, with the last output of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, rows: Tensor) -> Tensor:
        lengths = rows[:, 0, 0].abs().mul(2).long().clamp(1, rows.shape[1]).cpu()
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][0])


def _packed(rows: int) -> tuple[Tensor, Tensor]:
    drawn = _seeded(rows)
    return torch.randn(rows, 6, 8, generator=drawn), torch.randint(4, (rows,), generator=drawn)


class Words(nn.Module):
    """A language model of two LSTM layers and a linear head."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0]).transpose(1, 2)


def _tokens(words: int, length: int, rows: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(words, (rows, length + 1), generator=_seeded(rows))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _convolutions(norm: nn.Module, *, dropout: float = 0.0) -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), norm, nn.GELU(), nn.Dropout(dropout), nn.Conv2d(8, 8, 3, 2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(392, 4))


_CE = nn.CrossEntropyLoss()
_TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TINY_GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}


def _head(name: str, head: str, batch: Callable[[int], Any], **sizes: Any) -> Case:
    make = partial(_transformer, name, head, **sizes)
    return Case(
        make=make,
        loss=ab.ModelLoss(),
        whole=_own,
        batch=batch,
        needs="transformers",
        loss_in_float32=name in ("Llama", "GPT2"),
    )


_llm, _classes = partial(_text, 64, 16), partial(_text, 64, 16, labels=3)
_pixels = partial(_images, 16, 4)


def _vit(size: int, classes: int, rows: int) -> dict[str, Tensor]:
    return dict(zip(("pixel_values", "labels"), _images(size, classes, rows), strict=True))


#: Twelve families, small: any cut is the whole batch.
FAMILIES: dict[str, Case] = {
    "Llama, unequal tokens": _head("Llama", "ForCausalLM", _llm, vocab_size=64, **_TINY),
    "GPT-2, padded": _head(
        "GPT2", "LMHeadModel", _llm, **_TINY_GPT, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
    "BERT, classes": _head(
        "Bert", "ForSequenceClassification", _classes, vocab_size=64, num_labels=3, **_TINY, **_STILL
    ),
    "BERT, masked words": _head("Bert", "ForMaskedLM", _llm, vocab_size=64, **_TINY, **_STILL),
    "ViT": _head(
        "ViT",
        "ForImageClassification",
        partial(_vit, 16, 4),
        image_size=16,
        patch_size=4,
        num_labels=4,
        **_TINY,
    ),
    "convolutions, GroupNorm": Case(
        make=lambda: _convolutions(nn.GroupNorm(2, 8)), loss=_CE, whole=_plain(_CE), batch=_pixels
    ),
    "convolutions, frozen BatchNorm": Case(
        make=lambda: _convolutions(nn.BatchNorm2d(8).eval()), loss=_CE, whole=_plain(_CE), batch=_pixels
    ),
    "ResNet, GroupNorm": Case(
        make=lambda: ab.batch_norm_to_group_norm(ResNet(blocks=(1, 1, 1, 1), width=8, classes=4), groups=4),
        loss=_CE,
        whole=_plain(_CE),
        batch=partial(_images, 32, 4),
    ),
    "LSTM, packed": Case(make=Packed, loss=_CE, whole=_plain(_CE), batch=_packed),
    "LSTM, words": Case(
        make=lambda: Words(64, 32), loss=_CE, whole=_plain(_CE), batch=partial(_tokens, 64, 9)
    ),
    "contrastive": Case(
        make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.Tanh(), nn.Linear(32, 16)),
        loss=ab.WholeBatch(_contrast),
        whole=lambda model, batch: _contrast(model(batch[0])),
        batch=lambda rows: (_pixels(rows)[0],),
    ),
    "dropout, recomputed": Case(
        make=lambda: _convolutions(nn.GroupNorm(2, 8), dropout=0.5),
        loss=_CE,
        whole=_plain(_CE),
        batch=_pixels,
        dropout=True,
    ),
}


def sized(scale: str) -> dict[str, Case]:
    """Return models of card size, or a hundred times smaller."""
    big = scale == "card"
    tiny = {} if big else _TINY
    words, length, image = (50257, 512, 224) if big else (64, 16, 32)
    gpt: dict[str, Any] = {"n_positions": length} if big else {**_TINY_GPT, "n_positions": length}
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    wide = {**large, "num_attention_heads": 16, "vocab_size": 30522} if big else {**_TINY, "vocab_size": 64}
    base = {"vocab_size": 30522} if big else {**_TINY, "vocab_size": 64}
    classes = 1000 if big else 4
    net = {"classes": classes} if big else {"blocks": (1, 1, 1, 1), "width": 8, "classes": classes}
    lstm = (10_000, 650, 35) if big else (64, 32, 9)
    no_drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    text = partial(_text, words, length, least=length // 2)
    gpt2 = partial(_head, "GPT2", "LMHeadModel", text)
    pictures = partial(_images, image, classes)
    patch = {} if big else {"patch_size": 8}
    found = {
        "GPT-2": gpt2(**gpt, **no_drop),
        "GPT-2, dropout": gpt2(**gpt),
        "ResNet-50, GroupNorm": Case(
            make=lambda: ab.batch_norm_to_group_norm(ResNet(**net), groups=8),
            loss=_CE,
            whole=_plain(_CE),
            batch=pictures,
        ),
        "ResNet-50, BatchNorm": Case(make=lambda: ResNet(**net), loss=_CE, whole=_plain(_CE), batch=pictures),
        "ViT-B": _head(
            "ViT",
            "ForImageClassification",
            partial(_vit, image, classes),
            image_size=image,
            num_labels=classes,
            **tiny,
            **patch,
        ),
        "BERT-large": _head(
            "Bert",
            "ForSequenceClassification",
            partial(_text, 64, length // 2, labels=3),
            num_labels=3,
            **wide,
        ),
        "BERT-base": _head(
            "Bert",
            "ForSequenceClassification",
            partial(_text, 64, length // 4, labels=3),
            num_labels=3,
            **base,
            **_STILL,
        ),
        "LSTM": Case(
            make=lambda: Words(*lstm[:2]),
            loss=_CE,
            whole=_plain(_CE),
            batch=partial(_tokens, lstm[0], lstm[2]),
        ),
    }
    return found
