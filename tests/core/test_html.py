"""What notebooks show of plans and checks: a table with every word of the text, and no markup of its own."""

import html
import re
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import anybatch as ab
from anybatch.core import html_table


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


def make(name: str = "a<b>&") -> tuple[nn.Module, nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    model = nn.Sequential()
    model.add_module(name.replace(".", ""), nn.BatchNorm1d(4))
    model.add_module("last", nn.Linear(4, 1))
    return model, nn.MSELoss(), (torch.randn(6, 4), torch.randn(6, 1))


def plan(memory: str | None) -> ab.PlanReport:
    model, loss, batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ab.plan(model, loss, optimizer, batch, memory=memory, batch_norm="frozen", measure=False)


@pytest.mark.parametrize(
    "report",
    [
        lambda: plan(None),
        lambda: plan("2KB"),
        lambda: ab.check(*make()),
        lambda: ab.check(*make(), batch_norm="frozen"),
    ],
    ids=["plan", "plan within a budget", "not exact", "exact"],
)
def test_the_table_says_what_the_text_says(report: object) -> None:
    found = report()
    page = Page(found._repr_html_())
    assert {tag for tag, _ in page.cells} == {"th", "td"}
    assert page.cells[0][0] == "th"
    words = lambda text: re.findall(r"[\w<>&.,]+", text)  # noqa: E731
    shown = words(" ".join(text for _, text in page.cells))
    assert sorted(words(str(found))) == sorted(shown)


def test_cells_are_escaped_and_lines_stay_apart() -> None:
    table = html_table([("<i>", "1 < 2\n  3"), ("", "&amp;")])
    assert Page(table).cells == [("th", "<i>"), ("td", "1 < 2\n  3"), ("td", "&amp;")]
    assert html.escape("1 < 2\n  3") in table
    assert "white-space: pre" in table  # or columns would not stand below each other
