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

from everytoken.classes import class_finder, shown_name
from everytoken.data.batch import normalise
from everytoken.data.evaluation import EvalTransform
from everytoken.data.sources import DataSet
from everytoken.errors import EverytokenError
from everytoken.evaluation.run import eval_view
from everytoken.maps import Maps
from everytoken.maps.summary import folder_label, sample_positions, summarize
from everytoken.models.load import find_weights, load_model
from everytoken.reports.predictions import Predicted
from everytoken.reports.runs import Run

SIDE = 160  # pixels of a picture on the page, at most


@dataclass(frozen=True)
class TokenMap:
    """The classes of a grid of tokens.

    Attributes:
        top: [h, w] the best class; confidence: [h, w] its probability; names: of the classes.
        source: who says so: "token head", "class head" or "annotator".
    """

    top: np.ndarray
    confidence: np.ndarray
    names: Sequence[str]
    source: str

    def shares(self) -> list[tuple[str, float]]:
        """(class, part of the tokens), greatest first."""
        classes, counts = np.unique(self.top, return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return [(self.names[int(classes[i])], float(counts[i] / self.top.size)) for i in order]


@dataclass(frozen=True)
class Said:
    """One group's answer about an image."""

    group: str
    guess: str
    confidence: float
    right: bool
    tokens: TokenMap | None


@dataclass(frozen=True)
class Sample:
    """One image: `why` it was picked, the picture as a data address, the label, what was said."""

    key: str
    why: str
    picture: str
    label: str
    said: tuple[Said, ...]


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


def choose(found: Sequence[Predicted], count: int = 12) -> list[tuple[int, str]]:
    """(position in the predictions, why) of images to show, of the first set of predictions' images.

    With two groups or more: equally many that only the last group gets right, that only the first one does (so that
    nothing looks better than it is), that all get wrong, surest first, and that all get right. With one group: half
    wrong, surest first, and half right. Where the order is not by sureness, they are spread evenly over it.
    """
    correct = np.array([p.predictions.correct for p in found])
    sure = np.mean([p.predictions.confidence for p in found], axis=0)
    by_sureness = np.argsort(-sure, kind="stable")
    kinds: list[tuple[str, np.ndarray]] = [("wrong", ~np.any(correct, axis=0)), ("right", np.all(correct, axis=0))]
    if len(found) > 1:
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


def token_maps(run: Run, images: DataSet, indices: Sequence[int]) -> tuple[list[Image.Image], list[TokenMap | None]]:
    """The network's view of some images, and what its tokens say."""
    loaded = load_model(find_weights(run.path))
    view = EvalTransform(eval_view(loaded))
    pictures, maps = [], []
    names = list(loaded.description.token_class_names) or list(loaded.description.class_names)
    for index in indices:
        pixels, _ = view(images.picture(index))
        pictures.append(Image.fromarray(pixels))
        batch = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))[None]
        maps.append(_ask_tokens(loaded, normalise(batch, view.config.mean, view.config.std), names))
    return pictures, maps


@torch.no_grad()
def _ask_tokens(loaded: object, images: torch.Tensor, names: list[str]) -> TokenMap | None:
    model = loaded.model  # type: ignore[attr-defined]
    logits, source = model(images).token_logits, "token head"
    if logits is None:
        source, names = "class head", list(loaded.description.class_names)  # type: ignore[attr-defined]
        try:
            logits = model.cell_logits(images)
        except (RuntimeError, EverytokenError, AttributeError):  # a head that cannot read single cells
            return None
    if logits.shape[-1] != len(names):
        names = [f"class {i}" for i in range(logits.shape[-1])]
    sure, top = logits[0].float().softmax(-1).max(-1)
    return TokenMap(top.numpy(), sure.numpy(), [shown_name(name) for name in names], source)


def samples(groups: Sequence[tuple[str, Run, Predicted]], count: int = 12) -> list[Sample]:
    """Some validation images with every group's answer; the groups have the same images."""
    base = groups[0][2]
    chosen = choose([predicted for _, _, predicted in groups], count)
    indices = [int(base.predictions.index[i]) for i, _ in chosen]
    asked = [token_maps(run, predicted.data, indices) for _, run, predicted in groups]
    out = []
    for place, (i, why) in enumerate(chosen):
        said = []
        for (name, _, predicted), (_, maps) in zip(groups, asked, strict=True):
            p, names = predicted.predictions, predicted.class_names
            top = shown_name(names[int(p.top[i, 0])])
            said.append(Said(name, top, float(p.confidence[i]), bool(p.correct[i]), maps[place]))
        label = shown_name(base.class_names[int(base.predictions.label[i])])
        words = why.replace("the last group", groups[-1][0]).replace("the first group", groups[0][0])
        out.append(Sample(base.keys[indices[place]], words, data_address(asked[-1][0][place]), label, tuple(said)))
    return out


@dataclass(frozen=True)
class Agreement:
    """What an annotator's maps are like.

    Attributes:
        store: its folder; annotator: its name; held_out: accuracy on images it did not train on, if it is known.
        looked_at, agreement, confidence, vocabulary: of the maps that were looked at; agreement is with the folders.
        per_class: (class, maps, part whose main class is the folder's).
        skipped: images without a map, key -> reason.
        shown: training images with their maps.
    """

    store: str
    annotator: str
    held_out: float | None
    grid: tuple[int, int]
    looked_at: int
    agreement: float | None
    confidence: float
    vocabulary: float
    per_class: list[tuple[str, int, float]]
    skipped: dict[str, str]
    shown: list[tuple[str, str, str, TokenMap]]


def annotator_agreement(store: Maps, images: DataSet | None, limit: int = 2000, show: int = 6) -> Agreement:
    """Compare maps with the folders' labels; `images` is where the pictures are, None without."""
    manifest = store.manifest
    find = class_finder(manifest.class_names)
    right: dict[int, list[bool]] = {}
    sure, words = [], []
    for i in sample_positions(len(store), limit):
        one = summarize(store.read(i), manifest.num_classes)
        sure.append(float(one.confidence[one.inside].mean()))
        words.append(one.vocabulary)
        label = folder_label(store.key(i), find)
        if label is not None:
            right.setdefault(label, []).append(label == one.image_class)
    settings = manifest.annotator
    held = settings.get("held_out_accuracy")
    every = [hit for hits in right.values() for hit in hits]
    return Agreement(
        str(store.path),
        _annotator_name(settings),
        float(held) if isinstance(held, int | float) else None,
        manifest.grid,
        len(sure),
        float(np.mean(every)) if every else None,
        float(np.mean(sure)) if sure else 0.0,
        float(np.mean(words)) if words else 0.0,
        [(shown_name(manifest.class_names[c]), len(hits), float(np.mean(hits))) for c, hits in sorted(right.items())],
        store.skipped,
        _shown(store, images, show) if images is not None else [],
    )


def _annotator_name(settings: Mapping[str, Any]) -> str:
    """ "fit" is a network that was trained on the data set; say which, and from what."""
    name, fit = str(settings.get("name", "unknown")), settings.get("fit")
    if not isinstance(fit, Mapping):
        return name
    model = fit.get("model") or "a small CNN"
    begun = fit.get("pretrained") or str(model).startswith("registry:")
    return f"{name}, {model} trained on these images" + (" from pretrained weights" if begun else " from scratch")


def _shown(store: Maps, images: DataSet, count: int) -> list[tuple[str, str, str, TokenMap]]:
    """(key, picture, label, map) of a few images spread over the data set."""
    names = [shown_name(store.manifest.class_name(i)) for i in range(store.manifest.num_classes)]
    out = []
    for i in sample_positions(len(images), count):
        key = images.key(i)
        if key not in store:
            continue
        one = summarize(store[key], store.manifest.num_classes)
        try:
            picture = images.load(i)
        except EverytokenError:
            continue
        x0, y0, x1, y1 = store[key].area  # what the map covers; beyond the image (letterbox) is black
        w, h = picture.size
        picture = picture.crop((round(x0 * w), round(y0 * h), round(x1 * w), round(y1 * h)))
        label = shown_name(images.class_names[images.label(i)]) if images.label(i) >= 0 else "no label"
        out.append((key, data_address(picture), label, TokenMap(one.top, one.confidence, names, "annotator")))
    return out
