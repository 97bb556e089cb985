"""Every recipe makes the same updates in every cut; models are those of the papers; options are checked."""

import copy
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)
import torch
from torch import nn

from anybatch import Step
from anybatch.core.errors import AnybatchError, PlanError
from anybatch.recipes import RECIPES, Training, find_recipe
from anybatch.recipes.gpt import GPT2
from anybatch.recipes.lenet5 import LeNet5
from anybatch.recipes.resnet import NORMS, ResNet
from anybatch.testing import relative_error, tolerance

TEXTS = [f"{'abc'[n % 3]}\t{' '.join(['word', 'ward', 'wood', 'weed'][: n % 4 + 1])} {n}" for n in range(40)]
SMALL: dict[str, list[dict[str, Any]]] = {
    "lenet5": [{}],
    "resnet18": [{"width": 4}, {"width": 4, "norm": "frozen"}],
    "resnet50": [{"width": 4}],
    "bert": [{"block_size": 16}, {"block_size": 16, "task": "mask"}],
    "gpt": [{"block_size": 8}],
    "clip": [{}],
}
CASES = [(name, options) for name, many in SMALL.items() for options in many]


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("\n".join(TEXTS))
    return str(tmp_path / "text.txt")


def prepared(name: str, text: str, **options: Any) -> Training:
    if name == "bert":
        pytest.importorskip("transformers")
    data = text if find_recipe(name).data == "python" else None
    return find_recipe(name).prepare(data, **options)


def moved(training: Training, rows: int, micro_batch: int | None, updates: int = 2) -> list[torch.Tensor]:
    """How far each parameter goes, in double precision."""
    model = copy.deepcopy(training.model).double()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss, optimizer = copy.deepcopy(training.loss), torch.optim.SGD(model.parameters(), lr=0.01)
    step = Step(model, loss, optimizer, micro_batch=micro_batch, options=training.options)
    batch = training.first(rows)
    leaves = batch.values() if isinstance(batch, dict) else batch
    doubled = [leaf.double() if leaf.is_floating_point() else leaf for leaf in leaves]
    for _ in range(updates):
        step(dict(zip(batch, doubled, strict=True)) if isinstance(batch, dict) else tuple(doubled))
    return [after.detach() - was for after, was in zip(model.parameters(), before, strict=True)]


def test_every_recipe_is_tried() -> None:
    assert tuple(SMALL) == tuple(RECIPES)
    with pytest.raises(PlanError, match=r"got 'lenet6'. Known: lenet5, resnet18"):
        find_recipe("lenet6")


@pytest.mark.parametrize(("name", "options"), CASES)
def test_two_updates_are_the_same_in_any_cut(name: str, options: dict[str, Any], text: str) -> None:
    training = prepared(name, text, **options)
    whole = moved(training, 7, None)
    # Two updates of a deep network: the second starts from the rounding of the first.
    bound = 1000 * tolerance(torch.float64, 7)
    for micro_batch in (1, 3):
        assert relative_error(moved(training, 7, micro_batch), whole) <= bound
    assert max(float(one.abs().max()) for one in whole) > 0


@pytest.mark.parametrize(("name", "options"), CASES)
def test_one_seed_gives_one_training_and_draws_nothing_else(name: str, options: Any, text: str) -> None:
    before = torch.get_rng_state()
    one, again, other = (prepared(name, text, seed=seed, **options) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [torch.cat([p.flatten() for p in t.model.parameters()]) for t in (one, again, other)]
    assert (torch.equal(weights[0], weights[1]), torch.equal(weights[0], weights[2])) == (True, False)
    assert one.vocabulary == again.vocabulary
    leaves = [list(t.train.values() if isinstance(t.train, dict) else t.train) for t in (one, again)]
    assert all(map(torch.equal, *leaves))


NETS = ((2, 2, 2, 2), False, 11_689_512), ((3, 4, 6, 3), True, 25_557_032)


@pytest.mark.parametrize(("blocks", "bottleneck", "count"), NETS)
def test_resnets_have_the_parameters_of_the_paper(blocks: Any, bottleneck: bool, count: int) -> None:
    """For 1000 classes; torchvision's have as many."""
    with torch.device("meta"):
        model = ResNet(blocks, bottleneck, 3, 1000, small=False)
        assert sum(parameter.numel() for parameter in model.parameters()) == count
        images = torch.zeros(2, 3, 224, 224)
        assert model.pool(model.first(images)).shape == (2, 64, 56, 56)
        assert model(images).shape == (2, 1000)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_do_what_they_say(norm: str) -> None:
    training = find_recipe("resnet18").prepare(norm=norm, width=4)
    kinds = {type(module) for module in training.model.modules()} & {nn.BatchNorm2d, nn.GroupNorm}
    assert kinds == {nn.GroupNorm if norm == "group" else nn.BatchNorm2d}
    whole = moved(training, 6, None, updates=1)
    if norm == "whole":
        with pytest.raises(PlanError, match="BatchNorm"):
            moved(training, 6, 3, updates=1)
        return
    is_same = relative_error(moved(training, 6, 3, updates=1), whole) <= 1000 * tolerance(torch.float64, 6)
    assert is_same == (norm != "micro")


def test_gpt_is_gpt2_and_sees_only_what_came_before() -> None:
    with torch.device("meta"):
        model = GPT2(50257, 1024, layers=12, heads=12, width=768)
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    model = GPT2(10, 12, layers=2, heads=2, width=8).eval()
    text = torch.arange(10)[None]
    changed = text.clone()
    changed[0, 6] = 0
    same = (model(text) == model(changed)).all(1)[0]
    assert same.tolist() == [True] * 6 + [False] * 4


def test_masked_tokens_are_those_asked_for(text: str) -> None:
    training = prepared("bert", text, task="mask", block_size=32)
    plain = prepared("bert", text, block_size=32)
    shown, targets, ids = (training.train["input_ids"], training.train["labels"], plain.train["input_ids"])
    chosen = targets != -100
    assert torch.equal(targets[chosen], ids[chosen])
    assert torch.equal(shown[~chosen], ids[~chosen])
    assert not (chosen & (ids < 5)).any()  # neither padding nor the ends
    assert 0.08 < float(chosen.sum() / (ids >= 5).sum()) < 0.22
    assert 0.6 < float((shown[chosen] == 4).float().mean()) < 0.95


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("lenet5", {"norm": "group"}, "Expected options of lenet5 (--label-smoothing), got --norm"),
        ("resnet18", {"norm": "batch"}, "--norm to be one of ['group', 'whole', 'frozen', 'micro']"),
        ("resnet18", {"width": 0}, "--width to be at least 1, got 0"),
        ("bert", {"task": "guess"}, "one of ['classify', 'mask'], got 'guess'"),
        ("bert", {"block_size": 4}, "--block-size to be from 8 to 512"),
        ("gpt", {"block_size": 1000}, "more than ten blocks of 1000 characters"),
    ],
)
def test_options_are_checked(name: str, options: dict[str, Any], words: str, text: str) -> None:
    with pytest.raises(AnybatchError) as error:
        prepared(name, text, **options)
    assert words in str(error.value)


@pytest.mark.parametrize(("channels", "size"), [(1, 61_706), (3, 62_006)])  # counted from the paper
def test_lenet5_is_that_of_the_paper(channels: int, size: int) -> None:
    model = LeNet5(channels, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == size
    assert model(torch.zeros(5, channels, 32, 32)).shape == (5, 10)
    assert LeNet5(channels, 3)(torch.zeros(2, channels, 32, 32)).shape == (2, 3)
