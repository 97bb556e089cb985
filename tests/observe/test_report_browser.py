"""The report in headless Chromium: phone and desktop, light and dark; skipped where there is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from anybatch.observe import report_page
from tests.observe.browser import CHROMIUM, Browser
from tests.observe.logs import NAMES, START, lines, step, write
from tests.observe.test_report import ALL

SHOWN = "[...document.querySelectorAll('figure[id]')].filter(f => {SOME}).map(f => f.id).join(' ')"
CURVES = "f.querySelector(f.id === 'flow' ? '.cell' : '.curve')?.getAttribute('d')"
CHOSEN = "document.querySelector('#layer h3').textContent"
TICKS = "[...document.querySelectorAll('#loss text.middle')].map(t => t.textContent).join()"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, as in: apt-get install chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write(tmp_path_factory.mktemp("page") / "run", lines(40))
    path = folder / "a page.html"
    path.write_text(report_page(folder))
    return path


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_chart_is_drawn_and_answers(browser: Browser, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.run(SHOWN.replace("{SOME}", CURVES)) == ALL
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    light = browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert light is not dark

    assert NAMES[0] in browser.run(CHOSEN)  # the first that is marked
    browser.run("document.querySelector('#flow').scrollIntoView()")
    row = "(r => [r.x + r.width / 2, r.y])(document.querySelector('#flow svg svg').getBoundingClientRect())"
    x, y = browser.run(row)
    for kind in ("Pressed", "Released"):
        browser.mouse(kind, x, y + 18 * 1.5)
    browser.settle()
    assert NAMES[1] in browser.run(CHOSEN)
    browser.run("document.querySelector('#layers').open = true")
    browser.run("document.querySelectorAll('#layers button')[2].click()")
    browser.run("document.querySelector('#flow .plot > svg').focus()")
    browser.key("ArrowUp")
    browser.key("ArrowUp")
    assert NAMES[0] in browser.run(CHOSEN)
    assert browser.errors == []
    assert browser.requests == [page.as_uri()]


def test_hover_and_zoom(browser: Browser, page: Path) -> None:
    browser.open(page, width=1280, dark=False)
    whole = browser.run(TICKS)
    x, y, wide = browser.run(
        "(r => [r.x, r.y, r.width])(document.querySelector('#loss svg svg').getBoundingClientRect())"
    )
    at = [x + 5 + (wide - 10) * (update - 1) / 39 for update in (11, 20)]
    browser.mouse("Moved", at[0], y + 50)
    assert "update 11 training 0.4545" in browser.run("document.querySelector('#loss output').innerText")
    browser.mouse("Pressed", at[0], y + 50)
    browser.mouse("Moved", at[1], y + 50)
    browser.mouse("Released", at[1], y + 50)
    browser.settle()
    assert browser.run(TICKS).split(",")[0] == "12"
    for clicks in (1, 2):
        browser.mouse("Pressed", at[0], y + 50, clicks)
        browser.mouse("Released", at[0], y + 50, clicks)
    browser.settle()
    assert browser.run(TICKS) == whole
    browser.run("document.querySelector('#loss .plot > svg').focus()")
    browser.key("+")
    assert browser.run(TICKS) != whole
    browser.run("document.querySelector('#reset').click()")
    browser.settle()
    assert browser.run(TICKS) == whole
    assert browser.errors == []


def test_odd_runs_give_no_error(browser: Browser, tmp_path: Path) -> None:
    odd = [step(1, loss=1e300, grad_norm=-1e300), step(2, loss=-1e300, observed={}, memory=0)]
    for name, records in {"empty": [START], "one": [START, step(9)], "odd": [START, *odd]}.items():
        path = write(tmp_path / name, records) / "report.html"
        path.write_text(report_page(path.parent))
        browser.open(path, width=360, dark=False)
        assert (browser.errors, browser.requests) == ([], [path.as_uri()])
        assert "NaN" not in browser.run("document.documentElement.outerHTML.split('<script')[0]")
