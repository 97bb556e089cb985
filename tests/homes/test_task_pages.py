"""The programs of the task pages in the loops of other libraries: the gradient of the whole batch."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector as vector

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("host_leaves_nothing_behind")]
pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")

from anybatch.homes import WholeBatchTrainer  # noqa: E402
from tests.homes.updates import in_lightning, in_trainer  # noqa: E402

DOCS = Path(__file__).parents[2] / "docs"
EXACT = 1e-10
MEANS = ("distillation", "diffusion", "packing", "mixup")  # their loss is one of means over rows
MEETING = ("preference", "segmentation", "contrastive", "moe")  # their loss needs all rows
TOTALS = ("multitask",)  # their loss is a function of named totals


def program(page: str) -> dict[str, Any]:
    block = re.search(r"^```python\n(.*?)^```$", (DOCS / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": page}
    exec(block[1], names)
    names["net"] = copy.deepcopy(names["step"].model)
    return names


def off(names: dict[str, Any], after: nn.Module) -> float:
    """The relative error of an update by SGD with lr 1."""
    net = names["net"]
    whole = vector(torch.autograd.grad(names["usual"](net, names["batch"]), [*net.parameters()]))
    return float((vector(net.parameters()) - vector(after.parameters()) - whole).norm() / whole.norm())


@pytest.mark.parametrize("page", [*MEANS, *MEETING, *TOTALS])
def test_in_lightning(page: str) -> None:
    names = program(page)
    net, loader = copy.deepcopy(names["net"]), torch.utils.data.DataLoader([names["batch"]], batch_size=None)
    given = (lambda found, micro: names["loss"](found.net, micro)) if page in TOTALS else None
    options = {"micro_batch": 3, "rows_meet": page in MEETING, "loss": given}
    assert in_lightning(net, names["usual"], loader, **options).micro_batches > 1
    assert off(names, net) < EXACT


@pytest.mark.parametrize("page", [*MEANS, *MEETING, *TOTALS])
def test_in_transformers_trainer(page: str) -> None:
    names = program(page)
    net, batch = copy.deepcopy(names["net"]), names["batch"]
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    loss = None if page in MEANS else names["step"].loss
    collate, usual = torch.utils.data.default_collate, names["usual"]
    in_trainer(net, rows, collate, WholeBatchTrainer, compute_loss=usual, micro_batch=3, loss=loss)
    assert off(names, net) < EXACT
