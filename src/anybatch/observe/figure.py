"""Pictures written to files; the ending of the name chooses the format."""

from pathlib import Path
from typing import Any

from anybatch.core import PlanError

FORMATS = (".png", ".svg", ".pdf")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of matplotlib; raise PlanError if it is not installed."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which keeps figures and opens a window system
    except ImportError as error:
        raise PlanError(
            f"Expected matplotlib for a picture, got {error}. Install it: pip install 'anybatch[plot]'."
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def checked(path: str | Path) -> Path:
    """Return the path of a picture; raise PlanError unless its ending is known and its folder exists."""
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


def save(figure: Any, path: Path) -> Path:
    """Write a figure to a path from `checked`."""
    figure.savefig(path, dpi=150)
    return path
