"""Reading the house: its files, imports and floors; and rules, tests that prove that they can fail."""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

# Every package, from the ground up, a line for each floor. A package imports only from the faces of packages
# of lower floors: never upward, and never from its own floor.
FLOORS = """
    core
    state batchnorm integrations
    precision recompute memory data
    losses
    engine
    planner parallel compare
    step
    observe
    check train recipes homes
    cli
"""
FLOOR = {name: height for height, line in enumerate(FLOORS.split("\n")) for name in line.split()}
TOP = ("__init__", "__main__", "testing")  # files beside the packages; they may import every face

SRC = "src/anybatch/"
ROOT = Path(__file__).parents[1]
House = dict[str, str]  # path -> text
Rule = Callable[[House], Iterable[str]]


def read_house() -> House:
    """All the text that rules speak about."""
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    patterns = [f"{folder}/**/*.{ending}" for folder in folders for ending in ("py", "md")]
    paths = [path for pattern in (*patterns, "*.md", "*.toml", "*.lock") for path in ROOT.glob(pattern)]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def rule(*offences: House) -> Callable[[Rule], Callable[[House | None], None]]:
    """Make a test of a function that says what breaks a house: ours nowhere, each offence exactly once."""

    def as_test(find: Rule) -> Callable[[House | None], None]:
        ids = ["ours", *(f"offence{number}" for number in range(1, len(offences) + 1))]

        @pytest.mark.parametrize("offence", [None, *offences], ids=ids)
        def test(offence: House | None) -> None:
            found = list(find(read_house() if offence is None else offence))
            expected = 0 if offence is None else 1
            assert len(found) == expected, "\n".join(["found:", *found])

        return test

    return as_test


def only(source: str, path: str = "core/total.py") -> House:
    """A house that is only one file of src."""
    return {SRC + path: source}


@cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


def python(house: House, folder: str = SRC) -> Iterator[tuple[str, ast.Module]]:
    """Path and syntax tree of every Python file under a folder."""
    paths = (path for path in house if path.startswith(folder) and path.endswith(".py"))
    return ((path, parse(house[path])) for path in paths)


def package_of(path: str) -> str:
    """The package that a file of src is in, or the file's own name at the top."""
    return path.removeprefix(SRC).split("/")[0].removesuffix(".py")


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return node.end_lineno - node.lineno + 1


def imports(path: str, tree: ast.Module) -> set[str]:
    """Dotted names of all that a file imports, however late: `from a import b` is `a.b`."""
    package = path.removeprefix("src/").split("/")[:-1]
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) + 1 - level] if level else []
                found |= {".".join([*base, *([module] if module else []), alias.name]) for alias in names}
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                found |= {name} if "import" in ast.unparse(func) else set()
            case _:
                pass
    return found


def ours(path: str, tree: ast.Module) -> set[str]:
    """Dotted names below `anybatch` that a file uses, without that prefix: `core.Batch`, however imported."""
    names = {name.removeprefix("anybatch.") for name in imports(path, tree) if name.startswith("anybatch.")}
    packages = names & set(FLOOR)  # `from anybatch import core`: what is used of it counts
    used = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages
    }
    return (names - {one.split(".")[0] for one in used}) | used


def face(house: House, package: str) -> set[str]:
    """The names that a package shows: those imported as themselves, and those that its `__init__` defines."""
    tree = parse(house.get(f"{SRC}{package}/__init__.py", ""))
    shown = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        match node:
            case ast.ImportFrom(names=names):
                shown |= {alias.name for alias in names if alias.asname == alias.name}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                shown.add(name)
            case _:
                pass
    return shown
