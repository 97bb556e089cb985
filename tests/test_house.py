"""The shape and the habits of the house: floors, faces, captions, sizes, words, errors, pins.

A rule says what breaks a house, and is tried on ours and on small ones that break it.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import anybatch
from anybatch.core import errors

# Every package, from the ground up, a line for each floor. A package imports only from the faces of packages
# of lower floors: never upward, and never from its own floor.
FLOORS = """
    core
    state batchnorm integrations
    precision recompute memory data
    losses
    engine
    trial
    planner parallel audit
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


def classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


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


# Not to be loaded by an import of ours.
HEAVY = (
    "accelerate lightning lightning_fabric matplotlib pytorch_lightning ray sentence_transformers sklearn "
    "transformers"
)


# ---- floors and faces


def test_floors_name_every_package_and_no_other() -> None:
    packages = {package_of(path) for path, _ in python(read_house())}
    assert sorted(packages) == sorted([*FLOORS.split(), *TOP])


@rule(
    only("from anybatch.step import Step"),
    only("if TYPE_CHECKING:\n    from anybatch.losses import Terms"),
    only("importlib.import_module('anybatch.step')"),
    only("from anybatch.batchnorm import BatchNorm", "state/rng.py"),
)
def test_packages_import_downward(house: House) -> Iterable[str]:
    for path, tree in python(house):
        own = package_of(path)
        for name in sorted(ours(path, tree)):
            other = name.split(".")[0]
            if own not in TOP and other != own and FLOOR.get(other, len(FLOORS)) >= FLOOR[own]:
                yield f"{path} imports {name}, which is not on a lower floor"


@rule(
    only("from anybatch.core.errors import LossError", "losses/loss.py"),
    only("from anybatch.losses.terms import Terms", "__init__.py"),
    only("import anybatch.core.tree", "losses/loss.py"),
)
def test_packages_import_each_other_through_their_faces(house: House) -> Iterable[str]:
    for path, tree in python(house):
        for name in sorted(ours(path, tree)):
            other, _, what = name.partition(".")
            if other != package_of(path) and other in FLOOR and what not in face(house, other):
                yield f"{path} imports {name}, which the face of {other} does not show"


@rule(
    {SRC + "core/a.py": "from anybatch.core.b import x", SRC + "core/b.py": "from anybatch.core.a import y"},
    {
        SRC + "core/a.py": "from . import b",
        SRC + "core/b.py": "def late():\n    from anybatch.core.a import y",
    },
)
def test_no_circle_inside_a_package(house: House) -> Iterable[str]:
    """Take away files that import none of those that are left; a circle cannot be taken away."""
    trees = {
        path.removeprefix(SRC).removesuffix(".py").replace("/", "."): (path, tree)
        for path, tree in python(house)
    }
    told = {name: {f"{one}." for one in ours(*at)} for name, at in trees.items() if name[-9:] != ".__init__"}
    graph = {
        name: {other for other in trees if any(one.startswith(f"{other}.") for one in names)}
        for name, names in told.items()
    }
    while free := {name for name, others in graph.items() if not others & (graph.keys() - {name})}:
        graph = {name: others for name, others in graph.items() if name not in free}
    if graph:
        yield f"files that import each other in a circle, or stand above one: {sorted(graph)}"


@rule(only("import torch\ntorch.cuda.empty_cache()", "step/step.py"))
def test_devices_are_asked_in_one_file(house: House) -> Iterable[str]:
    """Name "cuda" in `core/accelerator.py`, in the table of cards, and where NCCL is named."""
    for path, _ in python(house):
        lines = house[path].splitlines() if path.startswith(SRC) else ()
        found = [line.strip() for line in lines if "cuda" in line and "nccl" not in line]
        if found and path not in (f"{SRC}core/accelerator.py", f"{SRC}memory/device.py"):
            yield f"{path} names one kind of device in {found[0]!r}: ask core/accelerator.py"


@rule(
    only("def is_due(update):\n    return not update & update - 1", "state/snapshot.py"),
    only("from anybatch import engine\nengine.is_due(3)", "observe/flow.py"),
)
def test_one_function_says_what_is_due(house: House) -> Iterable[str]:
    """Define the calendar in `engine/task.py`, and ask it once a step: in `step/step.py`."""
    places = {"def is_due(update": "engine/task.py", "engine.is_due(": "step/step.py"}
    for path, _ in python(house):
        for sign, place in places.items():
            if path.startswith(SRC) and sign in house[path] and path != SRC + place:
                yield f"{path} has {sign!r}, which belongs in {place}"


# ---- the front door


def test_exports_are_one_sorted_screen_and_the_version_is_that_of_the_project() -> None:
    tree = ast.parse((ROOT / SRC / "__init__.py").read_text(encoding="utf-8"))
    nodes = [node for block in tree.body if isinstance(block, ast.If) for node in ast.walk(block)]
    typed = {
        (one.module, name.name) for one in nodes if isinstance(one, ast.ImportFrom) for name in one.names
    }
    homes = {(f"anybatch.{home}", name) for home, names in anybatch._HOMES.items() for name in names.split()}
    assert typed == homes
    assert sorted(anybatch.__all__) == sorted(name for _, name in homes)
    for home, name in homes:
        assert getattr(anybatch, name) is getattr(importlib.import_module(home), name)
    assert dir(anybatch) == sorted(anybatch.__all__)
    assert len(anybatch.__all__) <= 32
    assert f'\nversion = "{anybatch.__version__}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f"\nversion: {anybatch.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


# Runs in a process of its own: imports every module of anybatch and says which part of the state it changed.
PROBE = """
import importlib, json, logging, os, pkgutil, random, sys, threading, warnings
import torch

def state():
    return {
        "environment": dict(os.environ),
        "root logger": (logging.root.level, list(logging.root.handlers)),
        # Torch 2.6 loads sympy, which has one.
        "warning filters": [one for one in warnings.filters if "sympy" not in str(one[2])],
        "threads": threading.active_count(),
        "random state": (random.getstate(), torch.get_rng_state().tolist()),
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "CUDA": torch.cuda.is_initialized(),
        "loaded": {name for name in sys.argv[1:] if name in sys.modules},
    }

before = state()
import anybatch
for module in pkgutil.walk_packages(anybatch.__path__, "anybatch."):
    if not module.name.endswith(("__main__", "homes.lightning")):  # a base class there is Lightning's
        importlib.import_module(module.name)
print(json.dumps([name for name, value in state().items() if value != before[name]]))
"""


def test_import_has_no_effect() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", PROBE, *HEAVY.split()]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(run.stdout) == []


# ---- captions and first words


def caption(tree: ast.Module) -> str:
    return (ast.get_docstring(tree) or "").partition("\n")[0].removesuffix(".")


def tree_of(text: str) -> House:
    """Path -> caption of a tree in a text: two spaces more for each folder, `name.py   caption`.

    The tree starts at the line `src/anybatch/` and ends with its code block. Lines of another form, such as
    `  --- what a step means`, may part it.
    """
    found: House = {}
    folders: list[str] = []
    start = text.find("\n" + SRC) + 1
    for line in text[start:].partition("\n```")[0].splitlines() if start else ():
        if match := re.fullmatch(r"((?:  )*)(\S+)(?: {2,}(.*))?", line):
            indent, name, words = match.groups()
            folders = [*folders[: len(indent) // 2], name]
            found["".join(folders)] = words or ""
    return {path: words for path, words in found.items() if path.startswith(SRC)}


@rule(
    only('"""Sums with weights."""'),
    only('"""Sums."""') | {"docs/architecture.md": "\nsrc/anybatch/\n  core/\n    total.py  Means\n```"},
    {"docs/architecture.md": "\nsrc/anybatch/\n  losses/\n    gone.py  Gone\n```"},
    only('"""Losses."""', "losses/__init__.py"),
    only('"""Losses."""', "losses/__init__.py")
    | {"docs/architecture.md": "\nsrc/anybatch/\n  losses/  Sums\n```"},
)
def test_architecture_captions_every_package_and_file(house: House) -> Iterable[str]:
    ours = {path.removesuffix("__init__.py"): caption(tree) for path, tree in python(house)}
    told = tree_of(house.get("docs/architecture.md", ""))
    for path in sorted((ours.keys() | told.keys()) - {SRC}):
        if (ours.get(path) or "") != (told.get(path) or "") or (path in ours and not ours[path]):
            yield f"{path}: docs/architecture.md says {told.get(path)!r}, the docstring {ours.get(path)!r}"


# ---- sizes


@rule(only("x = 1\n" * 501), {"tests/test_total.py": "x = 1\n" * 501}, {"examples/masked.py": "x = 1\n" * 80})
def test_no_file_is_too_long(house: House) -> Iterable[str]:
    limits = {"src/": 500, "tests/": 500, "benchmarks/": 500, "examples/": 79}
    for path, text in house.items():
        limit = next((limit for start, limit in limits.items() if path.startswith(start)), None)
        if limit and text.count("\n") > limit:
            yield f"{path}: {text.count(chr(10))} lines, at most {limit}"


@rule(
    only(
        "class Many:\n    def f(self):\n" + "".join(f"        self.a{n} = 0\n" for n in range(16)),
        "step/a.py",
    ),
    only("class Many:\n" + "".join(f"    a{n}: int\n" for n in range(16)), "step/a.py"),
)
def test_classes_of_engine_and_step_have_few_attributes(house: House) -> Iterable[str]:
    for path, tree in (*python(house, SRC + "engine/"), *python(house, SRC + "step/")):
        for node in classes(tree):
            names = {ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)}
            for one in ast.walk(node):
                match one:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        names.add(name)
                    case _:
                        pass
            if len(names) > 15:
                yield f"{path}: {node.name} has {len(names)} attributes, at most 15"


# ---- habits

VALUELESS = ("WindowError",)  # an order of calls has no value to show


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
