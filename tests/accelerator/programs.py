"""Programs on the simulated accelerator, and how far they are from the CPU's whole batch in float64."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anybatch as ab
from anybatch.state import rng
from tests.accelerator.simulated import counted, load
from tests.options import flat
from tests.zoo import Perceptron, Transformer, conv_net, own_loss

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


def steps(clip: Any = None, **options: Any) -> float:
    """Two steps with a loss of torch."""
    load()
    batches, model = [batch(0), batch(1)], perceptron()
    return trained(model, reference(model, [mean_of(one) for one in batches], clip), batches, **options)


def plain() -> float:
    return steps()


def cut() -> float:
    return steps(micro_batch=3)


def clipped() -> float:
    return steps(lambda ones: nn.utils.clip_grad_norm_(ones, 0.05), micro_batch=3, clip_norm=0.05)


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


def window() -> float:
    """Two windows of three `add`s of unequal sizes."""
    load()
    batches, model = [batch(0), batch(1)], perceptron()
    expected = reference(model, [mean_of(one) for one in batches])
    model = model.to("sim")
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd(model), micro_batch=2)
    for x, y in batches:
        with step.window() as opened:
            for start, end in ((0, 5), (5, 6), (6, ROWS)):
                opened.add(moved((x[start:end], y[start:end])))
    return error(model, expected)


def model_loss() -> float:
    load()
    torch.manual_seed(1)
    model, rows = own_loss(Perceptron(FEATURES, CLASSES)).double(), batch(0)
    expected = reference(model, [lambda one: one(*rows)["loss"]] * 2)
    return trained(model, expected, [{"x": rows[0], "labels": rows[1]}] * 2, ab.ModelLoss(), micro_batch=3)


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, targets.clamp(0, 3))


def whole_batch() -> float:
    load()
    model, (x, y) = perceptron(), batch(0)
    expected = reference(model, [lambda one: contrast(one(x), y)] * 2)
    return trained(model, expected, [(x, y)] * 2, ab.WholeBatch(contrast), micro_batch=3)


def drop() -> float:
    """Rows 3, 4 and 5 are a micro-batch, and one of them is not finite."""
    load()
    model, (x, y) = perceptron(), batch(0)
    rest = torch.tensor([0, 1, 2, *range(6, ROWS)])
    expected = reference(model, [mean_of((x[rest], y[rest]))])
    x[5] = torch.nan
    return trained(model, expected, [(x, y)], micro_batch=3, non_finite="drop")


def batch_loss() -> float:
    load()
    rows, model = batch(0), perceptron()
    expected = reference(model, [mean_of(rows)] * 2)
    model = model.to("sim")
    optimizer, loss = sgd(model), ab.BatchLoss(model, nn.CrossEntropyLoss(), micro_batch=3)
    for _ in range(2):
        optimizer.zero_grad()
        loss(moved(rows)).backward()
        optimizer.step()
    return error(model, expected)


def trainer() -> float:
    """Three epochs of one batch, which the trainer shuffles and brings to the device."""
    load()
    rows, model = batch(0, 2 * ROWS), perceptron()
    expected = reference(model, [mean_of(rows)] * 3)
    model = model.to("sim")
    step = ab.Step(model, nn.CrossEntropyLoss(), sgd(model), micro_batch=3)
    ab.Trainer(step, rows, batch_size=2 * ROWS, progress=False).fit(epochs=3)
    return error(model, expected)


def of(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Two steps of a model on a batch, cut."""
    return trained(model, reference(model, [mean_of((x, y))] * 2), [(x, y)] * 2, micro_batch=2)


def convolution() -> float:
    load()
    torch.manual_seed(1)
    x, y = torch.randn(5, 2, 4, 4, dtype=torch.float64), torch.randint(3, (5, 4, 4))
    return of(conv_net(2, 3).double(), x, y)


def transformer() -> float:
    load()
    torch.manual_seed(1)
    tokens = torch.randint(1, 9, (5, 6))
    return of(Transformer(9).double(), tokens, tokens.roll(-1, 1).where(tokens != 3, -100))


PLAIN = plain, cut, clipped, offloaded, window, convolution, transformer
EXACT = *PLAIN, model_loss, whole_batch, drop, batch_loss, trainer


def drawn_again() -> list[list[float]]:
    """Numbers that the device draws, twice, from one captured state."""
    load()
    state = rng.capture_process()
    found: list[list[float]] = []
    for _ in range(2):
        rng.restore_process(state)
        found.append(torch.rand(3, device="sim").tolist())
    return found


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
