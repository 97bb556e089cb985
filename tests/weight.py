"""The weight of the code: its syntax nodes, of which src may have no more than `weight.json` says.

`python -m tests.weight` prints a table and lowers the number in the file if src is lighter; `--check` writes
nothing. Docstrings, comments and line breaks weigh nothing.
"""

import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = ROOT / "tests/weight.json"
WEIGHTLESS = ast.expr_context | ast.operator | ast.unaryop | ast.cmpop | ast.boolop
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def weigh(text: str) -> tuple[int, int, int]:
    """Return nodes, statements and lines of a source.

    >>> weigh("def f():\\n    return 1")
    (5, 2, 2)
    >>> weigh("def f():\\n    '''Return 1.'''\\n    return (  # one\\n        1\\n    )")[:2]
    (5, 2)
    """
    nodes = [node for node in ast.walk(ast.parse(text)) if not isinstance(node, WEIGHTLESS)]
    docstrings = sum(isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None for node in nodes)
    statements = sum(isinstance(node, ast.stmt) for node in nodes)
    return len(nodes) - 2 * docstrings, statements - docstrings, len(text.splitlines())


def weight_of(folder: Path) -> list[int]:
    texts = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
    return [sum(column) for column in zip((0, 0, 0), *map(weigh, texts), strict=True)]


def excess(nodes: int, most: int) -> str:
    """Return what is wrong with this weight of src; "" if nothing is.

    >>> excess(7, 7)
    ''
    >>> excess(9, 7)[:59]
    'Expected src to weigh at most 7 nodes, got 9, which is 2 mo'
    """
    if nodes <= most:
        return ""
    return (
        f"Expected src to weigh at most {most:,} nodes, got {nodes:,}, which is {nodes - most:,} more. "
        "Simplify src elsewhere by as much. Or write the new number into tests/weight.json by hand, and a "
        "line into LOG.md that names what was bought with it."
    )


def main(arguments: Sequence[str]) -> int:
    packages = sorted(path.parent for path in (ROOT / "src/anybatch").glob("*/__init__.py"))
    print(f"{'':24}{'nodes':>10}{'statements':>12}{'lines':>10}")
    for folder in (*packages, ROOT / "src", ROOT / "tests", ROOT / "benchmarks"):
        print(f"{folder.relative_to(ROOT)!s:24}" + "{:10,}{:12,}{:10,}".format(*weight_of(folder)))
    nodes, most = weight_of(ROOT / "src")[0], json.loads(LIMIT.read_text(encoding="utf-8"))["src"]
    if said := excess(nodes, most):
        print(said, file=sys.stderr)
    elif nodes < most and "--check" not in arguments:
        LIMIT.write_text(json.dumps({"src": nodes}) + "\n", encoding="utf-8")
        print(f"tests/weight.json: src {most:,} -> {nodes:,}")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
