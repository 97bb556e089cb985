"""Programs on the simulated accelerator, and how far they are from the CPU's whole batch in float64."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from tests.accelerator.simulated import counted, load
from tests.options import flat
from tests.zoo import Perceptron

FEATURES, CLASSES, ROWS = 5, 4, 11
Batch = tuple[Tensor, Tensor]


def perceptron() -> nn.Module:
    torch.manual_seed(1)
    return Perceptron(FEATURES, CLASSES).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def batch(seed: int, rows: int = ROWS) -> Batch:
    """A batch whose rows do not all count, so that micro-batches have unequal weights."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, FEATURES, generator=draw, dtype=torch.float64)
    y = torch.randint(CLASSES, (rows,), generator=draw)
    return x, y.where(torch.arange(rows) % 3 != 1, -100)


def moved(value: Any) -> Any:
    """A batch on the device."""
    if isinstance(value, dict):
        return {name: one.to("sim") for name, one in value.items()}
    return tuple(one.to("sim") for one in value)


def reference(
    model: nn.Module, means: Sequence[Callable[[nn.Module], Tensor]], clip: Any = None
) -> nn.Module:
    """The model after an update for each mean, each with one forward and one backward."""
    model = copy.deepcopy(model)
    optimizer = sgd(model)
    for mean in means:
        optimizer.zero_grad()
        mean(model).backward()
        if clip is not None:
            clip(model.parameters())
        optimizer.step()
    return model


def error(model: nn.Module, expected: nn.Module) -> float:
    """The largest difference of two models' parameters, relative to the largest parameter."""
    found = [one.detach().cpu().double() for one in model.parameters()]
    wanted = [one.detach() for one in expected.parameters()]
    largest = max(float(one.abs().max()) for one in wanted)
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)) / largest


def mean_of(rows: Batch) -> Callable[[nn.Module], Tensor]:
    return lambda model: F.cross_entropy(model(rows[0]), rows[1])


def trained(
    model: nn.Module, expected: nn.Module, batches: Sequence[Any], loss: Any = None, **options: Any
) -> float:
    """Steps of a model on the device, one for each batch; how far it is from what is expected."""
    model = model.to("sim")
    step = ab.Step(model, loss or nn.CrossEntropyLoss(), sgd(model), **flat(options))
    for one in batches:
        step(moved(one))
    return error(model, expected)


def clipped() -> float:
    """Two steps with a loss of torch."""
    load()
    batches, model, clip = (
        [batch(0), batch(1)],
        perceptron(),
        lambda ones: nn.utils.clip_grad_norm_(ones, 0.05),
    )
    expected = reference(model, [mean_of(one) for one in batches], clip)
    return trained(model, expected, batches, micro_batch=3, clip_norm=0.05)


def offloaded() -> float:
    """Tensors large enough to wait in host memory, copied on a side stream."""
    load()
    torch.manual_seed(1)
    model = nn.Sequential(*[Perceptron(FEATURES, FEATURES, width=1024) for _ in range(3)]).double()
    rows = batch(0, 9)
    expected = reference(model, [mean_of(rows)] * 2)
    with counted() as counts:
        found = trained(model, expected, [rows] * 2, micro_batch=8, recompute="offload")
    assert counts["bytes_out"] > 2 * 3 * 8 * 1024 * 8  # in two steps, three blocks of 8 rows of float64
    return found


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, targets.clamp(0, 3))


def mixed(name: str) -> tuple[float, bool]:
    """A step in mixed precision: its distance from float64, and whether autocast ran in 16 bits."""
    sim = load()
    rows, model = batch(0), perceptron().float()
    expected = reference(copy.deepcopy(model).double(), [mean_of(rows)])
    model, seen = model.to("sim"), set[torch.dtype]()
    model.layers[0].register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd(model), micro_batch=3, precision=name)
    assert step(moved((rows[0].float(), rows[1]))).updated
    return error(model, expected), seen <= {*sim.get_amp_supported_dtype()}
