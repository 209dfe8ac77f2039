"""The detection task, and `train`.

Loss: the sum of all terms: objectness and anchor boxes of the proposals, and class, box and mask of each stage with the
stage's weight. What is sampled in a step is drawn from torch's generator, which the loop seeds for every update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.data.datasets import DataSet
from everytoken.engine.distributed import World
from everytoken.engine.run_folder import Run, RunFolder
from everytoken.errors import EverytokenError
from everytoken.files import plain_json
from everytoken.tasks.dense import (
    PICTURES,
    DenseTask,
    fill_colour,
    held_out_note,
    plan_dense,
    save_sheet,
    train_dense,
    whole_set,
)
from everytoken.tasks.detect.data import DetectTransform, InstanceSet, ObjectViews, divided, open_instances
from everytoken.tasks.detect.infer import Inference, resolve, truth_and_answer
from everytoken.tasks.detect.masks import tool
from everytoken.tasks.detect.metrics import Detections, average_precision
from everytoken.tasks.detect.model import Detector, DetectorInfo, build_detector
from everytoken.tasks.detect.options import DetectOptions

_SURE = 0.5  # score of the objects in the pictures at the end of a run


class DetectStep(nn.Module):
    """Batch -> loss terms."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Terms by name; "loss" is their sum."""
        terms = self.detector.losses(batch.images, batch.targets)
        return {"loss": torch.stack(list(terms.values())).sum(), **terms}


class DetectTask(DenseTask):
    """Trains a detector."""

    network_name = "detector"
    score_name = "mAP"
    info: DetectorInfo
    options: DetectOptions

    def __init__(self, options: DetectOptions, world: World, folder: RunFolder) -> None:
        if "epochs" in (config := folder.read().config) and "rule" not in config:
            raise EverytokenError(
                f"{folder.path} was started by an older version, whose detectors were trained by other rules: train it "
                "with that version to its end, or choose another output. Its weights can be evaluated and used."
            )
        sets = _open_data(options, folder)
        names, side = tuple(sets[0].class_names), options.augment.sizes[-1]
        detector, info = build_detector(options.model, options.detector, side, names, options.find)
        super().__init__(DetectStep(detector), info, sets, options, world, folder)

    def train_views(self, skip: bool) -> ObjectViews:
        """Random crops, sizes and flips."""
        transform = DetectTransform(self.options.augment, fill_colour(self.info.backbone.mean))
        masks = self.options.detector.masks
        return ObjectViews(self.train_set, transform, self.options.run.seed, masks=masks, skip=skip)

    def val_views(self, skip: bool) -> ObjectViews:
        """One size, no flips."""
        transform = Inference.of(self.network(self.module), self.info).transform
        return ObjectViews(self.val_set, transform, None, masks=False, skip=skip)

    def inference(self, module: nn.Module) -> Callable[[Batch], Detections]:
        """How validation uses a network."""
        return Inference.of(self.network(module), self.info).on(self.world.device)

    def detections(self, module: nn.Module) -> tuple[InstanceSet, dict[int, Detections]]:
        """The whole dataset, and the detections in every validation image exactly once, over all processes."""
        data, _ = whole_set(self.val_set, 0, InstanceSet)
        of_rank: dict[int, Detections] = {}
        for batch, answer in self.answers(module):
            assert batch.indices is not None
            of_rank[whole_set(self.val_set, int(batch.indices[0]), InstanceSet)[1]] = answer
        return data, {k: v for part in self.world.gather(of_rank) for k, v in part.items()}

    def validate(self, module: nn.Module) -> dict[str, float]:
        """Validation numbers; "score" is AP of masks, or of boxes if there are no masks."""
        result = average_precision(*self.detections(module))
        numbers = {f"val_{k.replace(' ', '_')}": round(v, 4) for k, v in result.numbers.items()}
        return {"score": max(result.numbers.get("mask AP", result.numbers["box AP"]), 0.0), **numbers}

    def describe(self) -> str:
        """Data and model."""
        options, sizes = self.options.detector, self.options.augment.sizes
        kind = {"cascade": "Cascade ", "mask": ""}[options.detector] + ("Mask R-CNN" if options.masks else "R-CNN")
        network = f"{kind} on {self.info.backbone.architecture}"
        return f"{self.summary(network)}, short side {min(sizes)} to {max(sizes)}"

    def finish(self, module: nn.Module) -> None:
        """The table of classes and pictures, of a run of one process."""
        if self.world.size > 1:
            return
        data, detections = self.detections(module)
        result = average_precision(data, detections)
        self.folder.write("classes.json", plain_json(result.classes))
        numbers = {name: value for name, value in result.numbers.items() if name[-1] not in "sml"}
        self.folder.log(", ".join(f"{name} {value:.1f}" for name, value in numbers.items()))
        shown = sorted(detections)[:PICTURES]
        cards = [truth_and_answer(data, i, detections[i].better_than(_SURE)) for i in shown]
        save_sheet(cards, self.folder.path / "pictures.jpg", f"{self.info.backbone.architecture}, validation images")


def _resolved(options: DetectOptions) -> DetectOptions:
    tool()  # say at once if it is missing
    return replace(options, find=resolve(options.find, options.augment))


def train(options: DetectOptions) -> Run:
    """Train a detector, or continue the run in the output folder."""
    return train_dense(_resolved(options), "detect", DetectTask)


def dry_run(options: DetectOptions) -> dict[str, Any]:
    """What `train` would do, as rows of a table."""
    return plan_dense(_resolved(options), "detect", DetectTask)


def _open_data(options: DetectOptions, folder: RunFolder) -> tuple[DataSet, DataSet]:
    """Training and validation images."""
    data, dataset = options.data, options.dataset
    training, validation = open_instances(data, "train", dataset), open_instances(data, "val", dataset)
    if list(training.class_names) != list(validation.class_names):
        raise EverytokenError("the categories of training and validation annotations differ; they must be the same")
    with_objects = training if dataset.keep_empty else only_with_objects(training)
    for part, name in ((with_objects, "training"), (validation, "validation")):
        if not len(part):
            raise EverytokenError(f"{data} has no {name} images")
    if not divided(data, dataset):
        folder.log(held_out_note(data, dataset.val_split))
    notes = [note for part in (training, validation) for note in whole_set(part, 0, InstanceSet)[0].notes]
    if len(with_objects) < len(training):
        count = len(training) - len(with_objects)
        notes.append(f"{count} training images without objects are left out (keep_empty)")
    for note in dict.fromkeys(notes):
        folder.log(f"note: {note}")
    return with_objects, validation


def only_with_objects(data: DataSet) -> DataSet:
    """Without the images that have nothing to learn from."""
    keep = []
    for i in range(len(data)):
        whole, number = whole_set(data, i, InstanceSet)
        if whole.trained(number):
            keep.append(i)
    return data if len(keep) == len(data) else data.subset(np.array(keep, dtype=np.int64))
