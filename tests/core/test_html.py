"""What notebooks show of plans and checks: a table with every word of the text, and no markup of its own."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core import html_table


def cells(page: str) -> list[tuple[str, str]]:
    """Tags and texts of the cells of a page; fails where a tag is not closed."""
    return [(cell.tag, cell.text or "") for row in ElementTree.fromstring(page).iter("tr") for cell in row]


@pytest.mark.parametrize("kind", ["plan", "plan within a budget", "not exact", "exact"])
def test_the_table_says_what_the_text_says(kind: str) -> None:
    model = nn.Sequential()
    model.add_module("a<b>&", nn.BatchNorm1d(4))
    model.add_module("last", nn.Linear(4, 1))
    rest: Any = nn.MSELoss(), (torch.randn(6, 4), torch.randn(6, 1))
    if kind.startswith("plan"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        memory = "2KB" if "budget" in kind else None
        options: Any = {"memory": memory, "batch_norm": "frozen", "measure": False}
        found: Any = ab.plan(model, rest[0], optimizer, rest[1], **options)
    else:
        found = ab.check(model, *rest, batch_norm="frozen" if kind == "exact" else None)
    tags, texts = zip(*cells(found._repr_html_()), strict=True)
    assert {*tags} == {"th", "td"}
    assert tags[0] == "th"
    shown = " ".join(texts)
    assert sorted(re.findall(r"[\w<>&.,]+", str(found))) == sorted(re.findall(r"[\w<>&.,]+", shown))


def test_cells_are_escaped_and_lines_stay_apart() -> None:
    table = html_table([("<i>", "1 < 2\n  3"), ("", "&amp;")])
    assert cells(table) == [("th", "<i>"), ("td", "1 < 2\n  3"), ("th", ""), ("td", "&amp;")]
    assert "white-space: pre" in table  # or columns would not stand below each other
