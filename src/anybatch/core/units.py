"""Bytes, seconds and counts as readable text."""

import html
import re
from collections.abc import Iterable

from anybatch.core.errors import PlanError

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float) -> str:
    """Format a number of bytes with a binary prefix, to one part in a hundred or better."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 1023.5 and unit < len(_BINARY) - 1:  # would be printed as 1024
        size, unit = size / 1024, unit + 1
    digits = 0 if unit == 0 or abs(size) >= 99.95 else 1
    return f"{size:.{digits}f} {_BINARY[unit]}"


def parse_bytes(text: str | int) -> int:
    """Parse a number of bytes above 0: "12GB" is 12 x 1000^3, "20 GiB" is 20 x 1024^3, an int is bytes."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGTP]i?)?B?\s*", str(text), re.IGNORECASE)
    if isinstance(text, str) and found is not None:
        number, prefix = float(found[1]), (found[2] or "").upper()
        base = 1024 if prefix.endswith("I") else 1000
        num_bytes = int(number * base ** "BKMGTP".index(prefix[:1] or "B"))
        if num_bytes > 0:
            return num_bytes
    raise PlanError(
        f"Expected a number of bytes above 0, got {text!r}. Write a whole number, one with a unit, as in "
        '"12GB" (1000^3) or "12GiB" (1024^3), or, for memory=, a share of the device, as in "80%".'
    )


def format_seconds(seconds: float) -> str:
    """Format a duration: `0.52 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, as in `1 row` and `2 rows`."""
    return f"{number} {noun}" + "s" * (number != 1)


def kind_of(value: object) -> str:
    """Return the name of a value's type for an error, as in `Tensor` and `the class SGD`."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def format_count(number: float) -> str:
    """Format a whole number with separators, as in `60,000`."""
    return f"{number:,.0f}"


def html_table(rows: Iterable[tuple[str, str]]) -> str:
    """Return rows of a name and a text as an escaped HTML table for notebooks."""
    style = "text-align: left; vertical-align: top; white-space: pre; font-family: monospace"
    lines = [
        f'<tr><th style="{style}">{html.escape(name)}</th><td style="{style}">{html.escape(text)}</td></tr>'
        for name, text in rows
    ]
    return f"<table>{''.join(lines)}</table>"
