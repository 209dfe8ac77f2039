"""The detection task, and `train`.

Loss: the sum of all terms: objectness and anchor boxes of the proposals, and class, box and mask of each stage with the
stage's weight. What is sampled in a step is drawn from torch's generator, which the loop seeds for every update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken_lab.data.augment import mean_colour
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.dense.common import SIDE, DenseTask, open_parts, train_dense, whole_set
from everytoken_lab.dense.detect.data import (
    DetectTransform,
    InstanceSet,
    ObjectReader,
    Objects,
    divided,
    open_instances,
)
from everytoken_lab.dense.detect.infer import Detections, DetectScore, Inference
from everytoken_lab.dense.detect.masks import tool
from everytoken_lab.dense.detect.model import Detector, DetectorInfo, build_detector
from everytoken_lab.dense.detect.options import NEW_RUN, DetectOptions
from everytoken_lab.draw import Panel, Row, fit_photo, object_overlay
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.run_folder import RunFolder
from everytoken_lab.training.options import fill


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

    command = "detect"
    network_name = "detector"
    score_name = "mAP"
    info: DetectorInfo
    options: DetectOptions

    def __init__(self, options: DetectOptions, world: World, folder: RunFolder) -> None:
        training, validation = open_parts(open_instances, divided(options.data, options.dataset), options, folder)
        every, training = training, only_with_objects(training)
        if not len(training):
            raise EverytokenError(f"{options.data} has no training images with objects")
        notes = [note for part in (every, validation) for note in whole_set(part, 0, InstanceSet)[0].notes]
        if len(training) < len(every):
            notes.append(f"{len(every) - len(training)} training images without objects are left out")
        for note in dict.fromkeys(notes):
            folder.log(f"note: {note}")
        names, side = tuple(training.class_names), options.augment.sizes[-1]
        detector, info = build_detector(options.model, options.detector, side, names, options.find)
        transform = DetectTransform(options.augment, mean_colour(info.backbone.mean))
        masks, skip = options.detector.masks, options.dataset.on_bad_image == "skip"
        whole = Inference.of(detector, info).transform
        readers = (
            ObjectReader(training, transform, options.run.seed, masks=masks, skip=skip),
            ObjectReader(validation, whole, None, masks=False, skip=skip),
        )
        super().__init__(DetectStep(detector), info, readers, options, world, folder)

    @staticmethod
    def complete(options: DetectOptions) -> DetectOptions:
        tool()  # say at once if it is missing
        sizes = {"size": min(800, max(options.augment.sizes)), "max_size": options.augment.longest}
        return replace(options, find=fill(options.find, {**NEW_RUN, **sizes}))

    def inference(self, network: Detector) -> Callable[[Batch], Detections]:
        return Inference.of(network, self.info).on(self.world.device)

    def score(self, pictures: int) -> DetectScore:
        """AP of masks, or of boxes if there are no masks."""
        return DetectScore(self.val_set, pictures=pictures)

    def truth(self, pixels: np.ndarray, batch: Batch, i: int) -> Row:
        objects: Objects = batch.targets
        some = slice(sum(objects.counts[:i]), sum(objects.counts[: i + 1]))
        names = [self.info.class_names[label - 1] for label in objects.labels[some].tolist()]
        masks = () if objects.masks is None else list(objects.masks[some].cpu().numpy().astype(bool))
        shown = object_overlay(pixels, objects.boxes[some].cpu().numpy(), names, masks, SIDE)
        photo = fit_photo(Image.fromarray(pixels), SIDE)
        return Row("", [Panel("what the network gets", photo), Panel(f"its {len(names)} objects", shown)])

    def network_words(self) -> str:
        options, sizes = self.options.detector, self.options.augment.sizes
        kind = {"cascade": "Cascade ", "mask": ""}[options.detector] + ("Mask R-CNN" if options.masks else "R-CNN")
        return f"{kind} on {self.info.backbone.architecture}, short side {min(sizes)} to {max(sizes)}"


train = partial(train_dense, DetectTask)


def only_with_objects(data: DataSet) -> DataSet:
    """Without the images that have nothing to learn from."""
    pairs = (whole_set(data, i, InstanceSet) for i in range(len(data)))
    keep = [i for i, (whole, number) in enumerate(pairs) if whole.trained(number)]
    return data.subset(np.array(keep, dtype=np.int64))
