"""Which images of a dataset a model has not been trained on: those that its run held out, for every task.

Data without validation images is divided by the names of its images, so the same images are found again from `data` and
`val_split` in the run's config.yaml. Weights inside a run folder belong to that run. Of other weights nothing can be
known, and the user is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everytoken.errors import EverytokenError
from everytoken_lab.data.datasets import DataError, DataSet, open_dataset
from everytoken_lab.data.labels import find_labels
from everytoken_lab.data.tree import NAMED, find_split, split_folder
from everytoken_lab.engine.run_folder import PUBLISHED, Run, run_of


@dataclass(frozen=True)
class HeldOut:
    """What is known about models and a dataset without validation images."""

    fraction: float  # of the data that the runs held out; 0 if they were not trained on it
    trained: str  # the first model that was trained on it
    unknown: str  # the first model of which that cannot be known

    def note(self, data: str, images: int) -> str:
        """What to say about the images that are used; "" if there is nothing to say."""
        if self.trained:
            only = f"only the {images:,} images that it held out ({self.fraction:.0%}) are used here"
            return f"{self.trained} was trained on {data}: {only if self.fraction else 'these are its training images'}"
        if self.unknown and not split_folder([Path(data).stem], "val"):
            return (
                f"all {images:,} images of {data} are used; it is not known what {self.unknown} was trained on, so its "
                "training images may be among them"
            )
        return ""


def held_out(
    sources: Sequence[str],
    data: str,
    same: Callable[[Run], bool | None] | None = None,
    fraction: Callable[[Run], float] = lambda run: run.val_split,
) -> HeldOut:
    """What the runs of `sources` held out of `data`.

    Args:
        same: whether a run was trained on it; None if that cannot be known. Default: whether the paths are the same.
        fraction: of it that such a run held out; 0 if it had validation images of its own.
    """
    fractions: dict[str, float] = {}
    unknown = ""
    for source in sources:
        if source.startswith(PUBLISHED):
            continue
        run = run_of(source)
        trained = None if run is None else same(run) if same else run.names(data)
        if run is not None and trained:
            fractions[source] = fraction(run)
        elif trained is None:
            unknown = unknown or source
    if len(set(fractions.values())) > 1:
        raise EverytokenError(f"{' and '.join(fractions)} held out different fractions of {data}")
    trained_on, held = next(iter(fractions.items()), ("", 0.0))
    return HeldOut(held, trained_on, unknown)


def open_part(sources: Sequence[str], data: str, split: str = "val", *, doubt: bool = True) -> tuple[DataSet, str]:
    """The images to evaluate models on (run folders, weights files, timm:NAME), and what to say about them.

    Of data without validation images, these are the images that the runs held out, if they were trained on it, else
    all. `doubt`: say it if it cannot be known whether they were trained on these images.
    """
    named = data.startswith(NAMED)
    if split == "test" and not named and find_split(data, split) is None:
        raise EverytokenError(f"{data} has no part for {split}. Make a folder {split}/ in it, or choose another split")
    if split != "val" or (not named and find_split(data, "val")):
        return open_dataset(data, split), ""
    if named:
        try:
            return open_dataset(data, "val"), ""
        except DataError:
            held = held_out(sources, data)
            if not held.fraction:
                raise
    else:
        held = held_out(sources, data, lambda run: run.names(data, part=_train_folder), _fraction)
    if held.fraction:
        dataset = open_dataset(data, "val", val_split=held.fraction)
        return dataset, held.note(data, len(dataset))
    if train := find_split(data, "train"):
        raise EverytokenError(
            f"{data} has no validation images, only {train.name}. Give the run folder of a model that held some of "
            "them out, other images, or split='train' for all of them"
        )
    dataset = open_dataset(data, "all")
    return dataset, held.note(data, len(dataset)) if held.trained or doubt else ""


def _fraction(run: Run) -> float:
    """What a run held out; 0 if its data has validation images."""
    there = run.place()
    return 0.0 if there is not None and find_split(str(there), "val") else run.val_split


def _train_folder(path: Path) -> Path:
    """Where training images come from: data with train/ and that train/ itself hold the same; a labels file."""
    if labels := find_labels(path):
        return labels
    try:
        train = find_split(str(path), "train")
    except DataError:
        train = None
    return train.folder.resolve() if train and train.folder else path
