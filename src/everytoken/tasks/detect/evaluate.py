"""`detect eval` and `detect predict`: a trained detector on images."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from everytoken.data.batch import Batch
from everytoken.data.given import gather_images, result_stems
from everytoken.data.loader import BadImages, Loader
from everytoken.data.sources import DataSet
from everytoken.errors import EverytokenError
from everytoken.evaluation.held_out import held_out
from everytoken.tasks.detect.coco import divided, only_images, open_instances, whole_file
from everytoken.tasks.detect.data import Samples, base_of
from everytoken.tasks.detect.draw import compare, draw_objects, truth_of
from everytoken.tasks.detect.infer import Found, Inference
from everytoken.tasks.detect.metrics import Precision, precision
from everytoken.tasks.detect.model import DetectorDescription, load_detector
from everytoken.tasks.detect.options import CocoOptions, FindOptions
from everytoken.tasks.segment.draw import sheet


@dataclass(frozen=True)
class Evaluation:
    """Numbers of one detector on one set; `numbers` also has images and images_per_second."""

    precision: Precision
    numbers: dict[str, float]
    notes: list[str]
    skipped: dict[str, str]


def _asked(find: FindOptions, about: DetectorDescription) -> FindOptions:
    """Sizes that are not given are those of the run's own validation."""
    known = {f.name: about.find[f.name] for f in fields(FindOptions) if f.name in about.find}
    return replace(
        find, size=find.size or known.get("size", 800), max_size=find.max_size or known.get("max_size", 1333)
    )


def class_columns(own: Sequence[str], data: Sequence[str], where: str) -> list[int]:
    """Of each class of a detector, the class of the data with its name, -1 if there is none."""
    index = {name: k for k, name in enumerate(data)}
    columns = [index.get(name, -1) for name in own]
    if max(columns, default=-1) < 0:
        raise EverytokenError(
            f"no class of the detector ({', '.join(list(own)[:3])}, ...) is a category of {where} "
            f"({', '.join(list(data)[:3])}, ...)"
        )
    return columns


def evaluate(
    source: str, data: str, find: FindOptions | None = None, coco: CocoOptions | None = None, *, split: str = "val",
    workers: int = 0, device: str = "cpu", amp: bool = False, on_bad_image: str = "raise", pictures: str = "",
    picture_count: int = 8, sure: float = 0.5, results: str = "",
) -> Evaluation:  # fmt: skip
    """COCO's average precision of a detector; see `everytoken detect eval --help`."""
    found_set, notes = _open(source, data, split, coco or CocoOptions())
    if not len(found_set):
        raise EverytokenError(f"{data} has no images for {split!r}")
    base, _ = base_of(found_set, 0)
    loaded = load_detector(source)
    about = loaded.description
    notes += base.notes
    columns = class_columns(about.class_names, base.class_names, base.name)
    unknown = sum(c not in columns for c in range(base.num_classes))
    if unknown:
        notes.append(f"{unknown} of the {base.num_classes} categories of the data are unknown to the detector")
    ask = Inference.of(loaded.model.to(device), about, _asked(find or FindOptions(), about))
    bad = BadImages(on_bad_image)
    samples = Samples(found_set, ask.transform, None, masks=False, skip=on_bad_image == "skip")
    loader = Loader(found_set, None, 1, train=False, workers=workers, bad_images=bad, samples=samples)
    found: dict[int, Found] = {}
    started = time.perf_counter()
    for batch, answer in _answers(ask, loader, device, amp):
        assert batch.indices is not None
        found[base_of(found_set, int(batch.indices[0]))[1]] = answer
    seconds = time.perf_counter() - started
    loader.close()
    made = precision(base, found, columns)
    if pictures:
        panels = []
        for i in sorted(found)[:picture_count]:
            shown = found[i].better_than(sure)
            known = [k for k in range(len(shown.labels)) if columns[int(shown.labels[k])] >= 0]
            shown = _relabel(shown, columns, known)
            image = np.asarray(base.picture(i).upright())
            panels.append(compare(image, truth_of(base, i, shown.masks is not None), shown, base.class_names))
        Path(pictures).parent.mkdir(parents=True, exist_ok=True)
        sheet(panels).save(pictures, quality=88)
    if results:
        rows = []
        ids = [base.category_ids[c] if c >= 0 else -1 for c in columns]
        for i in sorted(found):
            rows += [row for row in found[i].rows(int(base.image_ids[i]), ids) if row["category_id"] != -1]
        Path(results).parent.mkdir(parents=True, exist_ok=True)
        Path(results).write_text(json.dumps(rows))
    numbers = {**made.numbers, "images": len(found), "images_per_second": len(found) / seconds}
    return Evaluation(made, numbers, notes, dict(bad.seen))


def _open(source: str, data: str, split: str, coco: CocoOptions) -> tuple[DataSet, list[str]]:
    """The images to evaluate on, and what to say about them: of data without parts, what the run held out."""
    if split != "val" or coco.val_split or divided(data, coco):
        return open_instances(data, split, coco), []
    known = held_out(
        [source], data,
        lambda run: run.names(coco.annotations or data, "annotations" if run.config.get("annotations") else "data",
                              whole_file),
        lambda run: 0.0 if run.config.get("val_annotations") else run.val_split,
    )  # fmt: skip
    found = open_instances(data, "val" if known.share else "all", replace(coco, val_split=known.share))
    note = known.note(data, len(found))
    return found, [note] if note else []


def _relabel(found: Found, columns: Sequence[int], keep: Sequence[int]) -> Found:
    labels = np.array([columns[int(found.labels[k])] for k in keep], dtype=np.int64)
    masks = None if found.masks is None else [found.masks[k] for k in keep]
    return Found(found.boxes[list(keep)], found.scores[list(keep)], labels, masks)


def predict(
    source: str, images: Sequence[str], output: str, find: FindOptions | None = None, *, workers: int = 0,
    device: str = "cpu", amp: bool = False, sure: float = 0.5,
) -> list[dict[str, Any]]:  # fmt: skip
    """Objects of images: a picture of each, and predictions.json, written to a folder; never over an image.

    Args:
        sure: score of the objects that are drawn and counted; the file has all of them.

    Returns:
        A row for each image: file, and how many objects of which class.
    """
    out = Path(output)
    stems = result_stems(*gather_images(images), out, (".objects.jpg",))
    data = only_images(images)
    loaded = load_detector(source)
    names = list(loaded.description.class_names)
    ask = Inference.of(loaded.model.to(device), loaded.description, _asked(find or FindOptions(), loaded.description))
    samples = Samples(data, ask.transform, None, truth=False)
    loader = Loader(data, None, 1, train=False, workers=workers, samples=samples)
    out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for batch, answer in _answers(ask, loader, device, amp):
        assert batch.indices is not None
        key = batch.keys[0]
        shown = answer.better_than(sure)
        image: Image.Image = data.picture(int(batch.indices[0])).upright()
        target = stems[key]
        target.parent.mkdir(parents=True, exist_ok=True)
        drawn = draw_objects(np.asarray(image), shown, names)
        drawn.save(target.with_name(target.name + ".objects.jpg"), quality=90)
        objects += answer.rows(key, names)
        counts = Counter(names[int(label)] for label in shown.labels)
        rows.append({"image": key, **dict(counts.most_common())})
    loader.close()
    (out / "predictions.json").write_text(json.dumps(objects))
    return rows


def _answers(ask: Inference, loader: Loader, device: str, amp: bool) -> Iterator[tuple[Batch, Found]]:
    for batch in loader.epoch(0):
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=amp):
            (answer,) = ask(batch, device)
        yield batch, answer
