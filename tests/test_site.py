"""The documentation site: complete, true in its table of what works with what, and without requests."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch import errors
from tests.parallel.inline import Inline

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

# ---- what works with what


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.norm, self.score = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.words(input_ids)).transpose(1, 2)
        return self.score(self.norm(hidden).transpose(1, 2)).transpose(1, 2)


class Looks(ab.Callback):
    def gradients(self, gradients: Any) -> None: ...


def batch() -> dict[str, torch.Tensor]:
    mask = torch.arange(9) < torch.tensor([3, 9, 5, 8, 4, 7, 6, 2])[:, None]
    words = torch.randint(1, 9, mask.shape) * mask
    return {"input_ids": words, "attention_mask": mask.long(), "labels": words.clamp(max=2).where(mask, -100)}


def collated(samples: list[dict[str, torch.Tensor]]) -> Any:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def entropy(model: nn.Module, rows: Any, reduction: str) -> torch.Tensor:
    outputs = model(rows["input_ids"], rows["attention_mask"])
    return nn.functional.cross_entropy(outputs, rows["labels"], reduction=reduction)


def total(model: nn.Module, rows: Any) -> ab.Total:
    return ab.Total(entropy(model, rows, "sum"), (rows["labels"] != -100).sum())


def additive(model: nn.Module, rows: Any) -> torch.Tensor:
    return entropy(model, rows, "sum") / 44


def per_row(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return nn.functional.cross_entropy(outputs, labels, reduction="none"), labels != -100


def made(way: str, loss: Any, norm: str | None, keywords: dict[str, Any]) -> None:
    """One update, in one of the ways."""
    torch.manual_seed(0)
    model, rows = Tagger(), batch()
    if norm is None:
        model.norm = nn.Identity()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"micro_batch": 2} | keywords
    options = {name: given.pop(name) for name in [*given] if name in ab.Options.__dataclass_fields__}
    options |= {"batch_norm": norm} if norm else {}
    if "scheduler" in options:
        options["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if way == 'order="length"':
        options["order"] = "length"
    samples: Any = rows
    if "collate" in given:
        samples = [{name: column[row] for name, column in rows.items()} for row in range(8)]
    if way == "ab.BatchLoss":
        return ab.BatchLoss(model, loss, **given, options=ab.Options(**options))(samples).backward()
    if way == "ab.ParameterServer":
        options["strategy"] = ab.ParameterServer(1, 1, cluster=Inline())
    step = ab.Step(model, loss, optimizer, **given, options=ab.Options(**options))
    if way != "window":
        assert step(samples).updated
        return None
    with step.window() as window:
        window.add(samples)
    return None


OPTIONS: dict[str, dict[str, Any]] = {
    "`micro_batch`": {"micro_batch": 3},
    "`memory`": {"memory": "1GB", "micro_batch": None},
    '`precision="bf16-mixed"`': {"precision": "bf16-mixed"},
    '`precision="fp16-mixed"`': {"precision": "fp16-mixed"},
    '`precision="bf16-true"`': {"precision": "bf16-true"},
    "`clip_norm`": {"clip_norm": 1.0},
    "`clip_value`": {"clip_value": 1.0},
    "`scheduler`": {"scheduler": "made with the optimizer"},
    "`collate`": {"collate": collated},
    '`order="length"`': {"order": "length"},
    "`recompute`": {"recompute": ["layers.0"]},
    '`batch_norm="frozen"`': {"batch_norm": "frozen"},
    '`batch_norm="micro"`': {"batch_norm": "micro"},
    '`non_finite="drop"`': {"non_finite": "drop"},
    '`non_finite="skip"`': {"non_finite": "skip"},
    "callbacks of gradients": {"callbacks": [Looks()]},
}
LOSSES: dict[str, Any] = {
    "a loss of torch": nn.CrossEntropyLoss(),
    "a function that returns `ab.Total`": total,
    "`ab.PerRow`": ab.PerRow(per_row),
    "`ab.ModelLoss`": ab.ModelLoss(call=partial(entropy, reduction="mean")),
    "`ab.Additive`": ab.Additive(additive),
    "`ab.WholeBatch`": ab.WholeBatch(nn.functional.cross_entropy),
}


def cells(heading: str) -> dict[tuple[str, str], str]:
    """The cells of the first table under a heading of the page, by row and column."""
    _, _, text = (DOCS / "compatibility.md").read_text().partition(f"\n## {heading}\n")
    lines = [line.strip("|").split("|") for line in text.strip().split("\n\n")[0].splitlines()]
    (_, *columns), _, *rows = [[cell.strip() for cell in line] for line in lines]
    return {
        (row[0], column.strip("`")): cell
        for row in rows
        for column, cell in zip(columns, row[1:], strict=True)
        if "ranks" not in column
    }


def settings(row: str) -> tuple[Any, str | None, dict[str, Any]]:
    keywords = dict(OPTIONS.get(row, {}))
    return LOSSES.get(row, LOSSES["a loss of torch"]), keywords.pop("batch_norm", None), keywords


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("heading", "rows"), [("Options", OPTIONS), ("Losses", LOSSES)])
def test_the_table_of_what_works_with_what_is_true(heading: str, rows: dict[str, Any]) -> None:
    told = cells(heading)
    assert {row for row, _ in told} == {*rows}
    for (row, way), cell in told.items():
        assert cell.startswith(("yes", "no")), (row, way)
        with nullcontext() if cell.startswith("yes") else pytest.raises(ab.AnybatchError):
            made(way, *settings(row))


# ---- completeness


def test_reference_has_every_public_name_with_an_example() -> None:
    listed = re.findall(r"^   (\w+)$", (DOCS / "reference.rst").read_text(), re.MULTILINE)
    shown = {name for name in ab.__all__ if not hasattr(errors, name) and name != "errors"}
    assert sorted(listed) == sorted(shown)  # errors have a page of their own, which lists them all
    assert not [
        name for name in {*ab.__all__} - {"errors"} if ">>> " not in (getattr(ab, name).__doc__ or "")
    ]


# ---- the site itself, and the workflows


def test_readme_names_demo_and_tests_on_lines_of_their_own() -> None:
    _, _, install = (ROOT / "README.md").read_text().partition("\n## Install\n")
    lines = install.partition("\n## ")[0].splitlines()
    assert {"make demo", "make test"} <= {*lines}  # tests/test_pages.py holds that CI runs them


def test_workflows_run_commands_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "".join(path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    run = re.findall(r"run: (?!python -m )(.*)", text)  # Windows has no make
    wanted = {"check", "test", "test-oldest", "test-slow", "test-device", "docs", "wheel"}
    assert {command.removeprefix("make ") for command in run} == wanted <= targets


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("sphinx") or not find_spec("myst_parser"), reason="sphinx is not installed")
def test_site_builds_without_a_warning_and_requests_nothing(tmp_path: Path) -> None:
    options = ["-b", "html", "-W", "--keep-going", "-n", "-q", "-d", str(tmp_path / "trees")]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path / "site")]
    shutil.rmtree(DOCS / "reference", ignore_errors=True)  # of an earlier build
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    shutil.rmtree(DOCS / "reference", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    loads: Callable[[str], list[str]] = re.compile(
        r"<(?:link|script|img|iframe|source)\b[^>]*?(?:src|href)=\"(?:https?:)?//[^\"]*|@import[^;]*//|url\([\"']?https?:"
    ).findall
    pages = [*(tmp_path / "site").rglob("*.html"), *(tmp_path / "site").rglob("*.css")]
    assert len(pages) > len(ab.__all__)
    assert not {page.name: found for page in pages if (found := loads(page.read_text()))}
