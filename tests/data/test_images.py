"""Folders of images: classes by name, one size, the same pixels; what is damaged is named."""

from pathlib import Path

import pytest
import torch

from anybatch.core.errors import DataError
from anybatch.data import load
from anybatch.data.dataset import normalise
from anybatch.data.images import read_images

pillow = pytest.importorskip("PIL.Image")


def put(folder: Path, count: int, size: tuple[int, int] = (6, 5)) -> torch.Tensor:
    """Images of a class, as bytes (count, 3, height, width)."""
    folder.mkdir(parents=True)
    width, height = size
    pixels = torch.randint(256, (count, height, width, 3), dtype=torch.uint8)
    for number, image in enumerate(pixels):
        pillow.fromarray(image.numpy()).save(folder / f"{number}.png")
    return pixels.permute(0, 3, 1, 2)


def test_every_fifth_image_of_a_class_is_held_out(tmp_path: Path) -> None:
    cats, dogs = put(tmp_path / "cat", 5), put(tmp_path / "dog", 6)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    split = load(tmp_path)
    train, test = normalise(torch.cat([cats[:4], dogs[:4], dogs[5:]]), torch.stack([cats[4], dogs[4]]))
    assert torch.equal(split.train.inputs, train)
    assert torch.equal(split.test.inputs, test)
    assert (split.train.classes, split.test.targets.tolist()) == (("cat", "dog"), [0, 1])
    assert split.train.targets.tolist() == [0] * 4 + [1] * 5


@pytest.mark.parametrize("held", ["test", "val"])
def test_folders_to_test_on_are_taken(tmp_path: Path, held: str) -> None:
    for part in ("train", held):
        for name in ("b", "a"):
            put(tmp_path / part / name, 2, size=(8, 6) if part == "train" else (5, 9))
    split = load(tmp_path, image_size=4)
    assert split.train.inputs.shape == split.test.inputs.shape == (4, 3, 4, 4)
    assert split.test.targets.tolist() == [0, 0, 1, 1]


def test_images_of_several_sizes_need_one(tmp_path: Path) -> None:
    put(tmp_path / "a", 5)
    put(tmp_path / "b", 5, size=(7, 5))
    with pytest.raises(DataError, match=r"images of one size, got 7 x 5 where 0.png has 6 x 5; .*image-size"):
        load(tmp_path)
    assert load(tmp_path, image_size=8).train.inputs.shape == (8, 3, 8, 8)


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "a", 5)
    with pytest.raises(DataError, match=r"two classes or more.*got 1 classes, 4 images to learn and 1 to"):
        read_images(tmp_path)
    put(tmp_path / "b", 5)
    whole = (tmp_path / "b" / "2.png").read_bytes()
    for damaged in (b"", b"no image", whole[: len(whole) // 2]):
        (tmp_path / "b" / "2.png").write_bytes(damaged)
        with pytest.raises(DataError, match=r"2\.png: expected an image"):
            load(tmp_path)
