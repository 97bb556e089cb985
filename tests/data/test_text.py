"""Text: blocks give back the text, each row knows its label, and what is no such text is refused."""

from pathlib import Path

import pytest

from anybatch.core.errors import DataError
from anybatch.data import read_blocks, read_lines

TEXT = "".join(chr(97 + n * n % 23) for n in range(1234))


def test_blocks_are_the_text_and_targets_one_further(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    blocks = read_blocks(str(tmp_path / "a.txt"), 10)
    assert blocks.vocabulary == "".join(sorted(set(TEXT)))
    train, test = TEXT[:-123], TEXT[-123:]
    for whole, (inputs, targets) in ((train, blocks.train), (test, blocks.test)):
        rows = (len(whole) - 1) // 10
        assert inputs.shape == targets.shape == (rows, 10)
        read = ["".join(blocks.vocabulary[i] for i in part.flatten()) for part in (inputs, targets)]
        assert read == [whole[: rows * 10], whole[1 : rows * 10 + 1]]


def test_every_tenth_line_is_held_out_with_its_label(tmp_path: Path) -> None:
    rows = [(f"label {n % 3}", f"text\tnumber {n}") for n in range(25)]
    (tmp_path / "a.txt").write_text("\n\n".join(f"{label}\t {text}" for label, text in rows))
    lines = read_lines(str(tmp_path / "a.txt"), labelled=True)
    assert lines.classes == ("label 0", "label 1", "label 2")
    assert [(lines.classes[n], t) for n, t in zip(lines.test_labels, lines.test, strict=True)] == rows[9::10]
    there = [(lines.classes[n], text) for n, text in zip(lines.train_labels, lines.train, strict=True)]
    assert there == [row for n, row in enumerate(rows) if n % 10 != 9]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "expected a readable file"),
        (b"", "got 0 characters"),
        (b" \n\t\n", "all blank"),
        (b"\xff\xfe\x00", "expected text in UTF-8"),
        (b"a\tb\n" * 9, "at least 10 lines with text, got 9"),
        (b"a\tb\n" * 12, "two labels or more, got only 'a'"),
        (b"a\tb\n" * 5 + b"c d\n", "got 'c d' in line 6; write label<TAB>text"),
        (b"a\tb\n" * 5 + b"\td\n", r"in line 6"),
        (b"a\tb\n" * 5 + b"c\t\n", r"in line 6"),
    ],
)
def test_what_is_no_labelled_text_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_lines(str(path), labelled=True)
    assert words in str(error.value)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("size", [-1, 0, 10, 2000])
def test_a_text_shorter_than_its_blocks_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.txt").write_text(TEXT[:100])
    told = f"ten blocks of {size} characters, got 100 .* block size from 1 to 9$"
    with pytest.raises(DataError, match=told):
        read_blocks(str(tmp_path / "a.txt"), size)
    assert len(read_blocks(str(tmp_path / "a.txt"), 9).test[0]) == 1
