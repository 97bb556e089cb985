"""The zoo: nine models, each with its loss and made-up batches, at full size and as a small copy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import anybatch as ab
from anybatch.recipes.lenet5 import LeNet5
from benchmarks.nets import LSTM, ResNet, UNet

SCALES = ("full", "medium", "small")
"""The size in the papers; and the same structure so small that a step takes about a tenth of a second, or
milliseconds."""

BatchOf = Callable[[int, Generator], Any]
"""Makes random rows, the same for the same state of the generator."""


class Made(NamedTuple):
    """A model with random weights, the loss a user would hand to `ab.Step`, and its batches."""

    model: nn.Module
    loss: object
    batch_of: BatchOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One animal.

    Attributes:
        name: its name on the command line.
        make: makes it, of one of SCALES, with the global random state.
        batch_norm: what `ab.Step` must be told before it cuts a batch; None where rows do not meet.
        rows: sizes of micro-batches to try, small enough for a processor; the last one is the whole batch.
        blocks: patterns of the modules to recompute where no block repeats; () for the blocks that do.
    """

    name: str
    make: Callable[[str], Made]
    batch_norm: str | None = None
    rows: tuple[int, int, int] = (2, 4, 8)
    blocks: tuple[str, ...] = ()

    def build(self, scale: str = "full", *, seed: int = 0) -> Made:
        """The same for the same seed, without touching the caller's random state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make(scale)

    def step(self, made: Made, optimizer: Optimizer, **options: Any) -> ab.Step:
        """A step with what this model needs; no look at the loss beforehand, which takes memory too."""
        return ab.Step(
            made.model,
            made.loss,
            optimizer,
            options=ab.Options(batch_norm=self.batch_norm, check=False),
            **options,
        )


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: SGD(model.parameters(), lr=1e-3),
    "adamw": lambda model: AdamW(model.parameters(), lr=1e-4),
}


def find(name: str) -> Entry:
    """The entry of a name."""
    return ZOO[name]


# ---- images


def _lenet5(scale: str) -> Made:
    """So small that its small copy is itself."""
    del scale
    model = LeNet5(1, 10)
    return Made(model, nn.CrossEntropyLoss(), _images(1, 32, 10))


def _resnet50(scale: str) -> Made:
    if scale == "full":
        return Made(ResNet(), nn.CrossEntropyLoss(), _images(3, 224, 1000))
    blocks, width = ((2, 2, 2, 2), 16) if scale == "medium" else ((1, 2, 1, 1), 8)
    return Made(ResNet(blocks=blocks, width=width, classes=10), nn.CrossEntropyLoss(), _images(3, 64, 10))


def _unet(scale: str) -> Made:
    width, depth, classes, size = {
        "full": (64, 4, 21, 128), "medium": (8, 3, 5, 64), "small": (4, 2, 3, 16),
    }[scale]  # fmt: skip
    model = UNet(width=width, depth=depth, classes=classes)

    def batch_of(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(rows, 3, size, size, generator=generator)
        return images, torch.randint(classes, (rows, size, size), generator=generator)

    return Made(model, nn.CrossEntropyLoss(), batch_of)


def vit(scale: str) -> Made:
    """ViT-B/16. Source: A. Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021, table 1."""
    from transformers import ViTConfig, ViTForImageClassification

    image = {"full": 224, "medium": 128, "small": 32}[scale]
    config = ViTConfig(**_SIZES[scale], image_size=image, num_labels=1000 if scale == "full" else 10)
    images = _images(3, config.image_size, config.num_labels)

    def batch_of(rows: int, generator: Generator) -> dict[str, Tensor]:
        pixels, labels = images(rows, generator)
        return {"pixel_values": pixels, "labels": labels}

    return Made(ViTForImageClassification(config), ab.ModelLoss(), batch_of)


def _images(maps: int, size: int, classes: int) -> Callable[[int, Generator], tuple[Tensor, Tensor]]:
    def batch_of(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(rows, maps, size, size, generator=generator)
        return images, torch.randint(classes, (rows,), generator=generator)

    return batch_of


# ---- text


def _sized(width: int, layers: int) -> dict[str, int]:
    return {
        "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }  # fmt: skip


_SIZES: dict[str, dict[str, int]] = {"full": {}, "medium": _sized(128, 6), "small": _sized(32, 3)}
_WORDS = {"medium": 997, "small": 97}  # at full scale what the model has
_TOKENS = {"full": 128, "medium": 64, "small": 12}


def bert(scale: str) -> Made:
    """BERT-base with a head for sequences, rows of unequal lengths.

    Source: J. Devlin et al., "BERT", NAACL 2019, section 3.
    """
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**_SIZES[scale], vocab_size=_WORDS.get(scale, 30_522), num_labels=3)
    length = _TOKENS[scale]

    def batch_of(rows: int, generator: Generator) -> dict[str, Tensor]:
        lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
        return {
            "input_ids": torch.randint(config.vocab_size, (rows, length), generator=generator),
            "attention_mask": (torch.arange(length) < lengths).long(),
            "labels": torch.randint(3, (rows,), generator=generator),
        }

    return Made(BertForSequenceClassification(config), ab.ModelLoss(), batch_of)


def gpt2(scale: str, *, length: int = 128) -> Made:
    """GPT-2 small, `length` tokens a row at full scale.

    Source: A. Radford et al., "Language models are unsupervised multitask learners" (2019), table 2.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    if scale == "full":
        config = GPT2Config()
    else:
        words, length, sizes = _WORDS[scale], _TOKENS[scale], _SIZES[scale]
        config = GPT2Config(
            vocab_size=words,
            n_embd=sizes["hidden_size"],
            n_layer=sizes["num_hidden_layers"],
            n_head=sizes["num_attention_heads"],
            bos_token_id=words - 1,
            eos_token_id=words - 1,
        )
    return Made(GPT2LMHeadModel(config), ab.ModelLoss(), _text(config.vocab_size, length))


def mixtral(scale: str) -> Made:
    """A mixture of eight experts, two of them for each token, with the router loss.

    Source: A. Jiang et al., "Mixtral of experts" (2024), section 2; far narrower here. Experts are evaluated
    as batched products of fixed shape, so that memory does not depend on where the router sends tokens; each
    token gathers the weights of its experts, which takes more memory than anything else in the model.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    full = scale == "full"
    width, inner, layers = {"full": (256, 512, 4), "medium": (64, 64, 4), "small": (32, 64, 3)}[scale]
    config = MixtralConfig(
        **_sized(width, layers) | {"intermediate_size": inner},
        num_key_value_heads=4,
        vocab_size=_WORDS.get(scale, 32_000),
        num_local_experts=8 if full else 4,
        output_router_logits=True,
        experts_implementation="batched_mm",
    )
    text = _text(config.vocab_size, 32 if full else _TOKENS[scale])
    return Made(MixtralForCausalLM(config), ab.ModelLoss(), text)


def t5(scale: str) -> Made:
    """T5-small. Source: C. Raffel et al., "Exploring the limits of transfer learning", JMLR 21 (2020)."""
    from transformers import T5Config, T5ForConditionalGeneration

    if scale == "full":
        config = T5Config()
    else:
        width, layers = _SIZES[scale]["hidden_size"], _SIZES[scale]["num_hidden_layers"]
        config = T5Config(
            vocab_size=_WORDS[scale],
            d_model=width,
            d_kv=width // 4,
            d_ff=4 * width,
            num_layers=layers,
            num_heads=4,
        )
    config.decoder_start_token_id = 0
    return Made(T5ForConditionalGeneration(config), ab.ModelLoss(), _text(config.vocab_size, _TOKENS[scale]))


def _lstm(scale: str) -> Made:
    if scale == "full":
        return Made(LSTM(), _token_total, _tokens(10_000, 35))
    words = _WORDS[scale]
    model = LSTM(words=words, width=128 if scale == "medium" else 16)
    return Made(model, _token_total, _tokens(words, _TOKENS[scale]))


def _token_total(model: nn.Module, micro: tuple[Tensor, Tensor]) -> ab.Total:
    tokens, target = micro
    loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten(), reduction="sum")
    return ab.Total(loss, target.numel())


def _tokens(words: int, length: int) -> Callable[[int, Generator], tuple[Tensor, Tensor]]:
    def batch_of(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(words, (rows, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch_of


def _text(words: int, length: int) -> Callable[[int, Generator], dict[str, Tensor]]:
    """Inputs and labels are the same tokens, which the model shifts, or writes anew (T5)."""

    def batch_of(rows: int, generator: Generator) -> dict[str, Tensor]:
        tokens = torch.randint(words, (rows, length), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return batch_of


_ENTRIES = (
    Entry(name="lenet5", make=_lenet5, rows=(8, 16, 64), blocks=("conv?", "linear1")),
    Entry(name="resnet50", make=_resnet50, batch_norm="micro"),
    Entry(name="bert", make=bert),
    Entry(name="gpt2", make=gpt2),
    Entry(name="vit", make=vit),
    Entry(name="unet", make=_unet, batch_norm="micro"),
    Entry(name="lstm", make=_lstm, rows=(4, 8, 16), blocks=("lstm",)),
    Entry(name="mixtral", make=mixtral),
    Entry(name="t5", make=t5),
)
ZOO = {entry.name: entry for entry in _ENTRIES}
