"""The calibration of a run: from its held-out images once, then kept in RUN/calibration.json for these weights.

Weights that `export` wrote carry theirs in their description. Published weights have none: nobody knows here which
images they have not seen.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.files import plain_json, sha256_of, write_atomically
from everytoken_lab import schema
from everytoken_lab.calibration import Calibration
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.engine.run_folder import Run, run_of
from everytoken_lab.evaluation import InferenceOptions
from everytoken_lab.maps.summary import sample_positions
from everytoken_lab.models.description import Description
from everytoken_lab.models.open import OpenModel

FILE = "calibration.json"
FEWEST, MOST = 20, 1000  # images to calibrate on
NOT_FINITE = "the model's answers are not finite numbers: its weights are damaged, or mixed precision overflows (amp)."


@dataclass(frozen=True)
class RunCalibration:
    """The content of the file. weights: hash of the weights file that it is about."""

    weights: str
    calibration: Calibration


def splits(run: Run, data: str = "") -> tuple[DataSet, DataSet]:
    """Training and validation images of a run; `data`: where its images are now, if they have moved.

    They are the same where cross-validation judged it.
    """
    from everytoken_lab.engine.options import TrainOptions, apply
    from everytoken_lab.training.build import Inputs

    settings = {name: value for name, value in run.config.items() if name == "val_split"}
    settings["data"] = data or run.own_data()
    for name in ("corrections", *(("exclude",) if run.cross_validated else ())):
        if (file := run.place(name)) is not None:
            settings[name] = str(file)
    options = apply(TrainOptions(), settings, f"{run.path}/config.yaml")
    if run.cross_validated:
        whole = Inputs().undivided(options)
        return whole, whole
    train, val, _ = Inputs().splits(options)
    return train, val


def validation_set(run: Run, data: str = "") -> DataSet:
    """The validation images of a run."""
    return splits(run, data)[1]


def read_calibration(run: Run, weights: Path) -> Calibration | None:
    """What the run keeps about these weights; None if nothing, or if it is about others."""
    with contextlib.suppress(schema.SchemaError, OSError):  # a torn file is made again
        kept = schema.read_json(run.path / FILE, RunCalibration)
        if kept.weights == sha256_of(weights):
            return kept.calibration
    return None


def keep_calibration(run: Run, weights: Path, calibration: Calibration) -> None:
    """Write it to the run, for the next time; a folder that cannot be written is only slower then."""
    with contextlib.suppress(OSError, EverytokenError):
        content = plain_json(asdict(RunCalibration(sha256_of(weights), calibration)))
        write_atomically(run.path / FILE, content.encode())


def calibrated(opened: OpenModel, options: InferenceOptions) -> tuple[OpenModel, str]:
    """The model with the calibration of its run, and a remark if that was made now or cannot be made."""
    run = run_of(opened.source) if Path(opened.source).is_file() else None
    if opened.info.calibration is not None or run is None:
        return opened, ""
    weights, remark = Path(opened.source), ""
    calibration = read_calibration(run, weights)
    if calibration is None:
        try:
            calibration = _calibrate(opened, run, options)
        except (EverytokenError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            return opened, f"probabilities are not calibrated: the run's held-out images cannot be used ({reason})"
        keep_calibration(run, weights, calibration)
        remark = (
            f"calibrated on {calibration.images:,} images that the run held out (temperature "
            f"{calibration.temperature:.2f})"
        )
    return replace(opened, info=replace(opened.info, calibration=calibration)), remark


def probabilities(info: Description, logits: Tensor) -> Tensor:
    """What people are shown, [..., K]: with the temperature of the calibration, if there is one."""
    if not logits.isfinite().all():
        raise EverytokenError(NOT_FINITE)
    scaled = logits.float() / (1.0 if info.calibration is None else info.calibration.temperature)
    return scaled.sigmoid() if info.multi_label else scaled.softmax(-1)


def _calibrate(opened: OpenModel, run: Run, options: InferenceOptions) -> Calibration:
    from everytoken_lab.evaluation.run import evaluate

    if run.cross_validated:
        raise EverytokenError("it was trained on all of its images, and what cross-validation found is not kept")
    images = validation_set(run)
    if len(images) < FEWEST:
        raise EverytokenError(f"there are fewer than {FEWEST}")
    some = images.subset(sample_positions(len(images), MOST))
    how: dict[str, Any] = {"batch_size": options.batch_size, "workers": options.workers, "device": options.device}
    calibration = evaluate(opened, some, calibrates=True, on_bad_image="skip", **how).calibration
    assert calibration is not None
    return calibration
