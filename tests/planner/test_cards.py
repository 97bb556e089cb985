"""Plans of a card beside what was measured on it."""

import json
import queue
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from anybatch import plan
from anybatch.core.errors import BudgetError
from anybatch.memory.device import find_device
from anybatch.memory.ledger import Holding
from anybatch.planner.trace import _CASTS
from benchmarks.gpu import nets

PAGE = Path(__file__).parents[2] / "benchmarks/results/gpu/2026-11-27-nvidia-h100-80gb-hbm3/gpu.json"
LIMIT = 0.03  # relative
QUICK = ("resnet50 float32", "resnet50 bf16-mixed")
HOPPER, BEFORE = 68_157_440, 18_087_936  # bytes that cuBLAS keeps


def measured() -> dict[str, int]:
    """Return the bytes of section "plan", and those of plain steps of models that it leaves out."""
    sections = json.loads(PAGE.read_text(encoding="utf-8"))["sections"]
    plain, found = [
        {one["case"]: one["value"] for one in sections[section]["figures"] if one["name"] == name}
        for section, name in (("budgets", "plain bytes"), ("plan", "bytes measured"))
    ]
    return {f"{name} float32": plain[name] for name in ("resnet50-bn", "vit")} | found


MEASURED = measured()


def test_all_cases_of_the_page_are_there() -> None:
    assert len(MEASURED) == 10


@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in MEASURED]
)
def test_a_plan_of_an_h100_is_what_was_measured_there(case: str) -> None:
    name, precision, *dropout = case.split()
    model, loss, batch_of = nets.make(name, small=False, dropout=bool(dropout))
    batch = batch_of(nets.ROWS[name], torch.Generator().manual_seed(1))
    optimizer, asked = torch.optim.AdamW(model.parameters(), lr=1e-4), {"precision": precision}
    report = plan(model, loss, optimizer, batch, device="cuda:h100", **asked)  # pyright: ignore
    assert MEASURED[case] == pytest.approx(report.peak, rel=LIMIT)


def planned(model: nn.Module, *shape: int, device: str = "cuda:h100", **options: Any) -> Any:
    batch = torch.zeros(16, *shape), torch.zeros(16, *shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return plan(model, nn.MSELoss(), optimizer, batch, device=device, **options)


class Apply(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


SEEN: Any = queue.SimpleQueue()  # planning puts lists back


def dtype_after(layer: nn.Module, device: str, precision: Any) -> torch.dtype:
    """Return the dtype of a layer's outputs behind a product, in a plan."""
    model = nn.Sequential(nn.Conv3d(8, 8, 1), layer, Apply(lambda x: SEEN.put(x.dtype) or x))
    planned(model, 8, 8, 8, 8, device=device, precision=precision)
    return [SEEN.get() for _ in range(SEEN.qsize())][-1]


IN_FLOAT32: dict[str, nn.Module] = {
    "group": nn.GroupNorm(2, 8),
    "layer": nn.LayerNorm(8),
    "rms": nn.RMSNorm(8),
    "softplus": nn.Softplus(),
    "softmax": nn.Softmax(-1),
    "log_softmax": nn.LogSoftmax(1),
    "power": Apply(lambda x: x**3),
    "base": Apply(lambda x: 2**x),
    "sum": Apply(lambda x: x.sum(1, keepdim=True)),
    "cumsum": Apply(lambda x: x.cumsum(-1)),
    "norm": Apply(lambda x: x.norm(dim=-1, keepdim=True)),
    "scatter": Apply(lambda x: x.float().scatter_add(0, torch.zeros_like(x, dtype=torch.long), x)),
    **{one.__name__: Apply(one) for one in (torch.exp, torch.square, torch.rsqrt, torch.log1p)},
}
IN_16_BITS = (
    nn.GELU(),
    nn.SiLU(),
    nn.AvgPool3d(1),
    nn.MaxPool3d(1),
    nn.AdaptiveAvgPool3d(8),
    nn.ReplicationPad3d(0),
    Apply(lambda x: x.mean(1, keepdim=True)),
)


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_a_card_casts_as_cuda_does_and_the_host_as_before(precision: str) -> None:
    short = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    for name, layer in IN_FLOAT32.items():
        assert dtype_after(layer, "cuda:a100", precision) is torch.float32, name
    for layer in IN_16_BITS:
        assert dtype_after(layer, "cuda:a100", precision) is short, layer
    for name in ("group", "softmax", "power", "sum"):
        assert dtype_after(IN_FLOAT32[name], "cpu", precision) is short, name


def test_a_card_that_stores_16_bits_casts_nothing() -> None:
    assert dtype_after(IN_FLOAT32["softmax"], "cuda:a100", "bf16-true") is torch.bfloat16


OLDER = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)


@pytest.mark.skipif(OLDER, reason="the list is that of torch 2.13")
def test_every_operator_of_cuda_autocast_is_cast_as_there() -> None:
    """Those of its 16-bit list are in the CPU's, or made of operators that are, or run on a card only."""
    have = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [one.removeprefix("aten::") for one in torch._C._dispatch_get_all_op_names() if "aten::" in one]
    cuda, cpu = [
        {one for one in names if have(f"aten::{one}", key)} for key in ("AutocastCUDA", "AutocastCPU")
    ]
    listed = {one for names in _CASTS.values() for one in names.split()}
    in_16_bits = re.compile(
        "cudnn_|_?convolution|_scaled|_thnn|.*_cell|addmv|addr|mv|chain_m|einsum|.*multi_dot"
    )
    assert not [one for one in cuda - cpu - listed if not in_16_bits.match(one)]
    assert not cuda & set(_CASTS["as given"].split())


def test_another_thread_trains_as_before_while_a_card_is_planned() -> None:
    def train() -> None:
        x, weight = (
            torch.linspace(-1, 1, 32).view(4, 8),
            torch.linspace(-2, 2, 64).view(8, 8).requires_grad_(),
        )
        with torch.autocast("cpu", torch.bfloat16):
            outputs = F.dropout(F.layer_norm(F.linear(x, weight), (8,)), 0.0).softmax(-1)
        outputs.float().square().sum().backward()
        SEEN.put((outputs.detach(), weight.grad))

    def train_beside(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=train)
        other.start()
        other.join()
        return x.exp()

    train()
    before = SEEN.get()
    planned(nn.Sequential(nn.Linear(8, 8), Apply(train_beside)), 8, precision="bf16-mixed")
    during = [SEEN.get() for _ in range(SEEN.qsize())]
    assert during
    train()
    for found in (*during, SEEN.get()):
        assert found[0].dtype is torch.bfloat16
        assert all(one.equal(other) for one, other in zip(found, before, strict=True))
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::exp", "AutocastIPU")


@pytest.mark.parametrize(
    ("device", "size"), [("cuda:h100", HOPPER), ("cuda:h200", HOPPER), ("cuda:a100", BEFORE), ("cpu", 0)]
)
def test_cublas_keeps_its_workspaces(device: str, size: int) -> None:
    report = planned(nn.Linear(8, 8), 8, device=device)
    assert find_device(device).workspace == size
    assert min(moment.bytes[4] for moment in report.ledger.moments) == size
    assert (Holding("cuBLAS", "workspace", size) in report.ledger.by_module) is (size > 0)
    assert ("workspace of cuBLAS" in str(report.ledger)) is (size > 0)
    assert size < report.peak < size + 1e5


def test_a_budget_counts_what_cublas_keeps() -> None:
    model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64))
    whole = planned(model, 512, 64).peak
    report = planned(model, 512, 64, memory=whole * 7 // 10)
    assert report.plan.is_cut
    assert HOPPER < report.peak <= whole * 7 // 10
    with pytest.raises(BudgetError) as refused:
        planned(model, 512, 64, memory=HOPPER)
    assert HOPPER < int(refused.value.smallest) <= report.peak
