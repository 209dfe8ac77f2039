"""Segmentation: a class for every pixel, of whole images or windows, at several scales, mirrored; train and use it.

An image is resized so that its short side is that of training (its long side at most four times that), times each
scale. Logits of overlapping windows are averaged; of scales and mirrored images, probabilities. The result is
interpolated to the image's own size. A segmenter is used as its run was validated, unless the options say otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
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
    resized,
    train_dense,
)
from everytoken_lab.dense.segment import (
    NEW_RUN,
    EvalOptions,
    SegmenterOptions,
    SegmentEval,
    SegmentOptions,
    SegmentPredict,
)
from everytoken_lab.dense.segment.data import LONGEST, MaskReader, SegmentTransform, divided, open_masks
from everytoken_lab.dense.segment.model import Segmenter, SegmenterInfo, build_segmenter, load_segmenter, resize
from everytoken_lab.draw import (
    ClassColours,
    Panel,
    Row,
    class_overlay,
    class_picture,
    colour_of,
    fit_photo,
    palette_image,
)
from everytoken_lab.engine.distributed import World, pick_device
from everytoken_lab.engine.options import fill
from everytoken_lab.engine.run_folder import RunFolder
from everytoken_lab.models.open import find_weights

Network = Callable[[Tensor], Tensor]
_WINDOWS = 8  # that go through the network together
_CHUNK = 2**26  # numbers that are interpolated together


class Inference:
    """A segmenter, used as it was validated where `options` do not say otherwise."""

    def __init__(self, network: Segmenter, info: SegmenterInfo, options: EvalOptions | None = None) -> None:
        self.network, self.info = network, info
        self.options = fill(options or EvalOptions(), asdict(info.evaluation))

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """Batch of one image as bytes -> int64 [H, W] of classes, on the CPU."""
        scores = self.scores(batch.images.to(next(self.network.parameters()).device, non_blocking=True))
        return best_class(scores, (batch.images.shape[-2], batch.images.shape[-1])).cpu()

    @torch.no_grad()
    def scores(self, image: Tensor) -> Tensor:
        """uint8 [1, 3, H, W] -> [1, K, h, w] at scale 1: logits of a single pass, else mean probabilities."""
        options, info = self.options, self.info
        short = info.resize or info.backbone.img_size[0]
        width, height = resized((image.shape[-1], image.shape[-2]), short, LONGEST * short)
        many = len(options.scales) > 1 or options.flip
        total: Any = 0
        for scale in options.scales:
            at = (max(round(height * scale), 1), max(round(width * scale), 1))
            pixels = image
            if (image.shape[-2], image.shape[-1]) != at:  # anti-aliased, in whole levels, as an image editor would
                pixels = F.interpolate(image.float(), at, mode="bilinear", antialias=True).round_().clamp_(0, 255)
            pixels = normalise(pixels, info.backbone.mean, info.backbone.std)
            for mirrored in (False, True) if options.flip else (False,):
                logits = self._logits(pixels.flip(-1) if mirrored else pixels)
                logits = logits.flip(-1) if mirrored else logits
                answer = resize(logits, (height, width))
                total = total + (answer.softmax(1) if many else answer)
        out: Tensor = total
        return out

    def _logits(self, images: Tensor) -> Tensor:
        if self.options.mode == "slide":
            window = self.info.backbone.img_size[0]
            out = slide(self.network, images, window, self.options.stride or -(-2 * window // 3))
        else:
            out = self.network(images)
        return out.float()


def starts(length: int, window: int, stride: int) -> list[int]:
    """Where windows begin along an axis: every `stride`, the last one at the end."""
    last = max(length - window, 0)
    return [*range(0, last, stride), last]


def slide(network: Network, images: Tensor, window: int, stride: int) -> Tensor:
    """The mean of the logits of overlapping windows, at most as large as the image. [1, 3, H, W] -> [1, K, H, W]"""
    rows, columns = images.shape[-2:]
    h, w = min(rows, window), min(columns, window)
    places = [(y, x) for y in starts(rows, window, stride) for x in starts(columns, window, stride)]
    total, count = torch.empty(0), torch.zeros(1, 1, rows, columns, device=images.device)
    for first in range(0, len(places), _WINDOWS):
        some = places[first : first + _WINDOWS]
        logits = network(torch.cat([images[..., y : y + h, x : x + w] for y, x in some])).float()
        if not first:
            total = logits.new_zeros(1, logits.shape[1], rows, columns)
        for k, (y, x) in enumerate(some):
            total[..., y : y + h, x : x + w] += logits[k]
            count[..., y : y + h, x : x + w] += 1
    return total / count


def best_class(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """[1, K, h, w] -> int64 [H, W]: the class with the largest interpolated score."""
    step = max(1, _CHUNK // (size[0] * size[1]))
    best, index = resize(scores[:, :step], size)[0].max(0)
    for first in range(step, scores.shape[1], step):
        value, where = resize(scores[:, first : first + step], size)[0].max(0)
        index = torch.where(value > best, where + first, index)
        best = torch.maximum(value, best)
    return index


class SegmentScore(Score[Tensor]):
    """mIoU, mAcc and aAcc from one confusion matrix over the whole set, int64 [K, K] of (truth, prediction).

    IoU_c = N[c,c] / (sum_p N[c,p] + sum_t N[t,c] - N[c,c]), accuracy of a class N[c,c] / sum_p N[c,p]; mIoU and mAcc
    are means over the classes that occur (in truth or prediction; in truth). Ignored pixels are not counted.
    """

    def __init__(self, class_names: Sequence[str]) -> None:
        self.class_names = class_names
        self.counts = torch.zeros(len(class_names), len(class_names), dtype=torch.int64)

    def add(self, batch: Batch, answer: Tensor) -> None:
        self.count(batch.targets[0], answer)

    def count(self, truth: Tensor, prediction: Tensor) -> None:
        """Truth below 0 is ignored. Both of one shape, any integer type, predictions 0..K-1."""
        k = self.counts.shape[0]
        truth, prediction = truth.reshape(-1).long(), prediction.reshape(-1).long()
        counted = truth >= 0
        pairs = truth[counted] * k + prediction[counted].to(truth.device)
        self.counts += torch.bincount(pairs, minlength=k * k).reshape(k, k).cpu()

    def join(self, world: World) -> None:
        self.counts = world.add(self.counts.to(world.device)).cpu()

    def result(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """mIoU, mAcc and aAcc; and of each class that occurs, IoU, accuracy, pixels in percent, what it is taken for.

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


# -- training ----------------------------------------------------------------------------------------------------------


class SegmentTask(DenseTask):
    """Trains a segmenter."""

    command = "segment"
    inference = Inference
    score_name = "mIoU"
    info: SegmenterInfo
    options: SegmentOptions

    def __init__(self, options: SegmentOptions, world: World, folder: RunFolder) -> None:
        if options.dataset.batch_size < 2:
            raise EverytokenError(
                "batch_size 1 is too small: the heads normalise over the images of a batch; take 2 or more"
            )
        training, validation = open_parts(open_masks, divided(options.data), options, folder)
        segmenter, info = build_segmenter(options, tuple(training.class_names))
        transform = SegmentTransform(options.augment, mean_colour(info.backbone.mean))
        skip = options.dataset.on_bad_image == "skip"
        readers = MaskReader(training, transform, options.run.seed, skip), MaskReader(validation, skip=skip)
        super().__init__(segmenter, info, readers, options, world, folder)

    @staticmethod
    def complete(options: SegmentOptions) -> SegmentOptions:
        return replace(options, evaluation=fill(options.evaluation, NEW_RUN))

    def score(self) -> SegmentScore:
        return SegmentScore(self.info.class_names)

    def truth(self, pixels: np.ndarray, batch: Batch, i: int) -> Row:
        mask, names = batch.targets[i].cpu().numpy(), self.info.class_names
        photo = fit_photo(Image.fromarray(pixels), SIDE)
        painted, legend = class_picture(photo, mask, np.ones(mask.shape), names.__getitem__, ClassColours(names))
        return Row("", [Panel("image", photo), Panel("mask", painted)], legend)

    def facts(self) -> dict[str, str]:
        head, side = self.options.decoder.head, self.options.augment.crop_size
        return {**super().facts(), "model": f"{self.info.backbone.architecture} + {head} on crops of {side}"}


train = partial(train_dense, SegmentTask)


# -- evaluate, predict ------------------------------------------------------------------------------------------------


def open_inference(options: SegmenterOptions) -> Inference:
    """A trained segmenter on its device, used as the options say."""
    segmenter, info = load_segmenter(options.source)
    evaluation = options.evaluation
    if options.multi_scale:
        scales = evaluation.scales or evaluation.test_scales or info.evaluation.test_scales
        if not scales:
            raise EverytokenError(f"{options.source} names no test_scales for multi_scale; give scales")
        evaluation = fill(evaluation, {"scales": scales, "flip": True})
    return Inference(segmenter.to(pick_device(options.device)), info, evaluation)


def evaluate(options: SegmentEval) -> Evaluation:
    """mIoU, mAcc and aAcc of a segmenter on a dataset, in percent, and a row for each class that occurs."""
    data, notes = open_unseen(options, options.masks, open_masks, divided(options.data))
    inference = open_inference(options)
    released, count = find_weights(options.source).suffix != ".safetensors", len(inference.info.class_names)
    if released and data.num_classes == count:
        notes.append(f"the {count} classes of these weights are taken to be those of the data, in their order")
    else:
        check_classes(inference.info, data)
    reader = MaskReader(data, skip=options.on_bad_image == "skip")
    return evaluate_dense(options, inference, reader, SegmentScore(data.class_names), inference.info.backbone, notes)


def predict(options: SegmentPredict) -> list[dict[str, Any]]:
    """Masks and pictures of images, written to a folder; never over an image.

    Returns:
        A row for each image: file, and classes with the percentage of pixels.
    """
    images, place = open_predicted(options, (".png", ".overlay.jpg"))
    inference = open_inference(options)
    names = inference.info.class_names
    rows: list[dict[str, Any]] = []
    for batch, answer in answer_images(inference, MaskReader(images), options, inference.info.backbone):
        mask, key = answer.numpy(), batch.keys[0]
        write_picture(place(key, ".png"), palette_image(mask, len(names)))
        photo = Image.fromarray(batch.images[0].permute(1, 2, 0).numpy())
        picture = class_overlay(photo, mask, np.ones(mask.shape), {i: colour_of(i) for i in range(len(names))})
        write_picture(place(key, ".overlay.jpg"), picture, quality=90)
        parts = np.bincount(mask.reshape(-1), minlength=len(names)) / mask.size
        order = [i for i in np.argsort(-parts, kind="stable").tolist() if parts[i] > 0]
        rows.append({"image": key, **{names[i]: round(100 * float(parts[i]), 2) for i in order}})
    write_atomically(Path(options.out) / "classes.json", json.dumps(dict(enumerate(names)), indent=1).encode())
    return rows
