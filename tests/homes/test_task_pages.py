"""The programs of the task pages in the loops of other libraries: the gradient of the whole batch."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector as vector

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("host_leaves_nothing_behind")]
pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")

import anybatch as ab  # noqa: E402
from anybatch.core import LossError  # noqa: E402
from anybatch.homes import WholeBatchTrainer  # noqa: E402
from tests.homes.updates import in_lightning, in_trainer  # noqa: E402

IN_FLOAT32 = 2e-6
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
    loss, collate = None if page in MEANS else names["step"].loss, torch.utils.data.default_collate
    usual: Any = {"compute_loss": names["usual"], "micro_batch": 3, "loss": loss}
    in_trainer(net, rows, collate, WholeBatchTrainer, **usual)
    assert off(names, net) < EXACT


def test_padding_free_samples_are_exact_unless_documents_attend_to_one_another() -> None:
    def gradient(cut: int | None, *, has_cache: bool) -> Tensor:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=50, use_cache=has_cache, **sizes)
        model = transformers.LlamaForCausalLM(config).double()
        samples = [{"input_ids": torch.randint(50, (length,)).tolist()} for length in (9, 3, 5, 7, 2, 8)]
        collate = transformers.DataCollatorWithFlattening()
        ab.BatchLoss(model, ab.ModelLoss(), micro_batch=cut, collate=collate)(samples).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = gradient(None, has_cache=False)
    assert (gradient(2, has_cache=False) - whole).norm() < IN_FLOAT32 * whole.norm()
    with pytest.raises(LossError, match="Rows affect each other"):
        gradient(2, has_cache=True)
