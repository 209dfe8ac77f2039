"""What the best weights of a run say about its validation images, kept in the run folder for the next report.

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

import numpy as np

from everytoken.data.sources import DataSet
from everytoken.evaluation.accuracy import Predictions
from everytoken.evaluation.held_out import origin_of
from everytoken.evaluation.kept import keep, kept
from everytoken.reports.runs import Run

CACHE = "report-predictions.npz"


@dataclass(frozen=True)
class Predicted:
    """Predictions of one run on its validation images.

    Attributes:
        predictions: numbers in the classes of `class_names`.
        keys: of the images, by `predictions.index`.
        data: the images.
        skipped: unreadable images, key -> reason.
    """

    predictions: Predictions
    class_names: list[str]
    keys: list[str]
    data: DataSet
    skipped: dict[str, str]


def validation_set(run: Run, data: str = "") -> DataSet:
    """The validation images of a run; `data`: where its images are now, if they have moved."""
    return splits(run, data)[1]


def splits(run: Run, data: str = "") -> tuple[DataSet, DataSet]:
    """Training and validation images of a run."""
    from everytoken.engine.options import TrainOptions
    from everytoken.engine.recipe import apply
    from everytoken.tasks.build import open_splits

    origin = origin_of(str(run.path))
    there = origin.there() if origin is not None and not data else None  # from whatever folder the run was started in
    data = data or (str(there) if there is not None else "")
    known = {k: v for k, v in run.config.items() if k in ("data", "val_split")}
    options = apply(TrainOptions(), known, f"{run.path}/config.yaml")
    if data:
        options = replace(options, data=data)
    train, val, _ = open_splits(options)
    return train, val


def predict_run(
    run: Run, device: str, data: str = "", workers: int = 0, tell: Callable[[int, int], None] = lambda done, total: None
) -> Predicted:
    """Evaluate the best weights of a run, or read what the last report found.

    Raises:
        EverytokenError: there are no weights or no images, or they do not fit; the message says which.
    """
    from everytoken.models.load import describe, find_weights, load_model

    images = validation_set(run, data)
    weights = find_weights(run.path)
    keys = list(images.keys())
    stamp = _stamp(weights, keys, images)
    about = describe(weights)
    known = kept(run.path / CACHE, stamp)
    if known is not None and about is not None and about.class_names:
        found, skipped = known
        return Predicted(found, list(about.class_names), keys, images, skipped)
    from everytoken.evaluation.run import evaluate_on

    loaded = load_model(weights)
    result = evaluate_on(loaded, images, device=device, workers=workers, on_bad_image="skip", tell=tell)
    with contextlib.suppress(OSError):  # a run folder that cannot be written is only slower next time
        keep(run.path / CACHE, result.predictions, stamp, result.skipped)
    return Predicted(result.predictions, result.class_names, keys, images, result.skipped)


def _stamp(weights: Path, keys: list[str], images: DataSet) -> str:
    """Changes when the weights or the images do."""
    with weights.open("rb") as file:
        content = hashlib.file_digest(file, "sha256")
    content.update(json.dumps([images.name, images.class_names, keys]).encode("utf-8", "surrogateescape"))
    content.update(images.labels.tobytes())
    return content.hexdigest()


def confusion(found: Predicted) -> np.ndarray:
    """[classes, classes] images of a row's class that were taken for the column's."""
    count = len(found.class_names)
    p = found.predictions
    return np.bincount(p.label * count + p.top[:, 0], minlength=count * count).reshape(count, count)
