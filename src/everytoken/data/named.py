"""Data sets that go by a name: torchvision's and Hugging Face's.

    torchvision:CIFAR10           any classification data set of torchvision.datasets
    torchvision:CIFAR10:folder    the same, in a folder of yours
    hf:owner/name                 from the hub; hf:owner/name:config for one of several configurations
    hf:/path/to/folder            saved with `save_to_disk`

Keys are "part/number" (train/00000012), because such samples have no path of their own. Images of torchvision are taken
as Pillow images, those of Hugging Face as the encoded bytes they are stored as.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from everytoken.data.decode import ImageError
from everytoken.data.sources import DataError, DataSet, ImageSet
from everytoken.errors import did_you_mean, need

# what the parts are called elsewhere, in the order of preference
_TORCHVISION_PARTS = {
    "train": ("train", "trainval", "train-standard"),
    "val": ("val", "valid", "test"),
    "test": ("test",),
}
_HF_PARTS = {
    "train": ("train", "training"),
    "val": ("validation", "val", "valid", "dev", "test"),
    "test": ("test",),
}
_DEFAULT_ROOT = "~/.cache/everytoken/datasets"


def open_named(spec: str, split: str, root: str | os.PathLike[str] | None, download: bool) -> DataSet:
    """Open one part ("train", "val" or "test") of a data set by its name."""
    kind, _, name = spec.partition(":")
    if split not in _TORCHVISION_PARTS:
        raise DataError(f"{spec}: the part {split!r} is none of {', '.join(_TORCHVISION_PARTS)}.")
    if kind == "hf":
        return _open_hf(name, split)
    name, _, folder = name.partition(":")
    return _open_torchvision(name, split, Path(folder or root or _DEFAULT_ROOT).expanduser(), download)


class TorchvisionSet(ImageSet):
    """A torchvision data set."""

    def __init__(self, name: str, part: str, data: Any) -> None:
        self.name, self.part, self.data = f"torchvision:{name}", part, data
        self.labels = np.asarray(_torchvision_labels(data), dtype=np.int64)
        self.class_names = _class_names(getattr(data, "classes", None), self.labels)

    def key(self, i: int) -> str:
        """part/number"""
        return f"{self.part}/{i:08d}"

    def where(self, i: int) -> str:
        """The data set and the number."""
        return f"{self.name}, {self.part} image {i}"

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

    known = {n.lower(): n for n in datasets.__all__ if inspect.isclass(getattr(datasets, n, None))}
    if name.lower() not in known:
        raise DataError(f"torchvision has no data set {name!r}.{did_you_mean(name, known.values())}")
    name = known[name.lower()]
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
        choices = [{"split": part} for part in _TORCHVISION_PARTS[split]]
    elif split == "train":
        choices = [{}]
    else:
        raise DataError(
            f"torchvision:{name} is not divided into parts; set some aside with val_split (--val-split 0.1)."
        )
    trouble: Exception | None = None
    for choice in choices:
        try:
            data = make(**options, **choice)
        except ValueError as error:  # no part of that name
            trouble = error
            continue
        except (RuntimeError, FileNotFoundError) as error:
            raise DataError(
                f"torchvision:{name} was not found in {root}: {error}{'' if download else _ways(name, split, root)}"
            ) from error
        return TorchvisionSet(name, str(choice.get("split", split)), data)
    raise DataError(f"torchvision:{name} has no part for {split}: {trouble}")


def _ways(name: str, split: str, root: Path) -> str:
    """How to get a data set that is not there."""
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


class HuggingFaceSet(ImageSet):
    """One split of a Hugging Face data set, with an image column and a label column."""

    def __init__(self, name: str, part: str, data: Any, library: Any) -> None:
        self.name, self.part = f"hf:{name}", part
        kinds = {column: type(feature).__name__ for column, feature in data.features.items()}
        self.image_column = self._column(kinds, "Image", ("image", "img", "jpg", "png"))
        self.label_column = self._column(kinds, "ClassLabel", ("label", "labels", "fine_label", "cls"))
        self.labels = np.asarray(data[self.label_column], dtype=np.int64)
        names = getattr(data.features[self.label_column], "names", None)
        self.class_names = _class_names(names, self.labels)
        if kinds[self.image_column] == "Image":  # keep the bytes as they are stored
            data = data.cast_column(self.image_column, library.Image(decode=False))
        self.data = data

    def _column(self, kinds: dict[str, str], kind: str, usual: tuple[str, ...]) -> str:
        found = [column for column, value in kinds.items() if value == kind] or [c for c in usual if c in kinds]
        if not found:
            raise DataError(f"{self.name} has no {kind} column; its columns are {', '.join(kinds)}.")
        return found[0]

    def key(self, i: int) -> str:
        """part/number"""
        return f"{self.part}/{i:08d}"

    def where(self, i: int) -> str:
        """The data set and the number."""
        return f"{self.name}, {self.part} image {i}"

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

    def picture(self, i: int, alpha: Any = "white") -> Any:
        """From the stored bytes if there are any."""
        value = self._stored(i)
        if isinstance(value, bytes):
            return DataSet.picture(self, i, alpha)
        return super().picture(i, alpha)


def _open_hf(name: str, split: str) -> DataSet:
    library = need("datasets", "hf", f"hf:{name}")
    folder = Path(name).expanduser()
    try:
        if folder.is_dir() and any((folder / n).exists() for n in ("dataset_dict.json", "dataset_info.json")):
            found = library.load_from_disk(str(folder))
        else:
            owner_name, _, config = name.partition(":")
            found = library.load_dataset(owner_name, config or None)
    except Exception as error:  # the library raises many kinds: network, unknown name, unknown configuration
        raise DataError(f"hf:{name} cannot be opened: {error}") from error
    if not hasattr(found, "keys"):  # a single split
        if split != "train":
            raise DataError(f"hf:{name} is not divided into parts; set some aside with val_split (--val-split 0.1).")
        return HuggingFaceSet(name, "train", found, library)
    for part in _HF_PARTS[split]:
        if part in found.keys():  # noqa: SIM118
            return HuggingFaceSet(name, part, found[part], library)
    raise DataError(f"hf:{name} has no part for {split}; its parts are {', '.join(found.keys())}. "
                    "Set some images aside with val_split (--val-split 0.1).")  # fmt: skip
