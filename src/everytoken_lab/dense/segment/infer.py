"""From an image to a class for every pixel: whole or by windows, at several scales, mirrored; `evaluate`, `predict`.

An image is resized so that its short side is that of training (its long side at most four times that), times each
scale. Logits of overlapping windows are averaged; of scales and mirrored images, probabilities. The result is
interpolated to the image's own size, a few classes at a time so that memory stays bounded, and the best class taken.
As in the papers' set-ups: windows of 512 every 341 pixels; scales 0.5 or 0.75 to 1.75 with mirroring.

A segmenter is used as its run was validated, unless the options say otherwise.
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
from torch import Tensor

from everytoken.data.batch import Batch, normalise
from everytoken.errors import EverytokenError
from everytoken.files import write_atomically, write_picture
from everytoken_lab.classes import exact_lookup, mapped_names
from everytoken_lab.dense.common import (
    Evaluation,
    answer_images,
    evaluate_dense,
    open_predicted,
    open_unseen,
    resized,
)
from everytoken_lab.dense.segment.augment import LONGEST
from everytoken_lab.dense.segment.data import WholeViews, divided, open_masks
from everytoken_lab.dense.segment.metrics import SegmentScore
from everytoken_lab.dense.segment.model import Segmenter, SegmenterInfo, load_segmenter, resize
from everytoken_lab.dense.segment.options import (
    NEW_RUN,
    EvalOptions,
    InferOptions,
    SegmenterOptions,
    SegmentEval,
    SegmentPredict,
)
from everytoken_lab.dense.segment.token import load_token_segmenter
from everytoken_lab.draw import mask_overlay, palette_image
from everytoken_lab.engine.distributed import pick_device
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.models.open import Description, find_weights
from everytoken_lab.training.options import fill

Network = Callable[[Tensor], Tensor]
_WINDOWS = 8  # that go through the network together
_CHUNK = 2**26  # numbers that are interpolated together


@dataclass(frozen=True)
class Inference:
    """How a network is asked.

    Attributes:
        network: images [B, 3, H, W] -> logits [B, K, H, W].
        short: length of the short side at scale 1. window: side of the windows.
        mean, std: normalisation.
        options: whole or windows, their step, scales, mirroring; as for a new run where they are open.
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
    def __call__(self, image: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """uint8 [1, 3, H, W] -> int64 [H, W] of classes, or of another (height, width)."""
        size = size or (image.shape[-2], image.shape[-1])
        return best_class(self.scores(image), size)

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
            view = normalise(_resized_bytes(image, at), self.mean, self.std)
            for mirrored in (False, True) if options.flip else (False,):
                logits = self._logits(view.flip(-1) if mirrored else view)
                logits = logits.flip(-1) if mirrored else logits
                answer = resize(logits, (height, width))
                answer = answer.softmax(1) if many else answer
                total = answer if total is None else total + answer
        assert total is not None
        return total

    def _logits(self, view: Tensor) -> Tensor:
        if self.options.mode == "slide":
            out = slide(self.network, view, self.window, self.options.stride or -(-2 * self.window // 3), self.fixed)
        else:
            out = self.network(view)
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

    Args:
        fixed: pad images that are smaller than a window; otherwise the window shrinks.
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
        part = places[first : first + _WINDOWS]
        logits = network(torch.cat([images[..., y : y + h, x : x + w] for y, x in part])).float()
        if total is None:
            total = logits.new_zeros(1, logits.shape[1], rows, columns)
        for k, (y, x) in enumerate(part):
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
    validated = {name: value for name, value in asdict(info.evaluation).items() if value not in (None, ())}
    resolved = fill(options or InferOptions(), validated)
    window, fixed = info.backbone.img_size[0], model.features.fixed_size is not None
    if fixed:
        resolved = replace(resolved, mode="slide")
    return Inference(model, resolved.resize or window, window, info.backbone.mean, info.backbone.std, resolved, fixed)


# -- evaluate, predict ------------------------------------------------------------------------------------------------


def open_inference(
    options: SegmenterOptions, data_names: Sequence[str] | None, device: str
) -> tuple[Inference, Description, list[str], list[str]]:
    """What answers, its backbone's description, the names of its classes, and notes for the user.

    Args:
        data_names: classes of the data; None: answer in the model's own.
    """
    if options.head == "segment":
        segmenter, segmenter_info = load_segmenter(options.source)
        evaluation = options.evaluation
        if options.multi_scale:
            if not segmenter_info.test_scales and not evaluation.scales:
                raise EverytokenError(f"{options.source} names no test_scales for multi_scale; give scales")
            evaluation = fill(evaluation, {"scales": segmenter_info.test_scales, "flip": True})
        inference = segmenter_inference(segmenter.to(device), segmenter_info, evaluation)
        model_names = list(segmenter_info.class_names)
        if data_names is None or list(data_names) == model_names:
            return inference, segmenter_info.backbone, model_names, []
        if len(data_names) == len(model_names) and find_weights(options.source).suffix != ".safetensors":
            note = f"the {len(model_names)} classes of these weights are taken to be those of the data, in their order"
            return inference, segmenter_info.backbone, list(data_names), [note]
        columns = torch.from_numpy(exact_lookup(data_names, model_names, "the data"))
        note = f"{len(data_names)} of the {len(model_names)} classes are asked"
        return replace(inference, columns=columns), segmenter_info.backbone, list(data_names), [note]
    if data_names is None:
        if not options.class_map:
            raise EverytokenError("a token or class head needs a class_map file, which names the classes to draw")
        data_names = mapped_names(options.class_map)
    model, info, mapping = load_token_segmenter(
        options.source, data_names, options.class_map, options.head, options.model, options.img_size or None
    )
    height, width = info.img_size
    if height != width:
        raise EverytokenError(f"{options.source} takes {height}x{width} pixels; windows have to be square here")
    resolved = replace(options.evaluation, mode="slide")
    inference = Inference(model.to(device), resolved.resize or width, width, info.mean, info.std, resolved, fixed=True)
    used = mapping[mapping >= 0]
    note = (
        f"the {options.head} head answers for {len(used.unique())} of {len(data_names)} classes of the data, with "
        f"{len(used)} of its {len(mapping)} classes, in windows of {width} pixels"
    )
    return inference, info, list(data_names), [note]


def evaluate(options: SegmentEval) -> Evaluation:
    """mIoU, mAcc and aAcc of a segmenter on a dataset, in percent, and a row for each class that occurs."""
    device, masks = pick_device(options.device), options.masks

    def same(run: Run) -> bool | None:
        return run.names(options.data) if (run.config.get("images") or "") == masks.images else None

    data, notes = open_unseen(options, masks, open_masks, divided(options.data, masks), same)
    inference, info, class_names, more = open_inference(options, data.class_names, device)
    views = WholeViews(data, options.on_bad_image == "skip")
    score = SegmentScore(class_names, options.picture_count if options.pictures else 0)
    return evaluate_dense(options, inference.on(device), views, score, info, [*notes, *more])


def predict(options: SegmentPredict) -> tuple[list[dict[str, Any]], list[str]]:
    """Masks and pictures of images, written to a folder; never over an image.

    Returns:
        A row for each image (file, classes with their share in percent), and notes for the user.
    """
    device = pick_device(options.device)
    images, place = open_predicted(options, (".png", ".overlay.jpg"))
    inference, info, class_names, notes = open_inference(options, None, device)
    rows: list[dict[str, Any]] = []
    for batch, answer in answer_images(inference.on(device), WholeViews(images, masks=False), options, info):
        mask, key = answer.numpy(), batch.keys[0]
        write_picture(place(key, ".png"), palette_image(mask, len(class_names)))
        picture = mask_overlay(batch.images[0].permute(1, 2, 0).numpy(), mask, len(class_names))
        write_picture(place(key, ".overlay.jpg"), picture, quality=90)
        shares = np.bincount(mask.reshape(-1), minlength=len(class_names)) / mask.size
        order = [i for i in np.argsort(-shares, kind="stable").tolist() if shares[i] > 0]
        rows.append({"image": key, **{class_names[i]: round(100 * float(shares[i]), 2) for i in order}})
    names = json.dumps(dict(enumerate(class_names)), indent=1)
    write_atomically(Path(options.out) / "classes.json", names.encode())
    return rows, notes
