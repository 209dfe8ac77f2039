"""The segmentation task, and `train`.

Loss: cross-entropy of every pixel at full resolution, plus 0.4 times that of the auxiliary head. Ignored pixels have no
loss; the mean is over all pixels of the batch, ignored ones included, as in the papers' set-ups, so that a crop with
few labels weighs less, and one without any gives zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everytoken.data.batch import Batch
from everytoken.draw import Card
from everytoken.engine.distributed import World
from everytoken.engine.run_folder import Run, RunFolder
from everytoken.errors import EverytokenError
from everytoken.files import plain_json
from everytoken.tasks.dense import PICTURES, DenseTask, fill_colour, held_out_note, plan_dense, save_sheet, train_dense
from everytoken.tasks.options import fill
from everytoken.tasks.segment.augment import SegmentTransform
from everytoken.tasks.segment.data import TrainViews, WholeViews, divided, open_masks
from everytoken.tasks.segment.infer import segmenter_inference, truth_and_answer
from everytoken.tasks.segment.metrics import Confusion
from everytoken.tasks.segment.model import Segmenter, SegmenterInfo, build_segmenter
from everytoken.tasks.segment.options import NEW_RUN, EvalOptions, InferOptions, SegmentOptions


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
            terms["accuracy"] = (logits.argmax(1) == masks)[masks >= 0].float().mean().nan_to_num()
        return terms


class SegmentTask(DenseTask):
    """Trains a segmenter."""

    network_name = "segmenter"
    score_name = "mIoU"
    info: SegmenterInfo
    options: SegmentOptions

    def __init__(self, options: SegmentOptions, world: World, folder: RunFolder) -> None:
        if options.dataset.batch_size < 2:
            raise EverytokenError(
                "batch_size 1 is too small: the heads normalise over the images of a batch; take 2 or more"
            )
        data, dataset = options.data, options.dataset
        sets = open_masks(data, "train", dataset), open_masks(data, "val", dataset)
        if not divided(data, dataset):
            folder.log(held_out_note(data, dataset.val_split))
        used = {f.name: getattr(options.evaluation, f.name) for f in fields(EvalOptions)}
        evaluation, side = InferOptions(**used, resize=options.augment.resize), options.augment.crop_size
        names, scales = tuple(sets[0].class_names), options.evaluation.test_scales
        segmenter, info = build_segmenter(options.model, options.decoder, side, names, evaluation, scales)
        super().__init__(SegmentStep(segmenter, options.decoder.aux_weight), info, sets, options, world, folder)

    def train_views(self, skip: bool) -> TrainViews:
        """Random crops."""
        transform = SegmentTransform(self.options.augment, fill_colour(self.info.backbone.mean))
        return TrainViews(self.train_set, transform, self.options.run.seed, skip)

    def val_views(self, skip: bool) -> WholeViews:
        """Whole images."""
        return WholeViews(self.val_set, skip)

    def inference(self, module: nn.Module) -> Callable[[Batch], Tensor]:
        """How validation uses a network."""
        return segmenter_inference(self.network(module), self.info).on(self.world.device)

    def validate(self, module: nn.Module) -> dict[str, float]:
        """Of every validation image exactly once, over all processes; "score" is mIoU."""
        confusion = Confusion(len(self.info.class_names))
        for batch, answer in self.answers(module):
            confusion.add(batch.targets[0], answer)
        confusion.counts = self.world.add(confusion.counts.to(self.world.device)).cpu()
        summary = confusion.summary()
        return {"score": summary["mIoU"], **{f"val_{k}": round(v, 4) for k, v in summary.items()}}

    def describe(self) -> str:
        """Data and model."""
        network = f"{self.info.backbone.architecture} + {self.options.decoder.head}"
        return f"{self.summary(network)}, crops of {self.options.augment.crop_size}"

    def finish(self, module: nn.Module) -> None:
        """The table of classes and pictures, of a run of one process."""
        if self.world.size > 1:
            return
        names = self.info.class_names
        confusion, cards = Confusion(len(names)), list[Card]()
        for batch, answer in self.answers(module):
            confusion.add(batch.targets[0], answer)
            if len(cards) < PICTURES:
                cards.append(truth_and_answer(batch, answer, names))
        self.folder.write("classes.json", plain_json(confusion.per_class(names)))
        numbers = confusion.summary()
        self.folder.log(f"mIoU {numbers['mIoU']:.2f}, mAcc {numbers['mAcc']:.2f}, pixels right {numbers['aAcc']:.2f} %")
        save_sheet(cards, self.folder.path / "pictures.jpg", f"{self.info.backbone.architecture}, validation images")


def _resolved(options: SegmentOptions) -> SegmentOptions:
    return replace(options, evaluation=fill(options.evaluation, NEW_RUN))


def train(options: SegmentOptions) -> Run:
    """Train a segmenter, or continue the run in the output folder."""
    return train_dense(_resolved(options), "segment", SegmentTask)


def dry_run(options: SegmentOptions) -> dict[str, Any]:
    """What `train` would do, as rows of a table."""
    return plan_dense(_resolved(options), "segment", SegmentTask)
