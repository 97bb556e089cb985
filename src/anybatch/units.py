"""Bytes, seconds and counts: printed so that a person reads them at a glance."""

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float) -> str:
    """Print a number of bytes with a binary prefix, to one part in a hundred or better.

    Example:
        >>> format_bytes(512), format_bytes(20 * 2**30)
        ('512 B', '20.0 GiB')
    """
    size, unit = float(num_bytes), 0
    while abs(size) >= 1023.5 and unit < len(_BINARY) - 1:  # what would be printed as 1024
        size, unit = size / 1024, unit + 1
    digits = 0 if unit == 0 or abs(size) >= 99.95 else 1
    return f"{size:.{digits}f} {_BINARY[unit]}"


def format_seconds(seconds: float) -> str:
    """Print a duration: `0.52 s`, `3 min 20 s`, `2 h 05 min`.

    Example:
        >>> format_seconds(0.52), format_seconds(200), format_seconds(7500)
        ('0.52 s', '3 min 20 s', '2 h 05 min')
    """
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_count(number: float) -> str:
    """Print a whole number with separators, as in `60,000`.

    Example:
        >>> format_count(60000)
        '60,000'
    """
    return f"{number:,.0f}"
