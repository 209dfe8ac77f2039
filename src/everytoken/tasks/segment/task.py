"""`segment train`: the segmentation task for the training loop, and the run around it.

Loss: cross-entropy of every pixel at full resolution, plus 0.4 times that of the auxiliary head. Ignored pixels have no
loss; the mean is over all pixels of the batch, ignored ones included, as in the papers' set-ups, so that a crop with
few labels weighs less, and one without any gives zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everytoken._json import plain_json
from everytoken.data.batch import Batch, Prefetcher
from everytoken.data.loader import BadImages, Loader
from everytoken.data.places import DEFAULT_VAL_SPLIT
from everytoken.data.sources import DataSet
from everytoken.engine.checks import check_loop
from everytoken.engine.distributed import World, join_world
from everytoken.engine.drive import drive, say
from everytoken.engine.loop import Loop
from everytoken.engine.progress import watched
from everytoken.engine.runfolder import RunFolder
from everytoken.errors import EverytokenError
from everytoken.tasks.options import default_output, in_epochs
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
            seen = batch.targets >= 0
            terms["accuracy"] = (logits.argmax(1) == batch.targets)[seen].float().mean().nan_to_num()
        return terms


class Segmentation:
    """What the loop needs to train a segmenter; see `loop.Task`. An epoch of the loop is `updates` updates."""

    counts_updates = True
    score_name = "mIoU"

    def __init__(
        self,
        segmenter: Segmenter,
        about: SegmenterDescription,
        sets: tuple[DataSet, DataSet],
        options: SegmentOptions,
        updates: int,
        world: World,
        folder: RunFolder,
    ) -> None:
        self.about, self.options, self.world = about, options, world
        self.train_set, self.val_set = sets
        if world.size > 1 and world.device.type == "cuda":
            segmenter = nn.SyncBatchNorm.convert_sync_batchnorm(segmenter)
        step = SegmentStep(segmenter, options.decoder.aux_weight).to(world.device)
        self.module: nn.Module = step
        self.backbone: nn.Module = step.segmenter.features.backbone
        data = options.dataset
        bad = BadImages(data.on_bad_image, log=folder.path / "skipped-images.jsonl" if folder.writable else None)
        skip = data.on_bad_image == "skip"
        red, green, blue = (min(255, round(255 * value)) for value in about.backbone.mean)
        samples = TrainSamples(
            self.train_set, SegmentTransform(options.augment, (red, green, blue)), options.run.seed, skip
        )
        common: dict[str, Any] = {
            "seed": options.run.seed,
            "workers": data.workers,
            "rank": world.rank,
            "world": world.size,
            "bad_images": bad,
            "pin_memory": world.device.type == "cuda",
        }
        self.loader = Loader(self.train_set, None, data.batch_size, train=True, samples=samples, **common)
        whole = EvalSamples(self.val_set, skip)
        self.val_loader = Loader(self.val_set, None, 1, train=False, samples=whole, **common)
        self.batches_per_epoch = updates * options.optim.grad_accum_steps

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Training batches from a place on, through as many passes over the data as needed."""
        about = self.about.backbone
        yield from Prefetcher(self._passes(epoch, start), self.world.device, about.mean, about.std)

    def _passes(self, epoch: int, start: int) -> Iterator[Batch]:
        done, left = epoch * self.batches_per_epoch + start, self.batches_per_epoch - start
        while left > 0:
            number, offset = divmod(done, len(self.loader))
            for batch in self.loader.epoch(number, offset):
                yield batch
                done, left = done + 1, left - 1
                if left == 0:
                    return

    def size(self, batch: Batch) -> int:
        """Images in a batch."""
        return len(batch)

    def name(self, batch: Batch) -> list[str]:
        """Keys of a batch."""
        return list(batch.keys)

    def inference(self, module: nn.Module) -> Inference:
        """How validation asks the network."""
        segmenter: Any = module.segmenter
        return build_inference(segmenter, self.about, self.options.augment.resize, self.options.evaluation)

    @torch.no_grad()
    def confusion(self, module: nn.Module) -> Confusion:
        """Of every validation image exactly once, over all processes."""
        was = module.training
        module.eval()
        ask = self.inference(module)
        counts = Confusion(len(self.about.class_names))
        for batch in watched(self.val_loader.epoch(0), len(self.val_set), self.world):
            with torch.autocast(
                self.world.device.type, _dtype(self.options.optim.amp_dtype), enabled=self.options.optim.amp
            ):
                found = ask(batch.images.to(self.world.device))
            counts.add(batch.targets[0], found.cpu())
        module.train(was)
        total = self.world.add(counts.counts.to(self.world.device))
        counts.counts = total.cpu()
        return counts

    def score(self, module: nn.Module) -> dict[str, float]:
        """Validation numbers; "score" is mIoU."""
        summary = self.confusion(module).summary()
        return {"score": summary["mIoU"], **{f"val_{k}": round(v, 4) for k, v in summary.items()}}

    def weights(self, state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The whole segmenter in one file."""
        return {"": {k.removeprefix(_PREFIX): v for k, v in state.items() if k.startswith(_PREFIX)}}

    def metadata(self) -> dict[str, str]:
        """The description that `load_segmenter` reads."""
        return self.about.to_metadata()

    def close(self) -> None:
        """End the loader's workers."""
        self.loader.close()
        self.val_loader.close()


def build_inference(model: Segmenter, about: SegmenterDescription, short: int, options: Any) -> Inference:
    """How a segmenter is asked, by what it was trained on."""
    window, fixed = about.backbone.img_size[0], model.features.fixed_size is not None
    options = replace(options, mode="slide") if fixed else options
    return Inference(model, short or window, window, about.backbone.mean, about.backbone.std, options, fixed)


def _dtype(name: str) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def train(options: SegmentOptions) -> int:
    """Train. Returns the exit code: 0, or 130 and 143 after a signal."""
    if not options.data:
        raise EverytokenError("say which data to train on: everytoken segment train DATA --model NAME")
    check_loop(options)
    if options.run.threads:
        torch.set_num_threads(options.run.threads)
    optim, updates = in_epochs(options.optim, options.run)
    options = replace(options, optim=optim)
    with join_world(options.run.device) as world:
        tell: Callable[[str], None] = say if world.is_main else lambda text: None
        if options.dataset.batch_size < 2:
            raise EverytokenError(
                "--batch-size 1 is too small: the heads normalise over the images of a batch; take 2 or more"
            )
        torch.manual_seed(options.run.seed)  # of fresh weights
        sets = (open_masks(options.data, "train", options.dataset), open_masks(options.data, "val", options.dataset))
        if not divided(options.data, options.dataset):
            share = options.dataset.val_split or DEFAULT_VAL_SPLIT
            tell(f"note: {options.data} has no validation part: {share:.0%} are held out (--val-split)")
        names = tuple(sets[0].class_names)
        segmenter, about = build_segmenter(options.model, options.decoder, options.augment.crop_size, names)
        about = replace(about, evaluation={**asdict(options.evaluation), "resize": options.augment.resize})
        folder = RunFolder(options.run.output or default_output(options, "segment"), writable=world.is_main)
        world.barrier()
        task = Segmentation(segmenter, about, sets, options, updates, world, folder)
        with contextlib.closing(task):
            return drive(
                task, options, folder, world, lambda loop: _introduce(task, loop),
                lambda loop, summary, log: _finish(task, loop, folder, summary, log),
            )  # fmt: skip


def _introduce(task: Segmentation, loop: Loop) -> str:
    side, decoder = task.options.augment.crop_size, task.options.decoder
    segmenter: Any = task.module
    return (
        f"{len(task.train_set):,} training and {len(task.val_set):,} validation images, {len(task.about.class_names)} "
        f"classes; {task.about.backbone.architecture} + {decoder.head}, {count(segmenter) / 1e6:.1f} M parameters, "
        f"crops of {side}; global batch {loop.global_batch}, lr {loop.lr:.3g}, {loop.epochs * loop.updates_per_epoch} "
        f"updates, validation every {loop.updates_per_epoch}; run folder {loop.folder.path}"
    )


def _finish(
    task: Segmentation, loop: Loop, folder: RunFolder, summary: dict[str, Any], log: Callable[[str], None]
) -> None:
    module = loop.ema.module if loop.ema is not None else task.module
    if task.world.size == 1:
        counts = task.confusion(module)
        folder.write("classes.json", plain_json(counts.per_class(task.about.class_names)))
        numbers = counts.summary()
        log(f"mIoU {numbers['mIoU']:.2f}, mAcc {numbers['mAcc']:.2f}, pixels right {numbers['aAcc']:.2f} %")
        module.eval()
        ask, panels = task.inference(module), []
        for batch in task.val_loader.epoch(0):
            found = ask(batch.images.to(task.world.device)).cpu().numpy()
            image = batch.images[0].permute(1, 2, 0).numpy()
            panels.append(panel(image, [("truth", batch.targets[0].numpy()), ("found", found)], task.about.class_names))
            if len(panels) == _PICTURES:
                break
        sheet(panels).save(folder.path / "pictures.jpg", quality=88)
    log(f"best mIoU {summary['best']['score']:.2f} at update {summary['best']['step']}; weights: "
        f"{folder.path / 'best.safetensors'}")  # fmt: skip
