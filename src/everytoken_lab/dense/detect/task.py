"""Detection: from an image to objects, in pixels of the source, with masks as run lengths; train, evaluate, predict.

A detector is used as its run was validated, unless the options say otherwise. Average precision is computed by COCO's
own evaluator (pycocotools), in percent: AP is the mean over IoU 0.50, 0.55, ..., 0.95; AP50 and AP75 are at one IoU;
APs, APm, APl are of objects up to 32 x 32, up to 96 x 96, and larger.

What is sampled in a training step is drawn from torch's generator, which the loop seeds for every update.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from everytoken.data.batch import Batch, normalise
from everytoken.errors import EverytokenError, need
from everytoken.files import write_atomically, write_picture
from everytoken_lab.data.augment import mean_colour
from everytoken_lab.dense.common import (
    SIDE,
    DenseTask,
    Evaluation,
    Score,
    answer_images,
    check_classes,
    evaluate_dense,
    open_parts,
    open_predicted,
    open_unseen,
    train_dense,
)
from everytoken_lab.dense.detect import (
    NEW_RUN,
    DetectAugment,
    DetectEval,
    DetectOptions,
    DetectPredict,
    FindOptions,
)
from everytoken_lab.dense.detect.data import (
    DetectTransform,
    InstanceSet,
    ObjectReader,
    Objects,
    compress,
    divided,
    open_instances,
    tool,
    whole_file,
)
from everytoken_lab.dense.detect.model import Detector, DetectorInfo, build_detector, load_detector
from everytoken_lab.draw import Panel, Row, fit_photo, object_overlay
from everytoken_lab.engine.distributed import World, pick_device
from everytoken_lab.engine.options import SourceOptions, fill
from everytoken_lab.engine.run_folder import Run, RunFolder

NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl")


@dataclass(frozen=True)
class Detections:
    """Objects of one image, best first."""

    boxes: np.ndarray  # float64 [n, 4], x0, y0, x1, y1 in pixels of the source
    scores: np.ndarray  # float64 [n]
    labels: np.ndarray  # int64 [n], classes from 0
    masks: list[dict[str, Any]] | None  # COCO run lengths at the source's size

    def rows(self, image: int | str, classes: Sequence[int | str]) -> list[dict[str, Any]]:
        """As COCO's result files have it. `classes`: what to call each class."""
        rows: list[dict[str, Any]] = []
        for label, (x0, y0, x1, y1), score in zip(self.labels.tolist(), self.boxes.tolist(), self.scores, strict=True):
            box = [round(v, 3) for v in (x0, y0, x1 - x0, y1 - y0)]
            row = {"image_id": image, "category_id": classes[label], "bbox": box, "score": round(float(score), 5)}
            rows.append(row if self.masks is None else {**row, "segmentation": self.masks[len(rows)]})
        return rows


class Inference:
    """A detector, used as it was validated where `find` does not say otherwise."""

    def __init__(self, model: Detector, info: DetectorInfo, find: FindOptions | None = None) -> None:
        self.model, self.info, self.find = model, info, fill(find or FindOptions(), asdict(info.find))

    @property
    def transform(self) -> DetectTransform:
        """Makes the images that it needs."""
        assert self.find.size is not None
        assert self.find.max_size is not None
        return DetectTransform(DetectAugment((self.find.size,), self.find.max_size))

    def __call__(self, batch: Batch) -> Detections:
        """The objects of a batch of one image, as bytes."""
        (objects,) = batch.targets
        images = batch.images.to(next(self.model.parameters()).device, non_blocking=True)
        images = normalise(images, self.info.backbone.mean, self.info.backbone.std)
        (answer,) = self.model.detect(images, [objects.size], self.find)
        boxes = answer["boxes"].float().cpu().numpy().astype(np.float64)  # of an image that is upright
        boxes = boxes * np.tile(objects.matrix.diagonal(), 2) + np.tile(objects.matrix[:, 2], 2)
        masks = None
        if "masks" in answer:
            pairs = zip(answer["masks"].cpu(), boxes.tolist(), strict=True)
            masks = [compress(paste(mask, box, objects.source).numpy()) for mask, box in pairs]
        scores, labels = answer["scores"].cpu().numpy().astype(np.float64), answer["labels"].cpu().numpy() - 1
        return Detections(boxes, scores, labels, masks)


def paste(mask: torch.Tensor, box: Sequence[float], size: tuple[int, int]) -> torch.Tensor:
    """A mask [28, 28] of probabilities put into its box on an image of (height, width): bool [height, width].

    A pixel is inside if the mask, interpolated at its centre, is at least one half.
    """
    whole = torch.zeros(size, dtype=torch.bool)
    axes, spans = [], []
    for low, high, length in zip(box[:2], box[2:], size[::-1], strict=True):
        start = min(max(math.floor(low) - 1, 0), length)
        spans.append(slice(start, max(min(math.ceil(high) + 1, length), start)))
        axes.append((torch.arange(start, spans[-1].stop) + 0.5 - low) / max(high - low, 1e-6) * 2 - 1)
    grid = torch.stack(torch.meshgrid(*axes, indexing="xy"), -1).float()
    if grid.numel():
        inside = F.grid_sample(mask[None, None].float(), grid[None], align_corners=False)[0, 0] >= 0.5
        whole[spans[1], spans[0]] = inside
    return whole


# -- score ------------------------------------------------------------------------------------------------------------


class DetectScore(Score[Detections]):
    """COCO's average precision."""

    def __init__(self, data: InstanceSet) -> None:
        self.data = data
        self.detections: dict[int, Detections] = {}  # by number of the image

    def add(self, batch: Batch, answer: Detections) -> None:
        assert batch.indices is not None
        self.detections[int(batch.indices[0])] = answer

    def join(self, world: World) -> None:
        self.detections = {k: v for part in world.gather(self.detections) for k, v in part.items()}

    def result(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """AP of masks first, if there are masks."""
        numbers, classes = coco_scores(self.data, self.detections)
        return dict(sorted(numbers.items(), key=lambda item: item[0].startswith("box"))), classes


def coco_rows(data: InstanceSet, detections: Mapping[int, Detections]) -> list[dict[str, Any]]:
    """Detections, by number of the image in `data`, as COCO's result files have them, with the ids of the data."""
    found = sorted(detections.items())
    return [row for i, objects in found for row in objects.rows(int(data.image_ids[i]), data.category_ids)]


def coco_scores(
    data: InstanceSet, detections: Mapping[int, Detections]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Compare detections, by number of the image in `data`, with the truth; other images do not count.

    Returns:
        "box AP", "box AP50", ..., "mask AP", ... in percent, -1 where no object is of that kind; and a row for each
        class that occurs: class, objects, and AP and AP50 of boxes and masks.
    """
    api, evaluator = (need(f"pycocotools.{name}", "detect", "everytoken detect") for name in ("coco", "cocoeval"))
    masks = any(image.masks is not None for image in detections.values())
    rows, numbers = coco_rows(data, detections), dict[str, float]()
    with contextlib.redirect_stdout(io.StringIO()):  # the evaluator talks
        truth = api.COCO()
        truth.dataset = data.as_coco(sorted(detections), masks)
        truth.createIndex()
        counts = Counter(row["category_id"] for row in truth.dataset["annotations"] if not row["iscrowd"])
        names = zip(data.category_ids, data.class_names, strict=True)
        table = {c: {"class": name, "objects": counts[c]} for c, name in names if counts[c]}
        for kind, what in (("box", "bbox"), ("mask", "segm")) if masks else (("box", "bbox"),):
            numbers |= {f"{kind} {name}": 0.0 for name in NAMES}
            for entry in table.values():
                entry |= {f"{kind} AP": 0.0, f"{kind} AP50": 0.0}
            if not rows:
                continue
            evaluation = evaluator.COCOeval(truth, truth.loadRes([dict(row) for row in rows]), what)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            values = [100 * float(v) if v >= 0 else -1.0 for v in evaluation.stats[:6]]
            numbers |= {f"{kind} {name}": value for name, value in zip(NAMES, values, strict=True)}
            curves = evaluation.eval["precision"]  # [IoU, recall, class, area, limit]
            for k, category in enumerate(evaluation.params.catIds):
                if category in table:
                    table[category][f"{kind} AP"] = _mean(curves[:, :, k, 0, -1])
                    table[category][f"{kind} AP50"] = _mean(curves[0, :, k, 0, -1])
    return numbers, list(table.values())


def _mean(values: np.ndarray) -> float:
    defined = values[values > -1]
    return round(100 * float(defined.mean()), 3) if defined.size else -1.0


# -- training ----------------------------------------------------------------------------------------------------------


class DetectTask(DenseTask):
    """Trains a detector."""

    command = "detect"
    inference = Inference
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
            ObjectReader(validation, Inference(detector, info).transform, None, skip=skip),
        )
        super().__init__(detector, info, readers, options, world, folder)

    @staticmethod
    def complete(options: DetectOptions) -> DetectOptions:
        tool()  # say at once if it is missing
        sizes = {"size": min(800, max(options.augment.sizes)), "max_size": options.augment.longest}
        return replace(options, find=fill(options.find, {**NEW_RUN, **sizes}))

    def score(self) -> DetectScore:
        return DetectScore(self.val_set)

    def truth(self, pixels: np.ndarray, batch: Batch, i: int) -> Row:
        objects: Objects = batch.targets[i]
        numbers = [label - 1 for label in objects.labels.tolist()]
        names = [self.info.class_names[number] for number in numbers]
        masks = () if objects.masks is None else list(objects.masks.cpu().numpy().astype(bool))
        shown = object_overlay(pixels, objects.boxes.cpu().numpy(), names, numbers, masks, SIDE)
        photo = fit_photo(Image.fromarray(pixels), SIDE)
        return Row("", [Panel("image", photo), Panel(f"{len(names)} objects", shown)])

    def facts(self) -> dict[str, str]:
        options, sizes = self.options.detector, self.options.augment.sizes
        kind = {"cascade": "Cascade ", "mask": ""}[options.detector] + ("Mask R-CNN" if options.masks else "R-CNN")
        model = f"{kind} on {self.info.backbone.architecture}, short side {min(sizes)} to {max(sizes)}"
        return {**super().facts(), "model": model}


train = partial(train_dense, DetectTask)


# -- evaluate, predict ------------------------------------------------------------------------------------------------


def open_inference(options: SourceOptions, find: FindOptions) -> Inference:
    """A trained detector on its device, used as the options say."""
    detector, info = load_detector(options.source)
    return Inference(detector.to(pick_device(options.device)), info, find)


def evaluate(options: DetectEval) -> Evaluation:
    """COCO's average precision of a detector, in percent, and a row for each class that occurs."""
    coco = options.coco

    def same(run: Run) -> bool | None:
        option = "annotations" if run.config.get("annotations") else "data"
        return run.names(coco.annotations or options.data, option, whole_file)

    def fraction(run: Run) -> float:
        return 0.0 if run.config.get("val_annotations") else run.val_split

    data, notes = open_unseen(options, coco, open_instances, divided(options.data, coco), same, fraction)
    if not len(data):
        raise EverytokenError(f"{options.data} has no images for {options.split!r}")
    network = open_inference(options, options.find)
    check_classes(network.info, data)
    reader = ObjectReader(data, network.transform, None, skip=options.on_bad_image == "skip")
    score = DetectScore(data)
    result = evaluate_dense(options, network, reader, score, network.info.backbone, [*notes, *data.notes])
    if options.results:
        Path(options.results).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(options.results), json.dumps(coco_rows(data, score.detections)).encode())
    return result


def predict(options: DetectPredict) -> list[dict[str, Any]]:
    """Objects of images: a picture of each, and predictions.json, written to a folder; never over an image.

    Returns:
        A row for each image: file, and how many objects of which class.
    """
    images, place = open_predicted(options, (".objects.jpg",))
    network = open_inference(options, options.find)
    info = network.info
    rows, objects = list[dict[str, Any]](), list[dict[str, Any]]()
    for batch, answer in answer_images(network, ObjectReader(images, network.transform, None), options, info.backbone):
        assert batch.indices is not None
        key, count = batch.keys[0], int((answer.scores >= options.sure).sum())  # the best come first
        labels = answer.labels[:count].tolist()
        names = [info.class_names[label] for label in labels]
        captions = [f"{name} {100 * score:.0f}" for name, score in zip(names, answer.scores[:count], strict=True)]
        masks = [tool().decode(runs).astype(bool) for runs in (answer.masks or [])[:count]]
        pixels = np.asarray(images.picture(int(batch.indices[0])).upright())
        picture = object_overlay(pixels, answer.boxes[:count], captions, labels, masks)
        write_picture(place(key, ".objects.jpg"), picture, quality=90)
        objects += answer.rows(key, info.class_names)
        rows.append({"image": key, **dict(Counter(names).most_common())})
    write_atomically(Path(options.out) / "predictions.json", json.dumps(objects).encode())
    return rows
