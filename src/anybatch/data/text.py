"""Text from a file or from Python's own sources: blocks of characters, and lines with labels."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from anybatch.core import DataError
from anybatch.data.dataset import unreadable

PYTHON = "python"  # the name of the text below, in the place of a path
MODULES = ("argparse", "difflib", "doctest", "inspect", "ipaddress", "mailbox", "tarfile", "typing")
LINES, ROWS = 4, 250  # lines of a row, rows of a module
HELD_OUT_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """A text as blocks of characters with next-character targets."""

    train: tuple[Tensor, Tensor]  # inputs and targets, int64 of shape (rows, block_size) each
    test: tuple[Tensor, Tensor]  # inputs and targets of the last tenth of the text
    vocabulary: str  # all characters of the text, sorted; a number is an index into it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lines:
    """Texts of one line each; every tenth is held out."""

    train: list[str]
    train_labels: list[int]  # the class of each text, an index into `classes`; all 0 without labels
    test: list[str]
    test_labels: list[int]
    classes: tuple[str, ...]  # names of the labels, sorted


def read_blocks(source: str, block_size: int) -> Blocks:
    """Read a text in UTF-8 as blocks of characters without overlap; the last tenth is held out.

    "python" are the sources of two modules of the standard library: 0.18 million characters that differ a
    little between versions of Python.
    """
    text = "\n".join(map(_source, MODULES[:2])) if source == PYTHON else _read(Path(source))
    vocabulary = sorted(set(text))
    places = {character: place for place, character in enumerate(vocabulary)}
    numbers = torch.tensor([places[character] for character in text])
    tenth = len(numbers) // 10
    if block_size < 1 or tenth <= block_size:
        raise DataError(
            f"{source}: expected a text of more than ten blocks of {block_size} characters, got "
            f"{len(numbers)} characters; choose a longer text or a block size from 1 to {max(1, tenth - 1)}"
        )
    parts = [_in_blocks(part, block_size) for part in (numbers[:-tenth], numbers[-tenth:])]
    return Blocks(train=parts[0], test=parts[1], vocabulary="".join(vocabulary))


def _in_blocks(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    whole = (len(numbers) - 1) // size * size
    return numbers[:whole].view(-1, size), numbers[1 : whole + 1].view(-1, size)


def read_lines(source: str, *, labelled: bool) -> Lines:
    """Read a text in UTF-8 as lines; every tenth line is held out.

    Lines are `label<TAB>text`; if not `labelled`, text before a tab is dropped. "python" are groups of four
    lines of eight modules of the standard library, whose names are the labels.
    """
    lines = _python_lines() if source == PYTHON else _read(Path(source)).splitlines()
    rows: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        label, tab, text = line.partition("\t")
        if not line.strip():
            continue
        if labelled and not (tab and label.strip() and text.strip()):
            raise DataError(
                f"{source}: expected lines of a label, a tab and a text, got {line[:40]!r} in line {number}; "
                "write label<TAB>text"
            )
        rows.append((label.strip() if labelled else "", text.strip() or label.strip()))
    if len(rows) < HELD_OUT_EVERY:
        raise DataError(
            f"{source}: expected at least {HELD_OUT_EVERY} lines with text, got {len(rows)}; add some"
        )
    classes = sorted({label for label, _ in rows})
    if labelled and len(classes) < 2:
        raise DataError(f"{source}: expected two labels or more, got only {classes[0]!r}; add another")
    test = rows[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del rows[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return Lines(
        train=[text for _, text in rows],
        train_labels=[classes.index(label) for label, _ in rows],
        test=[text for _, text in test],
        test_labels=[classes.index(label) for label, _ in test],
        classes=tuple(classes),
    )


def _python_lines() -> list[str]:
    found: list[str] = []
    for name in MODULES:
        lines = [" ".join(line.split()) for line in _source(name).splitlines() if line.strip()]
        starts = range(0, len(lines) - LINES + 1, LINES)[:ROWS]
        found += [f"{name}\t{' '.join(lines[start : start + LINES])}" for start in starts]
    return found


def _source(module: str) -> str:
    return _read(Path(sysconfig.get_path("stdlib"), f"{module}.py"))


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(path, error) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected text in UTF-8, got {error.reason}; convert it first") from None
    if not text.strip():
        raise DataError(f"{path}: expected a text, got {len(text)} characters, all blank; name another file")
    return text
