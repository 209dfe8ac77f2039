"""Prediction for unlabelled images: classes with calibrated probabilities, "unsure", and where the object is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everytoken.errors import EverytokenError
from everytoken.files import make_inside, write_picture
from everytoken_lab import schema
from everytoken_lab.calibration import UNFAMILIAR, Calibration
from everytoken_lab.classes import shown_name
from everytoken_lab.data.augment import eval_view
from everytoken_lab.data.datasets import FileSet
from everytoken_lab.data.decode import Picture
from everytoken_lab.data.tree import gather_images, result_stems
from everytoken_lab.draw import object_overlay
from everytoken_lab.evaluation import PredictOptions, Progress
from everytoken_lab.evaluation.locate import ALIKE, Location, Locator, run_lengths
from everytoken_lab.evaluation.run import Inference, Voter, calibrated, open_with, shown_probabilities, write_csv
from everytoken_lab.models.open import OpenModel

UNSURE = "unsure"


@dataclass(frozen=True)
class ImagePrediction:
    """The most likely classes of one image, best first."""

    path: str
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    sure: bool = True  # whether the first is likely enough, by the option `sure`
    location: Location | None = None  # of the object, by the option `locate`; None also where none is seen
    labels: tuple[str, ...] | None = None  # of a multi-label model, all classes that are likely enough
    familiarity: float | None = None  # fraction of the held-out images that look less like the classes, if it is known

    @property
    def unfamiliar(self) -> bool:
        """Whether it may show none of the classes."""
        return self.familiarity is not None and self.familiarity < UNFAMILIAR

    @property
    def answers(self) -> tuple[str, ...]:
        """The first class, or "unsure"; all labels of a multi-label model."""
        return (self.classes[0] if self.sure else UNSURE,) if self.labels is None else self.labels

    @property
    def answer(self) -> str:
        """`answers` as one text, with ";" between labels."""
        return ";".join(self.answers)

    def to_json(self) -> dict[str, Any]:
        """For JSON; the mask as COCO's run lengths: numbers of 0s, 1s, 0s, ... down the columns."""
        row: dict[str, Any] = {"image": self.path, "classes": dict(zip(self.classes, self.probabilities, strict=True))}
        row |= {"answer": self.answer} if self.labels is None else {"labels": self.labels}
        if self.familiarity is not None:
            row |= {"familiarity": self.familiarity, "unfamiliar": self.unfamiliar}
        if self.location is not None:
            mask = self.location.mask()
            row |= {"box": self.location.pixels, "size": self.location.size}
            row["mask"] = {"size": list(mask.shape), "counts": run_lengths(mask.ravel(order="F"))}
        return row


@dataclass(frozen=True)
class ImagePredictions(Sequence[ImagePrediction]):
    """Predictions in the order of the images; those that could not be read are in `skipped`."""

    images: tuple[ImagePrediction, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # path -> why
    threshold: float = 0.0  # the least probability of a sure answer, or of each label
    notes: tuple[str, ...] = ()  # what to know about the probabilities
    class_names: tuple[str, ...] = ()  # of the model; their order decides the colours of pictures
    located: bool = False  # whether the option `locate` was on

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: Any) -> Any:
        return self.images[i]

    def to_csv(self, path: str | Path) -> None:
        """One line per image: its path, class, probability, the next best classes, and how familiar it looks.

        Of a multi-label model also `label`, with ";" between labels as in `labels.csv`. With the option `sure` also the
        answer, which may be "unsure"; with `locate` the box in pixels of the upright image, or nothing if none is seen.
        An image that could not be read has only its path and the error.
        """
        rows = []
        for image in self.images:
            row = {"image": image.path}
            for i, (name, p) in enumerate(zip(image.classes, image.probabilities, strict=True), 1):
                number = f" {i}" if i > 1 else ""
                row |= {f"class{number}": name, f"probability{number}": f"{p:.4f}"}
            if self.threshold or image.labels is not None:
                row["answer" if image.labels is None else "label"] = image.answer
            if image.familiarity is not None:
                row |= {"familiarity": f"{image.familiarity:.2f}", "unfamiliar": "yes" if image.unfamiliar else ""}
            if self.located:
                box = [f"{at:.0f}" for at in image.location.pixels] if image.location else [""] * 4
                row |= dict(zip(("left", "top", "right", "bottom"), box, strict=True))
            rows.append(row)
        rows += [{"image": name, "error": reason} for name, reason in self.skipped.items()]
        header = list(dict.fromkeys(name for row in rows for name in row)) or ["image", "class", "probability"]
        write_csv(Path(path), header, [[row.get(name, "") for name in header] for row in rows])

    def save_pictures(self, folder: str | Path) -> list[Path]:
        """Each image with outline, box and class of its object, in a folder, under its name, 640 pixels long."""
        if not self.images:
            return []
        root, names = gather_images([image.path for image in self.images])
        stems = result_stems(root, names, Path(folder), [".jpg"])
        if not self.located:
            raise EverytokenError("the predictions have no locations; predict with locate=True.")
        files = []
        for image, name in zip(self.images, names, strict=True):
            pixels = np.asarray(Picture(image.path, image.path).upright())
            caption = f"{shown_name(image.answer)} {image.probabilities[0]:.0%}"
            boxes = np.array([image.location.pixels if image.location else (0, 0, 0, 0)])
            masks = [image.location.mask()] if image.location else []
            file = stems[name].with_name(stems[name].name + ".jpg")
            make_inside(Path(folder), file.parent.relative_to(folder))
            number = self.class_names.index(image.classes[0])
            write_picture(file, object_overlay(pixels, boxes, [caption], [number], masks, 640), quality=88)
            files.append(file)
        return files


def _of_pass(progress: Progress | None, number: int, passes: int, images: int) -> Progress | None:
    """Progress of one of several passes over the images: an image is done when all passes are."""
    return None if progress is None else lambda done, _: progress((number * images + done) // passes, images)


def _threshold(calibration: Calibration | None, sure: float, multi_label: bool) -> tuple[float, str]:
    """The least probability of a sure answer, or of each label of a multi-label model, and what to say about it."""
    if not sure and not multi_label:
        return 0.0, ""
    what = "labels are classes of {:.3f} or more" if multi_label else "answers below {:.3f} are unsure"
    quality, amount = ("precision", "recall") if multi_label else ("accuracy", "coverage")
    if calibration is None:
        threshold = sure or 0.5
        return threshold, f"{what.format(threshold)}; there are no held-out images to choose the threshold with"
    if sure:
        (threshold, found), reached = calibration.threshold(sure), 100 * sure
        if not found:
            return threshold, f"no threshold reaches a {quality} of {sure:.0%} on the held-out images"
    else:
        threshold, reached, found = calibration.best_threshold()
    measured = f"{quality} {reached:.0f} %, {amount} {found:.0f} % on the held-out images"
    return threshold, f"{what.format(threshold)}: {measured}"


def predict(
    source: str | Path | OpenModel,
    images: str | Path | Sequence[str | Path],
    *,
    progress: Progress | None = None,
    **settings: Any,
) -> ImagePredictions:
    """Predict the classes of unlabelled images.

    Example:
        >>> for image in lab.predict("runs/first", "new-photos", sure=0.95, locate=True):
        ...     print(image.path, image.answer, image.probabilities[0], image.location.pixels)

    Args:
        source: as for `load`, or a loaded model.
        images: files and folders; folders are searched to the bottom.
        settings: fields of `PredictOptions`.
    """
    options = schema.from_keywords(PredictOptions, settings, "predict()")
    root, names = gather_images([str(file) for file in ([images] if isinstance(images, str | Path) else images)])
    opened = open_with(source, options)
    remark, calibration = "", None
    if options.calibrate and options.token_vote is None and not options.img_size and not options.crop_pct:
        opened, remark = calibrated(opened, options)
        calibration = opened.info.calibration
    shown, multi_label = replace(opened.info, calibration=calibration), opened.info.multi_label
    threshold, note = _threshold(calibration, options.sure, multi_label)
    data = FileSet(root, names)
    model = Voter(opened, options.token_vote).eval()
    where, here = [root / name for name in names], Path.cwd()
    shown_paths = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in where]
    first, second = (_of_pass(progress, number, 2 if options.locate else 1, len(data)) for number in (0, 1))
    inference = Inference(model, data, eval_view(opened.info), options, opened.info.amp_dtype(options.amp), first)
    inference.bad_images.quota = 1.0
    out: dict[int, ImagePrediction] = {}
    likely: dict[int, tuple[Tensor, Tensor]] = {}  # classes and their probabilities
    for batch, logits in inference.batches():
        assert batch.indices is not None
        values, order = shown_probabilities(shown, logits).sort(descending=True, stable=True)
        shown_classes = None if multi_label else options.top
        values, order = values[:, :shown_classes], order[:, :shown_classes]
        familiar: list[float | None] = [None] * len(logits)
        if calibration is not None and calibration.energies:
            familiar = calibration.familiarity(logits.cpu().numpy()).tolist()
        rows = zip(batch.indices.tolist(), values.tolist(), order.tolist(), familiar, strict=True)
        for i, row, numbers, known in rows:
            named = tuple(opened.class_names[number] for number in numbers)
            labels = named[: sum(p >= threshold for p in row)] if multi_label else None
            top, sure = tuple(row[: options.top]), row[0] >= threshold
            out[i] = ImagePrediction(shown_paths[i], named[: options.top], top, sure, None, labels, known)
        if options.locate:
            values, classes = logits.softmax(-1).topk(min(ALIKE, logits.shape[1]))
            likely |= zip(batch.indices.tolist(), zip(classes, values, strict=True), strict=True)
    if options.locate:
        answered, locator = sorted(out), Locator(opened)
        whole = Inference(opened.model, data.subset(answered), locator.view, options, progress=second)
        for batch in whole.views():
            assert batch.indices is not None
            numbers = [answered[i] for i in batch.indices.tolist()]
            sizes = [data.picture(i).size for i in numbers]
            classes, chances = (torch.stack(values) for values in zip(*(likely[i] for i in numbers), strict=True))
            located = locator.locate(batch.images, classes, chances, sizes)
            out |= {i: replace(out[i], location=place) for i, place in zip(numbers, located, strict=True)}
    notes = tuple(filter(None, (remark, note)))
    bad = inference.bad_images.seen
    skipped = {path: bad[name] for path, name in zip(shown_paths, names, strict=True) if name in bad}
    predicted = tuple(out[i] for i in sorted(out))
    return ImagePredictions(predicted, skipped, threshold, notes, tuple(opened.class_names), options.locate)
