"""Every block of the README and the docs runs as pasted, and prints what the page says; every example runs.

- A `python` block runs in a fresh namespace and an empty folder. One that begins with `# name.py` is also
  a file of that name, for the commands of its page.
- A `text` block shows what the block before it prints, with `...` for what varies.
- The `anybatch` commands of a `sh` block run, for one epoch. One that needs data that is not here has to
  say so.
"""

import doctest
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)

import anybatch as ab
from anybatch.cli import main
from tests.check.conftest import unhurried as unhurried

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
NEEDS = {
    "transformers": "from transformers import",
    "accelerate": "anybatch.homes",
    "matplotlib": "anybatch[plot]",
    "tensorboard": "import SummaryWriter",
    "wandb": "import wandb",
    "mlflow": "import mlflow",
    "trackio": "import trackio",
    "ray": "ab.ParameterServer(",
    "lightning": "import lightning",
    "accelerate.utils": "from accelerate import",
    "sentence_transformers": "from sentence_transformers",
    "peft": "from peft import",
}  # and what shows it in a block
COMPILER = "a C++ compiler"
HOSTS = ("lightning", "accelerate", "accelerate.utils", "sentence_transformers")
ALONE = {"wandb", "mlflow", "trackio", "ray", "peft", COMPILER, *HOSTS}  # leave threads and variables behind
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MOST_WORDS, LONGEST = 900, 60  # of a page, without blocks; lines of a page under "I train ..."
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    text: str
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: str, text: str) -> Iterator[Block]:
    block: Block | None = None
    for found in FENCE.finditer(text):
        kind, code = found.groups()
        if kind == "text" and block is not None:
            block = replace(block, output=code)
            continue
        if block is not None:
            yield block
        block = Block(page, text[: found.start(2)].count("\n"), kind, code)
    if block is not None:
        yield block


BLOCKS = [block for page in PAGES for block in read_blocks(page, (ROOT / page).read_text())]
PYTHON = [block for block in BLOCKS if block.kind == "python"]
SERVED = [block for block in PYTHON if NEEDS["ray"] in block.text]
SHELL = [block for block in BLOCKS if block.kind == "sh"]
FILES = {
    (block.page, name[1]): block.text for block in PYTHON if (name := re.match(r"# (\w+)\.py\b", block.text))
}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    for _, name in FILES:
        sys.modules.pop(name, None)


def agrees(said: str, printed: str) -> bool:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(said, printed, options)


def run_alone(path: str) -> str:
    """Run a program in a process of its own, and return what it prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, path]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.mark.parametrize("block", [block for block in PYTHON if block not in SERVED], ids=str)
def test_python_block_runs_as_pasted(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    needed = [name for name, sign in NEEDS.items() if sign in block.text]
    if "torch.compile(" in block.text:
        if not shutil.which("g++"):
            pytest.skip(f"{COMPILER} is not installed")
        needed.append(COMPILER)
    for name in {*needed} - {COMPILER}:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    if {*needed} & ALONE:
        Path("block.py").write_text(block.text)
        printed = run_alone("block.py")
    else:
        code = compile("\n" * block.line + block.text, block.page, "exec")
        exec(code, {"__name__": "__main__"})
        printed = capsys.readouterr().out
    assert block.output is None or agrees(block.output, printed), f"{block} printed\n{printed}"


@pytest.mark.slow
@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize("block", SERVED, ids=str)
def test_block_with_servers_runs_as_pasted(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    test_python_block_runs_as_pasted(block, capsys)


def run_command(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    match shlex.split(line, comments=True):
        case ["anybatch", *options]:
            has_data = not any(option.startswith("path/to/") for option in options)
            short = ["1" if before == "--epochs" else now for before, now in pairwise(["", *options])]
            assert main.main(short) == (0 if has_data else 1), capsys.readouterr().err
        case ["pip", "install", "."]:
            assert "build-backend" in (ROOT / "pyproject.toml").read_text()
        case ["make", target]:  # CI runs it
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert line in (ROOT / ".ci" / "run").read_text().splitlines()
        case _:
            pytest.fail(f"nobody knows how to test {line!r}")


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell_block_runs_as_pasted(block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for (page, name), text in FILES.items():
        if page == block.page:
            Path(f"{name}.py").write_text(text)
    for line in block.text.splitlines():
        run_command(line, capsys)
    printed = capsys.readouterr().out
    assert block.output is None or agrees(block.output, printed), f"{block} printed\n{printed}"


def test_every_block_says_its_kind() -> None:
    assert {block.kind for block in BLOCKS} <= {"python", "sh", "diff"}
    assert len(PYTHON) > len(PAGES)
    assert EXAMPLES


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_only_what_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    assert set(re.findall(r"\bab\.([A-Za-z_]+)", text)) <= set(dir(ab))
    assert set(re.findall(r"`\.\[(\w+)\]`", text)) <= set(EXTRAS)
    for link in re.findall(r"(?<!\")\]\((?!https?:|#)([^)#]+)", text):
        assert (ROOT / page).parent.joinpath(link).exists(), link


@pytest.mark.parametrize("page", PAGES)
def test_page_is_short(page: str) -> None:
    text = re.sub(r"<!-- bench.*?<!-- end of bench -->", "", (ROOT / page).read_text(), flags=re.DOTALL)
    prose = re.sub(r"^(```|~~~).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= MOST_WORDS


def task_pages() -> list[str]:
    _, _, listed = (ROOT / "docs" / "index.md").read_text().partition("\n## I train ...\n")
    return sorted({*re.findall(r"\]\((\w+\.md)\)", listed.partition("\n:::")[0])} - {"lora.md", "colab.md"})


@pytest.mark.parametrize("page", task_pages())
def test_task_page_is_short_and_its_program_says_that_it_is_exact(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert len(text.splitlines()) <= LONGEST
    (block,) = [block for block in read_blocks(page, text) if block.kind == "python"]
    assert "1e-10" in block.text  # that it is true shows the run of the block
    assert re.search(r"% off", block.output or "")
    assert re.search(r"exact( to 1e-10: True)?$", block.output or "", re.MULTILINE)
    assert " False" not in (block.output or "")


@pytest.mark.slow
def test_notebook_runs_from_cell_to_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    cells = json.loads((ROOT / "examples" / "first_minutes.ipynb").read_text())["cells"]
    assert len(cells) == 10
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    Path("cells.py").write_text("\n".join([*code, "print(len(plt.get_fignums()), 'pictures')"]))
    monkeypatch.setenv("MPLBACKEND", "agg")
    printed = run_alone("cells.py")
    assert "3 pictures" in printed
    assert re.search(r"usual loop: \d\d% off; anybatch: \de-1\d\n", printed)
    assert "NOT exact" in printed  # BatchNorm


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_says_something(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = [name for name in HOSTS if NEEDS[name] in path.read_text()]
    if any(find_spec(name) is None for name in needed):
        pytest.skip(f"{needed[0]} is not installed")
    if needed:
        assert "loss" in run_alone(str(path))
        return
    runpy.run_path(str(path), run_name="__main__")
    assert "loss" in capsys.readouterr().out
