"""`anybatch train` on a function of one's own and on recipes that are no LeNet-5: train, resume, evaluate."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)

from anybatch.train import checkpoint
from tests.cli.test_main import run
from tests.parallel.inline import Inline
from tests.parallel.test_server import EndAt
from tests.snapshots import same

FAST = ["--batch-size", "8", "--micro-batch", "3", "--quiet", "--device", "cpu"]
CONFIG = {"batch_size": 8, "micro_batch": 3, "lr": 0.02, "clip_norm": 9, "device": "cpu", "memory": None}


@pytest.mark.parametrize("function", ["make", "held_out", "samples", "own_optimizer"])
def test_a_function_is_trained_resumed_and_evaluated(here: str, function: str, capsys: Any) -> None:
    options = [*FAST, "--validation", "0.2"] if function != "held_out" else [*FAST, "--optimizer", "sgd"]
    command = ["train", f"{here}:{function}", *options]
    assert run(capsys, *command, "--epochs", 3, "--out", "whole")[0] == 0
    assert run(capsys, *command, "--epochs", 1, "--out", "parts")[0] == 0
    code, printed, error = run(capsys, "train", "--resume", "parts", "--epochs", 3, "--json")
    told = json.loads(printed)
    assert (code, told["updates"]) == (0, 3 * (3 if function == "held_out" else 2)), error
    whole, parts = (checkpoint.load(Path(name)) for name in ("whole", "parts"))
    assert same(whole.model, parts.model)
    assert json.loads(Path("parts/settings.json").read_text())["recipe"] == f"{here}:{function}"
    _, printed, _ = run(capsys, "eval", "whole", "--json")
    found = json.loads(printed)
    assert found["rows"] == (6 if function == "held_out" else 20)
    assert function != "held_out" or found["loss"] <= told["loss"] + 1e-4  # the best, by the lowest loss
    kind = "adamw" if function in ("make", "samples") else None
    assert whole.progress["config"].get("optimizer") == kind


def flows(folder: str) -> dict[int, dict[str, list[float]]]:
    events = map(json.loads, Path(folder, "log.jsonl").read_text().splitlines())
    found = {one["step"]: one.get("observed", {}).get("flow") for one in events if one["event"] == "step"}
    return {step: record for step, record in found.items() if record}


def test_a_run_records_its_gradient_flow_within_the_budget(here: str, capsys: Any, monkeypatch: Any) -> None:
    """Every tenth update, also after a resume; weights are copied only where the budget has room."""
    command = ["train", f"{here}:make", *FAST, "--memory", "1MB"]
    run(capsys, *command, "--epochs", 8, "--out", "whole")
    run(capsys, *command, "--epochs", 5, "--out", "parts")
    run(capsys, "train", "--resume", "parts", "--epochs", 8, "--quiet")
    whole, parts = flows("whole"), flows("parts")
    assert [*whole] == [*parts] == [1, 11, 21]
    assert {name: parts[21][name] for name in whole[21]} == whole[21]
    assert min(whole[21]["ratio"]) > 0
    assert run(capsys, "train", f"{here}:loader", *command[2:], "--epochs", 1)[0] == 0  # needs no rows first
    run(capsys, "report", "whole")
    assert '<figure id="flow"' in Path("whole/report.html").read_text()
    for memory, has_ratio in (("2.2MB", False), ("4MB", True)):  # weights of 363 kB
        run(capsys, "train", f"{here}:wide", *FAST, "--memory", memory, "--epochs", 1, "--out", memory)
        assert (flows(memory)[1]["ratio"][1] is not None) is has_ratio
    monkeypatch.setattr("anybatch.cli.train.GradientFlow", lambda model, ratio: [].append)
    run(capsys, *command, "--epochs", 8, "--out", "without")
    ends = [checkpoint.load(Path(name)).model for name in ("whole", "parts", "without")]
    assert same(ends[0], ends[1])
    assert same(ends[0], ends[2])


def test_a_served_run_tells_what_servers_did(here: str, capsys: Any, monkeypatch: Any) -> None:
    """Gradient flow, which only workers could see, is left out."""
    end = EndAt("Worker", "fold", "after", 3)
    monkeypatch.setattr("anybatch.parallel.parameter_server.RayCluster", lambda *_: Inline(1, end))
    command = ["train", f"{here}:make", *FAST, "--servers", "1"]
    code, printed, _ = run(capsys, *command, "--epochs", 1, "--out", "run")
    assert code == 0
    line = next(line for line in printed.splitlines() if line.startswith("servers "))
    assert "pushes 20, " in line  # of 8 and 4 rows, as units of one row
    assert "workers replaced 1" in line
    assert run(capsys, "train", "--resume", "run", "--epochs", 2, "--quiet")[0] == 0
    run(capsys, "report", "run")
    page = Path("run/report.html").read_text()
    assert "<h2>Servers and workers</h2>" in page
    assert '<figure id="flow"' not in page


@pytest.mark.parametrize(("arguments", "words"), [
    (["{}:pair"], "['Linear', 'MSELoss']"),
    (["{}:without_rows"], "got"),
    (["{}:loader", "--validation", "0.2"], "counted to hold some out, got DataLoader"),
    (["{}:without_parameters"], "got Tanh with none"),
    (["{}:make", "--data", "digits"], "no options of recipes"),
    (["{}:own_optimizer", "--lr", "0.1"], "which makes its own, got lr"),
    (["gpt", "--data", "{}.txt"], "{}.txt"),
    (["gpt", "--data", "{}.py", "--block-size", "300"], "ten blocks of 300"),
    (["bert", "--data", "{}.py"], "label<TAB>text"),
    (["resnet18", "--norm", "whole", "--micro-batch", "9"], "BatchNorm"),
])  # fmt: skip
def test_refusals_are_one_message(here: str, arguments: list[str], words: str, capsys: Any) -> None:
    options = [argument.format(here) for argument in arguments]
    code, printed, error = run(capsys, "train", *options, "--epochs", 1, "--quiet", "--device", "cpu")
    assert (code, printed) == (1, "")
    assert words.format(here) in error
    assert "Traceback" not in error


def test_a_text_model_is_evaluated_on_its_own_text(here: str, capsys: Any) -> None:
    Path("one.txt").write_text("abcd efgh " * 60)
    Path("two.txt").write_text("abcd efgx " * 60)
    options = ["--block-size", 8, *FAST, "--batch-size", 32, "--epochs", 2, "--out", "run", "--json"]
    code, printed, _ = run(capsys, "train", "gpt", "--data", "one.txt", *options)
    told = json.loads(printed)
    code, printed, _ = run(capsys, "eval", "run", "--data", "one.txt", "--json")
    assert (code, json.loads(printed)["accuracy"]) == (0, told["accuracy"])
    code, _, error = run(capsys, "eval", "run", "--data", "two.txt")
    assert (code, "with another vocabulary. Name that text" in error) == (1, True)


def test_a_config_is_the_run_of_its_flags_and_flags_win(here: str, capsys: Any) -> None:
    given = ["--lr", 0.02, "--clip-norm", 9, "--epochs", 2, "--seed", 3, "--quiet"]
    run(capsys, "train", f"{here}:make", *FAST, *given, "--out", "flags")
    Path("run.json").write_text(json.dumps(CONFIG | {"recipe": f"{here}:make", "seed": 1}))
    config = ["train", "--config", "run.json", "--seed", 3, "--epochs", 2]
    code, printed, _ = run(capsys, *config, "--print-config")
    assert (code, Path("runs").exists()) == (0, False)
    assert run(capsys, "train", "lenet6", "--print-config")[0] != 0
    Path("printed.json").write_text(printed)
    plain = {name: value for name, value in json.loads(printed).items() if value is not None}
    Path("run.toml").write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in plain.items()))
    assert run(capsys, *config, "--quiet", "--out", "json")[0] == 0
    for name in ("printed.json", "run.toml", "flags/settings.json"):
        assert run(capsys, "train", "--config", name, "--quiet", "--out", name[:5])[0] == 0
    ends = [checkpoint.load(Path(name)) for name in ("flags", "json", "print", "run.t", "flags-2")]
    assert all(same(ends[0].model, one.model) for one in ends)
    assert len({str(one.progress["run"]) for one in ends}) == 1
    Path("open.json").write_text(json.dumps(CONFIG | {"recipe": f"{here}:make", "seed": 3, "lr": None}))
    again = ["--config", "open.json", "--resume", "json", "--epochs", 3, "--quiet"]
    assert run(capsys, "train", *again)[::2] == (0, "")  # what a config leaves open stays as the run had it


@pytest.mark.parametrize(("text", "words"), [
    ('{"micro-batchs": 3}', "got 'micro-batchs'. Did you mean micro_batch?"),
    ('{"resume": "run"}', "got 'resume'"),
    ('{"lr": "0.1"}', "expected lr to be a number or null, got '0.1'"),
    ('{"epochs": true}', "expected epochs to be a whole number, got True"),
    ('{"data": {"of": 1}}', "expected data to be a text or null"),
    ('{"optimizer": "lion"}', "expected optimizer to be one of sgd, adamw, adam or null, got 'lion'"),
    ('{"lr": -1}', "Expected --lr to be above 0, got -1"),
    ('{"lr": 1, "lr": 2}', "a name twice"),
    ("[1]", "options of a run as JSON or TOML"),
    ("lr = 0.1", "options of a run as JSON or TOML"),
])  # fmt: skip
def test_a_config_that_is_wrong_is_told_with_its_key(here: str, capsys: Any, text: str, words: str) -> None:
    Path("run.json").write_text(text)
    code, printed, error = run(capsys, "train", f"{here}:make", "--config", "run.json")
    assert (code, printed, error.count("\n"), Path("runs").exists()) == (1, "", 1, False)
    assert words in error


@pytest.mark.parametrize(("flag", "words"), [
    ("--micro_batch", "got --micro_batch. Did you mean --micro-batch?"),
    ("--accumulate", "got --accumulate. Did you mean --micro-batch?"),
    ("--max-grad-norm", "Did you mean --clip-norm?"),
    ("--batchsize", "Did you mean --batch-size?"),
    ("--zzz", "Known are --json, "),
])  # fmt: skip
def test_an_unknown_flag_is_told_the_right_one(here: str, capsys: Any, flag: str, words: str) -> None:
    code, printed, error = run(capsys, "train", f"{here}:make", flag, "8", "--json")
    assert (code, json.loads(printed)["error"] in error, words in error) == (1, True, True)


def test_help_imports_no_torch() -> None:
    code = "import sys; sys.argv = ['anybatch', '--help']; from anybatch.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, "train a recipe" in done.stdout) == (0, True), done.stderr
