"""torchvision's datasets: torchvision:CIFAR10, or torchvision:CIFAR10:FOLDER for files in a folder of yours.

Keys are "split/number" (train/00000012), because such samples have no path.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from everytoken.errors import DataError, did_you_mean
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.data.decode import ImageError, Picture

# what the splits are called there, in the order of preference
_SPLITS = {
    "train": ("train", "training", "trainval", "train-standard"),
    "val": ("validation", "val", "valid", "dev", "test"),
    "test": ("test",),
}
_DEFAULT_ROOT = "~/.cache/everytoken/datasets"


class TorchvisionSet(DataSet):
    """One split of a torchvision dataset: Pillow images, known by their numbers."""

    PER_IMAGE = ("labels", "numbers")

    def __init__(self, name: str, split: str, data: Any, labels: Any, class_names: Iterable[Any] | None) -> None:
        self.name, self.split, self.data, self.labels = name, split, data, np.asarray(labels, dtype=np.int64)
        names = [", ".join(name) if isinstance(name, (tuple, list)) else str(name) for name in class_names or ()]
        self.numbers = np.arange(len(self.labels))
        top = int(self.labels.max(initial=-1))
        self.class_names = names if len(names) > top else [str(k) for k in range(top + 1)]

    def key(self, i: int) -> str:
        return f"{self.split}/{self.numbers[i]:08d}"

    def where(self, i: int) -> str:
        return f"{self.name}, {self.split} image {self.numbers[i]}"

    def image(self, i: int) -> Image.Image:
        """Sample i."""
        try:
            image = self.data[int(self.numbers[i])][0]
        except (OSError, SyntaxError, ValueError) as error:
            raise ImageError(f"{self.where(i)}: cannot be read ({error}).") from error
        if not isinstance(image, Image.Image):
            raise DataError(f"{self.name} gives {type(image).__name__} instead of images; it cannot be used here.")
        return image

    def open_bytes(self, i: int) -> bytes:
        """The image as a PNG file (lossless)."""
        file = io.BytesIO()
        self.image(i).save(file, "PNG")
        return file.getvalue()

    def picture(self, i: int) -> Picture:
        """Sample i, without a detour through a file."""
        return Picture(self.image(i), self.where(i))


def open_named(spec: str, split: str) -> DataSet:
    """Open one split ("train", "val" or "test") of torchvision:NAME or torchvision:NAME:FOLDER."""
    from torchvision import datasets

    if split not in _SPLITS:
        raise DataError(f"{spec}: the split {split!r} is none of {', '.join(_SPLITS)}.")
    _, name, *folder = spec.split(":", 2)
    root = Path("".join(folder) or _DEFAULT_ROOT).expanduser()
    names = {n.lower(): n for n in datasets.__all__ if inspect.isclass(getattr(datasets, n, None))}
    if name.lower() not in names:
        raise DataError(f"torchvision has no dataset {name!r}.{did_you_mean(name, names.values())}")
    name = names[name.lower()]
    make = getattr(datasets, name)
    accepted = inspect.signature(make).parameters
    options = {"root": str(root)} if "root" in accepted else {}
    choices: list[dict[str, Any]] = [{}]
    if "train" in accepted:
        choices = [{"train": split == "train"}]
    elif "split" in accepted:
        choices = [{"split": spelling} for spelling in _SPLITS[split]]
    elif split != "train":
        raise DataError(f"torchvision:{name} is not divided into splits; hold images out with val_split, such as 0.1.")
    refusal: Exception | None = None
    for choice in choices:
        try:
            data = make(**options, **choice)
        except ValueError as error:  # no split of that name
            refusal = error
            continue
        except (RuntimeError, FileNotFoundError) as error:
            given = ", ".join(f"{key}={value!r}" for key, value in {**options, **choice, "download": True}.items())
            raise DataError(
                f"torchvision:{name} is not in {root}: {error}\n"
                f"If you have it, name the folder that holds it: torchvision:{name}:FOLDER. To download it, once:\n"
                f'  python -c "from torchvision.datasets import {name}; {name}({given})"'
            ) from error
        except Exception as error:  # wants other arguments, or its files are damaged: many kinds
            raise DataError(f"torchvision:{name} cannot be opened in {root} ({error}).") from error
        try:
            labels, classes = _labels(data), getattr(data, "classes", None)
            return TorchvisionSet(f"torchvision:{name}", str(choice.get("split", split)), data, labels, classes)
        except (TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise DataError(f"torchvision:{name} has no class for each image, so it cannot be used here.") from error
    raise DataError(f"torchvision:{name} has no images for {split}: {refusal}")


def _labels(data: Any) -> list[int]:
    for attribute in ("targets", "labels", "_labels", "y", "samples", "_samples", "imgs"):
        values = getattr(data, attribute, None)
        if values is not None and len(values) == len(data):
            return [int(value[1] if isinstance(value, (tuple, list)) else value) for value in values]
    return [int(data[i][1]) for i in range(len(data))]  # decodes everything once; the last resort
