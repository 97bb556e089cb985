"""What notebooks show of plans and checks: a table with every word of the text, and no markup of its own."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core import html_table
from tests.check.conftest import unhurried as unhurried


class Page(HTMLParser):
    """Texts of a page by tag; fails where a tag is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells.append((self.open[-1], data))


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
    cells = Page(found._repr_html_()).cells
    assert {tag for tag, _ in cells} == {"th", "td"}
    assert cells[0][0] == "th"
    shown = " ".join(text for _, text in cells)
    assert sorted(re.findall(r"[\w<>&.,]+", str(found))) == sorted(re.findall(r"[\w<>&.,]+", shown))


def test_cells_are_escaped_and_lines_stay_apart() -> None:
    table = html_table([("<i>", "1 < 2\n  3"), ("", "&amp;")])
    assert Page(table).cells == [("th", "<i>"), ("td", "1 < 2\n  3"), ("td", "&amp;")]
    assert "white-space: pre" in table  # or columns would not stand below each other
