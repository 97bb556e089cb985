"""Checkpoints: what was saved is what is loaded, to the bit, and training goes on as if never stopped."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler, MultiStepLR

import anybatch as ab
from anybatch.core.errors import CheckpointError
from anybatch.parallel.checkpoint import load, restore, save
from anybatch.state import rng
from tests.compiled import Counting
from tests.snapshots import same

PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5))
DTYPES = ["float64", "float32", "bfloat16", "float8_e4m3fn", "int64", "int16", "uint8", "bool"]
NESTED = st.recursive(
    PLAIN | st.builds(torch.tensor, st.integers(-9, 9)) | st.just(torch.arange(6.0).view(2, 3).T),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.sampled_from(["$", "of", "a/b", "a"]), inner, max_size=3),
        st.dictionaries(st.integers(-3, 3) | st.sampled_from(["1", "2"]), inner, max_size=3),
        st.dictionaries(st.integers(0, 9), st.integers(0, 9), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def trip(folder: Path, **progress: Any) -> dict[str, Any]:
    save(folder / "trip", 0, model=nn.Linear(1, 1), progress=progress)
    return load(folder / "trip").progress


@given(NESTED)
def test_nested_values_come_back_with_their_types(folder: Path, value: Any) -> None:
    found = trip(folder, value=value)["value"]
    assert same(found, value)
    assert repr(found) == repr(value)  # and -0.0 is not 0.0


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_tensors_of_every_kind_come_back(folder: Path, dtype: torch.dtype) -> None:
    base = torch.arange(24).to(torch.float32).to(dtype)
    shaped = {"scalar": base[3], "empty": base[:0].view(0, 5), "transposed": base.view(4, 6).T}
    parts = {"strided": base[::5], "expanded": base[:1].expand(7), "front": base[:16], "back": base[8:]}
    tensors = shaped | parts
    assert same(trip(folder, **tensors), tensors)


@pytest.mark.parametrize(
    ("value", "path"),
    [({"deep": [1, {"er": {2, 3}}]}, "deep/1/er"), ({"f": np.arange(3)}, "f"), ({"f": {True: 3}}, "f")],
)
def test_a_value_that_needs_pickle_is_refused_with_its_place(tmp_path: Path, value: Any, path: str) -> None:
    with pytest.raises(CheckpointError, match=f"^progress/{path}: expected .* got .*[.] "):
        save(tmp_path / "a", 0, model=nn.Linear(1, 1), progress=value)
    assert list(tmp_path.iterdir()) == []


class Extra(nn.BatchNorm1d):
    extra = 0
    get_extra_state = lambda self: {"extra": self.extra}  # noqa: E731
    set_extra_state = lambda self, state: setattr(self, "extra", state["extra"])  # noqa: E731


def tied() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), Extra(4))
    model[1].weight = model[0].weight
    return model


def test_a_model_comes_back_in_place_with_its_ties(tmp_path: Path) -> None:
    model, other = tied(), tied()
    model(torch.randn(3, 4))
    model[2].extra, weight = 7, other[0].weight
    made = save(tmp_path / "a", 0, model=model)
    restore(load(tmp_path / "a"), model=other)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other[0].weight is weight is other[1].weight
    assert other[2].extra == 7
    found = load_file(made / "rank-0.safetensors")  # as another program reads it: one weight is stored once
    assert torch.equal(found["model/0.weight"], weight)
    assert sum(value.shape == (4, 4) for value in found.values()) == 1


def two_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    return [{"params": list(model[0].parameters()), **options}, {"params": list(model[1:].parameters())}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD of two groups": lambda m: optim.SGD(two_groups(m, lr=0.2, momentum=0.5), lr=0.1, momentum=0.9),
    "AdamW, fused": lambda m: optim.AdamW(m.parameters(), lr=0.01, amsgrad=True, fused=True),
    "AdamW, lr as tensor": lambda m: optim.AdamW(two_groups(m), lr=torch.tensor(0.01)),
    "Adafactor": lambda m: optim.Adafactor(m.parameters(), lr=0.01),
}
ramp = lambda o: optim.lr_scheduler.LinearLR(o, 1 / 3, total_iters=2)  # noqa: E731
SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda update: 0.9**update),
    "MultiStepLR": lambda o: MultiStepLR(o, milestones=[3, 3, 7], gamma=0.5),
    "SequentialLR": lambda o: optim.lr_scheduler.SequentialLR(o, [ramp(o), MultiStepLR(o, [2, 4])], [3]),
    "ChainedScheduler": lambda o: optim.lr_scheduler.ChainedScheduler([ramp(o), ExponentialLR(o, 0.9)]),
}


class Parts:
    """A model, its optimizers and schedulers, from a seed."""

    def __init__(self, seed: int, optimizer: str, scheduler: str, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 2))
        self.model = model.to(dtype)
        one = OPTIMIZERS[optimizer](self.model[:3])
        self.optimizers = [one, optim.SGD(self.model[3].parameters(), lr=0.1, momentum=0.9)]
        names = zip((scheduler, "LambdaLR"), self.optimizers, strict=True)
        self.schedulers = [SCHEDULERS[name](made) for name, made in names]

    def train(self, updates: Sequence[int]) -> list[Any]:
        parts = (*self.optimizers, *self.schedulers)
        for update in updates:
            generator = torch.Generator().manual_seed(update)
            x, y = (torch.randn(6, n, generator=generator).to(self.model[3].weight.dtype) for n in (3, 2))
            self.model.zero_grad()
            ((self.model(x) - y) ** 2).sum().backward()
            for part in parts:
                part.step()
        return [dict(self.model.state_dict()), *[part.state_dict() for part in parts]]


PAIRS = [(name, "LambdaLR") for name in OPTIMIZERS] + [("Adafactor", name) for name in [*SCHEDULERS][1:]]


@pytest.mark.filterwarnings("ignore:.*capturable.*")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", PAIRS, ids=str)
def test_every_optimizer_and_scheduler_goes_on(tmp_path: Path, names: Any, dtype: Any) -> None:
    whole, path = Parts(0, *names, dtype), tmp_path / "a"
    whole.train(range(5))
    save(path, 0, **vars(whole), random=rng.capture_process())
    end = whole.train(range(5, 10))
    found, other = load(path), Parts(1, *names, dtype)
    for _ in range(2):  # twice: going on must not write into the checkpoint
        restore(found, **vars(other))
        rng.restore_process(found.random)
        assert same(other.train(range(5, 10)), end)


# ---- a compiled model


def trainer(*, is_compiled: bool = False) -> ab.Trainer:
    torch.manual_seed(0)
    x, y = torch.randn(43, 4), torch.randint(3, (43,))  # batches of 20, 20 and 3
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3))
    model = Counting().compile(model) if is_compiled else model
    optimizer, flow = torch.optim.AdamW(model.parameters(), lr=0.01), ab.GradientFlow(model)
    step = ab.Step(model, nn.CrossEntropyLoss(), optimizer, micro_batch=16, callbacks=[flow])
    return ab.Trainer(step, (x, y), batch_size=20, progress=False, callbacks=[ab.EMA(0.9)])


@pytest.mark.parametrize("is_compiled", [True, False])
def test_either_model_goes_on_from_the_others_checkpoint(is_compiled: bool, tmp_path: Path) -> None:
    first, second = trainer(is_compiled=is_compiled), trainer(is_compiled=not is_compiled)
    first.fit(epochs=1)
    first.save(tmp_path / "a")
    second.resume(tmp_path / "a")
    saved, loaded = (
        {name.replace("_orig_mod.", ""): value.clone() for name, value in one.step.model.state_dict().items()}
        for one in (first, second)
    )
    assert same(loaded, saved)
    ema: Any = second.callbacks[-1]
    assert ema.average.keys() == saved.keys()
    second.fit(epochs=2)
    found = load(tmp_path / "a").model
    assert set(found) == set(saved)
    trainer().step.model.load_state_dict(found)
