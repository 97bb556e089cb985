"""`make mutants`: small changes of `src`, drawn at random, that the tests of the changed line have to notice.

1. The suite runs once with this file as a pytest plugin, which writes the lines that each test function runs.
2. Each change is made in a copy of the project, and the tests of its line run there until one fails: first
   one case of each function, those of the same folder before others and quick ones before slow ones.
3. The tests that failed run once on an unchanged copy; those that fail there too are no proof and are named.

Everything is in build/mutants, in a folder for the state of `src`; a stopped run goes on. Lines that only
child processes run have no tests of their own: those of the same folder run for them.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import coverage
import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "anybatch"
STATE = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCE.rglob("*.py")))).hexdigest()[:8]
BUILD = ROOT / "build" / "mutants" / STATE
ROUNDS = ((20.0, 12), (40.0, 1000))  # seconds of tests, and files with tests: survivors meet the second one
CPU, WALL = 300, 1200  # seconds after which a change that runs for ever is ended
SWAPS: dict[type, tuple[str, str, str]] = {
    ast.Lt: ("compared", "<", "<="),
    ast.LtE: ("compared", "<=", "<"),
    ast.Gt: ("compared", ">", ">="),
    ast.GtE: ("compared", ">=", ">"),
    ast.Eq: ("compared", "==", "!="),
    ast.NotEq: ("compared", "!=", "=="),
    ast.Is: ("compared", "is", "is not"),
    ast.IsNot: ("compared", r"is\s+not", "is"),
    ast.In: ("compared", "in", "not in"),
    ast.NotIn: ("compared", r"not\s+in", "in"),
    ast.Add: ("sign", r"\+", "-"),
    ast.Sub: ("sign", "-", "+"),
    ast.Mult: ("sign", r"\*", "/"),
    ast.Div: ("sign", "/", "*"),
    ast.And: ("and or", r"\band\b", "or"),
    ast.Or: ("and or", r"\bor\b", "and"),
}
Place = tuple[int, int]


class Change(NamedTuple):
    """A stretch of a file in bytes, the text that takes its place, and the lines that tell whether it ran."""

    file: str
    line: int
    kind: str
    begin: int
    end: int
    text: str
    ran: tuple[range, ...]

    @property
    def name(self) -> str:
        """The change in a few words, which tell it from all others."""
        return f"{self.file}:{self.line} {self.kind}: {self.begin}-{self.end} {self.text}"


def changes(path: Path) -> Iterator[Change]:
    """Yield the changes of a file. Texts, annotations, decorators and what `raise` says have none."""
    source, file = path.read_bytes(), path.relative_to(SOURCE).as_posix()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def first(node: Any) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def last(node: Any) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset

    def visit(node: Any, ran: tuple[range, ...], within: bool) -> Iterator[Change]:
        own = (range(getattr(node, "lineno", 0), getattr(node, "lineno", 0) + 1),)
        if within and hasattr(node, "lineno"):
            ran = own if isinstance(node, ast.stmt) else own + ran[-1:]
        scope = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if (
            scope and not within
        ):  # defaults and fields run at import: the lines of their function or class tell
            ran = (range(node.body[0].lineno, node.end_lineno + 1), *ran)

        def change(kind: str, text: str, begin: int | None = None, end: int | None = None) -> Change:
            begin, end = begin or first(node), end or last(node)
            return Change(file, node.lineno, kind, begin, end, text, ran)

        def swaps(operators: list[Any], operands: list[Any]) -> Iterator[Change]:
            for operator, left, right in zip(operators, operands, operands[1:], strict=False):
                kind, pattern, text = SWAPS.get(type(operator), ("", "(?!)", ""))
                between = re.sub(
                    rb"#.*", lambda found: b" " * len(found[0]), source[last(left) : first(right)]
                )
                if found := re.search(pattern.encode(), between):
                    yield change(kind, text, last(left) + found.start(), last(left) + found.end())

        match node:
            case ast.Expr(value=ast.Constant()) | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assign(targets=[ast.Name(id="__all__")]):
                return
            case ast.Raise():
                yield change("removed", "pass")
                return
            case ast.Expr() | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Delete():
                yield change("removed", "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield change("removed", "pass")
            case ast.Return(value=None):
                yield change("returned", "pass")
            case ast.Return(value=value) if not (isinstance(value, ast.Constant) and value.value is None):
                yield change("returned", "return None")
            case ast.Constant(value=bool()):
                yield change("flipped", str(not node.value))
            case ast.Constant(value=int() | float()):
                yield change("off by one", f"{node.value + 1}")
            case ast.UnaryOp(op=ast.Not()):
                yield change("not", "", first(node), first(node) + len("not"))
            case ast.UnaryOp(op=ast.USub()):
                yield change("sign", "", first(node), first(node) + len("-"))
            case ast.Compare():
                yield from swaps(node.ops, [node.left, *node.comparators])
            case ast.BinOp() if not any(is_text(one) for one in (node.left, node.right)):
                yield from swaps([node.op], [node.left, node.right])
            case ast.BoolOp():
                yield from swaps([node.op] * len(node.values), node.values)
            case _:
                pass
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "decorator_list", "type_params"):
                inside = within or (field == "body" and isinstance(node, ast.FunctionDef))
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from visit(child, ran, inside)

    yield from visit(ast.parse(source), (range(1, len(starts)),), within=False)


def is_text(node: ast.AST) -> bool:
    """Return True if an expression is a text as it stands."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


# ---- the plugin


class Recorder:
    """Writes a line of JSON for the cases of one test function that ran one after the other."""

    def __init__(self) -> None:
        self.coverage = coverage.Coverage(data_file=None, source=[str(SOURCE)], config_file=False)
        self.name, self.cases, self.cpu, self.wall = "", list[str](), 0.0, 0.0
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, Any, Any]:
        if (name := item.nodeid.partition("[")[0]) != self.name:
            self.flush()
            self.name = name
            self.coverage.switch_context(name)
        before = sum(os.times()[:4]), time.monotonic()
        result = yield
        self.cases.append(item.nodeid)
        self.cpu += sum(os.times()[:4]) - before[0]
        self.wall += time.monotonic() - before[1]
        if nextitem is None:
            self.flush()
        return result

    def flush(self) -> None:
        """Write what ran since the last time."""
        if self.cases:
            data = self.coverage.get_data()
            data.set_query_context(self.name)
            lines = {
                Path(one).relative_to(SOURCE).as_posix(): data.lines(one) for one in data.measured_files()
            }
            record = {
                "test": self.name,
                "cpu": round(self.cpu, 3),
                "wall": round(self.wall, 3),
                "nodes": self.cases,
            }
            with (BUILD / "map.jsonl").open("a") as file:
                file.write(
                    json.dumps(record | {"lines": {one: found for one, found in lines.items() if found}})
                    + "\n"
                )
        self.cases, self.cpu, self.wall = [], 0.0, 0.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what an earlier run wrote down; note what there is."""
    if not hasattr(config, "workerinput"):
        (BUILD / "nodes.json").write_text(json.dumps([item.nodeid for item in items]))
    done = {node for record in read(BUILD / "map.jsonl") for node in record["nodes"]}
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Record where tests run."""
    if hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Recorder())


# ---- the runs


def read(path: Path) -> list[Any]:
    """Return the lines of a file; one that was being written when the run stopped is left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


class Map:
    """The test functions that run a line, their cases, and their seconds per case."""

    def __init__(self) -> None:
        there = set(json.loads((BUILD / "nodes.json").read_text()))
        seconds, self.cases = Counter[str](), defaultdict[str, list[str]](list)
        self.lines = defaultdict[str, dict[int, set[str]]](lambda: defaultdict(set))
        for record in read(BUILD / "map.jsonl"):
            test, nodes = record["test"], [node for node in record["nodes"] if node in there]
            self.cases[test] += nodes
            # The work of child processes that go on is in neither sum; waiting for them is about as long.
            seconds[test] += max(record["cpu"], record["wall"] / 2)
            for file, lines in record["lines"].items() if nodes else ():
                for line in lines:
                    self.lines[file][line].add(test)
        self.seconds = {test: seconds[test] / max(1, len(cases)) for test, cases in self.cases.items()}

    def functions(self, change: Change) -> set[str]:
        """Return the functions that run a change; for one that children or imports run, those of its folder."""
        for lines in change.ran:
            if found := set[str]().union(*(self.lines[change.file].get(line, ()) for line in lines)):
                return found
        folder = f"tests/{change.file.split('/')[0]}/"
        is_known = folder != "tests/parallel/" and len(change.ran[-1]) == 1
        return set() if is_known else {test for test in self.cases if test.startswith(folder)}

    def rounds(self, change: Change) -> Iterator[list[str]]:
        """Yield what is to run, one list after the other."""
        stem, folder = Path(change.file).stem, f"tests/{change.file.split('/')[0]}/"
        functions = self.functions(change)
        order = sorted(functions, key=lambda one: (stem not in one, folder not in one, self.seconds[one]))
        turns = max((len(self.cases[one]) for one in order), default=0)
        left = [
            (one, self.cases[one][turn])
            for turn in range(turns)
            for one in order
            if turn < len(self.cases[one])
        ]
        for seconds, most in ROUNDS:
            chosen, rest, files = list[str](), list[tuple[str, str]](), set[str]()
            for one, case in left:
                file = one.partition("::")[0]
                if self.seconds[one] <= seconds and (file in files or len(files) < most):
                    seconds -= self.seconds[one]
                    chosen.append(case)
                    files.add(file)
                else:
                    rest.append((one, case))
            left = rest
            yield chosen


def play(copy: Path, cases: list[str], *options: str) -> tuple[int, list[str]]:
    """Run tests in a copy; return the exit status and those that failed."""
    listed = copy.with_suffix(".txt")
    listed.write_text("\n".join(cases))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        *options,
        f"@{listed}",
    ]
    surroundings = {"PYTHONPATH": f"{copy}/src", "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
    surroundings |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with copy.with_suffix(".log").open("w+") as log:
        process = subprocess.Popen(command, cwd=copy, env=os.environ | surroundings, stdout=log, stderr=log)
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (CPU, CPU))
        try:
            status = process.wait(WALL)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        log.seek(0)
        found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log.read(), re.MULTILINE)
    return status, [*dict.fromkeys(found)]


def attempt(change: Change, covering: Map, copy: Path) -> dict[str, Any]:
    """Make a change in a copy of the project, run its tests until one fails, and take it back."""
    target, original, start = copy / "src" / "anybatch" / change.file, SOURCE / change.file, time.monotonic()
    source = original.read_bytes()
    target.write_bytes(source[: change.begin] + change.text.encode() + source[change.end :])
    state, by, ran = "survived", list[str](), 0
    for cases in covering.rounds(change):
        status, by = play(copy, cases, "-x") if cases else (0, [])
        ran += len(cases)
        if status:
            state = "timed out" if status < 0 else "killed" if status in (1, 2) and by else "broken"
            break
    shutil.copy2(original, target)  # with its time, so that it is not compiled again
    every = sum(len(covering.cases[one]) for one in covering.functions(change))
    before = source[change.begin : change.end].decode()
    return {
        "change": change.name, "file": change.file, "line": change.line, "kind": change.kind, "before": before,
        "state": state, "by": by, "ran": ran, "of": every, "wall": round(time.monotonic() - start, 1),
    }  # fmt: skip


def copied(number: int) -> Path:
    """Return a copy of the project's files."""
    copy = BUILD / f"copy{number}"
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    shutil.rmtree(copy, ignore_errors=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def main() -> int:
    """Run the changes drawn by a seed that have no result yet, and print the share that was noticed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=53)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--results", default="", help="name of the file of results; the seed when left out")
    parser.add_argument("--map", action="store_true", help="only write which tests run which lines")
    asked = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    options = ["-n", "2", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "tests.mutants"]
    if subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, check=False).returncode not in (
        0,
        5,
    ):
        print("mutants: some tests fail without a change, see above", file=sys.stderr)
    if asked.map:
        return 0
    covering = Map()
    drawn = [one for path in sorted(SOURCE.rglob("*.py")) for one in changes(path)]
    random.Random(asked.seed).shuffle(drawn)
    uncovered = sorted({(one.file, one.line) for one in drawn if not covering.functions(one)})
    (BUILD / "uncovered.txt").write_text("".join(f"{file}:{line}\n" for file, line in uncovered))
    drawn = [one for one in drawn if covering.functions(one)][: asked.count]
    path = BUILD / f"{asked.results or asked.seed}.jsonl"
    known = {one["change"] for one in read(path)}
    copies = Queue[Path]()
    for number in range(2):
        copies.put(copied(number))

    def work(change: Change) -> None:
        copy = copies.get()
        result = attempt(change, covering, copy)
        copies.put(copy)
        with path.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{result['state']:9} {change.name} {' '.join(result['by'])}"[:160], flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, [one for one in drawn if one.name not in known]))
    results = [one for one in read(path) if one["change"] in {change.name for change in drawn}]
    _, unsound = play(copies.get(), [*dict.fromkeys(node for one in results for node in one["by"])])
    states = Counter("unsound" if {*one["by"]} & {*unsound} else one["state"] for one in results)
    for one in results:
        if one["state"] == "survived":
            print(
                f"survived: src/anybatch/{one['change']} was {one['before']!r}, {one['ran']} of {one['of']} cases"
            )
    print(*(f"fails without a change: {node}" for node in unsound), sep="\n")
    noticed = states["killed"] + states["timed out"]
    print(
        f"seed {asked.seed}: noticed {noticed} of {noticed + states['survived']}; {dict(states)}, "
        f"{len(uncovered)} lines that no test runs are in {BUILD}/uncovered.txt"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
