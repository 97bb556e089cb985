"""Reading the house: its files, imports and order; and rules, tests that prove that they can fail."""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

# Every module from the ground up, a line for each layer. A module imports only what stands before it.
# A folder's own name is its __init__, which stands after its files.
LAYERS = """
    errors units tree
    batch total rng events exhausted finite nested surroundings remembered
    fold meetings integrations.transformers integrations.torchao integrations
    ledger recording resized device
    precision scale masters stalled casts lower
    recompute.find recompute.inside recompute.trust recompute.replay recompute.selective recompute.offload
    recompute.apply recompute
    meter
    losses.loss losses.convention losses.kinds losses.terms losses.summed losses.pull losses.seen
    losses.linear losses.whole_batch losses.reductions losses.origin losses.tail
    losses.model_loss losses.resolve losses.additive losses
    gradients plan
    tolerance optimize data.dataset data.idx data.cifar10 data.digits data.open data
    task conditions before run smaller scaled course execute
    likely fakes feed trace update measured compose recorded predict solve timing options
    question survey blame planner contest shapes budget
    limits planning room guard door noted halfway window step
    probe.rows probe.draws probe.copies probe.choose probe.cut probe.observed probe.passes probe.calls
    probe.trial probe.finding probe.agreement probe.weights probe.given
    probe.denominators probe.padding probe.nature probe.modules
    probe.terms probe.prepare probe.explain probe check foresee
    recipes.recipe recipes.lenet5 recipes
    train.learning_rate train.pack train.checkpoint train.rows train.metrics train.watch train.progress
    train.interrupt train.trainer train
    observe.picture observe.memory observe.backward observe.exponents observe
    testing target verbs plan_verb cli __main__
    anybatch
"""
ORDER = LAYERS.split()

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


def total(source: str) -> House:
    """A house that is only src/anybatch/total.py."""
    return {SRC + "total.py": source}


@cache
def parse(source: str) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(source)


def python(house: House, folder: str = SRC) -> Iterator[tuple[str, ast.Module]]:
    """Path and syntax tree of every Python file under a folder."""
    paths = (path for path in house if path.startswith(folder) and path.endswith(".py"))
    return ((path, parse(house[path])) for path in paths)


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods, however deep."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def classes(tree: ast.AST) -> list[ast.ClassDef]:
    """All classes, however deep."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """Lines of a definition, its docstring included."""
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def module_name(path: str) -> str:
    """`src/anybatch/losses/terms.py` is `losses.terms`, its folder `losses`, the topmost `anybatch`."""
    inside = path.removeprefix(SRC).removesuffix(".py").removesuffix("__init__")
    return inside.strip("/").replace("/", ".") or "anybatch"


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
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if "import" in ast.unparse(
                func
            ):
                found.add(name)
            case _:
                pass
    return found


def siblings(path: str, tree: ast.Module) -> set[str]:
    """The modules of ORDER that a file imports; a name that a package re-exports counts as the package."""
    found: set[str] = set()
    for dotted in imports(path, tree):
        first, *rest = dotted.split(".")
        prefixes = (".".join(rest[:end]) for end in range(len(rest), 0, -1))
        if first == "anybatch":
            found.add(next((prefix for prefix in prefixes if prefix in ORDER), "anybatch"))
    return found
