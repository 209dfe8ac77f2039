"""What the best weights of a run answer about its validation images, kept in the run folder for the next report.

The validation images are those of the training run: found from its configuration, `--val-split` included. What was
predicted is kept in RUN/report-predictions.npz with a note of the weights and images it belongs to, and is used again
when both are unchanged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from everytoken.data.datasets import DataSet
from everytoken.engine.accuracy import Predictions
from everytoken.engine.run_folder import Run

if TYPE_CHECKING:
    from everytoken.models.open import OpenModel

CACHE = "report-predictions.npz"


@dataclass(frozen=True)
class PredictedRun:
    """Predictions of one run on its validation images.

    Attributes:
        predictions: numbers in the classes of `class_names`.
        keys: of the images, by `predictions.index`.
        data: the images.
        skipped: unreadable images, key -> reason.
        weights: the file that was evaluated.
        loaded: its model, if it had to be opened for the predictions.
    """

    predictions: Predictions
    class_names: list[str]
    keys: list[str]
    data: DataSet
    skipped: dict[str, str]
    weights: Path
    loaded: OpenModel | None = None

    def model(self) -> OpenModel:
        """The model, opened once."""
        from everytoken.models.open import open_model

        return self.loaded or open_model(self.weights)

    def same_images(self, other: PredictedRun) -> bool:
        """Whether two runs answered the same images, in the same classes."""
        return (
            self.keys == other.keys
            and self.class_names == other.class_names
            and np.array_equal(self.predictions.index, other.predictions.index)
        )

    def confusion(self) -> np.ndarray:
        """[classes, classes] images of a row's class that were taken for the column's."""
        count, p = len(self.class_names), self.predictions
        return np.bincount(p.label * count + p.top[:, 0], minlength=count * count).reshape(count, count)


def validation_set(run: Run, data: str = "") -> DataSet:
    """The validation images of a run; `data`: where its images are now, if they have moved."""
    return splits(run, data)[1]


def splits(run: Run, data: str = "") -> tuple[DataSet, DataSet]:
    """Training and validation images of a run."""
    from everytoken.engine.options import TrainOptions
    from everytoken.engine.recipe import apply
    from everytoken.tasks.build import open_splits

    there = None if data else run.place()  # from whatever folder the run was started in
    data = data or (str(there) if there is not None else "")
    known = {k: v for k, v in run.config.items() if k in ("data", "val_split")}
    options = apply(TrainOptions(), known, f"{run.path}/config.yaml")
    if data:
        options = replace(options, data=data)
    train, val, _ = open_splits(options)
    return train, val


def predict_run(
    run: Run, device: str, data: str = "", workers: int = 0, tell: Callable[[int, int], None] = lambda done, total: None
) -> PredictedRun:
    """Evaluate the best weights of a run, or read what the last report found.

    Raises:
        EverytokenError: there are no weights or no images, or they do not fit; the message says which.
    """
    from everytoken.models.open import describe, find_weights, open_model

    images = validation_set(run, data)
    weights = find_weights(run.path)
    keys = list(images.keys())
    stamp = _stamp(weights, keys, images)
    about = describe(weights)
    known = Predictions.saved(run.path / CACHE, stamp)
    if known is not None and about is not None and about.class_names:
        predictions, skipped = known
        return PredictedRun(predictions, list(about.class_names), keys, images, skipped, weights)
    from everytoken.evaluation import evaluate

    loaded = open_model(weights)
    result = evaluate(loaded, images, device=device, workers=workers, on_bad_image="skip", progress=tell)
    with contextlib.suppress(OSError):  # a run folder that cannot be written is only slower next time
        result.predictions.save(run.path / CACHE, stamp, result.skipped)
    return PredictedRun(result.predictions, result.class_names, keys, images, result.skipped, weights, loaded)


def _stamp(weights: Path, keys: list[str], images: DataSet) -> str:
    """Changes when the weights or the images do."""
    with weights.open("rb") as file:
        content = hashlib.file_digest(file, "sha256")
    content.update(json.dumps([images.name, images.class_names, keys]).encode("utf-8", "surrogateescape"))
    content.update(images.labels.tobytes())
    return content.hexdigest()
