"""`detect train`: the detection task for the training loop, and the run around it.

Loss: the sum of all terms: objectness and anchor boxes of the proposals, and class, box and mask of each stage with the
stage's weight. What is sampled in a step is drawn from torch's generator, which the loop seeds for every update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from everytoken.data.batch import Batch, Prefetcher
from everytoken.data.places import DEFAULT_VAL_SPLIT
from everytoken.data.sources import DataSet
from everytoken.engine.checks import check_loop
from everytoken.engine.distributed import World
from everytoken.engine.loop import run
from everytoken.engine.progress import watched
from everytoken.engine.run_folder import Run, RunFolder
from everytoken.engine.task import Task
from everytoken.errors import EverytokenError
from everytoken.files import plain_json
from everytoken.tasks.detect.augment import DetectTransform
from everytoken.tasks.detect.coco import divided, open_instances
from everytoken.tasks.detect.data import InstanceSet, Samples, base_of
from everytoken.tasks.detect.draw import compare, truth_of
from everytoken.tasks.detect.infer import Found, Inference, resolve
from everytoken.tasks.detect.masks import tool
from everytoken.tasks.detect.metrics import Precision, precision
from everytoken.tasks.detect.model import Detector, build_detector
from everytoken.tasks.detect.options import DetectOptions
from everytoken.tasks.options import default_output
from everytoken.tasks.segment.draw import sheet

_PREFIX = "detector."
_PICTURES = 8  # of validation images, at the end of a run
_SURE = 0.5  # score of the objects in them


class DetectStep(nn.Module):
    """Batch -> loss terms."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Terms by name; "loss" is their sum."""
        terms = self.detector.losses(batch.images, batch.targets)
        return {"loss": torch.stack(list(terms.values())).sum(), **terms}


class Detection(Task):
    """Train a detector."""

    score_name = "mAP"
    options: DetectOptions

    def __init__(self, options: DetectOptions, world: World, folder: RunFolder) -> None:
        sets = _open(options, folder.log)
        side, data = options.augment.sizes[-1], options.dataset
        detector, about = build_detector(options.model, options.detector, side, tuple(sets[0].class_names))
        if world.size > 1 and world.device.type == "cuda":
            detector = nn.SyncBatchNorm.convert_sync_batchnorm(detector)
        super().__init__(DetectStep(detector), options, world, folder)
        self.train_set, self.val_set = sets
        self.about = replace(about, find=asdict(options.find))
        red, green, blue = (min(255, round(255 * value)) for value in about.backbone.mean)
        transform = DetectTransform(
            options.augment.sizes, options.augment.longest, options.augment.hflip, (red, green, blue)
        )
        masks, skip = options.detector.masks, data.on_bad_image == "skip"
        samples = Samples(self.train_set, transform, options.run.seed, masks=masks, skip=skip)
        self.train_loader = self.loader(self.train_set, None, data.batch_size, train=True, samples=samples)
        samples = Samples(self.val_set, self.inference(self.module).transform, None, masks=False, skip=skip)
        self.val_loader = self.loader(self.val_set, None, 1, train=False, samples=samples)
        self.batches_per_epoch = len(self.train_loader)

    @property
    def backbone(self) -> nn.Module:
        """The timm model."""
        step: Any = self.module
        backbone: nn.Module = step.detector.features.backbone
        return backbone

    def train_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Training batches of an epoch from a position on."""
        about = self.about.backbone
        yield from Prefetcher(self.train_loader.epoch(epoch, start), self.world.device, about.mean, about.std)

    def inference(self, module: nn.Module) -> Inference:
        """How validation asks the network."""
        detector: Any = module.detector
        return Inference.of(detector, self.about, resolve(self.options.find, self.options.augment))

    def detections(self, module: nn.Module) -> dict[int, Found]:
        """Objects of every validation image exactly once, over all processes, by number of the image."""
        detect, of_rank = self.inference(module), {}
        for batch in watched(self.val_loader.epoch(0), len(self.val_set), self.world):
            with self.autocast():
                (objects,) = detect(batch, self.world.device)
            assert batch.indices is not None
            of_rank[int(batch.indices[0])] = objects
        return {k: v for part in self.world.gather(of_rank) for k, v in part.items()}

    def precision(self, detections: dict[int, Found]) -> Precision:
        """Average precision of the detections."""
        data, _ = base_of(self.val_set, 0)
        return precision(data, {base_of(self.val_set, i)[1]: objects for i, objects in detections.items()})

    def validate(self, module: nn.Module) -> dict[str, float]:
        """Validation numbers; "score" is AP of masks, or of boxes if there are no masks."""
        average = self.precision(self.detections(module))
        numbers = {f"val_{k.replace(' ', '_')}": round(v, 4) for k, v in average.numbers.items()}
        return {"score": max(average.main, 0.0), **numbers}

    def weights(self, state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The whole detector in one file."""
        return {"": {k.removeprefix(_PREFIX): v for k, v in state.items() if k.startswith(_PREFIX)}}

    def metadata(self) -> dict[str, str]:
        """The description that `load_detector` reads."""
        return self.about.to_metadata()

    def describe(self) -> str:
        """Data and model."""
        options = self.options
        count = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        kind = {"cascade": "Cascade ", "mask": ""}[options.detector.detector] + (
            "Mask R-CNN" if options.detector.masks else "R-CNN"
        )
        return (
            f"{len(self.train_set):,} training and {len(self.val_set):,} validation images, "
            f"{len(self.about.class_names)} classes; {kind} on {self.about.backbone.architecture}, {count / 1e6:.1f} M "
            f"parameters, short side {min(options.augment.sizes)} to {max(options.augment.sizes)}"
        )

    def finish(self, module: nn.Module) -> None:
        """A table of classes, and pictures of a few validation images."""
        if self.world.size > 1:
            return
        detections = self.detections(module)
        average = self.precision(detections)
        self.folder.write("classes.json", plain_json(average.classes))
        numbers = {name: value for name, value in average.numbers.items() if name[-1] not in "sml"}
        self.folder.log(", ".join(f"{name} {value:.1f}" for name, value in numbers.items()))
        panels = []
        for i in sorted(detections)[:_PICTURES]:
            base, number = base_of(self.val_set, i)
            panels.append(panel(base, number, detections[i], _SURE))
        sheet(panels).save(self.folder.path / "pictures.jpg", quality=88)


def _with_objects(data: DataSet) -> DataSet:
    """Without the images that have nothing to learn from."""
    keep = []
    for i in range(len(data)):
        base, number = base_of(data, i)
        if base.trained(number):
            keep.append(i)
    return data if len(keep) == len(data) else data.subset(np.array(keep, dtype=np.int64))


def train(options: DetectOptions) -> Run:
    """Train a detector, or continue the run in the output folder."""
    if not options.data:
        raise EverytokenError("data is empty: name the images to train on (everytoken detect train DATA)")
    check_loop(options)
    tool()  # say at once if it is missing
    options = replace(options, find=resolve(options.find, options.augment))
    output = options.run.output or default_output(options, "detect")
    return run(lambda world, folder: Detection(options, world, folder), options, output)


def _open(options: DetectOptions, log: Callable[[str], None]) -> tuple[DataSet, DataSet]:
    """Training and validation images."""
    sets = [open_instances(options.data, split, options.dataset) for split in ("train", "val")]
    if not divided(options.data, options.dataset):
        share = options.dataset.val_split or DEFAULT_VAL_SPLIT
        log(f"note: {options.data} has no validation part: {share:.0%} are held out (val_split)")
    notes = [note for data in sets if len(data) for note in base_of(data, 0)[0].notes]
    for note in dict.fromkeys(notes):
        log(f"note: {note}")
    first, second = sets
    if list(first.class_names) != list(second.class_names):
        raise EverytokenError("the categories of training and validation annotations differ; they must be the same")
    if not options.dataset.keep_empty:
        with_objects = _with_objects(first)
        if len(with_objects) < len(first):
            log(f"note: {len(first) - len(with_objects)} training images without objects are left out (keep_empty)")
        first = with_objects
    for data, what in ((first, "training"), (second, "validation")):
        if not len(data):
            raise EverytokenError(f"{options.data} has no {what} images")
    return first, second


def panel(data: InstanceSet, i: int, found: Found, sure: float) -> Any:
    """Truth and answer of an image, side by side."""
    image = np.asarray(data.picture(i).upright())
    return compare(image, truth_of(data, i, found.masks is not None), found.better_than(sure), data.class_names)
