"""Pictures for the page: validation images with what each group's tokens say.

A token map shows the best class of every token of the network's input, stronger where it is surer. It comes from the
token head where there is one; a plain model's own class head is asked at every token instead.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw

from everytoken.errors import EverytokenError
from everytoken_lab import draw
from everytoken_lab.evaluation.calibrated import probabilities
from everytoken_lab.evaluation.locate import ALIKE, Locator, cell_classes
from everytoken_lab.evaluation.run import network_inputs
from everytoken_lab.maps.summary import sample_positions
from everytoken_lab.reports.predictions import PredictedRun

SIDE = 160  # pixels of a picture on the page, at most


@dataclass(frozen=True)
class Answer:
    """One group's answer about an image; no confidence where the model has been trained on the image."""

    group: str
    guess: str
    confidence: float | None
    correct: bool
    tokens: TokenPicture | None


@dataclass(frozen=True)
class TokenPicture:
    """An image with the classes of its tokens, and the object of the predicted class in a frame."""

    address: str  # as `data:` text
    legend: Sequence[draw.Entry]
    source: str  # see `CellClasses`

    def words(self, most: int) -> str:
        """The classes with the most tokens."""
        return ", ".join(f"{entry.name} {entry.fraction:.0%}" for entry in self.legend[:most])


@dataclass(frozen=True)
class Sample:
    """One image: the picture as a data address, `why` it was picked, the label, each group's answer."""

    key: str
    why: str
    picture: str
    label: str
    answers: tuple[Answer, ...]


def data_address(image: Image.Image) -> str:
    """An image as `data:` text; small ones stay exact, larger ones become JPEG."""
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    file, kind = io.BytesIO(), "png" if max(image.size) <= 64 else "jpeg"
    if kind == "png":
        image.save(file, "PNG", optimize=True)
    else:
        image.save(file, "JPEG", optimize=True, quality=82)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def choose(predicted: Sequence[PredictedRun], count: int = 12) -> list[tuple[int, str]]:
    """(position in the predictions, why) of images to show: equally many for each set of groups that are right.

    Those that all get wrong are the ones that they are surest of; others are spread evenly over the sureness.
    """
    sure = np.mean([p.predictions.confidence for p in predicted], axis=0)
    right = np.array([p.predictions.correct for p in predicted]).T
    patterns, pattern_of = np.unique(right, axis=0, return_inverse=True)
    each = -(-count // len(patterns))
    picked: list[tuple[int, str]] = []
    for k, pattern in enumerate(patterns):
        inside = np.flatnonzero(pattern_of.ravel() == k)
        inside = inside[np.argsort(-sure[inside], kind="stable")]
        names = ", ".join(p.group for p, is_right in zip(predicted, pattern, strict=True) if is_right)
        why = "right" if pattern.all() else f"right: {names}" if names else "wrong"
        shown = inside[sample_positions(len(inside), each)] if pattern.any() else inside[:each]
        picked += [(i, why) for i in shown.tolist()]
    return picked[: max(count, len(patterns))]


@torch.no_grad()
def token_pictures(
    predicted: PredictedRun, indices: Sequence[int], device: str = "cpu"
) -> tuple[list[Image.Image], list[float], list[TokenPicture | None]]:
    """What a network sees of some images of the data, its highest probability, and what its tokens say."""
    opened = predicted.model()
    pixels, images = network_inputs(opened.info, map(predicted.data.picture, indices), device)
    pictures = [Image.fromarray(image) for image in pixels]
    answers = opened.model.to(device)(images)
    sure = probabilities(opened.info, answers.voted(opened.info.token_vote)).amax(-1).tolist()
    try:
        cells = cell_classes(opened, images)
    except (RuntimeError, EverytokenError, AttributeError):  # a head that cannot read single cells
        return pictures, sure, [None] * len(pictures)
    likely, classes = answers.logits.softmax(-1).topk(min(ALIKE, answers.logits.shape[-1]))
    colours, name_of = draw.ClassColours(cells.names), cells.names.__getitem__
    painted: list[TokenPicture | None] = []
    for i, location in enumerate(Locator(opened).locate(images, classes, likely, [p.size for p in pictures])):
        photo = draw.fit_photo(pictures[i], SIDE)
        image, legend = draw.class_picture(photo, cells.top[i], cells.confidence[i], name_of, colours)
        frame = [edge * side for edge, side in zip(location.box, 2 * image.size, strict=True)]
        ImageDraw.Draw(image).rectangle(frame, outline="white", width=2)
        painted.append(TokenPicture(data_address(image), legend, cells.source))
    return pictures, sure, painted


def samples(groups: Sequence[PredictedRun], count: int = 12, device: str = "cpu") -> list[Sample]:
    """Some validation images with every group's answer; the groups have the same images."""
    base, names = groups[0], groups[0].names
    chosen = choose(groups, count)
    indices = [int(base.predictions.index[i]) for i, _ in chosen]
    seen = [token_pictures(predicted, indices, device) for predicted in groups]
    result = []
    for place, (i, why) in enumerate(chosen):
        answers = []
        for predicted, (_, sure, maps) in zip(groups, seen, strict=True):
            p, confidence = predicted.predictions, None if predicted.run.cross_validated else sure[place]
            guess, correct = p.answer_text(i, names), bool(p.correct[i])
            answers.append(Answer(predicted.group, guess, confidence, correct, maps[place]))
        picture, label = data_address(seen[-1][0][place]), base.predictions.label_text(i, names)
        result.append(Sample(base.keys[indices[place]], why, picture, label, tuple(answers)))
    return result
