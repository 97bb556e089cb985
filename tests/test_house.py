"""The shape of the house: floors, faces, captions, import without effects, sizes.

How the rules work, and the floors, stand in `tests/house.py`.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable

import anybatch
from tests.house import (
    FLOOR,
    FLOORS,
    ROOT,
    SRC,
    TOP,
    House,
    classes,
    face,
    functions,
    lines,
    only,
    ours,
    package_of,
    python,
    read_house,
    rule,
)

# Not to be loaded by an import of ours.
HEAVY = "accelerate lightning lightning_fabric matplotlib ray sentence_transformers sklearn transformers"

# No docstring opens with one of these: "Return True if ...", not "Whether ..."; "The weight", not "What".
DOUBTS = ("What", "Whether", "Whose", "Of", "As", "Where", "Let", "Nobody")


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


@rule(only('"""Whether rows may be cut."""'), only('class Cut:\n    """What a cut holds."""'))
def test_docstrings_say_the_thing(house: House) -> Iterable[str]:
    """Say what a function does, and what a class is: not a question or a doubt about it."""
    for path, tree in python(house):
        for node in [tree, *classes(tree), *functions(tree)]:
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if first.partition(" ")[0] in DOUBTS:
                yield f"{path}: {first!r}"


# ---- sizes


@rule(only("x = 1\n" * 501), {"tests/test_total.py": "x = 1\n" * 501}, {"examples/masked.py": "x = 1\n" * 80})
def test_no_file_is_too_long(house: House) -> Iterable[str]:
    limits = {"src/": 500, "tests/": 500, "benchmarks/": 500, "examples/": 79}
    for path, text in house.items():
        limit = next((limit for start, limit in limits.items() if path.startswith(start)), None)
        if limit and text.count("\n") > limit:
            yield f"{path}: {text.count(chr(10))} lines, at most {limit}"


@rule(
    only("def long():\n" + "    pass\n" * 40),
    only("def short(): ...\n" * 9 + "def undocumented():\n" + "    pass\n" * 80),
)
def test_functions_are_short(house: House) -> Iterable[str]:
    sizes = [(lines(node), path, node) for path, tree in python(house) for node in functions(tree)]
    over = [f"{path}: {node.name} has {length} lines" for length, path, node in sizes if length > 40]
    if len(over) > len(sizes) / 10:
        yield "more than one function in ten is over 40 lines: " + ", ".join(over)
    for length, path, node in sizes:
        if length > 80 and not ast.get_docstring(node):
            yield f"{path}: {node.name} has {length} lines and no docstring"


@rule(
    only("class Long:\n" + "    pass\n" * 380),
    only("class Many:\n" + "    def f(self): ...\n" * 26),
)
def test_classes_are_small(house: House) -> Iterable[str]:
    for path, tree in python(house):
        for node in classes(tree):
            methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
            if lines(node) > 380 or methods > 25:
                yield f"{path}: {node.name} has {lines(node)} lines and {methods} methods, at most 380 and 25"


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


@rule({SRC + "core/a.py": "class Cut: ...", SRC + "check/b.py": "class _Cut: ..."})
def test_a_class_name_stands_for_one_thing(house: House) -> Iterable[str]:
    places: dict[str, set[str]] = {}
    for path, tree in python(house):
        for node in classes(tree):
            places.setdefault(node.name.lstrip("_"), set()).add(path)
    for name, paths in places.items():
        if len(paths) > 1:
            yield f"{name} is a class in {sorted(paths)}"
