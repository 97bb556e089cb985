"""`make mutants`: small changes of `src`, drawn at random, that the tests of the changed line have to notice.

1. The suite runs once with this file as a pytest plugin, which writes the lines that each test function runs.
2. Each change is made in a copy of the project, and the tests of its line run there until one fails: first
   the file of the same name, then one case of each function, those of the same folder and quick ones first.
3. The tests that failed run once on an unchanged copy; one that fails there too is no proof, and is named.

Everything is in build/mutants, in a folder for the state of `src`; a stopped run goes on. Lines that only
child processes run have no tests of their own: those of `tests/parallel` run for them.
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
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
CPU, WALL = 300, 1200  # seconds after which a change that runs for ever is ended
SWAPS = (
    {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
    | {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.In: ("in", "not in")}
    | {ast.IsNot: (r"is\s+not", "is"), ast.NotIn: (r"not\s+in", "in")}
    | {ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "/"), ast.Div: ("/", "*")}
    | {ast.And: (r"\band\b", "or"), ast.Or: (r"\bor\b", "and")}
)


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
    source, file, starts = path.read_bytes(), path.relative_to(SOURCE).as_posix(), [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def first(node: Any) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def last(node: Any) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset

    def visit(node: Any, ran: tuple[range, ...], within: bool) -> Iterator[Change]:
        if within and hasattr(node, "lineno"):
            own = (range(node.lineno, node.lineno + 1),)
            ran = own if isinstance(node, ast.stmt) else own + ran[-1:]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            # Defaults and fields run at import: the lines of their function or class tell.
            ran = (range(node.body[0].lineno, node.end_lineno + 1), *ran)

        def change(kind: str, text: str, begin: int | None = None, end: int | None = None) -> Change:
            return Change(file, node.lineno, kind, begin or first(node), end or last(node), text, ran)

        def swaps(kind: str, operators: list[Any], operands: list[Any]) -> Iterator[Change]:
            for operator, left, right in zip(operators, operands, operands[1:], strict=False):
                pattern, text = SWAPS.get(type(operator), ("(?!)", ""))
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
                yield from swaps("compared", node.ops, [node.left, *node.comparators])
            case ast.BinOp() if not any(is_text(one) for one in (node.left, node.right)):
                yield from swaps("sign", [node.op], [node.left, node.right])
            case ast.BoolOp():
                yield from swaps("and or", [node.op] * len(node.values), node.values)
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
        if (name := function_of(item.nodeid)) != self.name:
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
        if self.cases:
            data = self.coverage.get_data()
            data.set_query_context(self.name)
            lines = {
                Path(one).relative_to(SOURCE).as_posix(): found
                for one in data.measured_files()
                if (found := data.lines(one))
            }
            record = {"test": self.name, "nodes": self.cases, "cpu": self.cpu, "wall": self.wall}
            append(BUILD / "map.jsonl", record | {"lines": lines})
        self.cases, self.cpu, self.wall = [], 0.0, 0.0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Note what there is, once; leave out what an earlier run wrote down."""
    if getattr(config, "workerinput", {}).get("workerid") == "gw0":
        (BUILD / "nodes.json").write_text(json.dumps([item.nodeid for item in items]))
    done = {node for record in read(BUILD / "map.jsonl") for node in record["nodes"]}
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_sessionstart(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Recorder())


# ---- the runs


def function_of(node: str) -> str:
    return node.partition("[")[0]


def append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; one that was being written when the run stopped is left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


class Map:
    """The test functions that run a line, their cases, and their seconds per case."""

    def __init__(self) -> None:
        there = set(json.loads((BUILD / "nodes.json").read_text()))
        seconds, self.cases = Counter[str](), defaultdict[str, list[str]](list)
        self.lines = defaultdict[tuple[str, int], set[str]](set)
        for record in read(BUILD / "map.jsonl"):
            nodes = [node for node in record["nodes"] if node in there]
            self.cases[record["test"]] += nodes
            # Child processes that go on are in neither sum; the wait for them tells.
            seconds[record["test"]] += max(record["cpu"], record["wall"] / 4)
            for file, lines in record["lines"].items() if nodes else ():
                for line in lines:
                    self.lines[file, line].add(record["test"])
        self.seconds = {test: seconds[test] / max(1, len(cases)) for test, cases in self.cases.items()}

    def functions(self, change: Change) -> set[str]:
        """Return the functions that run a change, or those of its folder if children or imports run it."""
        for lines in change.ran:
            if found := set[str]().union(*(self.lines.get((change.file, line), ()) for line in lines)):
                return found
        folder = f"tests/{change.file.split('/')[0]}/"
        is_known = folder != "tests/parallel/" and len(change.ran[-1]) == 1
        return set() if is_known else {test for test in self.cases if test.startswith(folder)}

    def rounds(self, change: Change) -> Iterator[list[str]]:
        """Yield the cases that are to run, one list after the other."""
        stem, folder = Path(change.file).stem, f"tests/{change.file.split('/')[0]}/"
        order = [
            (stem not in one, folder not in one, self.seconds[one], one) for one in self.functions(change)
        ]
        cases = [(key[0], turn, key, case) for key in order for turn, case in enumerate(self.cases[key[-1]])]
        left = [case for *_, case in sorted(cases)]
        for seconds, most in ROUNDS:
            chosen, files = dict[str, None](), set[str]()
            for case in left:
                file, cost = case.partition("::")[0], self.seconds[function_of(case)]
                if seconds > 0 and (file in files or len(files) < most):
                    seconds -= cost
                    chosen[case] = None
                    files.add(file)
            left = [case for case in left if case not in chosen]
            yield [*chosen]


def play(copy: Path, cases: list[str], *options: str) -> tuple[int, list[str]]:
    """Run tests in a copy; return the exit status and those that failed."""
    listed = copy.with_suffix(".txt")
    listed.write_text("\n".join(cases))
    command = [*PYTEST, "-n", "0", *options, f"@{listed}"]
    surroundings = {"PYTHONPATH": f"{copy}/src", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    surroundings |= {"OMP_NUM_THREADS": "1", "CI": "1"}  # CI: hypothesis draws the same cases each time
    with copy.with_suffix(".log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=copy, env=os.environ | surroundings, stdout=log, stderr=log, start_new_session=True
        )
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (CPU, CPU))
        try:
            status = process.wait(WALL)
        except subprocess.TimeoutExpired:
            status = -signal.SIGKILL
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its child processes, too
            process.wait()
        log.seek(0)
        found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", log.read(), re.MULTILINE)
    return status, [*dict.fromkeys(found)]


def attempt(change: Change, covering: Map, copy: Path) -> dict[str, Any]:
    """Make a change in a copy of the project, run its tests until one fails, and take it back."""
    target, original = copy / "src" / "anybatch" / change.file, SOURCE / change.file
    source, start = original.read_bytes(), time.monotonic()
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
    before, seconds = source[change.begin : change.end].decode(), round(time.monotonic() - start, 1)
    result = {"change": change.name, "was": before, "state": state, "by": by, "ran": ran, "of": every}
    return result | {"seconds": seconds}


def copied(number: int) -> Path:
    """Return a copy of the project's files."""
    copy = BUILD / f"copy{number}"
    shutil.rmtree(copy, ignore_errors=True)
    left_out = ".git", ".venv*", "build", "runs", "__pycache__", ".*_cache", ".hypothesis"
    return shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*left_out))


def main() -> int:
    """Run the changes drawn by a seed that have no result yet, and print the share that was noticed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=53)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--results", help="name of the file of results; the seed when left out")
    asked = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    command = [*PYTEST, "-n", "2", "-m", "not slow", "-p", "tests.mutants"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode not in (0, 5):
        print("mutants: tests fail without a change, see above")
    covering = Map()
    drawn = [one for path in sorted(SOURCE.rglob("*.py")) for one in changes(path)]
    random.Random(asked.seed).shuffle(drawn)
    drawn = [one for one in drawn if covering.functions(one)][: asked.count]
    path = BUILD / f"{asked.results or asked.seed}.jsonl"
    known, copies = {one["change"] for one in read(path)}, Queue[Path]()
    for number in range(2):
        copies.put(copied(number))

    def work(change: Change) -> None:
        copy = copies.get()
        result = attempt(change, covering, copy)
        copies.put(copy)
        append(path, result)
        print(f"{result['state']:9} {change.name} {' '.join(result['by'])}"[:160], flush=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, [one for one in drawn if one.name not in known]))
    names = {one.name for one in drawn}
    results = [one for one in read(path) if one["change"] in names]
    killers = [*dict.fromkeys(node for one in results for node in one["by"])]
    _, unsound = play(copies.get(), killers) if killers else (0, [])
    states = Counter("unsound" if {*one["by"]} & {*unsound} else one["state"] for one in results)
    for one in results:
        if one["state"] == "survived":
            print(f"survived: {one['change']} was {one['was']!r}, {one['ran']} of {one['of']} cases ran")
    print(*(f"fails without a change: {node}" for node in unsound), sep="\n")
    noticed = states["killed"] + states["timed out"]
    print(f"seed {asked.seed}: noticed {noticed} of {noticed + states['survived']}; {dict(states)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
