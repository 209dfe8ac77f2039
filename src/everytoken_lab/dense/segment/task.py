"""The segmentation task, and `train`.

Loss: cross-entropy of every pixel at full resolution, plus 0.4 times that of the auxiliary head. Ignored pixels have no
loss; the mean is over all pixels of the batch, ignored ones included, as in the papers' set-ups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken_lab.data.augment import mean_colour
from everytoken_lab.dense.common import DenseTask, open_parts, train_dense
from everytoken_lab.dense.segment.augment import SegmentTransform
from everytoken_lab.dense.segment.data import MaskReader, divided, open_masks
from everytoken_lab.dense.segment.infer import SegmentScore, mask_row, segmenter_inference
from everytoken_lab.dense.segment.model import Segmenter, SegmenterInfo, build_segmenter
from everytoken_lab.dense.segment.options import NEW_RUN, EvalOptions, InferOptions, SegmentOptions
from everytoken_lab.draw import Row
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.run_folder import RunFolder
from everytoken_lab.training.options import fill


def pixel_loss(logits: Tensor, masks: Tensor) -> Tensor:
    """Mean cross-entropy: [B, K, H, W], int [B, H, W] -> scalar; pixels below 0 add nothing but count."""
    return F.cross_entropy(logits.float(), masks.long(), ignore_index=-1, reduction="sum") / masks.numel()


class SegmentStep(nn.Module):
    """Batch -> loss terms."""

    def __init__(self, segmenter: Segmenter, aux_weight: float) -> None:
        super().__init__()
        self.segmenter, self.aux_weight = segmenter, aux_weight

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Terms by name: "loss" is `pixels` plus the weighted `aux`; `accuracy` is of the pixels of this batch."""
        masks = batch.targets
        logits, aux = self.segmenter.both(batch.images)
        pixels = pixel_loss(logits, masks)
        terms = {"loss": pixels, "pixels": pixels}
        if aux is not None:
            terms["aux"] = pixel_loss(aux, masks)
            terms["loss"] = pixels + self.aux_weight * terms["aux"]
        with torch.no_grad():
            known = masks >= 0  # not as an index, whose size a GPU would have to tell
            terms["accuracy"] = ((logits.argmax(1) == masks) & known).sum() / known.sum().clamp(min=1)
        return terms


class SegmentTask(DenseTask):
    """Trains a segmenter."""

    command = "segment"
    network_name = "segmenter"
    score_name = "mIoU"
    info: SegmenterInfo
    options: SegmentOptions

    def __init__(self, options: SegmentOptions, world: World, folder: RunFolder) -> None:
        dataset, augment = options.dataset, options.augment
        if dataset.batch_size < 2:
            raise EverytokenError(
                "batch_size 1 is too small: the heads normalise over the images of a batch; take 2 or more"
            )
        training, validation = open_parts(open_masks, divided(options.data), options, folder)
        used = {f.name: getattr(options.evaluation, f.name) for f in fields(EvalOptions)}
        evaluation, scales = InferOptions(**used, resize=augment.resize), options.evaluation.test_scales
        names = tuple(training.class_names)
        segmenter, info = build_segmenter(options.model, options.decoder, augment.crop_size, names, evaluation, scales)
        transform, skip = SegmentTransform(augment, mean_colour(info.backbone.mean)), dataset.on_bad_image == "skip"
        readers = MaskReader(training, transform, options.run.seed, skip), MaskReader(validation, skip=skip)
        super().__init__(SegmentStep(segmenter, options.decoder.aux_weight), info, readers, options, world, folder)

    @staticmethod
    def complete(options: SegmentOptions) -> SegmentOptions:
        return replace(options, evaluation=fill(options.evaluation, NEW_RUN))

    def inference(self, network: Segmenter) -> Callable[[Batch], Tensor]:
        return segmenter_inference(network, self.info).on(self.world.device)

    def score(self, pictures: int) -> SegmentScore:
        return SegmentScore(self.info.class_names, pictures)

    def truth(self, pixels: np.ndarray, batch: Batch, i: int) -> Row:
        return mask_row(pixels, {"its mask": batch.targets[i].cpu().numpy()}, self.info.class_names)

    def network_words(self) -> str:
        head, side = self.options.decoder.head, self.options.augment.crop_size
        return f"{self.info.backbone.architecture} + {head} on crops of {side}"


train = partial(train_dense, SegmentTask)
