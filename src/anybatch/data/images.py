"""Folders of images, one for each class: decoded with Pillow, held in memory."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from anybatch.core import DataError
from anybatch.data.dataset import DataSplit, import_extra, normalised

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
TRAIN, TEST = "train", ("test", "val", "valid", "validation")
HELD_OUT_EVERY = 5  # images of each class, if there is no folder of test images


def has_images(folder: Path) -> bool:
    """Return True if a folder, or its folder `train`, has a folder of images for each class."""
    return any(map(_images_of, _root(folder).iterdir()))


def read_images(folder: Path, image_size: int | None = None) -> DataSplit:
    """Read `CLASS/*.png` and the like, or `train/CLASS/...` and `test/CLASS/...` (or `val`).

    Without a test folder every fifth image of each class is held out. All images are decoded as RGB and held
    in memory: float32 of shape (rows, 3, size, size), each channel normalized, 12 bytes per pixel. With an
    `image_size` the shorter side is scaled, and the center is cropped; without it all have one size.
    """
    root = _root(folder)
    held = next((folder / name for name in TEST if root != folder and (folder / name).is_dir()), None)
    found = {child.name: paths for child in sorted(root.iterdir()) if (paths := _images_of(child))}
    classes = tuple(found)
    train = [(path, label) for label, name in enumerate(classes) for path in found[name]]
    if held:
        found = {name: _images_of(held / name) for name in classes}
        others = [child.name for child in sorted(held.iterdir()) if child.is_dir()]
        if extra := [name for name in others if name not in classes]:
            raise DataError(f"{held}: expected the classes {list(classes)}, got also {extra}; move them")
    else:
        found = {name: paths[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY] for name, paths in found.items()}
        held_out = {path for paths in found.values() for path in paths}
        train = [row for row in train if row[0] not in held_out]
    test = [(path, label) for label, name in enumerate(classes) for path in found[name]]
    if len(classes) < 2 or not test:
        raise DataError(
            f"{folder}: expected folders of two classes or more, with images to test on, got "
            f"{len(classes)} classes, {len(train)} images to learn and {len(test)} to test on; add some"
        )
    images = _decoded([path for path, _ in (*train, *test)], image_size)
    labels = torch.tensor([label for _, label in (*train, *test)])
    split = len(train)
    return normalised(
        (images[:split], labels[:split]),
        (images[split:], labels[split:]),
        name=folder.resolve().name,
        classes=classes,
    )


def _root(folder: Path) -> Path:
    return folder / TRAIN if (folder / TRAIN).is_dir() else folder


def _images_of(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def _decoded(paths: Sequence[Path], size: int | None) -> Tensor:
    pillow, ops = (
        import_extra(name, "Pillow, which decodes images", "images") for name in ("PIL.Image", "PIL.ImageOps")
    )
    images: list[Tensor] = []
    for path in paths:
        try:
            with pillow.open(path) as opened:
                image = opened.convert("RGB")
        # Pillow's errors for damaged files depend on the format.
        except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
            raise DataError(f"{path}: expected an image, got: {error}; repair or remove it") from None
        if size is not None:
            image = ops.fit(image, (size, size), pillow.Resampling.BICUBIC)
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        if images[-1].shape != images[0].shape:
            sizes = [f"{one.shape[2]} x {one.shape[1]}" for one in (images[0], images[-1])]
            raise DataError(
                f"{path}: expected images of one size, got {sizes[1]} where {paths[0].name} has {sizes[0]}; "
                "name a size that all are brought to, as with --image-size 64"
            )
    return torch.stack(images)
