"""The segmentation task, and `train`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from PIL import Image

from everytoken.data.batch import Batch
from everytoken.errors import EverytokenError
from everytoken_lab.data.augment import mean_colour
from everytoken_lab.dense.common import SIDE, DenseTask, open_parts, train_dense
from everytoken_lab.dense.segment.data import MaskReader, SegmentTransform, divided, open_masks
from everytoken_lab.dense.segment.infer import Inference, SegmentScore
from everytoken_lab.dense.segment.model import Segmenter, SegmenterInfo, build_segmenter
from everytoken_lab.dense.segment.options import NEW_RUN, SegmentOptions
from everytoken_lab.draw import ClassColours, Panel, Row, class_picture, fit_photo
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.options import fill
from everytoken_lab.engine.run_folder import RunFolder


class SegmentTask(DenseTask):
    """Trains a segmenter."""

    command = "segment"
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

    def inference(self, network: Segmenter) -> Inference:
        return Inference.of(network, self.info)

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
