"""From an image to objects, in pixels of the source, with masks as run lengths; `evaluate` and `predict`.

A detector is used as its run was validated, unless the options say otherwise. Average precision is computed by COCO's
own evaluator (pycocotools), in percent: AP is the mean over IoU 0.50, 0.55, ..., 0.95; AP50 and AP75 are at one IoU;
APs, APm, APl are of objects up to 32 x 32, up to 96 x 96, and larger.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from everytoken.data.batch import Batch, normalise
from everytoken.errors import EverytokenError, need
from everytoken.files import write_atomically, write_picture
from everytoken_lab.dense.common import Evaluation, Score, answer_images, evaluate_dense, open_predicted, open_unseen
from everytoken_lab.dense.detect.data import (
    DetectTransform,
    InstanceSet,
    ObjectReader,
    Objects,
    divided,
    open_instances,
    whole_file,
)
from everytoken_lab.dense.detect.masks import compress, tool
from everytoken_lab.dense.detect.model import Detector, DetectorInfo, load_detector
from everytoken_lab.dense.detect.options import DetectAugment, DetectEval, DetectPredict, FindOptions
from everytoken_lab.draw import object_overlay
from everytoken_lab.engine.distributed import World, pick_device
from everytoken_lab.engine.options import SourceOptions, fill
from everytoken_lab.engine.run_folder import Run

NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl")


@dataclass(frozen=True)
class Detections:
    """Objects of one image, best first."""

    boxes: np.ndarray  # float64 [n, 4], x0, y0, x1, y1 in pixels of the source
    scores: np.ndarray  # float64 [n]
    labels: np.ndarray  # int64 [n], classes from 0
    masks: list[dict[str, Any]] | None  # COCO run lengths at the source's size

    def take(self, chosen: np.ndarray) -> Detections:
        """Some of them; bool [n]."""
        masks = None if self.masks is None else [self.masks[k] for k in np.flatnonzero(chosen)]
        return Detections(self.boxes[chosen], self.scores[chosen], self.labels[chosen], masks)

    def relabel(self, columns: Sequence[int]) -> Detections:
        """With the class `columns[label]`; without those for which that is -1."""
        labels = np.array(columns, dtype=np.int64)[self.labels]
        return replace(self, labels=labels).take(labels >= 0)

    def rows(self, image: int | str, classes: Sequence[int | str]) -> list[dict[str, Any]]:
        """As COCO's result files have it. `classes`: what to call each class."""
        rows: list[dict[str, Any]] = []
        for label, (x0, y0, x1, y1), score in zip(self.labels.tolist(), self.boxes.tolist(), self.scores, strict=True):
            box = [round(v, 3) for v in (x0, y0, x1 - x0, y1 - y0)]
            row = {"image_id": image, "category_id": classes[label], "bbox": box, "score": round(float(score), 5)}
            rows.append(row if self.masks is None else {**row, "segmentation": self.masks[len(rows)]})
        return rows


@dataclass(frozen=True)
class Inference:
    """A detector, and how it is used."""

    model: Detector
    info: DetectorInfo
    find: FindOptions  # nothing is left open

    @staticmethod
    def of(model: Detector, info: DetectorInfo, find: FindOptions | None = None) -> Inference:
        """As the detector was validated, where `find` does not say otherwise."""
        return Inference(model, info, fill(find or FindOptions(), asdict(info.find)))

    @property
    def transform(self) -> DetectTransform:
        """Makes the images that it needs."""
        assert self.find.size is not None
        assert self.find.max_size is not None
        return DetectTransform(DetectAugment((self.find.size,), self.find.max_size))

    def __call__(self, batch: Batch) -> Detections:
        """The objects of a batch of one image, as bytes."""
        objects: Objects = batch.targets
        device, (matrix,), (size,) = next(self.model.parameters()).device, objects.matrices, objects.sources
        images = batch.images.to(device, non_blocking=True)
        images = normalise(images, self.info.backbone.mean, self.info.backbone.std)
        (answer,) = self.model.detect(images, objects.sizes, self.find)
        boxes = answer["boxes"].float().cpu().numpy().astype(np.float64)  # of an image that is upright
        boxes = boxes * np.tile(matrix.diagonal(), 2) + np.tile(matrix[:, 2], 2)
        masks = None
        if "masks" in answer:
            pairs = zip(answer["masks"].cpu(), boxes.tolist(), strict=True)
            masks = [compress(paste(mask, box, size).numpy()) for mask, box in pairs]
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


# -- evaluate, predict ------------------------------------------------------------------------------------------------


def open_inference(options: SourceOptions, find: FindOptions) -> Inference:
    """A trained detector on its device, used as the options say."""
    detector, info = load_detector(options.source)
    return Inference.of(detector.to(pick_device(options.device)), info, find)


def class_columns(model_names: Sequence[str], data_names: Sequence[str], where: str) -> list[int]:
    """Of each class of a detector, the class of the data with its name, -1 if there is none."""
    index = {name: k for k, name in enumerate(data_names)}
    columns = [index.get(name, -1) for name in model_names]
    if max(columns, default=-1) < 0:
        raise EverytokenError(
            f"no class of the detector ({', '.join(list(model_names)[:3])}, ...) is a category of {where} "
            f"({', '.join(list(data_names)[:3])}, ...)"
        )
    return columns


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
    info = network.info
    columns = class_columns(info.class_names, data.class_names, data.name)
    notes += data.notes
    unknown = sum(c not in columns for c in range(data.num_classes))
    if unknown:
        notes.append(f"{unknown} of the {data.num_classes} categories of the data are unknown to the detector")
    reader = ObjectReader(data, network.transform, None, skip=options.on_bad_image == "skip")
    score = DetectScore(data)
    result = evaluate_dense(options, lambda batch: network(batch).relabel(columns), reader, score, info.backbone, notes)
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
        key, shown = batch.keys[0], answer.take(answer.scores >= options.sure)
        names = [info.class_names[label] for label in shown.labels.tolist()]
        captions = [f"{name} {100 * score:.0f}" for name, score in zip(names, shown.scores, strict=True)]
        masks = [tool().decode(runs).astype(bool) for runs in shown.masks or ()]
        pixels = np.asarray(images.picture(int(batch.indices[0])).upright())
        picture = object_overlay(pixels, shown.boxes, captions, shown.labels.tolist(), masks)
        write_picture(place(key, ".objects.jpg"), picture, quality=90)
        objects += answer.rows(key, info.class_names)
        rows.append({"image": key, **dict(Counter(names).most_common())})
    write_atomically(Path(options.out) / "predictions.json", json.dumps(objects).encode())
    return rows
