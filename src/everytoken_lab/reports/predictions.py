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
from functools import cached_property
from pathlib import Path

import numpy as np

from everytoken.errors import EverytokenError
from everytoken.files import sha256_of
from everytoken_lab.calibration import Calibration
from everytoken_lab.classes import shown_name
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.engine.accuracy import AnyPredictions, MultiLabelPredictions, Predictions
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.evaluation.run import FEWEST, evaluate, keep_calibration, read_calibration, validation_set
from everytoken_lab.models.description import describe
from everytoken_lab.models.open import OpenModel, find_weights, open_model
from everytoken_lab.stats import Estimate

CACHE = "report-predictions.npz"


@dataclass(frozen=True)
class PredictedRun:
    """Predictions of one run on its validation images."""

    run: Run
    predictions: AnyPredictions
    class_names: list[str]
    keys: list[str]  # of the images, by `predictions.index`
    data: DataSet
    skipped: dict[str, str]  # unreadable images, key -> reason
    weights: Path
    calibration: Calibration | None  # None of too few images
    opened: OpenModel | None = None  # if it had to be opened for the predictions
    group: str = ""  # name of the group that it stands for

    def model(self) -> OpenModel:
        """The model with its calibration."""
        opened = self.opened or open_model(self.weights)
        return replace(opened, info=replace(opened.info, calibration=self.calibration))

    def same_images(self, other: PredictedRun) -> bool:
        """Whether two runs answered the same images, in the same classes."""
        index = self.predictions.index, other.predictions.index
        return self.keys == other.keys and self.class_names == other.class_names and np.array_equal(*index)

    @property
    def names(self) -> list[str]:
        """Of the classes, for people."""
        return [shown_name(name) for name in self.class_names]

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several labels."""
        return isinstance(self.predictions, MultiLabelPredictions)

    @cached_property
    def score(self) -> Estimate:
        """Top-1, or mAP of multi-label images, in percent, with its interval over the images."""
        return self.predictions.accuracy


def predict_run(
    run: Run,
    device: str,
    data: str = "",
    workers: int = 0,
    tell: Callable[[int, int], None] = lambda done, total: None,
    images: DataSet | None = None,
) -> PredictedRun:
    """Evaluate the best weights of a run, or read what the last report found; `images`: those for validation, if open.

    Raises:
        EverytokenError: there are no weights or no images, or they do not fit; the message says which.
    """
    images = validation_set(run, data) if images is None else images
    weights, keys = find_weights(run.path), list(images.keys())
    note, about = stamp(weights, images), describe(weights)
    kind = MultiLabelPredictions if about is not None and about.multi_label else Predictions
    saved: tuple[AnyPredictions, dict[str, str]] | None = kind.saved(run.path / CACHE, note)
    calibration = read_calibration(run, weights)
    enough = len(images) >= FEWEST
    if saved is not None and about is not None and about.class_names and (calibration is not None or not enough):
        predictions, skipped = saved
        return PredictedRun(run, predictions, list(about.class_names), keys, images, skipped, weights, calibration)
    if run.cross_validated:
        raise EverytokenError(
            f"{run.name} was trained on all of its images, and its out-of-fold predictions ({CACHE}) are missing or of "
            "other images or weights"
        )
    opened = open_model(weights)
    how = {"device": device, "workers": workers, "on_bad_image": "skip"}
    result = evaluate(opened, images, progress=tell, calibrates=enough, **how)
    if result.calibration is not None:
        keep_calibration(run, weights, result.calibration)
    with contextlib.suppress(OSError):  # a run folder that cannot be written is only slower next time
        result.predictions.save(run.path / CACHE, note, result.skipped)
    return PredictedRun(
        run, result.predictions, result.class_names, keys, images, result.skipped, weights, result.calibration, opened
    )


def stamp(weights: Path, images: DataSet) -> str:
    """Changes when the weights or the images do."""
    content = hashlib.sha256(sha256_of(weights).encode())
    names = json.dumps([images.name, images.class_names, list(images.keys())])
    content.update(names.encode("utf-8", "surrogateescape"))
    content.update(images.labels.tobytes())
    return content.hexdigest()
