"""Which images of a data set a model has not been trained on: the part that its run held out, for every task.

Data without a validation part is divided by the names of its images, so the part can be made again from what the run
folder says: `data` and `val_split` in config.yaml, and, for a relative path, the folder in which it was typed, in
environment.json. Weights inside a run folder belong to that run. Of other weights nothing can be known, and the user is
told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from everytoken.data.places import DEFAULT_VAL_SPLIT, named
from everytoken.errors import EverytokenError

NAMED = ("torchvision:", "hf:")
_PUBLISHED = ("timm:", "registry:")  # weights that were not trained on a folder of the user's


@dataclass(frozen=True)
class Origin:
    """The run that weights come from: its folder, and its options as config.yaml has them."""

    run: Path
    options: dict[str, Any]

    def places(self, name: str = "data") -> Iterator[Path]:
        """Where the path of an option may lead: from the folder it was typed in, those above the run, and this one."""
        text = str(self.options.get(name) or "")
        if text:
            for base in (*self._typed_in(), *self.run.parents, Path.cwd()):
                yield (base / Path(text).expanduser()).resolve()

    def _typed_in(self) -> list[Path]:
        try:
            starts = json.loads((self.run / "environment.json").read_text())
            return [Path(starts[-1]["folder"])]
        except (OSError, ValueError, LookupError, TypeError):
            return []  # a run of an older version

    def there(self, name: str = "data") -> Path | None:
        """The path of an option, where it is now; None if it is nowhere."""
        return next((path for path in self.places(name) if path.exists()), None)

    def names(self, given: str, name: str = "data", place: Callable[[Path], Path] = Path) -> bool | None:
        """Whether an option of the run means what is `given` here; None if that cannot be known.

        Args:
            place: the folder or file that counts of what a path names, for comparison.
        """
        own = str(self.options.get(name) or "")
        if own.startswith(NAMED) or given.startswith(NAMED):
            return own == given
        path, there = Path(given).expanduser().resolve(), self.there(name)
        if there is not None:
            return place(there) == place(path)
        return True if path in self.places(name) else None

    @property
    def val_split(self) -> float:
        """The part that is held out of data without a validation part."""
        return float(self.options.get("val_split") or DEFAULT_VAL_SPLIT)


def origin_of(source: str) -> Origin | None:
    """The run that a run folder, a checkpoint or a weights file belongs to; None if there is none."""
    path = Path(source).expanduser().resolve()
    folder = path if path.is_dir() else path.parent
    run = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    try:
        options = yaml.safe_load((run / "config.yaml").read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return Origin(run, options) if isinstance(options, dict) and options.get("data") else None


@dataclass(frozen=True)
class HeldOut:
    """What is known about models and a data set without a validation part.

    Attributes:
        share: the part of the data that the runs held out; 0 if they were not trained on it.
        trained: models that were trained on it. unknown: models of which that cannot be known.
    """

    share: float = 0.0
    trained: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def note(self, data: str, images: int) -> str:
        """What to say about the images that are used; "" if there is nothing to say."""
        if self.share:
            part = f"only the {images:,} images that it held out ({self.share:.0%}) are used here"
            return f"{self.trained[0]} was trained on {data}: {part}"
        if self.trained:
            return f"{self.trained[0]} was trained on {data}: these are its training images"
        if self.unknown and not named([Path(data).stem], "val"):
            return (
                f"all {images:,} images of {data} are used; it is not known what {self.unknown[0]} was trained on, so "
                "its training images may be among them"
            )
        return ""


def held_out(
    sources: Sequence[str],
    data: str,
    same: Callable[[Origin], bool | None] | None = None,
    share: Callable[[Origin], float] = lambda run: run.val_split,
) -> HeldOut:
    """What the runs of `sources` held out of `data`.

    Args:
        same: whether a run was trained on it; None if that cannot be known. Default: whether the paths are the same.
        share: the part of it that such a run held out; 0 if it had validation images of its own.
    """
    shares: dict[str, float] = {}
    unknown = []
    for source in sources:
        if source.startswith(_PUBLISHED):
            continue
        run = origin_of(source)
        trained = None if run is None else same(run) if same else run.names(data)
        if run is not None and trained:
            shares[source] = share(run)
        elif trained is None:
            unknown.append(source)
    if len(set(shares.values())) > 1:
        raise EverytokenError(
            f"{' and '.join(shares)} were trained on {data} and held out different parts of it "
            f"({' and '.join(f'{part:.0%}' for part in shares.values())}), so no images are new to both"
        )
    return HeldOut(next(iter(shares.values()), 0.0), tuple(shares), tuple(unknown))
