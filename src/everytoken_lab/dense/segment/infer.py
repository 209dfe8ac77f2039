"""From an image to a class for every pixel: whole or by windows, at several scales, mirrored; `evaluate`, `predict`.

An image is resized so that its short side is that of training (its long side at most four times that), times each
scale. Logits of overlapping windows are averaged; of scales and mirrored images, probabilities. The result is
interpolated to the image's own size. A segmenter is used as its run was validated, unless the options say otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from everytoken.data.batch import Batch, normalise
from everytoken.errors import EverytokenError
from everytoken.files import write_atomically, write_picture
from everytoken_lab.classes import exact_lookup, map_to_dataset, mapped_names
from everytoken_lab.dense.common import (
    SIDE,
    Evaluation,
    Score,
    answer_images,
    evaluate_dense,
    open_predicted,
    open_unseen,
    resized,
)
from everytoken_lab.dense.segment.augment import LONGEST
from everytoken_lab.dense.segment.data import MaskReader, divided, open_masks
from everytoken_lab.dense.segment.model import Segmenter, SegmenterInfo, TokenSegmenter, load_segmenter, resize
from everytoken_lab.dense.segment.options import (
    NEW_RUN,
    EvalOptions,
    InferOptions,
    SegmenterOptions,
    SegmentEval,
    SegmentPredict,
)
from everytoken_lab.draw import Card, Panel, Row, fit_photo, mask_legend, mask_overlay, palette_image
from everytoken_lab.engine.distributed import World, pick_device
from everytoken_lab.models.open import Description, find_weights, open_model
from everytoken_lab.training.options import fill

Network = Callable[[Tensor], Tensor]
_WINDOWS = 8  # that go through the network together
_CHUNK = 2**26  # numbers that are interpolated together


@dataclass(frozen=True)
class Inference:
    """How a network, images [B, 3, H, W] -> logits [B, K, H, W], is used.

    Attributes:
        short: length of the short side at scale 1. window: side of the windows.
        fixed: the network takes windows of exactly this size; smaller images are padded.
        columns: of the network's classes, those wanted, in this order; None: all.
    """

    network: Network
    short: int
    window: int
    mean: Sequence[float]
    std: Sequence[float]
    options: EvalOptions
    fixed: bool = False
    columns: Tensor | None = None

    @torch.no_grad()
    def __call__(self, image: Tensor) -> Tensor:
        """uint8 [1, 3, H, W] -> int64 [H, W] of classes."""
        return best_class(self.scores(image), (image.shape[-2], image.shape[-1]))

    def on(self, device: torch.device | str) -> Callable[[Batch], Tensor]:
        """Batch of one image -> int64 [H, W] on the CPU."""
        return lambda batch: self(batch.images.to(device, non_blocking=True)).cpu()

    @torch.no_grad()
    def scores(self, image: Tensor) -> Tensor:
        """[1, K, h, w] at scale 1: logits of a single pass, else mean probabilities."""
        width, height = resized((image.shape[-1], image.shape[-2]), self.short, LONGEST * self.short)
        options = fill(self.options, NEW_RUN)
        many = len(options.scales) > 1 or options.flip
        total: Tensor | None = None
        for scale in options.scales:
            at = (max(round(height * scale), 1), max(round(width * scale), 1))
            pixels = normalise(_resized_bytes(image, at), self.mean, self.std)
            for mirrored in (False, True) if options.flip else (False,):
                logits = self._logits(pixels.flip(-1) if mirrored else pixels)
                logits = logits.flip(-1) if mirrored else logits
                answer = resize(logits, (height, width))
                answer = answer.softmax(1) if many else answer
                total = answer if total is None else total + answer
        assert total is not None
        return total

    def _logits(self, images: Tensor) -> Tensor:
        if self.options.mode == "slide":
            out = slide(self.network, images, self.window, self.options.stride or -(-2 * self.window // 3), self.fixed)
        else:
            out = self.network(images)
        out = out.float()
        return out if self.columns is None else out[:, self.columns.to(out.device)]


def _resized_bytes(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Anti-aliased, rounded to whole levels, as an image editor would."""
    if (image.shape[-2], image.shape[-1]) == size:
        return image
    resized_image = F.interpolate(image.float(), size, mode="bilinear", antialias=True)
    return resized_image.round_().clamp_(0, 255)


def starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin along an axis: every `stride`, the last one at the end."""
    last = max(length - window, 0)
    return [*range(0, last, stride), last]


def slide(network: Network, images: Tensor, window: int, stride: int, fixed: bool = False) -> Tensor:
    """The mean of the logits of overlapping windows. [1, 3, H, W] -> [1, K, H, W].

    Images that are smaller than a window are padded if `fixed`; otherwise the window shrinks.
    """
    height, width = images.shape[-2:]
    if fixed:
        images = F.pad(images, (0, max(window - width, 0), 0, max(window - height, 0)))
    rows, columns = images.shape[-2:]
    h, w = min(rows, window), min(columns, window)
    places = [(y, x) for y in starts(rows, window, stride) for x in starts(columns, window, stride)]
    total: Tensor | None = None
    count = torch.zeros(1, 1, rows, columns, device=images.device)
    for first in range(0, len(places), _WINDOWS):
        some = places[first : first + _WINDOWS]
        logits = network(torch.cat([images[..., y : y + h, x : x + w] for y, x in some])).float()
        if total is None:
            total = logits.new_zeros(1, logits.shape[1], rows, columns)
        for k, (y, x) in enumerate(some):
            total[..., y : y + h, x : x + w] += logits[k]
            count[..., y : y + h, x : x + w] += 1
    assert total is not None
    return (total / count)[..., :height, :width]


def best_class(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """[1, K, h, w] -> int64 [H, W]: the class with the largest interpolated score."""
    step = max(1, _CHUNK // (size[0] * size[1]))
    best: Tensor | None = None
    index = torch.zeros(size, dtype=torch.int64, device=scores.device)
    for first in range(0, scores.shape[1], step):
        value, where = resize(scores[:, first : first + step], size)[0].max(0)
        if best is None:
            best, index = value, where
            continue
        better = value > best
        index = torch.where(better, where + first, index)
        best = torch.where(better, value, best)
    return index


def segmenter_inference(model: Segmenter, info: SegmenterInfo, options: InferOptions | None = None) -> Inference:
    """How a segmenter is used: as it was validated, where `options` do not say otherwise."""
    resolved = fill(options or InferOptions(), asdict(info.evaluation))
    window, fixed = info.backbone.img_size[0], model.features.fixed_size is not None
    if fixed:
        resolved = replace(resolved, mode="slide")
    return Inference(model, resolved.resize or window, window, info.backbone.mean, info.backbone.std, resolved, fixed)


class SegmentScore(Score[Tensor]):
    """mIoU, mAcc and aAcc from one confusion matrix over the whole set, int64 [K, K] of (truth, prediction).

    IoU_c = N[c,c] / (sum_p N[c,p] + sum_t N[t,c] - N[c,c]), accuracy of a class N[c,c] / sum_p N[c,p]; mIoU and mAcc
    are means over the classes that occur (in truth or prediction; in truth). Ignored pixels are not counted.
    """

    def __init__(self, class_names: Sequence[str], pictures: int = 0) -> None:
        super().__init__(pictures)
        self.class_names = class_names
        self.counts = torch.zeros(len(class_names), len(class_names), dtype=torch.int64)

    def count(self, batch: Batch, answer: Tensor) -> None:
        self.count_pixels(batch.targets[0], answer)

    def count_pixels(self, truth: Tensor, prediction: Tensor) -> None:
        """Truth below 0 is ignored. Both of one shape, any integer type, predictions 0..K-1."""
        k = self.counts.shape[0]
        truth, prediction = truth.reshape(-1).long(), prediction.reshape(-1).long()
        counted = truth >= 0
        pairs = truth[counted] * k + prediction[counted].to(truth.device)
        self.counts += torch.bincount(pairs, minlength=k * k).reshape(k, k).cpu()

    def join(self, world: World) -> None:
        self.counts = world.add(self.counts.to(world.device)).cpu()

    def result(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """mIoU, mAcc and aAcc; and of each class that occurs, IoU, accuracy, part of the pixels, what it is taken for.

        The accuracy of a class that is answered but is not in the truth is None.
        """
        truth, answered, hit = self.counts.sum(1), self.counts.sum(0), self.counts.diagonal()
        iou = 100 * hit.double() / (truth + answered - hit)  # NaN where a class occurs in neither
        accuracy = 100 * hit.double() / truth
        total = int(truth.sum())
        right = 100 * int(hit.sum()) / total if total else float("nan")
        numbers = {"mIoU": float(iou.nanmean()), "mAcc": float(accuracy.nanmean()), "aAcc": right}
        off = self.counts.clone().fill_diagonal_(0)
        rows: list[dict[str, Any]] = []
        for i in torch.where(~iou.isnan())[0].tolist():
            other = int(off[i].argmax())
            row = {"class": self.class_names[i], "IoU": float(iou[i])}
            row["accuracy"] = float(accuracy[i]) if int(truth[i]) else None
            row["pixels"] = 100 * int(truth[i]) / max(total, 1)
            rows.append({**row, "taken for": self.class_names[other] if int(off[i, other]) else ""})
        return numbers, rows

    def card(self, batch: Batch, answer: Tensor) -> Card:
        pixels = batch.images[0].permute(1, 2, 0).numpy()
        masks = {"truth": batch.targets[0].numpy(), "answer": answer.numpy()}
        return Card(batch.keys[0], [mask_row(pixels, masks, self.class_names)], side=SIDE)


def mask_row(pixels: np.ndarray, masks: dict[str, np.ndarray], class_names: Sequence[str]) -> Row:
    """An image uint8 [H, W, 3] and its masks by title, side by side."""
    pictures = {"image": Image.fromarray(pixels)}
    pictures |= {title: mask_overlay(pixels, mask, len(class_names)) for title, mask in masks.items()}
    panels = [Panel(title, fit_photo(picture, SIDE)) for title, picture in pictures.items()]
    return Row("", panels, mask_legend(list(masks.values()), class_names))


# -- evaluate, predict ------------------------------------------------------------------------------------------------


Opened = tuple[Inference, Description, list[str], list[str]]
"""What answers, its backbone's description, the names of its classes, and notes for the user."""


def open_inference(options: SegmenterOptions, data_names: Sequence[str] | None, device: str) -> Opened:
    """A segmenter or a classifier's head; `data_names`: classes of the data; None: answer in the model's own."""
    if options.head != "segment":
        return open_token_inference(options, data_names, device)
    segmenter, info = load_segmenter(options.source)
    evaluation, names = options.evaluation, list(info.class_names)
    if options.multi_scale:
        if not info.test_scales and not evaluation.scales:
            raise EverytokenError(f"{options.source} names no test_scales for multi_scale; give scales")
        evaluation = fill(evaluation, {"scales": info.test_scales, "flip": True})
    inference = segmenter_inference(segmenter.to(device), info, evaluation)
    if data_names is None or list(data_names) == names:
        return inference, info.backbone, names, []
    if len(data_names) == len(names) and find_weights(options.source).suffix != ".safetensors":
        note = f"the {len(names)} classes of these weights are taken to be those of the data, in their order"
    else:
        inference = replace(inference, columns=torch.from_numpy(exact_lookup(data_names, names, "the data")))
        note = f"{len(data_names)} of the {len(names)} classes are asked"
    return inference, info.backbone, list(data_names), [note]


def open_token_inference(options: SegmenterOptions, data_names: Sequence[str] | None, device: str) -> Opened:
    """A classifier's token head, or its class head at every cell, in windows of its input size."""
    assert options.head != "segment"
    if data_names is None:
        if not options.class_map:
            raise EverytokenError("a token or class head needs a class_map file, which names the classes to draw")
        data_names = mapped_names(options.class_map)
    opened = open_model(options.source, architecture=options.model, img_size=options.img_size or None)
    model, info, (height, width) = opened.model, opened.info, opened.info.img_size
    if options.head == "token" and model.token_head is None and not model.uses_own_head:
        raise EverytokenError(
            f'{options.source} has no token head: it was not trained with token labels. head "class" reads its class '
            "head at every cell instead"
        )
    if height != width:
        raise EverytokenError(f"{options.source} takes {height}x{width} pixels; windows have to be square here")
    classes = (opened.token_classes if options.head == "token" else opened.classes).or_imagenet()
    names = classes.names or [f"class {i}" for i in range(classes.count)]  # a class map can name them by number
    mapping = torch.tensor(map_to_dataset(names, data_names, options.class_map), dtype=torch.int64)
    segmenter = TokenSegmenter(model, mapping, len(data_names), options.head).eval().to(device)
    resolved = replace(options.evaluation, mode="slide")
    inference = Inference(segmenter, resolved.resize or width, width, info.mean, info.std, resolved, fixed=True)
    used = mapping[mapping >= 0]
    note = (
        f"the {options.head} head answers for {len(used.unique())} of {len(data_names)} classes of the data, with "
        f"{len(used)} of its {len(mapping)} classes, in windows of {width} pixels"
    )
    return inference, info, list(data_names), [note]


def evaluate(options: SegmentEval) -> Evaluation:
    """mIoU, mAcc and aAcc of a segmenter on a dataset, in percent, and a row for each class that occurs."""
    device, same = pick_device(options.device), lambda run: run.names(options.data)
    data, notes = open_unseen(options, options.masks, open_masks, divided(options.data), same)
    inference, info, class_names, more = open_inference(options, data.class_names, device)
    reader = MaskReader(data, skip=options.on_bad_image == "skip")
    return evaluate_dense(options, inference.on(device), reader, SegmentScore(class_names), info, [*notes, *more])


def predict(options: SegmentPredict) -> tuple[list[dict[str, Any]], list[str]]:
    """Masks and pictures of images, written to a folder; never over an image.

    Returns:
        A row for each image (file, classes with the percentage of pixels), and notes for the user.
    """
    device = pick_device(options.device)
    images, place = open_predicted(options, (".png", ".overlay.jpg"))
    inference, info, class_names, notes = open_inference(options, None, device)
    rows: list[dict[str, Any]] = []
    for batch, answer in answer_images(inference.on(device), MaskReader(images, masks=False), options, info):
        mask, key = answer.numpy(), batch.keys[0]
        write_picture(place(key, ".png"), palette_image(mask, len(class_names)))
        picture = mask_overlay(batch.images[0].permute(1, 2, 0).numpy(), mask, len(class_names))
        write_picture(place(key, ".overlay.jpg"), picture, quality=90)
        parts = np.bincount(mask.reshape(-1), minlength=len(class_names)) / mask.size
        order = [i for i in np.argsort(-parts, kind="stable").tolist() if parts[i] > 0]
        rows.append({"image": key, **{class_names[i]: round(100 * float(parts[i]), 2) for i in order}})
    names = json.dumps(dict(enumerate(class_names)), indent=1)
    write_atomically(Path(options.out) / "classes.json", names.encode())
    return rows, notes
