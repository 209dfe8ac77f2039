"""Pictures for the page: validation images with what each group's tokens say, training images with their maps.

A token map shows the best class of every token of the network's input, stronger where it is surer. It comes from the
token head where there is one; a plain model's own class head is asked at every token instead.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from everytoken.data.batch import normalise
from everytoken.errors import EverytokenError
from everytoken.maps import Maps
from everytoken_lab.classes import class_finder, shown_name
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.evaluation.locate import ALIKE, Locator
from everytoken_lab.evaluation.run import eval_view
from everytoken_lab.maps.summary import folder_label, sample_positions, summarize
from everytoken_lab.reports.predictions import PredictedRun

SIDE = 160  # pixels of a picture on the page, at most


@dataclass(frozen=True)
class TokenMap:
    """The classes of a grid of tokens.

    Attributes:
        top: [h, w] the best class; confidence: [h, w] its probability; names: of the classes.
        source: who says so: "token head", "class head" or "annotator".
        box: where the object of the predicted class is: (left, top, right, bottom) in fractions of the picture.
    """

    top: np.ndarray
    confidence: np.ndarray
    names: Sequence[str]
    source: str
    box: tuple[float, float, float, float] | None = None

    def shares(self) -> list[tuple[str, float]]:
        """(class, part of the tokens), greatest first."""
        classes, counts = np.unique(self.top, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return [(self.names[int(classes[i])], float(counts[i] / self.top.size)) for i in order]


@dataclass(frozen=True)
class Answer:
    """One group's answer about an image."""

    group: str
    guess: str
    confidence: float
    correct: bool
    tokens: TokenMap | None


@dataclass(frozen=True)
class Sample:
    """One image: `why` it was picked, the picture as a data address, the label, each group's answer."""

    key: str
    why: str
    picture: str
    label: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Example:
    """A training image with its score map."""

    key: str
    picture: str
    label: str
    tokens: TokenMap


def data_address(image: Image.Image) -> str:
    """An image as `data:` text; small ones stay exact, larger ones become JPEG."""
    image = image.convert("RGB")
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    if max(image.size) <= 64:
        image.save(file, "PNG", optimize=True)
        kind = "png"
    else:
        image.save(file, "JPEG", quality=82)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def choose(predicted: Sequence[PredictedRun], count: int = 12) -> list[tuple[int, str]]:
    """(position in the predictions, why) of images to show, of the first set of predictions' images.

    With two groups or more: equally many that only the last group gets right, that only the first one does (so that
    nothing looks better than it is), that all get wrong, surest first, and that all get right. With one group: half
    wrong, surest first, and half right. Where the order is not by sureness, they are spread evenly over it.
    """
    correct = np.array([p.predictions.correct for p in predicted])
    sure = np.mean([p.predictions.confidence for p in predicted], axis=0)
    by_sureness = np.argsort(-sure, kind="stable")
    kinds: list[tuple[str, np.ndarray]] = [("wrong", ~np.any(correct, axis=0)), ("right", np.all(correct, axis=0))]
    if len(predicted) > 1:
        kinds = [
            ("only the last group is right", correct[-1] & ~np.any(correct[:-1], axis=0)),
            ("only the first group is right", correct[0] & ~np.any(correct[1:], axis=0)),
            *((f"{why}, by all groups", mask) for why, mask in kinds),
        ]
    share = -(-count // len(kinds))
    picked: list[tuple[int, str]] = []
    for why, mask in kinds:
        inside = [int(i) for i in by_sureness if mask[i]]
        if why.startswith(("right", "only")):
            inside = [inside[i] for i in sample_positions(len(inside), share)]
        picked += [(i, why) for i in inside[:share]]
    return picked[: max(count, len(kinds))]


def token_maps(
    predicted: PredictedRun, indices: Sequence[int], device: str = "cpu"
) -> tuple[list[Image.Image], list[TokenMap | None]]:
    """The network's view of some images of the data, and what its tokens say."""
    loaded = predicted.model()
    model = loaded.model.to(device)
    view = eval_view(loaded.info)
    pixels = [view(predicted.data.picture(index))[0] for index in indices]
    pictures = [Image.fromarray(image) for image in pixels]
    if not pictures:
        return [], []
    batch = torch.from_numpy(np.stack(pixels).transpose(0, 3, 1, 2).copy()).to(device)
    names = list(loaded.info.token_class_names) or list(loaded.info.class_names)
    source = "token head"
    with torch.no_grad():
        images = normalise(batch, view.mean, view.std)
        answers = model(images)
        logits = answers.token_logits
        if logits is None:
            source, names = "class head", list(loaded.info.class_names)
            try:
                logits = model.cell_logits(images)
            except (RuntimeError, EverytokenError, AttributeError):  # a head that cannot read single cells
                return pictures, [None] * len(pictures)
        likely, classes = answers.logits.softmax(-1).topk(min(ALIKE, answers.logits.shape[-1]))
        located = Locator(loaded).locate(images, classes, likely, [picture.size for picture in pictures])
    if logits.shape[-1] != len(names):
        names = [f"class {i}" for i in range(logits.shape[-1])]
    confidence, top = logits.float().softmax(-1).max(-1)
    shown = [shown_name(name) for name in names]
    maps = zip(top.cpu().numpy(), confidence.cpu().numpy(), located, strict=True)
    return pictures, [TokenMap(best, sure, shown, source, location.box) for best, sure, location in maps]


def samples(groups: Sequence[tuple[str, PredictedRun]], count: int = 12, device: str = "cpu") -> list[Sample]:
    """Some validation images with every group's answer; the groups have the same images."""
    base = groups[0][1]
    chosen = choose([predicted for _, predicted in groups], count)
    indices = [int(base.predictions.index[i]) for i, _ in chosen]
    views = [token_maps(predicted, indices, device) for _, predicted in groups]
    result = []
    for place, (i, why) in enumerate(chosen):
        answers = []
        for (name, predicted), (_, maps) in zip(groups, views, strict=True):
            p, names = predicted.predictions, predicted.class_names
            top = p.answer_text(i, list(map(shown_name, names)))
            answers.append(Answer(name, top, float(p.confidence[i]), bool(p.correct[i]), maps[place]))
        label = base.predictions.label_text(i, list(map(shown_name, base.class_names)))
        reason = why.replace("the last group", groups[-1][0]).replace("the first group", groups[0][0])
        picture = data_address(views[-1][0][place])
        result.append(Sample(base.keys[indices[place]], reason, picture, label, tuple(answers)))
    return result


@dataclass(frozen=True)
class Agreement:
    """What an annotator's maps are like.

    Attributes:
        store: its folder; annotator: its name; held_out: accuracy on images it did not train on, if it is known.
        maps: how many were read; agreement (with the folders), confidence, vocabulary: means over them.
        per_class: (class, maps, part whose main class is the folder's).
        skipped: images without a map, key -> reason.
        examples: training images with their maps.
    """

    store: str
    annotator: str
    held_out: float | None
    grid: tuple[int, int]
    maps: int
    agreement: float | None
    confidence: float
    vocabulary: float
    per_class: list[tuple[str, int, float]]
    skipped: dict[str, str]
    examples: list[Example]


def annotator_agreement(store: Maps, images: DataSet | None, limit: int = 2000, show: int = 6) -> Agreement:
    """Compare maps with the folders' labels; `images` is where the pictures are, None without."""
    manifest = store.manifest
    find = class_finder(manifest.class_names)
    agrees: dict[int, list[bool]] = {}
    confidences, vocabularies = [], []
    for i in sample_positions(len(store), limit):
        summary = summarize(store.read(i), manifest.num_classes)
        confidences.append(float(summary.confidence[summary.inside].mean()))
        vocabularies.append(summary.vocabulary)
        label = folder_label(store.key(i), find)
        if label is not None:
            agrees.setdefault(label, []).append(label == summary.image_class)
    held_out = manifest.annotator.get("held_out_accuracy")
    every = [hit for hits in agrees.values() for hit in hits]
    return Agreement(
        store=str(store.path),
        annotator=_annotator_name(manifest.annotator),
        held_out=float(held_out) if isinstance(held_out, int | float) else None,
        grid=manifest.grid,
        maps=len(confidences),
        agreement=float(np.mean(every)) if every else None,
        confidence=float(np.mean(confidences)) if confidences else 0.0,
        vocabulary=float(np.mean(vocabularies)) if vocabularies else 0.0,
        per_class=[
            (shown_name(manifest.class_names[c]), len(hits), float(np.mean(hits))) for c, hits in sorted(agrees.items())
        ],
        skipped=store.skipped,
        examples=_examples(store, images, show) if images is not None else [],
    )


def _annotator_name(settings: Mapping[str, Any]) -> str:
    """ "fit" is a network that was trained on the dataset; say which, and from what."""
    name, fit = str(settings.get("name", "unknown")), settings.get("fit")
    if not isinstance(fit, Mapping):
        return name
    model = fit.get("model") or "a small CNN"
    pretrained = fit.get("pretrained") or str(model).startswith("registry:")
    return f"{name}, {model} trained on these images" + (" from pretrained weights" if pretrained else " from scratch")


def _examples(store: Maps, images: DataSet, count: int) -> list[Example]:
    """A few images spread over the dataset."""
    names = [shown_name(store.manifest.class_name(i)) for i in range(store.manifest.num_classes)]
    examples = []
    for i in sample_positions(len(images), count):
        key = images.key(i)
        if key not in store:
            continue
        score_map = store[key]
        summary = summarize(score_map, store.manifest.num_classes)
        try:
            picture = images.load(i)
        except EverytokenError:
            continue
        x0, y0, x1, y1 = score_map.area  # what the map covers; beyond the image (letterbox) is black
        w, h = picture.size
        picture = picture.crop((round(x0 * w), round(y0 * h), round(x1 * w), round(y1 * h)))
        label = ", ".join(map(shown_name, images.label_text(i).split(";"))) or "no label"
        tokens = TokenMap(summary.top, summary.confidence, names, "annotator")
        examples.append(Example(key, data_address(picture), label, tokens))
    return examples
