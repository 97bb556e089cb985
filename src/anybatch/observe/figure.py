"""Pictures written to files: the ending chooses the format, and a page needs nothing else."""

import html
import io
from pathlib import Path
from typing import Any

from anybatch.core import PlanError

FORMATS = (".png", ".svg", ".html", ".pdf")


def new_figure(width: float, height: float) -> Any:
    """An empty figure of matplotlib's."""
    try:
        from matplotlib.figure import Figure  # not pyplot: it keeps figures, and chooses a window system
    except ImportError as error:
        raise PlanError(
            f"Expected matplotlib for a picture, got {error}. Install it: pip install 'anybatch[plot]'."
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def checked(path: str | Path) -> Path:
    """The path of a picture, if its ending is one of `FORMATS` and its folder is there."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise PlanError(
            f"Expected a picture's name to end in one of {', '.join(FORMATS)}, got {path.name!r}. "
            "Give it one of these endings."
        )
    if not path.parent.is_dir():
        raise PlanError(
            f"Expected a folder for the picture, got {path.parent}, which does not exist. Make it."
        )
    return path


def save(figure: Any, path: Path, *, title: str, text: str) -> Path:
    """Write a figure to a path from `checked`; a page holds its title, and a text below the picture."""
    if path.suffix.lower() != ".html":
        figure.savefig(path, dpi=150)
        return path
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    svg = picture.getvalue()
    path.write_text(
        f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"{svg[svg.index('<svg') :]}\n<pre>{html.escape(text)}</pre>\n</html>\n",
        encoding="utf-8",
    )
    return path
