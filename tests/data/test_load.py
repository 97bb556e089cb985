"""A name or a folder is recognised by what it holds; anything else is refused with what was looked for."""

from pathlib import Path

import pytest
import sklearn  # noqa: F401  (here, because its first import sets environment variables)

from anybatch.core.errors import DataError
from anybatch.data.load import load
from tests.data.files import write_cifar10, write_mnist

LOOKED_FOR = (
    r"name a folder with MNIST in IDX form \(train-images.*CIFAR-10 in binary form \(data_batch_\*\.bin"
)


@pytest.mark.parametrize("form", [str, Path])
def test_folders_are_recognised(tmp_path: Path, form: type) -> None:
    mnist, cifar10 = tmp_path / "a", tmp_path / "b"
    for folder, write in ((mnist, write_mnist), (cifar10, write_cifar10)):
        folder.mkdir()
        write(folder)
        (folder / "README.md").touch()  # other files do not matter
    assert load(form(mnist)).train.name == "MNIST, training"
    assert load(form(cifar10)).train.name == "CIFAR-10, training"
    assert load("digits").test.name == "digits, held out"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ("nothing", "'digits' or a folder that can be read, got: No such file or directory"),
        ("file", "'digits' or a folder that can be read, got: Not a directory"),
        ("empty", "files of one data set, got 0 other files"),
        ("other", "files of one data set, got 1 other files"),
        ("both", "files of one data set, got MNIST in IDX form and CIFAR-10 in binary form"),
    ],
)
def test_what_holds_no_data_set_is_refused(tmp_path: Path, make: str, message: str) -> None:
    folder = tmp_path / "some-data"
    if make == "file":
        folder.touch()
    elif make != "nothing":
        folder.mkdir()
    if make == "other":
        (folder / "cats.zip").touch()
    if make == "both":
        write_mnist(folder)
        write_cifar10(folder)
    with pytest.raises(DataError, match=f"some-data: expected .*{message}.*{LOOKED_FOR}"):
        load(folder)
