"""The habits of the house: null objects, words, tolerances, frozen records, telling errors, pins."""

import ast
import re
import tomllib
from collections.abc import Iterable

from anybatch.core import errors
from tests.house import House, classes, only, python, rule

BANNED_WORDS = re.compile(r"mini[-_ ]?batch|accumulation[-_ ]steps|(?<!\.)\bchunk", re.IGNORECASE)
GREETING = "gradient accumulation"  # lines that greet those who know the idea under this name
DATACLASS = r"(dataclasses\.)?dataclass\b"
VALUELESS = ("WindowError",)  # an order of calls has no value to show


@rule(only("# a Mini-batch"), only("accumulation_steps = 4"), {"README.md": "in chunks of 4"})
def test_one_word_per_idea(house: House) -> Iterable[str]:
    spoken = ("src/", "examples/", "docs/", "README.md")
    for path, text in house.items():
        for number, line in enumerate(text.splitlines() if path.startswith(spoken) else (), 1):
            found = BANNED_WORDS.search(line.replace("gradient_accumulation_steps", ""))  # transformers' name
            if found and GREETING not in line.lower():
                yield f"{path}:{number}: {found.group()!r} is not one of our words"


@rule(
    {"tests/test_total.py": "assert_close(a, b, rtol=1e-5, atol=tolerance)"},
    {"tests/test_total.py": "assert a == pytest.approx(b, rel=2 * 1e-6)"},
)
def test_tolerances_come_from_the_table(house: House) -> Iterable[str]:
    for path, tree in python(house, "tests/"):
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg in ("rtol", "atol", "rel", "abs"):
                literal = not any(isinstance(part, ast.Name) for part in ast.walk(node.value))
                if literal and ast.unparse(node.value) not in ("0", "0.0"):
                    yield f"{path}:{node.value.lineno}: {node.arg}={ast.unparse(node.value)}"


@rule(
    only("@dataclass\nclass A: ..."),
    only("@dataclasses.dataclass(frozen=True)\nclass A: ..."),
    only("@dataclass(slots=True, frozen=False)\nclass A: ..."),
)
def test_public_records_are_frozen(house: House) -> Iterable[str]:
    for path, tree in python(house):
        for node in classes(tree):
            calls = [call for call in map(ast.unparse, node.decorator_list) if re.match(DATACLASS, call)]
            frozen = all("frozen=True" in call and "slots=True" in call for call in calls)
            if not frozen and not node.name.startswith("_"):
                yield f"{path}: {node.name} is not frozen with slots"


@rule(
    only("raise BatchError"),
    only("raise BatchError()"),
    only("raise errors.BatchError('The batch is empty.')"),
)
def test_errors_show_what_came(house: House) -> Iterable[str]:
    shown = {name for name in vars(errors) if name.endswith("Error")} - set(VALUELESS)
    for path, tree in python(house):
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and node.exc:
                name = ast.unparse(node.exc).partition("(")[0].rpartition(".")[2]
                values = isinstance(node.exc, ast.Call) and not all(
                    isinstance(arg, ast.Constant) for arg in node.exc.args
                )
                if name in shown and not values:
                    yield f"{path}:{node.lineno}: {ast.unparse(node)} shows no value"


@rule(
    {"requirements.lock": "torch==2.13.0+cpu\n"},
    {"requirements.lock": "torch @ file:///torch.whl\n"},
    {
        "requirements.lock": "rich==15.0.0\n",
        "pyproject.toml": "[project]\ndependencies = ['torch>=2.6', 'rich']",
    },
)
def test_lock_pins_every_dependency(house: House) -> Iterable[str]:
    lines = [line for line in house.get("requirements.lock", "").splitlines() if not line.startswith("#")]
    yield from (line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line))
    project = tomllib.loads(house.get("pyproject.toml", "")).get("project", {})
    wanted = sum(project.get("optional-dependencies", {}).values(), project.get("dependencies", []))
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    for name in (re.split(r"[\[<>=]", line)[0] for line in wanted):
        if name not in pinned:
            yield f"requirements.lock does not pin {name}"
