"""Blocks found by structure, and read from what a caller asks for."""

from collections.abc import Callable
from typing import Any

import pytest
import transformers
from torch import nn

from anybatch.core.errors import PlanError
from anybatch.recipes.lenet5 import LeNet5
from anybatch.recompute import choose_blocks, find_blocks
from tests.integrations.heads import HEADS
from tests.recompute.models import DoubleConv, encoder, resnet, unet
from tests.zoo import Made

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


def head(name: str, **settings: Any) -> nn.Module:
    found = next(one for one in HEADS if one.name == name)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**{**found.settings, **settings}))


def pair() -> list[nn.Module]:
    return [DoubleConv(2, 2), DoubleConv(2, 2)]


def several(*, has_experts: bool = False) -> nn.Module:
    """Layers made of a list of blocks, or mostly of experts."""

    def layer() -> nn.Module:
        if has_experts:
            experts = nn.ModuleList([DoubleConv(9, 9) for _ in range(3)])
            return Made(lambda self: self.gate, gate=nn.Linear(2, 3), experts=experts)
        return Made(lambda self: self.layers, layers=nn.ModuleList(pair()))

    return nn.ModuleList([layer(), layer()])


STACKS = ("0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1")
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "lenet5": (lambda: LeNet5(1, 10), ()),
    "lstm": (lambda: nn.Sequential(nn.Embedding(4, 2), nn.LSTM(2, 2), nn.LSTM(2, 2)), ()),
    "leaves": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), ()),
    "resnet": (resnet, ("layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1")),
    "unet": (unet, ("first", "down", "join")),
    "encoder": (encoder, ("layers.0", "layers.1", "layers.2")),
    "stacks": (several, STACKS),
    "experts": (lambda: several(has_experts=True), ("0", "1")),
    "gpt2": (lambda: head("GPT2LMHeadModel", n_layer=2), ("transformer.h.0", "transformer.h.1")),
    "t5, one": (lambda: head("T5ForConditionalGeneration"), ("encoder.block.0", "decoder.block.0")),
    "vit": (lambda: head("ViTForImageClassification", num_hidden_layers=2), ("vit.layers.0", "vit.layers.1")),
}


@pytest.mark.parametrize(("make", "expected"), MODELS.values(), ids=MODELS)
def test_blocks_are_what_is_repeated(make: Callable[[], nn.Module], expected: tuple[str, ...]) -> None:
    assert find_blocks(make()) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, {}),
        ("all", dict.fromkeys(STACKS, "recompute")),
        ("offload", dict.fromkeys(STACKS, "offload")),
        (["1*"], {"1": "recompute"}),  # the outermost
        ({"?": "selective", "0": "offload"}, {"0": "offload", "1": "selective"}),  # the last counts
        (["0.layers"], dict.fromkeys(["0.layers.0", "0.layers.1"], "recompute")),  # a list: its elements
        ([], {}),
    ],
)
def test_what_a_caller_asks_for(asked: object, expected: dict[str, str]) -> None:
    assert choose_blocks(several(), asked) == tuple(expected.items())


def test_blocks_inside_of_blocks_and_what_transformers_recomputes_are_refused() -> None:
    with pytest.raises(PlanError, match=r"got '0' and '0.layers.1'"):
        choose_blocks(several(), {"0": "offload", "0.layers.1": "recompute"})
    model = head("GPT2LMHeadModel")
    model.get_submodule("transformer.h.0").gradient_checkpointing = True
    with pytest.raises(PlanError, match="gradient_checkpointing_disable"):
        choose_blocks(model, "all")


def test_a_sequential_of_blocks_is_a_list_and_one_of_layers_a_block() -> None:
    model = nn.Sequential(nn.Sequential(*pair()), nn.Sequential(nn.Tanh()))
    assert choose_blocks(model, ["0"]) == (("0.0", "recompute"), ("0.1", "recompute"))
    assert choose_blocks(model, ["1"]) == (("1", "recompute"),)
