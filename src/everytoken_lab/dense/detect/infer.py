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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from everytoken.data.batch import Batch, normalise
from everytoken.errors import EverytokenError, need
from everytoken.files import write_atomically, write_picture
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.dense.common import (
    Evaluation,
    Score,
    answer_images,
    evaluate_dense,
    open_predicted,
    open_unseen,
    whole_set,
)
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
from everytoken_lab.dense.detect.options import NEW_RUN, DetectAugment, DetectEval, DetectPredict, FindOptions
from everytoken_lab.draw import Card, Panel, Row, object_overlay
from everytoken_lab.engine.distributed import World, pick_device
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.training.options import fill

NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl")
SURE = 0.5  # score from which on objects of validation images are drawn


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
        rows = []
        for k, (x0, y0, x1, y1) in enumerate(self.boxes.tolist()):
            row: dict[str, Any] = {
                "image_id": image,
                "category_id": classes[int(self.labels[k])],
                "bbox": [round(v, 3) for v in (x0, y0, x1 - x0, y1 - y0)],
                "score": round(float(self.scores[k]), 5),
            }
            rows.append(row if self.masks is None else {**row, "segmentation": self.masks[k]})
        return rows


@dataclass(frozen=True)
class Inference:
    """A detector, and how it is used; `find` has nothing left open. mean, std: of the images' normalisation."""

    model: Detector
    find: FindOptions
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @staticmethod
    def of(model: Detector, info: DetectorInfo, find: FindOptions | None = None) -> Inference:
        """As the detector was validated, where `find` does not say otherwise."""
        validated = fill(info.find, NEW_RUN)
        resolved = fill(find or FindOptions(), asdict(validated))
        return Inference(model, resolved, info.backbone.mean, info.backbone.std)

    @property
    def transform(self) -> DetectTransform:
        """Makes the images that it needs."""
        assert self.find.size is not None
        assert self.find.max_size is not None
        return DetectTransform(DetectAugment((self.find.size,), self.find.max_size))

    def on(self, device: torch.device | str) -> Callable[[Batch], Detections]:
        """Batch of one image, as bytes -> its objects."""
        return lambda batch: self(batch, device)[0]

    def __call__(self, batch: Batch, device: torch.device | str) -> list[Detections]:
        """Objects of each image of a batch of bytes."""
        objects: Objects = batch.targets
        images = normalise(batch.images.to(device, non_blocking=True), self.mean, self.std)
        detections = []
        answers = self.model.detect(images, objects.sizes, self.find)
        for answer, matrix, size in zip(answers, objects.matrices, objects.sources, strict=True):
            boxes = answer["boxes"].float().cpu().numpy().astype(np.float64)
            scale = np.array([matrix[0, 0], matrix[1, 1]] * 2)  # images are upright here
            boxes = boxes * scale + np.array([matrix[0, 2], matrix[1, 2]] * 2)
            masks = None
            if "masks" in answer:
                pairs = zip(answer["masks"].cpu(), boxes.tolist(), strict=True)
                masks = [compress(paste(mask, box, size).numpy()) for mask, box in pairs]
            scores, labels = answer["scores"].cpu().numpy().astype(np.float64), answer["labels"].cpu().numpy() - 1
            detections.append(Detections(boxes, scores, labels, masks))
        return detections


def paste(mask: torch.Tensor, box: Sequence[float], size: tuple[int, int]) -> torch.Tensor:
    """A mask [28, 28] of probabilities put into its box on an image of (height, width): bool [height, width].

    A pixel is inside if the mask, interpolated at its centre, is at least one half.
    """
    whole = torch.zeros(size, dtype=torch.bool)
    axes, spans = [], []
    for low, high, length in zip(box[:2], box[2:], size[::-1], strict=True):
        start = min(max(math.floor(low) - 1, 0), length)
        span = slice(start, max(min(math.ceil(high) + 1, length), start))
        spans.append(span)
        axes.append((torch.arange(span.start, span.stop) + 0.5 - low) / max(high - low, 1e-6) * 2 - 1)
    grid = torch.stack(torch.meshgrid(axes[1], axes[0], indexing="ij")[::-1], -1).float()
    if grid.numel():
        whole[spans[1], spans[0]] = (
            F.grid_sample(mask[None, None].float(), grid[None], align_corners=False)[0, 0] >= 0.5
        )
    return whole


def truth_of(data: InstanceSet, i: int, masks: bool) -> Detections:
    """The objects that an image has, as if they had been detected; crowds are left out."""
    objects = [o for o in data.objects(i) if not o.crowd]
    runs = [data.run_lengths(i, o) for o in objects] if masks else None
    boxes = np.array([o.box for o in objects], dtype=np.float64).reshape(-1, 4)
    return Detections(boxes, np.ones(len(objects)), np.array([o.label for o in objects], dtype=np.int64), runs)


def draw_objects(
    pixels: np.ndarray, detections: Detections, names: Sequence[str], scores: bool = True, side: int = 0
) -> Image.Image:
    """Objects over an image uint8 [H, W, 3], with class and score; `side`: see `object_overlay`."""
    captions = [names[label] for label in detections.labels.tolist()]
    if scores:
        captions = [f"{name} {100 * score:.0f}" for name, score in zip(captions, detections.scores, strict=True)]
    masks = [tool().decode(runs).astype(bool) for runs in detections.masks or ()]
    return object_overlay(pixels, detections.boxes, captions, masks, side)


# -- score ------------------------------------------------------------------------------------------------------------


class DetectScore(Score[Detections]):
    """COCO's average precision; objects with a score of at least `sure` are drawn."""

    def __init__(self, data: DataSet, pictures: int = 0, sure: float = SURE) -> None:
        super().__init__(pictures)
        self.data, self.sure = data, sure
        self.whole = whole_set(data, 0, InstanceSet)[0]
        self.detections: dict[int, Detections] = {}  # by number of the image in `whole`

    def count(self, batch: Batch, answer: Detections) -> None:
        assert batch.indices is not None
        self.detections[whole_set(self.data, int(batch.indices[0]), InstanceSet)[1]] = answer

    def join(self, world: World) -> None:
        self.detections = {k: v for part in world.gather(self.detections) for k, v in part.items()}

    def result(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """AP of masks first, if there are masks."""
        numbers, classes = coco_scores(self.whole, self.detections)
        return dict(sorted(numbers.items(), key=lambda item: not item[0].startswith("mask"))), classes

    def card(self, batch: Batch, answer: Detections) -> Card:
        i, names, side = next(reversed(self.detections)), self.whole.class_names, 480
        pixels = np.asarray(self.whole.picture(i).upright())
        truth = draw_objects(pixels, truth_of(self.whole, i, answer.masks is not None), names, scores=False, side=side)
        shown = draw_objects(pixels, answer.take(answer.scores >= self.sure), names, side=side)
        return Card(self.whole.key(i), [Row("", [Panel("truth", truth), Panel("answer", shown)])], side=side)


def coco_scores(
    data: InstanceSet, detections: Mapping[int, Detections]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Compare detections, by number of the image in `data`, with the truth; other images do not count.

    Returns:
        "box AP", "box AP50", ..., "mask AP", ... in percent, -1 where no object is of that kind; and a row for each
        class that occurs: class, objects, and AP and AP50 of boxes and masks.
    """
    api, evaluator = (need(f"pycocotools.{name}", "detect", "everytoken detect") for name in ("coco", "cocoeval"))
    samples = sorted(detections)
    masks = any(image.masks is not None for image in detections.values())
    ids = range(1, data.num_classes + 1)
    rows = [row for number, i in enumerate(samples, 1) for row in detections[i].rows(number, ids)]
    numbers: dict[str, float] = {}
    table: dict[int, dict[str, Any]] = {}
    with contextlib.redirect_stdout(io.StringIO()):  # the evaluator talks
        truth = api.COCO()
        truth.dataset = data.as_coco(samples, masks)
        truth.createIndex()
        counts = Counter(row["category_id"] for row in truth.dataset["annotations"] if not row["iscrowd"])
        table = {c: {"class": data.class_names[c - 1], "objects": counts[c]} for c in sorted(counts)}
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
    device, coco = pick_device(options.device), options.coco

    def same(run: Run) -> bool | None:
        option = "annotations" if run.config.get("annotations") else "data"
        return run.names(coco.annotations or options.data, option, whole_file)

    def fraction(run: Run) -> float:
        return 0.0 if run.config.get("val_annotations") else run.val_split

    data, notes = open_unseen(options, coco, open_instances, divided(options.data, coco), same, fraction)
    if not len(data):
        raise EverytokenError(f"{options.data} has no images for {options.split!r}")
    whole, _ = whole_set(data, 0, InstanceSet)
    detector, info = load_detector(options.source)
    columns = class_columns(info.class_names, whole.class_names, whole.name)
    notes += whole.notes
    unknown = sum(c not in columns for c in range(whole.num_classes))
    if unknown:
        notes.append(f"{unknown} of the {whole.num_classes} categories of the data are unknown to the detector")
    inference = Inference.of(detector.to(device), info, options.find)
    network = inference.on(device)
    reader = ObjectReader(data, inference.transform, None, masks=False, skip=options.on_bad_image == "skip")
    score = DetectScore(data, sure=options.sure)
    evaluation = evaluate_dense(
        options, lambda batch: network(batch).relabel(columns), reader, score, info.backbone, notes
    )
    if options.results:
        found = sorted(score.detections.items())
        rows = [row for i, objects in found for row in objects.rows(int(whole.image_ids[i]), whole.category_ids)]
        Path(options.results).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(options.results), json.dumps(rows).encode())
    return evaluation


def predict(options: DetectPredict) -> tuple[list[dict[str, Any]], list[str]]:
    """Objects of images: a picture of each, and predictions.json, written to a folder; never over an image.

    Returns:
        A row for each image (file, and how many objects of which class), and notes for the user.
    """
    device = pick_device(options.device)
    images, place = open_predicted(options, (".objects.jpg",))
    detector, info = load_detector(options.source)
    names = list(info.class_names)
    inference = Inference.of(detector.to(device), info, options.find)
    rows: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    reader = ObjectReader(images, inference.transform, None, truth=False)
    for batch, answer in answer_images(inference.on(device), reader, options, info.backbone):
        assert batch.indices is not None
        key, shown = batch.keys[0], answer.take(answer.scores >= options.sure)
        picture = draw_objects(np.asarray(images.picture(int(batch.indices[0])).upright()), shown, names)
        write_picture(place(key, ".objects.jpg"), picture, quality=90)
        objects += answer.rows(key, names)
        rows.append({"image": key, **dict(Counter(names[label] for label in shown.labels.tolist()).most_common())})
    write_atomically(Path(options.out) / "predictions.json", json.dumps(objects).encode())
    return rows, []
