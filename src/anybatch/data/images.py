"""Folders of images, one for each class: decoded with Pillow, held in memory."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anybatch.core import DataError
from anybatch.data.dataset import DataSplit, normalised

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
TRAIN, TEST = "train", ("test", "val", "valid", "validation")
HELD_OUT_EVERY = 5  # images of each class, if there is no folder of test images


def has_images(folder: Path) -> bool:
    """Return True if a folder, or its folder `train`, has a folder of images for each class."""
    root = folder / TRAIN if (folder / TRAIN).is_dir() else folder
    return any(_images_of(child) for child in root.iterdir() if child.is_dir())


def read_images(folder: Path, image_size: int | None = None) -> DataSplit:
    """Read `CLASS/*.png` and the like, or `train/CLASS/...` and `test/CLASS/...` (or `val`).

    Without a test folder every fifth image of each class is held out. All images are decoded as RGB and held
    in memory: float32 of shape (rows, 3, size, size), each channel normalized, 12 bytes per pixel. With an
    `image_size` the shorter side is scaled, and the center is cropped; without it all have one size.
    """
    root = folder / TRAIN if (folder / TRAIN).is_dir() else folder
    held = [folder / name for name in TEST if root != folder and (folder / name).is_dir()][:1]
    found = {child.name: _images_of(child) for child in sorted(root.iterdir()) if child.is_dir()}
    classes = tuple(name for name, paths in found.items() if paths)
    train = [(path, label) for label, name in enumerate(classes) for path in found[name]]
    if held:
        test = [(path, label) for label, name in enumerate(classes) for path in _images_of(held[0] / name)]
        others = [child.name for child in sorted(held[0].iterdir()) if child.is_dir()]
        if extra := [name for name in others if name not in classes]:
            raise DataError(f"{held[0]}: expected the classes {list(classes)}, got also {extra}; move them")
    else:
        places = [place for name in classes for place in range(1, len(found[name]) + 1)]
        test = [row for row, place in zip(train, places, strict=True) if place % HELD_OUT_EVERY == 0]
        train = [row for row, place in zip(train, places, strict=True) if place % HELD_OUT_EVERY]
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


def _images_of(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)


def _decoded(paths: Sequence[Path], size: int | None) -> Tensor:
    try:
        pillow: Any = import_module("PIL.Image")
        fit: Any = import_module("PIL.ImageOps").fit
    except ImportError as error:
        raise DataError(
            f'expected Pillow, which decodes images, got: {error}; run: pip install "anybatch[images]"'
        ) from None
    images: list[Tensor] = []
    for path in paths:
        try:
            with pillow.open(path) as opened:
                image = opened.convert("RGB")
        # Pillow's errors for damaged files depend on the format.
        except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
            raise DataError(f"{path}: expected an image, got: {error}; repair or remove it") from None
        if size is not None:
            image = fit(image, (size, size), pillow.Resampling.BICUBIC)
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
        if images[-1].shape != images[0].shape:
            sizes = [f"{one.shape[2]} x {one.shape[1]}" for one in (images[0], images[-1])]
            raise DataError(
                f"{path}: expected images of one size, got {sizes[1]} where {paths[0].name} has {sizes[0]}; "
                "name a size that all are brought to, as with --image-size 64"
            )
    return torch.stack(images)
