"""The shape of the house: layers, exports, captions, import without effects, size of rooms.

How the rules work, and the order of the modules, stand in `tests/house.py`.
"""

import ast
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

import anybatch
from tests.house import (
    ORDER,
    ROOT,
    SRC,
    House,
    classes,
    functions,
    imports,
    lines,
    module_name,
    python,
    read_house,
    rule,
    siblings,
    total,
)

HOMES = {"torch.distributed": "parallel", "matplotlib": "observe"}  # the only folder that may use it
FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "transformers")
HEAVY = (*FRAMEWORKS, "matplotlib", "sklearn")  # not to be loaded by an import of ours


# ---- layers


def test_order_names_every_module_and_no_other() -> None:
    assert sorted(module_name(path) for path, _ in python(read_house())) == sorted(ORDER)


@rule(
    total("import anybatch.step"),
    total("from anybatch import step"),
    total("from anybatch import Step"),
    total("def late():\n    from .step import Step"),
    total("if TYPE_CHECKING:\n    from anybatch.losses.terms import Terms"),
    total("importlib.import_module('anybatch.step')"),
    {SRC + "losses/loss.py": "from . import terms"},
    {SRC + "losses/loss.py": "from ..gradients import add"},
)
def test_imports_point_down(house: House) -> Iterable[str]:
    for path, tree in python(house):
        above = ORDER[ORDER.index(module_name(path)) :] if module_name(path) in ORDER else ()
        yield from (f"{path} imports {other}" for other in siblings(path, tree) if other in above)


@rule(
    {SRC + "execute.py": "from anybatch import planner"},
    {SRC + "execute.py": "def late():\n    from anybatch.parallel.shard import Shard"},
    {SRC + "observe/record.py": "from anybatch.step import Step"},
)
def test_execute_and_its_choices_do_not_know_each_other(house: House) -> Iterable[str]:
    for path, tree in python(house):
        if path == SRC + "execute.py":
            far = r"anybatch\.(planner|observe|parallel\.(?!strategy))"
        elif path.startswith((SRC + "parallel/", SRC + "observe/")) and not path.endswith("/strategy.py"):
            far = r"anybatch\.(execute|step)\b"
        else:
            continue
        yield from (f"{path} imports {name}" for name in imports(path, tree) if re.match(far, name))


@rule(
    total("import torch.distributed as dist"),
    total("import torch\ntorch.distributed.barrier()"),
    total("def plot():\n    from matplotlib import pyplot"),
    total("import transformers"),
)
def test_frameworks_stay_in_their_rooms(house: House) -> Iterable[str]:
    homes = HOMES | dict.fromkeys(FRAMEWORKS, "integrations")
    for path, tree in python(house):
        attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for name, home in homes.items():
            used = any(f"{use}.".startswith(f"{name}.") for use in imports(path, tree) | attributes)
            if used and not path.startswith(f"{SRC}{home}/"):
                yield f"{path} uses {name}, which belongs in {home}/"


@rule(total("\n".join(f"import anybatch.{name}" for name in ORDER[:11])))
def test_no_module_imports_more_than_ten_siblings(house: House) -> Iterable[str]:
    for path, tree in python(house):
        count = len(siblings(path, tree))
        if count > 10 and not path.endswith("__init__.py"):  # to list others is what an __init__ is for
            yield f"{path} imports {count} siblings"


# ---- the front door


def export_faults(package: ModuleType) -> list[str]:
    """What keeps `__all__` from being one sorted screen of exactly the visible names."""
    told = list(package.__all__)
    submodules = {name for name in ORDER if isinstance(vars(package).get(name), ModuleType)}
    visible = {name for name in vars(package) if not name.startswith("_")} - submodules
    faults = [f"not told: {name}" for name in sorted(visible - set(told))]
    faults += [f"not there: {name}" for name in told if name not in vars(package)]
    faults += ["not sorted"] if told != sorted(set(told)) else []
    return faults + ([f"{len(told)} names, at most 25"] if len(told) > 25 else [])


def test_exports_are_one_sorted_screen() -> None:
    assert export_faults(anybatch) == []


@pytest.mark.parametrize(
    ("told", "there", "fault"),
    [
        (["Step", "Total"], ["Step", "Total"], []),
        (["Step"], ["Step", "Total", "_hidden"], ["not told: Total"]),
        (["Step", "Total"], ["Step"], ["not there: Total"]),
        (["Total", "Step"], ["Step", "Total"], ["not sorted"]),
        ([f"A{i}" for i in range(10, 36)], [f"A{i}" for i in range(10, 36)], ["26 names, at most 25"]),
    ],
)
def test_exports_can_be_faulty(told: list[str], there: list[str], fault: list[str]) -> None:
    package = ModuleType("package")
    vars(package).update(dict.fromkeys(there), __all__=told)
    assert export_faults(package) == fault


# Runs in a process of its own: imports every module of anybatch and says which part of the state it changed.
PROBE = """
import importlib, json, logging, os, pkgutil, random, sys, threading, warnings
import torch

def state():
    return {
        "environment": dict(os.environ),
        "root logger": (logging.root.level, list(logging.root.handlers)),
        "warning filters": list(warnings.filters),
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
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps([name for name, value in state().items() if value != before[name]]))
"""


def import_effects(*paths: Path) -> list[str]:
    """What importing all of anybatch changes; `paths` are looked in first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", PROBE, *HEAVY]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout)


def test_import_has_no_effect() -> None:
    assert import_effects(ROOT / "src") == []


def test_import_with_effects_is_found(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").touch()
    (tmp_path / "anybatch").mkdir()
    (tmp_path / "anybatch" / "__init__.py").touch()
    (tmp_path / "anybatch" / "late.py").write_text(
        "import logging, os, threading, time, warnings, torch, matplotlib\n"
        "os.environ['ANYBATCH'] = '1'\n"
        "logging.basicConfig()\n"
        "warnings.simplefilter('ignore')\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "torch.manual_seed(1)\n"
        "torch.set_default_dtype(torch.float64)\n"
        "torch.set_num_threads(torch.get_num_threads() + 1)\n"
        "torch.use_deterministic_algorithms(True)\n"
        "torch.cuda._initialized = True\n"
    )
    assert len(import_effects(tmp_path)) == 10


# ---- captions, and a test file for each idea


def caption(tree: ast.Module) -> str:
    return (ast.get_docstring(tree) or "").partition("\n")[0].removesuffix(".")


def readme_tree(readme: str) -> House:
    """Path -> caption of the README tree: two spaces more for each folder, `name.py   caption`.

    The tree starts at the line `src/anybatch/` and ends with its code block. A folder inside has the
    caption of its `__init__`. Lines of another form, such as `  --- what a step means`, may part it.
    """
    found: House = {}
    folders: list[str] = []
    start = readme.find("\n" + SRC) + 1
    for line in readme[start:].partition("\n```")[0].splitlines() if start else ():
        if match := re.fullmatch(r"((?:  )*)(\S+)(?: {2,}(.*))?", line):
            indent, name, words = match.groups()
            folders = [*folders[: len(indent) // 2], name]
            found["".join(folders)] = words or ""
    return {path: words for path, words in found.items() if path.startswith(SRC)}


@rule(
    total('"""Sums with weights."""'),
    total('"""Sums."""') | {"README.md": "\nsrc/anybatch/\n  total.py  Means\n```"},
    {
        "README.md": "\nsrc/anybatch/\n  losses/  Losses\n    gone.py  Gone\n```",
        SRC + "losses/__init__.py": "'Losses.'",
    },
)
def test_readme_captions_every_file(house: House) -> Iterable[str]:
    ours = {re.sub(f"(?<!^{SRC})__init__.py$", "", path): caption(tree) for path, tree in python(house)}
    told = readme_tree(house.get("README.md", ""))
    for path in sorted((ours.keys() | told.keys()) - {SRC}):
        if ours.get(path) != told.get(path) or not told[path]:
            yield f"{path}: README says {told.get(path)!r}, the docstring {ours.get(path)!r}"


@rule({SRC + "losses/terms.py": ""})
def test_every_module_has_its_test_file(house: House) -> Iterable[str]:
    for path, _ in python(house):
        folder, _, name = path.removeprefix(SRC).rpartition("/")
        mirror = "/".join(filter(None, ("tests", folder, f"test_{name}")))
        if not name.startswith("__") and mirror not in house:
            yield f"{path}: no {mirror}"


# ---- sizes


@rule(
    total("x = 1\n" * 401),
    {"tests/test_total.py": "x = 1\n" * 401},
    {"examples/masked.py": "x = 1\n" * 80},
    {"CONTRIBUTING.md": "x\n" * 60},
)
def test_no_file_is_too_long(house: House) -> Iterable[str]:
    limits = {"src/": 400, "tests/": 400, "benchmarks/": 400, "examples/": 79, "CONTRIBUTING.md": 59}
    for path, text in house.items():
        limit = next((limit for start, limit in limits.items() if path.startswith(start)), None)
        if limit and text.count("\n") > limit:
            yield f"{path}: {text.count(chr(10))} lines, at most {limit}"


@rule(total("x = 1\n" * 201))
def test_median_file_is_short(house: House) -> Iterable[str]:
    median = statistics.median([house[path].count("\n") for path, _ in python(house)] or [0])
    if median > 200:
        yield f"the median file of src has {median} lines, at most 200"


@rule(
    total("def long():\n" + "    pass\n" * 40),
    total("def short(): ...\n" * 9 + "def undocumented():\n" + "    pass\n" * 80),
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
    total("class Long:\n" + "    pass\n" * 250),
    total("class Many:\n" + "    def f(self): ...\n" * 16),
)
def test_classes_are_small(house: House) -> Iterable[str]:
    for path, tree in python(house):
        for node in classes(tree):
            methods = sum(isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) for item in node.body)
            if lines(node) > 250 or methods > 15:
                yield f"{path}: {node.name} has {lines(node)} lines and {methods} methods, at most 250 and 15"
