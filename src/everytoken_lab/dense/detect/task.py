"""The detection task, and `train`.

What is sampled in a step is drawn from torch's generator, which the loop seeds for every update.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from PIL import Image

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken_lab.data.augment import mean_colour
from everytoken_lab.dense.common import SIDE, DenseTask, open_parts, train_dense
from everytoken_lab.dense.detect.data import (
    DetectTransform,
    InstanceSet,
    ObjectReader,
    Objects,
    divided,
    open_instances,
)
from everytoken_lab.dense.detect.infer import DetectScore, Inference
from everytoken_lab.dense.detect.masks import tool
from everytoken_lab.dense.detect.model import Detector, DetectorInfo, build_detector
from everytoken_lab.dense.detect.options import NEW_RUN, DetectOptions
from everytoken_lab.draw import Panel, Row, fit_photo, object_overlay
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.options import fill
from everytoken_lab.engine.run_folder import RunFolder


class DetectTask(DenseTask):
    """Trains a detector."""

    command = "detect"
    score_name = "mAP"
    info: DetectorInfo
    options: DetectOptions
    val_set: InstanceSet

    def __init__(self, options: DetectOptions, world: World, folder: RunFolder) -> None:
        every, validation = open_parts(open_instances, divided(options.data, options.dataset), options, folder)
        training = every.subset([i for i in range(len(every)) if every.trained(i)])
        if not len(training):
            raise EverytokenError(f"{options.data} has no training images with objects")
        notes = [*every.notes, *validation.notes]
        if len(training) < len(every):
            notes.append(f"{len(every) - len(training)} training images without objects are left out")
        for note in dict.fromkeys(notes):
            folder.log(f"note: {note}")
        detector, info = build_detector(options, tuple(training.class_names))
        transform = DetectTransform(options.augment, mean_colour(info.backbone.mean))
        skip = options.dataset.on_bad_image == "skip"
        readers = (
            ObjectReader(training, transform, options.run.seed, options.detector.masks, skip),
            ObjectReader(validation, Inference.of(detector, info).transform, None, skip=skip),
        )
        super().__init__(detector, info, readers, options, world, folder)

    @staticmethod
    def complete(options: DetectOptions) -> DetectOptions:
        tool()  # say at once if it is missing
        sizes = {"size": min(800, max(options.augment.sizes)), "max_size": options.augment.longest}
        return replace(options, find=fill(options.find, {**NEW_RUN, **sizes}))

    def inference(self, network: Detector) -> Inference:
        return Inference.of(network, self.info)

    def score(self) -> DetectScore:
        return DetectScore(self.val_set)

    def truth(self, pixels: np.ndarray, batch: Batch, i: int) -> Row:
        objects: Objects = batch.targets
        some = slice(sum(objects.counts[:i]), sum(objects.counts[: i + 1]))
        numbers = [label - 1 for label in objects.labels[some].tolist()]
        names = [self.info.class_names[number] for number in numbers]
        masks = () if objects.masks is None else list(objects.masks[some].cpu().numpy().astype(bool))
        shown = object_overlay(pixels, objects.boxes[some].cpu().numpy(), names, numbers, masks, SIDE)
        photo = fit_photo(Image.fromarray(pixels), SIDE)
        return Row("", [Panel("image", photo), Panel(f"{len(names)} objects", shown)])

    def facts(self) -> dict[str, str]:
        options, sizes = self.options.detector, self.options.augment.sizes
        kind = {"cascade": "Cascade ", "mask": ""}[options.detector] + ("Mask R-CNN" if options.masks else "R-CNN")
        model = f"{kind} on {self.info.backbone.architecture}, short side {min(sizes)} to {max(sizes)}"
        return {**super().facts(), "model": model}


train = partial(train_dense, DetectTask)
