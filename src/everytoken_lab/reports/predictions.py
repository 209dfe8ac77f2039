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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from everytoken.errors import EverytokenError
from everytoken_lab.calibration import Calibration
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.engine.accuracy import AnyPredictions, MultiLabelPredictions, Predictions
from everytoken_lab.engine.run_folder import Run

if TYPE_CHECKING:
    from everytoken_lab.models.open import OpenModel

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
        calibration: what the images say about its probabilities.
        loaded: its model, if it had to be opened for the predictions.
    """

    predictions: AnyPredictions
    class_names: list[str]
    keys: list[str]
    data: DataSet
    skipped: dict[str, str]
    weights: Path
    calibration: Calibration
    loaded: OpenModel | None = None

    def model(self) -> OpenModel:
        """The model, opened once."""
        from everytoken_lab.models.open import open_model

        return self.loaded or open_model(self.weights)

    def same_images(self, other: PredictedRun) -> bool:
        """Whether two runs answered the same images, in the same classes."""
        return (
            self.keys == other.keys
            and self.class_names == other.class_names
            and np.array_equal(self.predictions.index, other.predictions.index)
        )

    def tally(self) -> np.ndarray:
        """[3, classes] images that have a class, that are said to have it, and both."""
        p, count = self.predictions, len(self.class_names)
        if isinstance(p, MultiLabelPredictions):
            named = p.logits > 0
            return np.stack([p.label.sum(0), named.sum(0), (p.label & named).sum(0)])
        parts = (p.label, p.top[:, 0], p.label[p.correct])
        return np.stack([np.bincount(part, minlength=count) for part in parts])

    def average_precision(self) -> np.ndarray | None:
        """[classes] percent, with several labels per image; nan for a class without images."""
        if not isinstance(self.predictions, MultiLabelPredictions):
            return None
        rows = self.predictions.per_class(self.class_names)
        return np.array([np.nan if row["AP"] is None else row["AP"] for row in rows])

    def confusion(self) -> np.ndarray | None:
        """[classes, classes] images of a row's class that were taken for the column's; None with several labels."""
        count, p = len(self.class_names), self.predictions
        if not isinstance(p, Predictions):
            return None
        return np.bincount(p.label * count + p.top[:, 0], minlength=count * count).reshape(count, count)


def predict_run(
    run: Run, device: str, data: str = "", workers: int = 0, tell: Callable[[int, int], None] = lambda done, total: None
) -> PredictedRun:
    """Evaluate the best weights of a run, or read what the last report found.

    Raises:
        EverytokenError: there are no weights or no images, or they do not fit; the message says which.
    """
    from everytoken_lab.evaluation import EvalOptions
    from everytoken_lab.evaluation.calibrated import keep_calibration, read_calibration, validation_set
    from everytoken_lab.evaluation.run import run_evaluation
    from everytoken_lab.models.open import describe, find_weights, open_model

    images = validation_set(run, data)
    weights = find_weights(run.path)
    keys = list(images.keys())
    note = stamp(weights, images)
    about = describe(weights)
    several = about is not None and about.multi_label
    saved: tuple[AnyPredictions, dict[str, str]] | None
    saved = (MultiLabelPredictions if several else Predictions).saved(run.path / CACHE, note)
    calibration = read_calibration(run, weights)
    if saved is not None and calibration is not None and about is not None and about.class_names:
        predictions, skipped = saved
        names = list(about.class_names)
        return PredictedRun(predictions, names, keys, images, skipped, weights, calibration)
    if run.cross_validated:
        raise EverytokenError(
            f"{run.name} was trained on all of its images, and its out-of-fold predictions ({CACHE}) are missing or of "
            "other images or weights"
        )
    loaded = open_model(weights)
    options = EvalOptions(device=device, workers=workers, on_bad_image="skip")
    result = run_evaluation(loaded, images, options, tell, calibrates=True)
    assert result.calibration is not None
    keep_calibration(run, weights, result.calibration)
    with contextlib.suppress(OSError):  # a run folder that cannot be written is only slower next time
        result.predictions.save(run.path / CACHE, note, result.skipped)
    return PredictedRun(
        result.predictions, result.class_names, keys, images, result.skipped, weights, result.calibration, loaded
    )


def stamp(weights: Path, images: DataSet) -> str:
    """Changes when the weights or the images do."""
    with weights.open("rb") as file:
        content = hashlib.file_digest(file, "sha256")
    content.update(
        json.dumps([images.name, images.class_names, list(images.keys())]).encode("utf-8", "surrogateescape")
    )
    content.update(images.labels.tobytes())
    return content.hexdigest()
