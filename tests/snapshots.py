"""What a refused or failed step must leave exactly as it was, and a step to try it on."""

import copy
import math
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anybatch import Options, Step
from tests.options import flat

ROWS, FEATURES, CLASSES = 8, 3, 4
PLAIN = (bool, int, float, str, Tensor, list, tuple, dict, set, type(None))  # attributes that are compared
STREAMS: dict[str, Callable[[], Any]] = {
    "Python": random.getstate,
    "NumPy": lambda: [str(one) for one in np.random.get_state()],
}
DRAWN = {"random state", *(f"random state of {name}" for name in STREAMS)}  # names of random streams


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def snapshot(step: Step) -> dict[str, Any]:
    """All that a step may touch, by name."""
    state: dict[str, Any] = {"random state": torch.get_rng_state(), "scale": step.scale.state()}
    state |= {f"random state of {name}": read() for name, read in STREAMS.items()}
    for name, module in step.model.named_modules():
        state[f"mode of {name}"] = module.training
        state[f"hooks of {name}"] = len(module._forward_hooks), "forward" in vars(module)
        for key, buffer in module._buffers.items():
            state[f"buffer {name}.{key}"] = None if buffer is None else buffer.clone()
        for key, value in vars(module).items():
            if not key.startswith("_") and key != "training" and isinstance(value, PLAIN):
                state[f"attribute {name}.{key}"] = _copied(value)
    for name, parameter in step.model.named_parameters():
        state[f"parameter {name}"] = parameter.detach().clone()
        full = step.masters.of(parameter)
        state[f"float32 copy of {name}"] = None if full is None else full.detach().clone()
        state[f"gradient {name}"] = None if parameter.grad is None else parameter.grad.clone()
        state[f"gradient's identity {name}"] = id(parameter.grad)
        state[f"hooks on gradient {name}"] = len(parameter._post_accumulate_grad_hooks or ())
    for kind, ones in (("optimizer", step.optimizers), ("scheduler", step.schedulers)):
        for index, one in enumerate(ones):
            state[f"{kind} {index}"] = copy.deepcopy(one.state_dict())
    return state


@contextmanager
def same_as_before(step: Step, *but_for: str) -> Generator[None]:
    """What happens inside changes nothing of a step, to the bit, but for these names; it may raise."""
    before = snapshot(step)
    try:
        yield
    finally:
        different = set(changes(before, snapshot(step))) - {*but_for}
        assert not different, f"not the same: {sorted(different)}"


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two snapshots are the same, to the bit."""
    assert changes(one, other) == []


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, list | tuple | set) else value


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not the same, bit for bit."""
    return [
        name
        for name in [*before, *(after.keys() - before.keys())]
        if name not in before or name not in after or not same(before[name], after[name])
    ]


def same(one: Any, other: Any) -> bool:
    """Bit for bit, through dicts, lists and tuples; NaN is the same as NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def make_model() -> nn.Module:
    """With buffers that change (BatchNorm), random numbers (dropout) and a layer that is easy to freeze."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, CLASSES)
    )


def make_step(loss: object = None, model: nn.Module | None = None, **options: Any) -> Step:
    """A step in the middle of a training: momentum, a scheduler, and somebody's gradients lying about."""
    model = make_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    loss = nn.CrossEntropyLoss() if loss is None else loss
    step = Step(
        model,
        loss,
        optimizer,
        **flat({"scheduler": scheduler, "batch_norm": "micro", "check": False} | options),
    )
    precision = options.get("precision", "float32")
    warm = Step(
        model, nn.CrossEntropyLoss(), optimizer, options=Options(scheduler=scheduler), precision=precision
    )
    warm(make_batch(seed=7))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    return step


def make_batch(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)
