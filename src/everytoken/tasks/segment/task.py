"""`segment train`: the segmentation task for the training loop, and the run around it.

Loss: cross-entropy of every pixel at full resolution, plus 0.4 times that of the auxiliary head. Ignored pixels have no
loss; the mean is over all pixels of the batch, ignored ones included, as in the papers' set-ups, so that a crop with
few labels weighs less, and one without any gives zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everytoken.data.batch import Batch, Prefetcher
from everytoken.data.places import DEFAULT_VAL_SPLIT
from everytoken.engine.distributed import World
from everytoken.engine.loop import run
from everytoken.engine.progress import watched
from everytoken.engine.run_folder import Run, RunFolder
from everytoken.engine.task import Task
from everytoken.errors import EverytokenError
from everytoken.files import plain_json
from everytoken.tasks.options import default_output
from everytoken.tasks.segment.augment import SegmentTransform
from everytoken.tasks.segment.data import EvalSamples, TrainSamples
from everytoken.tasks.segment.draw import panel, sheet
from everytoken.tasks.segment.infer import Inference
from everytoken.tasks.segment.layouts import divided, open_masks
from everytoken.tasks.segment.metrics import Confusion
from everytoken.tasks.segment.model import Segmenter, SegmenterDescription, build_segmenter, count
from everytoken.tasks.segment.options import SegmentOptions

_PREFIX = "segmenter."
_PICTURES = 8  # of validation images, at the end of a run


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
        logits, aux = self.segmenter.both(batch.images)
        pixels = pixel_loss(logits, batch.targets)
        terms = {"loss": pixels, "pixels": pixels}
        if aux is not None:
            terms["aux"] = pixel_loss(aux, batch.targets)
            terms["loss"] = pixels + self.aux_weight * terms["aux"]
        with torch.no_grad():
            labelled = batch.targets >= 0
            terms["accuracy"] = (logits.argmax(1) == batch.targets)[labelled].float().mean().nan_to_num()
        return terms


class Segmentation(Task):
    """Train a segmenter."""

    score_name = "mIoU"
    options: SegmentOptions

    def __init__(self, options: SegmentOptions, world: World, folder: RunFolder) -> None:
        if options.dataset.batch_size < 2:
            raise EverytokenError(
                "batch_size 1 is too small: the heads normalise over the images of a batch; take 2 or more"
            )
        data = options.dataset
        sets = tuple(open_masks(options.data, split, data) for split in ("train", "val"))
        if not divided(options.data, data):
            share = data.val_split or DEFAULT_VAL_SPLIT
            folder.log(f"note: {options.data} has no validation part: {share:.0%} are held out (val_split)")
        names = tuple(sets[0].class_names)
        segmenter, about = build_segmenter(options.model, options.decoder, options.augment.crop_size, names)
        if world.size > 1 and world.device.type == "cuda":
            segmenter = nn.SyncBatchNorm.convert_sync_batchnorm(segmenter)
        super().__init__(SegmentStep(segmenter, options.decoder.aux_weight), options, world, folder)
        self.train_set, self.val_set = sets
        self.about = replace(about, evaluation={**asdict(options.evaluation), "resize": options.augment.resize})
        skip = data.on_bad_image == "skip"
        red, green, blue = (min(255, round(255 * value)) for value in about.backbone.mean)
        transform = SegmentTransform(options.augment, (red, green, blue))
        samples = TrainSamples(self.train_set, transform, options.run.seed, skip)
        self.train_loader = self.loader(self.train_set, None, data.batch_size, train=True, samples=samples)
        self.val_loader = self.loader(self.val_set, None, 1, train=False, samples=EvalSamples(self.val_set, skip))
        self.batches_per_epoch = len(self.train_loader)

    @property
    def backbone(self) -> nn.Module:
        """The timm model."""
        step: Any = self.module
        backbone: nn.Module = step.segmenter.features.backbone
        return backbone

    def train_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Training batches of an epoch from a position on."""
        about = self.about.backbone
        yield from Prefetcher(self.train_loader.epoch(epoch, start), self.world.device, about.mean, about.std)

    def inference(self, module: nn.Module) -> Inference:
        """How validation asks the network."""
        segmenter: Any = module.segmenter
        return build_inference(segmenter, self.about, self.options.augment.resize, self.options.evaluation)

    def confusion(self, module: nn.Module) -> Confusion:
        """Of every validation image exactly once, over all processes."""
        segment = self.inference(module)
        counts = Confusion(len(self.about.class_names))
        for batch in watched(self.val_loader.epoch(0), len(self.val_set), self.world):
            with self.autocast():
                classes = segment(batch.images.to(self.world.device))
            counts.add(batch.targets[0], classes.cpu())
        counts.counts = self.world.add(counts.counts.to(self.world.device)).cpu()
        return counts

    def validate(self, module: nn.Module) -> dict[str, float]:
        """Validation numbers; "score" is mIoU."""
        summary = self.confusion(module).summary()
        return {"score": summary["mIoU"], **{f"val_{k}": round(v, 4) for k, v in summary.items()}}

    def weights(self, state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The whole segmenter in one file."""
        return {"": {k.removeprefix(_PREFIX): v for k, v in state.items() if k.startswith(_PREFIX)}}

    def metadata(self) -> dict[str, str]:
        """The description that `load_segmenter` reads."""
        return self.about.to_metadata()

    def describe(self) -> str:
        """Data and model."""
        side, decoder = self.options.augment.crop_size, self.options.decoder
        segmenter: Any = self.module
        return (
            f"{len(self.train_set):,} training and {len(self.val_set):,} validation images, "
            f"{len(self.about.class_names)} classes; {self.about.backbone.architecture} + {decoder.head}, "
            f"{count(segmenter) / 1e6:.1f} M parameters, crops of {side}"
        )

    def finish(self, module: nn.Module) -> None:
        """A table of classes, and pictures of a few validation images."""
        if self.world.size > 1:
            return
        counts = self.confusion(module)
        self.folder.write("classes.json", plain_json(counts.per_class(self.about.class_names)))
        numbers = counts.summary()
        self.folder.log(f"mIoU {numbers['mIoU']:.2f}, mAcc {numbers['mAcc']:.2f}, pixels right {numbers['aAcc']:.2f} %")
        segment, panels = self.inference(module), []
        for batch in self.val_loader.epoch(0):
            classes = segment(batch.images.to(self.world.device)).cpu().numpy()
            image, truth = batch.images[0].permute(1, 2, 0).numpy(), batch.targets[0].numpy()
            panels.append(panel(image, [("truth", truth), ("found", classes)], self.about.class_names))
            if len(panels) == _PICTURES:
                break
        sheet(panels).save(self.folder.path / "pictures.jpg", quality=88)


def build_inference(model: Segmenter, about: SegmenterDescription, short: int, options: Any) -> Inference:
    """How a segmenter is asked, by what it was trained on."""
    window, fixed = about.backbone.img_size[0], model.features.fixed_size is not None
    options = replace(options, mode="slide") if fixed else options
    return Inference(model, short or window, window, about.backbone.mean, about.backbone.std, options, fixed)


def train(options: SegmentOptions) -> Run:
    """Train a segmenter, or continue the run in the output folder."""
    if not options.data:
        raise EverytokenError("data is empty: name the images to train on (everytoken segment train DATA)")
    output = options.run.output or default_output(options, "segment")
    return run(lambda world, folder: Segmentation(options, world, folder), options, output)
