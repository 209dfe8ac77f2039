"""Datasets that go by a name: torchvision's and Hugging Face's.

    torchvision:CIFAR10           any classification dataset of torchvision.datasets
    torchvision:CIFAR10:folder    the same, in a folder of yours
    hf:owner/name                 from the hub; hf:owner/name:config for one of several configurations
    hf:/path/to/folder            saved with `save_to_disk`

Keys are "split/number" (train/00000012), because such samples have no path. Images of torchvision are taken as Pillow
images, those of Hugging Face as the encoded bytes they are stored as.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from everytoken.errors import did_you_mean, need
from everytoken_lab.data.datasets import DataError, DataSet, ImageSet
from everytoken_lab.data.decode import ImageError, Picture

# what the splits are called elsewhere, in the order of preference
_TORCHVISION_SPLITS = {
    "train": ("train", "trainval", "train-standard"),
    "val": ("val", "valid", "test"),
    "test": ("test",),
}
_HF_SPLITS = {
    "train": ("train", "training"),
    "val": ("validation", "val", "valid", "dev", "test"),
    "test": ("test",),
}
_DEFAULT_ROOT = "~/.cache/everytoken/datasets"


def open_named(spec: str, split: str, download: bool) -> DataSet:
    """Open one split ("train", "val" or "test") of a dataset by its name."""
    kind, _, name = spec.partition(":")
    if split not in _TORCHVISION_SPLITS:
        raise DataError(f"{spec}: the split {split!r} is none of {', '.join(_TORCHVISION_SPLITS)}.")
    if kind == "hf":
        return _open_hf(name, split)
    name, _, folder = name.partition(":")
    return _open_torchvision(name, split, Path(folder or _DEFAULT_ROOT).expanduser(), download)


class NumberedSet(ImageSet):
    """Samples of a split that are known by their numbers."""

    def __init__(self, name: str, split: str, data: Any) -> None:
        self.name, self.split, self.data = name, split, data

    def key(self, i: int) -> str:
        """split/number"""
        return f"{self.split}/{i:08d}"

    def where(self, i: int) -> str:
        """The dataset and the number."""
        return f"{self.name}, {self.split} image {i}"


class TorchvisionSet(NumberedSet):
    """A torchvision dataset."""

    def __init__(self, name: str, split: str, data: Any) -> None:
        super().__init__(f"torchvision:{name}", split, data)
        self.labels = np.asarray(_torchvision_labels(data), dtype=np.int64)
        self.class_names = _class_names(getattr(data, "classes", None), self.labels)

    def image(self, i: int) -> Image.Image:
        """Sample i."""
        try:
            image = self.data[i][0]
        except (OSError, SyntaxError, ValueError) as error:
            raise ImageError(f"{self.where(i)}: cannot be read ({error}).") from error
        if not isinstance(image, Image.Image):
            raise DataError(f"{self.name} gives {type(image).__name__} instead of images; it cannot be used here.")
        return image


def _open_torchvision(name: str, split: str, root: Path, download: bool) -> DataSet:
    from torchvision import datasets

    names = {n.lower(): n for n in datasets.__all__ if inspect.isclass(getattr(datasets, n, None))}
    if name.lower() not in names:
        raise DataError(f"torchvision has no dataset {name!r}.{did_you_mean(name, names.values())}")
    name = names[name.lower()]
    make = getattr(datasets, name)
    accepted = inspect.signature(make).parameters
    options: dict[str, Any] = {}
    if "root" in accepted:
        options["root"] = str(root)
    if "download" in accepted:
        options["download"] = download
        if download:
            root.mkdir(parents=True, exist_ok=True)
    if "train" in accepted:
        choices: list[dict[str, Any]] = [{"train": split == "train"}]
    elif "split" in accepted:
        choices = [{"split": spelling} for spelling in _TORCHVISION_SPLITS[split]]
    elif split == "train":
        choices = [{}]
    else:
        raise DataError(
            f"torchvision:{name} is not divided into splits; hold some images out with val_split, such as 0.1."
        )
    refusal: Exception | None = None
    for choice in choices:
        try:
            data = make(**options, **choice)
        except ValueError as error:  # no split of that name
            refusal = error
            continue
        except (RuntimeError, FileNotFoundError) as error:
            raise DataError(
                f"torchvision:{name} is not in {root}: {error}{'' if download else _ways(name, split, root)}"
            ) from error
        except Exception as error:  # wants other arguments, or its files are damaged: many kinds
            raise DataError(f"torchvision:{name} cannot be opened in {root} ({error}).") from error
        try:
            return TorchvisionSet(name, str(choice.get("split", split)), data)
        except (TypeError, ValueError, AttributeError) as error:
            raise DataError(f"torchvision:{name} has no class for each image, so it cannot be used here.") from error
    raise DataError(f"torchvision:{name} has no images for {split}: {refusal}")


def _ways(name: str, split: str, root: Path) -> str:
    """How to get a dataset that is not there."""
    spec = f"torchvision:{name}" if root == Path(_DEFAULT_ROOT).expanduser() else f"torchvision:{name}:{root}"
    code = f"from everytoken.data import open_dataset; open_dataset({spec!r}, {split!r}, download=True)"
    return (
        f"\nIf you have it, name the folder that holds it: torchvision:{name}:FOLDER. To download it, once:\n"
        f'  python -c "{code}"'
    )


def _torchvision_labels(data: Any) -> Sequence[int] | np.ndarray:
    for attribute in ("targets", "labels", "_labels", "y"):
        values = getattr(data, attribute, None)
        if values is not None and len(values) == len(data):
            return np.asarray(values)
    for attribute in ("samples", "_samples", "imgs"):
        pairs = getattr(data, attribute, None)
        if pairs is not None and len(pairs) == len(data):
            return [int(pair[1]) for pair in pairs]
    return [int(data[i][1]) for i in range(len(data))]  # decodes everything once; the last resort


def _class_names(given: Iterable[Any] | None, labels: np.ndarray) -> list[str]:
    names = [", ".join(name) if isinstance(name, (tuple, list)) else str(name) for name in given or ()]
    top = int(labels.max(initial=-1))
    return names if len(names) > top else [str(k) for k in range(top + 1)]


class HuggingFaceSet(NumberedSet):
    """One split of a Hugging Face dataset, with an image column and a label column."""

    def __init__(self, name: str, split: str, data: Any, library: Any) -> None:
        super().__init__(f"hf:{name}", split, data)
        kinds = {column: type(feature).__name__ for column, feature in data.features.items()}
        self.image_column = self._column(kinds, "Image", ("image", "img", "jpg", "png"))
        label_column = self._column(kinds, "ClassLabel", ("label", "labels", "fine_label", "cls"))
        self.labels = np.asarray(data[label_column], dtype=np.int64)
        self.class_names = _class_names(getattr(data.features[label_column], "names", None), self.labels)
        if kinds[self.image_column] == "Image":  # keep the bytes as they are stored
            self.data = data.cast_column(self.image_column, library.Image(decode=False))

    def _column(self, kinds: dict[str, str], kind: str, usual: tuple[str, ...]) -> str:
        columns = [column for column, value in kinds.items() if value == kind] or [c for c in usual if c in kinds]
        if not columns:
            raise DataError(f"{self.name} has no {kind} column; its columns are {', '.join(kinds)}.")
        return columns[0]

    def _stored(self, i: int) -> Any:
        value = self.data[int(i)][self.image_column]
        if isinstance(value, dict):
            return value["bytes"] if value.get("bytes") else Path(value["path"]).read_bytes()
        return value

    def open_bytes(self, i: int) -> bytes:
        """The stored file, or a PNG of a decoded image."""
        value = self._stored(i)
        return value if isinstance(value, bytes) else super().open_bytes(i)

    def image(self, i: int) -> Image.Image:
        """Sample i, decoded by the library."""
        value = self._stored(i)
        return value if isinstance(value, Image.Image) else Image.fromarray(np.asarray(value, dtype=np.uint8))

    def picture(self, i: int) -> Picture:
        """From the stored bytes if there are any."""
        if isinstance(self._stored(i), bytes):
            return DataSet.picture(self, i)
        return super().picture(i)


def _open_hf(name: str, split: str) -> DataSet:
    library = need("datasets", "hf", f"hf:{name}")
    folder = Path(name).expanduser()
    try:
        if folder.is_dir() and any((folder / n).exists() for n in ("dataset_dict.json", "dataset_info.json")):
            splits = library.load_from_disk(str(folder))
        else:
            owner_name, _, config = name.partition(":")
            splits = library.load_dataset(owner_name, config or None)
    except Exception as error:  # the library raises many kinds: network, unknown name, unknown configuration
        raise DataError(f"hf:{name} cannot be opened: {error}") from error
    if not hasattr(splits, "keys"):  # a single one
        if split != "train":
            raise DataError(f"hf:{name} is not divided into splits; hold some images out with val_split, such as 0.1.")
        return HuggingFaceSet(name, "train", splits, library)
    for spelling in _HF_SPLITS[split]:
        if spelling in splits.keys():  # noqa: SIM118
            return HuggingFaceSet(name, spelling, splits[spelling], library)
    raise DataError(
        f"hf:{name} has no images for {split}; its splits are {', '.join(splits.keys())}. Hold some images out with "
        "val_split, such as 0.1."
    )
