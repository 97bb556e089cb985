"""Blocks found by structure, and read from what a caller asks for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from anybatch.core.errors import PlanError
from anybatch.recipes.lenet5 import LeNet5
from anybatch.recompute.blocks import choose_blocks, find_blocks
from tests.integrations.heads import HEADS
from tests.recompute.models import Bottleneck, DoubleConv, Encoder, ResNet, UNet

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


def head(name: str, **settings: Any) -> nn.Module:
    """A tiny model of transformers, of several layers."""
    found = next(one for one in HEADS if one.name == name)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**{**found.settings, **settings}))


class Stack(nn.Module):
    """A stack of blocks, as in an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DoubleConv(2, 2), DoubleConv(2, 2)])


class Layer(nn.Module):
    """A layer in which experts hold nearly all the parameters, or one of two parts that are no list."""

    def __init__(self, *, has_experts: bool) -> None:
        super().__init__()
        if has_experts:
            self.gate = nn.Linear(2, 3)
            self.experts = nn.ModuleList([DoubleConv(9, 9) for _ in range(3)])
        else:
            self.one, self.other = DoubleConv(2, 2), DoubleConv(2, 2)


def several(kind: Callable[[], nn.Module]) -> nn.Module:
    return nn.ModuleList([kind(), kind()])


STACKS = ("0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1")
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "lenet5": (lambda: LeNet5(1, 10, torch.Generator()), ()),
    "lstm": (lambda: nn.Sequential(nn.Embedding(4, 2), nn.LSTM(2, 2), nn.LSTM(2, 2)), ()),
    "leaves": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)), ()),
    "parameterless": (lambda: nn.Sequential(*[nn.Sequential(nn.Tanh()) for _ in range(3)]), ()),
    "resnet": (ResNet, ("stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1")),
    "unet": (UNet, ("first", "down1", "down2", "join")),
    "encoder": (Encoder, ("encoder.layers.0", "encoder.layers.1", "encoder.layers.2")),
    "stacks": (lambda: several(Stack), STACKS),
    "experts": (lambda: several(lambda: Layer(has_experts=True)), ("0", "1")),
    "pairs": (lambda: several(lambda: Layer(has_experts=False)), ("0", "1")),
    "twice the same": (lambda: nn.Sequential(*[Bottleneck(2, 2)] * 2), ()),
    "gpt2": (lambda: head("GPT2LMHeadModel", n_layer=2), ("transformer.h.0", "transformer.h.1")),
    "gpt2, one": (lambda: head("GPT2LMHeadModel"), ("transformer.h.0",)),
    "t5, one": (lambda: head("T5ForConditionalGeneration"), ("encoder.block.0", "decoder.block.0")),
    "t5": (
        lambda: head("T5ForConditionalGeneration", num_layers=2),
        ("encoder.block.0", "encoder.block.1", "decoder.block.0"),
    ),
    "vit": (lambda: head("ViTForImageClassification", num_hidden_layers=2), ("vit.layers.0", "vit.layers.1")),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_what_is_repeated(name: str) -> None:
    make, expected = MODELS[name]
    assert find_blocks(make()) == expected


def test_a_compiled_block_keeps_its_place() -> None:
    model = ResNet()
    expected = find_blocks(model)
    for name in expected:
        model.set_submodule(name, torch.compile(model.get_submodule(name), backend="eager"))
    assert find_blocks(model) == expected


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
    assert choose_blocks(several(Stack), asked) == tuple(expected.items())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("layers", "one of .*got 'layers'"),
        ({"0": "forget"}, "got 'forget'"),
        (["nothing*"], r"got 'nothing\*'.*0, 0.layers"),
        ({"0": "offload", "0.layers.1": "recompute"}, "got '0' and '0.layers.1'"),
        (3, "got 3"),
    ],
)
def test_what_cannot_be_chosen_is_refused(asked: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        choose_blocks(several(Stack), asked)


def test_all_of_nothing_and_what_transformers_recomputes_are_refused() -> None:
    with pytest.raises(PlanError, match="got none in Sequential"):
        choose_blocks(nn.Sequential(nn.Linear(1, 1)), "all")
    model = head("GPT2LMHeadModel")
    model.get_submodule("transformer.h.0").gradient_checkpointing = True  # pyright: ignore
    with pytest.raises(PlanError, match="gradient_checkpointing_disable"):
        choose_blocks(model, "all")


def test_a_sequential_of_blocks_is_a_list_and_one_of_layers_a_block() -> None:
    model = ResNet()
    assert choose_blocks(model, ["stages.0"]) == (("stages.0.0", "recompute"), ("stages.0.1", "recompute"))
    assert choose_blocks(model, ["stem"]) == (("stem", "recompute"),)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_torch_jit_has_compiled_is_refused() -> None:
    blocks = [torch.jit.script(DoubleConv(2, 2)) for _ in range(2)]
    model = nn.Sequential(*blocks, DoubleConv(2, 2), DoubleConv(2, 2))
    assert find_blocks(model) == ("2", "3")
    assert choose_blocks(model, {"0": "offload"}) == (("0", "offload"),)
    with pytest.raises(PlanError, match="'selective', got '1' with a ScriptModule"):
        choose_blocks(model, {"1": "selective"})
