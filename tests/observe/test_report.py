"""The report of a run: what its page says of any log, whole, broken or hostile."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from anybatch.cli import main
from anybatch.core import DataError
from anybatch.observe import report_page

START: dict[str, Any] = {
    "event": "start", "format": 2, "time": "2026-11-23T08:00:00Z", "model": "GPT",
    "machine": {"python": "3.11", "device": "cpu"},
    "command": ["/bin/anybatch", "train", "gpt", "--memory", "2 GiB"],
    "total_updates": 40, "done_updates": 0, "done_epochs": 0,
}  # fmt: skip
NAMES = ["first", "blocks.0.<script>alert('a')</script>", 'blocks.1."last"', "unused", "far"]
ALL = "loss terms metric-0 learning-rate gradient-norm noise callback-1 scale flow layer layer-zeros"
EMPTY = ("input", "meta", "link", "rect", "br")


def step(number: int, **more: Any) -> dict[str, Any]:
    """One update's line with everything a log may hold; layer i's figures are 10**-i * update."""
    factors: list[float | None] = [1.0, 0.1, 0.01, None, 1e-9]
    flow: dict[str, Any] = {
        name: [None if one is None else one * number for one in factors]
        for name in ("mean", "largest", "norm", "ratio")
    }
    slow = 1.0 + number / 1000
    flow["zeros"] = [None if one is None else 0.25 for one in factors]
    record = {"event": "step", "step": number, "loss": 5.0 / number, "rows": 64, "micro_batches": 4}
    record |= {"terms": {"a": slow, "b": 0.5}, "grad_norm": slow, "updated": True, "cut": [[16, 4]]}
    record |= {"learning_rate": 0.1 / slow, "seconds": 0.5 * number, "memory": 1 << 20, "scale": 1024.0}
    flow |= {"layers": NAMES, "classes": ["Linear"] * 5} if number == 1 else {}
    noise = {"scale": 100.0 * slow, "rows": 1}
    return record | {"observed": {"flow": flow, "noise": noise, "mine": {"x": number}}} | more


def lines(updates: int) -> list[dict[str, Any]]:
    rare = {5: {"redone": 2}, 6: {"scale": 512.0}, 7: {"loss": None, "updated": False}, 8: {"dropped": 3}}
    epoch: dict[str, Any] = {"event": "epoch", "epoch": 1, "updates": updates, "loss": 0.5}
    epoch |= {"learning_rate": 0.1}
    epoch |= {"validation": {"loss": 0.25, "accuracy": 0.875}, "seconds": 2.0, "samples_per_second": 9.0}
    plan = {"event": "plan", "step": 1, "text": "micro_batch 16 rows <", "bytes": {"parameters": 1 << 20}}
    test = {"event": "test", "updates": updates, "loss": 0.3125, "accuracy": 0.75}
    first = epoch | {"updates": 1, "validation": {"loss": 2.0, "accuracy": 0.5}}
    steps = [step(number, **rare.get(number, {})) for number in range(1, updates + 1)]
    return [START, plan, first, *steps, epoch, {"event": "later"}, {"event": "stop"}, test]


def write(folder: Path, records: list[dict[str, Any]], end: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records) + end)
    return folder


class Page(HTMLParser):
    """Checks that elements close in order; keeps the data and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
        assert found
        self.data: Any = json.loads(found[1])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") or name in ("src", "style") for name, _ in attrs)
        self.open += [] if tag in EMPTY else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert tag in EMPTY or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if not {"script", "style"} & {*self.open} else ""


def read(folder: Path) -> Page:
    return Page(report_page(folder))


def test_everything_in_the_log_is_on_the_page(tmp_path: Path) -> None:
    page = read(write(tmp_path / "run", lines(40)))
    assert " ".join(page.data["charts"]) == ALL
    loss = page.data["charts"]["loss"]["series"]
    assert loss[0]["y"] == [None if n == 7 else float(f"{5 / n:.6g}") for n in range(1, 41)]
    assert (loss[1]["x"], loss[1]["y"]) == ([1, 40], [2.0, 0.25])
    same = "throughput 128; rows of a micro-batch 16; micro-batches of an update 4; peak memory so far"
    assert f"Always the same: {same} 1.0 MiB." in page.text
    assert "made.test loss0.3125test accuracy0.75best validation loss, epoch 10.25" in page.text
    happened = {event["name"].split(" (")[0]: event["x"] for event in page.data["events"]}
    told = {"micro-batches done again": [5], "loss scale lowered": [6], "loss scale raised": [7]}
    assert happened == told | {"rows left out": [8], "no finite loss": [7], "no update made": [7]}
    for text in ("GPT: run", "40 of 40 updates were made.", "anybatch train gpt --memory '2 GiB'", "1.0 MiB"):
        assert text in page.text
    assert "micro_batch 16 rows <" in page.text
    assert page.data["flow"]["layers"] == NAMES
    assert page.data["flow"]["classes"] == ["Linear"] * 5
    assert "farLinearvanishing" in page.text
    assert page.data["flow"]["marks"] == ["exploding", "", "", "unused", "vanishing"]


def test_same_log_same_page_and_no_name_becomes_code(tmp_path: Path) -> None:
    folder = write(tmp_path / "<b>run", [START | {"model": "</script><script>alert(1)</script>"}, step(1)])
    (folder / "settings.json").write_text('{"recipe": "\\ud800\\"<i>", "lr": 0.1}')
    page = report_page(folder)
    assert page == report_page(folder)
    assert page.count("<script") == page.count("</script") == 2
    assert not re.search(r"<b>|https?://(?!www\.w3)", page)
    assert "default-src 'none'" in page
    assert '?"<i>' in read(folder).text
    page.encode()


def test_several_runs_lie_over_one_another(tmp_path: Path, capsys: Any) -> None:
    folders = [write(tmp_path / "first", lines(40)), write(tmp_path / "second", [START, step(1), step(2)])]
    (folders[1] / "settings.json").write_text('{"lr": 0.5}')
    assert main.main(["report", *map(str, folders)]) == 0
    page = Page((tmp_path / "compare.html").read_text())
    over = {chart["title"]: chart["series"] for chart in page.data["charts"].values()}
    assert [(one["name"], len(one["x"])) for one in over["Loss"]] == [("first", 40), ("second", 2)]
    assert [one["name"] for one in over["Loss: validation"]] == ["first"]
    assert over["Loss"][1]["y"] == [5.0, 2.5]
    assert page.data["last"] == 40
    for text in ("test accuracy0.75", "best validation loss0.25, epoch 1", "lr0.5", "throughput 128"):
        assert text in page.text
    assert "device" not in page.text.partition("that differ")[2]  # the same in both
    assert main.main(["report", *[str(folders[0])] * 9]) == 1
    assert "at most 8 runs on one page, got 9" in capsys.readouterr().err


def test_a_run_that_went_on_has_each_update_once(tmp_path: Path) -> None:
    again = START | {"done_updates": 3, "total_updates": 6}
    steps = [step(n, loss=0.0) for n in (1, 2, 3, 4, 5)]
    page = read(write(tmp_path, [START, *steps, again, *(step(n, loss=1.0) for n in (4, 5, 5, 6))]))
    assert page.data["charts"]["loss"]["series"][0]["y"] == [0, 0, 0, 1, 1, 1]
    assert page.data["flow"]["x"] == [1, 2, 3, 4, 5, 6]
    assert [event["name"] for event in page.data["events"]][-1] == "the run went on"
    assert "in the log already, left out: 1" in page.text


@pytest.mark.parametrize(("records", "end", "told"), [
    ([START], "", "No update was made yet of 40."),
    ([START, step(1), step(2)], '{"event": "step", "st', "2 of 40 updates were made. The log has no end"),
    ([START, step(1)], "[1]\n{\n", "could not be read, or only in part: 2."),
    ([{"event": "start"}, {"event": "step", "step": 3}], "", "3 updates were made."),
    ([START, step(1, loss=None, grad_norm=None)], "", "no finite loss"),
    ([START, step(1, loss=-1e308, rows=10**400, grad_norm=1e-320)], "", "1 of 40"),
    ([START, step(1, observed={"flow": {"mean": ["a"]}}, terms=3, cut=["x"])], "", "in part: 1."),
    ([START, step(-1), step(2**70), {"event": 3}], "", "in part: 3."),
    ([START, step(1), {"event": "epoch", "validation": 3}, {"event": "plan", "bytes": 3}], "", "1 of 40"),
    ([START | {"command": "x", "machine": 3, "done_updates": None}, step(1)], "", "1 of 40"),
    ([START, step(1, counts={"pushes": 0, "units repeated": None, "bytes <": 1e300})], "", "<"),
    ([START, step(1), {"event": "stop"}], "", "40 updates were made. The run stopped before its end."),
    ([START, step(1), {"event": "stop", "reason": "<i>"}], "", "The run stopped before its end: <i>."),
])  # fmt: skip
def test_any_log_gives_a_whole_page(tmp_path: Path, records: Any, end: str, told: str) -> None:
    assert told in read(write(tmp_path, records, end)).text


def test_what_is_no_log_is_refused(tmp_path: Path, capsys: Any) -> None:
    cases = {
        "": "got an empty file",
        "\x00\x01 no JSON\n": "got 1 lines that are none of a log",
        '{"a": 1}\n' * 2: "got 2 lines that are none",
        json.dumps(START | {"format": 99}): "expected a log of format 1 or 2, got format 99",
    }
    for text, told in cases.items():
        (tmp_path / "log.jsonl").write_text(text)
        with pytest.raises(DataError, match=told):
            report_page(tmp_path)
        assert main.main(["report", str(tmp_path)]) == 1
        assert told in capsys.readouterr().err
    assert main.main(["report", str(tmp_path / "gone")]) == 1
    assert "expected the folder of a run, got no folder" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
