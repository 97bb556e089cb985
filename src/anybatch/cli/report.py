"""`anybatch report`: a run, or several over one another, as one page of HTML, written from the logs."""

import argparse
from pathlib import Path
from typing import Any

from anybatch.core import DataError, format_bytes
from anybatch.observe import report_page
from anybatch.train import write_whole


def report(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Run `anybatch report`: write the page of a run, or of several."""
    first, *others = options.folders
    page = report_page(first, *others).encode()
    path = Path(
        options.out or (Path(first).parent / "compare.html" if others else Path(first, "report.html"))
    )
    try:
        write_whole(path, lambda file: file.write_bytes(page))
    except OSError as error:
        raise DataError(
            f"{path}: expected a file that can be written, got: {error.strerror}. Name another with --out."
        ) from None
    return {"report": str(path), "bytes": len(page)}, f"report      {path}  ({format_bytes(len(page))})"
