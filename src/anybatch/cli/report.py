"""`anybatch report`: a run, or several over one another, as one page of HTML, written from the logs."""

import argparse
from pathlib import Path
from typing import Any

from anybatch.core import DataError, format_bytes
from anybatch.observe import report_page
from anybatch.train import checkpoint


def report(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run `anybatch report`: write the page of a run, or of several."""
    first, *others = options.folders
    page = report_page(first, *others).encode()
    default = Path(first).parent / "compare.html" if others else Path(first, "report.html")
    path = Path(options.out or default)
    checkpoint.write(path, lambda file: file.write_bytes(page), "Name another with --out.", DataError)
    return {"report": str(path), "bytes": len(page)}, f"report      {path}  ({format_bytes(len(page))})"
