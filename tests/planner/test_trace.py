"""Traces: the bytes of a step without memory."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from anybatch import ModelLoss, Options, Step, Terms, Total, WholeBatch, plan
from anybatch.core.batch import TensorBatch
from anybatch.core.errors import TraceError
from anybatch.memory.device import find_device
from anybatch.memory.meter import Meter
from anybatch.planner.trace import trace
from benchmarks.zoo import ZOO
from tests.options import flat
from tests.snapshots import changes, make_batch, make_step, snapshot
from tests.zoo import Made, words

ROWS, CROSS = 12, nn.CrossEntropyLoss()
CPU = find_device("cpu")


def tied() -> nn.Module:
    return words(nn.LayerNorm(16), width=16, count=50, tied=True)


def recurrent() -> nn.Module:
    body = nn.LSTM(16, 16, 2, batch_first=True)
    return words(Made(lambda self, x: self.body(x)[0], body=body), width=16, count=50)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 10))


def conv() -> nn.Module:
    head = (nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 10))
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), *head)


def vectors() -> Any:
    return torch.randn(ROWS, 16), torch.randint(10, (ROWS,))


def images(dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(ROWS, 1, 14, 14, dtype=dtype), torch.randint(10, (ROWS,))


def tokens() -> Any:
    return torch.randint(1, 50, (ROWS, 9)), torch.randint(50, (ROWS, 9))


def shifted() -> Any:
    whole = torch.randint(1, 50, (ROWS, 10))
    return whole[:, :-1], whole[:, 1:]  # two views of one tensor


def terms(model: nn.Module, micro: Any) -> dict[str, Total]:
    outputs = model(micro[0])
    losses = F.cross_entropy(outputs, micro[1], reduction="none")
    fit = Total(losses.sum(), (micro[1] >= 0).sum())
    return {"fit": fit, "size": Total(outputs.square().sum(), outputs.numel())}


def contrast(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def twice(model: nn.Module, micro: Any) -> Total:
    with torch.no_grad():
        aim = model(micro[0])
    return Total((model(micro[0] + 1) - aim).square().sum(), len(micro[1]))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Any]] = {
    "mlp": (mlp, vectors, CROSS),
    "bfloat16": (lambda: conv().bfloat16(), lambda: images(torch.bfloat16), CROSS),
    "conv": (conv, images, nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.ones(10))),
    "tied": (tied, tokens, CROSS),
    "shifted": (tied, shifted, CROSS),
    "recurrent": (recurrent, tokens, CROSS),
    "terms": (mlp, vectors, Terms(terms, coefficients={"size": 0.1})),
    "whole": (mlp, vectors, WholeBatch(contrast)),
    "model called twice": (mlp, vectors, twice),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}
for own in ("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "NAdam", "RMSprop", "Rprop"):
    OPTIMIZERS[own.lower()] = getattr(torch.optim, own)


def compare(model: nn.Module, loss: Any, optimizer: Optimizer, batch: Any, **options: Any) -> Any:
    """Predict from one row before the first step; measure the second."""
    step = Step(model, loss, optimizer, **flat({"batch_norm": "micro", "check": False} | options))
    logical = TensorBatch(batch)
    predicted = trace(step.plan(logical.rows), step.task(), logical.only(range(1)), device=CPU)
    step(batch)
    with Meter(model, [optimizer], loss_module=step.loss_module, batch_leaves=logical.leaves) as meter:
        step(batch)
    return predicted, meter


@pytest.mark.parametrize("micro_batch", [None, 5])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("case", CASES)
def test_peak_to_the_byte(case: str, name: str, micro_batch: int | None) -> None:
    build, make, loss = CASES[case]
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    predicted, meter = compare(model, loss, optimizer, make(), micro_batch=micro_batch)
    assert predicted.peak == predicted.ledger.peak == meter.peak


@pytest.mark.parametrize("micro_batch", [None, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_peak_to_the_byte_with_every_optimizer(name: str, micro_batch: int | None) -> None:
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in ("without state", "with it"):
        predicted, meter = compare(model, CROSS, optimizer, vectors(), micro_batch=micro_batch)
        assert predicted.peak == meter.peak
        now, then = predicted.ledger.phases(), meter.ledger().phases()
        assert now["update"].bytes[:4] == then["update"].bytes[:4]


@pytest.mark.parametrize(
    ("name", "micro_batch", "is_read"),
    [(name, 4, False) for name in ("gpt2", "t5", "vit", "mixtral")]
    + [("gpt2", 1, True), ("t5", 4, True), ("mixtral", None, True)],
)
def test_peak_to_the_byte_of_models_with_their_own_loss(
    name: str, micro_batch: int | None, is_read: bool, monkeypatch: Any
) -> None:
    """But for a scalar, that of a step that is watched; one whose loss is read holds some scalars less."""
    if not is_read:
        monkeypatch.setattr("anybatch.losses.model.model_loss.learn_form", lambda model, found: None)
    made = ZOO[name].build("small")
    optimizer, batch = OPTIMIZERS["adamw"](made.model.parameters()), made.batch_of(ROWS, torch.Generator())
    predicted, meter = compare(made.model, ModelLoss(), optimizer, batch, micro_batch=micro_batch)
    assert 0 <= predicted.peak - meter.peak <= (16 * ROWS if is_read else 8)


def picks(_: Any, x: Tensor) -> Tensor:
    return x + x[x > 0].sum()


def lengths(_: Any, x: Tensor) -> Tensor:
    return x + x[:, : int(x.long().max().clamp(1, 2))].sum()


@pytest.mark.parametrize(
    ("forward", "named"),
    [(picks, r"aten\.(nonzero|index)\.\w+ in 1"), (lengths, r"in 1 \(Made\); its shapes depend on values")],
)
def test_what_cannot_be_traced_is_named(forward: Any, named: str) -> None:
    step = make_step(model=nn.Sequential(nn.Linear(3, 4), Made(forward)), micro_batch=4)
    before, batch = snapshot(step), TensorBatch(make_batch())
    with pytest.raises(TraceError, match=named):
        trace(step.plan(8), step.task(), batch, device=CPU)
    assert not changes(before, snapshot(step))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"adagrad"}))  # its state is there from the start
def test_parameters_without_gradient_have_no_state(name: str) -> None:
    model = mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(1000)))
    optimizer, batch = OPTIMIZERS[name](model.parameters()), vectors()
    step = Step(model, CROSS, optimizer, options=Options(check=False))
    idle = frozenset([model.unused])
    plan, rows = step.plan(ROWS), TensorBatch(batch)
    found = [trace(plan, step.task(), rows, device=CPU, idle=known) for known in (frozenset(), idle)]
    assert {one.idle for one in found} == {idle}
    _, meter = compare(model, CROSS, optimizer, batch)
    assert [one.peak for one in found] == [meter.peak, meter.peak]


def layers(dropout: float, device: str) -> nn.Module:
    with torch.device(device):
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 4))


def planned(model: nn.Module, device: str, precision: str = "float32") -> int:
    """Return the bytes at the peak without those of cuBLAS."""
    batch = torch.zeros(2, 128, 32), torch.zeros(2, 128, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    report = plan(model, nn.MSELoss(), optimizer, batch, rows=16, device=device, precision=precision)
    return report.peak - find_device(device).workspace


@pytest.mark.parametrize("precision", ["float32", "bf16-mixed", "fp16-mixed"])
def test_a_model_on_the_meta_device_is_planned_as_one_on_the_cpu(precision: str) -> None:
    there, here = [planned(layers(0.0, device), "cuda:a100", precision) for device in ("meta", "cpu")]
    assert 0.98 * here <= there <= 1.02 * here
    assert there < planned(layers(0.0, "meta"), "cuda:a100") or precision == "float32"


def test_attention_with_dropout_keeps_no_scores_on_a_card() -> None:
    """Dropout outside of attention keeps a mask of bools; scores would take several times as much."""
    without, dropped = [planned(layers(p, "meta"), "cuda:a100") for p in (0.0, 0.1)]
    assert without < dropped <= 1.2 * without
    assert planned(layers(0.1, "cpu"), "cpu") > 1.5 * dropped


def heads_of(size: int = 16, heads: int = 4, shared: int = 4, mask: bool = False) -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        q = self.layer(x).unflatten(-1, (heads, size)).transpose(1, 2)
        given = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool) if mask else None
        keys = q[:, :shared]
        return F.scaled_dot_product_attention(q, keys, keys, given, enable_gqa=shared < 4)

    return Made(forward, layer=nn.Linear(heads * size, heads * size))


FLASH, EFFICIENT = r"fused \(flash\) on ", r"fused \(memory-efficient\) on "


@pytest.mark.parametrize(
    ("card", "precision", "heads", "kernel"),
    [
        ("a100", "bf16-mixed", {}, FLASH),
        ("a100", "fp16-mixed", {"mask": True}, EFFICIENT),
        ("a100", "float32", {}, EFFICIENT),
        ("a100", "float32", {"shared": 2}, "unfused, .* float32 whose heads share keys and values"),
        ("a100", "float32", {"size": 18}, "unfused, .* float32 of 18 numbers a head"),
        ("rtx4090", "bf16-mixed", {"size": 200}, EFFICIENT),
        ("t4", "fp16-mixed", {}, EFFICIENT),
        ("v100", "bf16-mixed", {}, "unfused, because cuda:v100 has no fused kernel for bfloat16"),
    ],
)
def test_a_plan_names_the_kernel_of_attention_that_it_counts(
    card: str, precision: Any, heads: dict[str, Any], kernel: str
) -> None:
    model, size = heads_of(**heads), heads.get("size", 16)
    x, aim = torch.zeros(2, 256, 4 * size), torch.zeros(2, 4, 256, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = plan(model, nn.MSELoss(), optimizer, (x, aim), device=f"cuda:{card}", precision=precision)
    (note,) = report.notes
    assert re.match(f"attention: {kernel}", note)
    scores, kept = 2 * 4 * 256 * 256 * 4, report.ledger.at_peak["activations"]
    assert (kept > scores) is note.startswith("attention: unfused") or size > 100
