"""The calendar of all that a training looks at now and then"""

_OFTEN = 256


def is_due(update: int, every: int = _OFTEN) -> bool:
    """Return True for updates 1, 2, 4 ... 256 and every 256th one after, and every so-many-th.

    Example:
        >>> [update for update in range(1, 1000) if is_due(update)]
        [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768]
    """
    return not (update % every and update % _OFTEN and update & update - 1)
