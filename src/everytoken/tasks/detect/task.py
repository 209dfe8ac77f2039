"""`detect train`: the detection task for the training loop, and the run around it.

Loss: the sum of all terms: objectness and anchor boxes of the proposals, and class, box and mask of each stage with the
stage's weight. What is sampled in a step is drawn from torch's generator, which the loop seeds for every update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
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
from everytoken.tasks.detect.augment import DetectTransform
from everytoken.tasks.detect.coco import divided, open_instances
from everytoken.tasks.detect.data import InstanceSet, Samples, base_of
from everytoken.tasks.detect.draw import compare, truth_of
from everytoken.tasks.detect.infer import Found, Inference, resolve
from everytoken.tasks.detect.masks import tool
from everytoken.tasks.detect.metrics import Precision, precision
from everytoken.tasks.detect.model import Detector, DetectorDescription, build_detector
from everytoken.tasks.detect.options import DetectOptions
from everytoken.tasks.options import default_output
from everytoken.tasks.segment.draw import sheet

_PREFIX = "detector."
_PICTURES = 8  # of validation images, at the end of a run
_SURE = 0.5  # score of the objects in them


class DetectStep(nn.Module):
    """Batch -> loss terms."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Terms by name; "loss" is their sum."""
        terms = self.detector.losses(batch.images, batch.targets)
        return {"loss": torch.stack(list(terms.values())).sum(), **terms}


class Detection:
    """What the loop needs to train a detector; see `loop.Task`."""

    score_name = "mAP"

    def __init__(
        self,
        detector: Detector,
        about: DetectorDescription,
        sets: tuple[DataSet, DataSet],
        options: DetectOptions,
        world: World,
        folder: RunFolder,
    ) -> None:
        self.about, self.options, self.world = about, options, world
        self.train_set, self.val_set = sets
        if world.size > 1 and world.device.type == "cuda":
            detector = nn.SyncBatchNorm.convert_sync_batchnorm(detector)
        step = DetectStep(detector).to(world.device)
        self.module: nn.Module = step
        self.backbone: nn.Module = step.detector.features.backbone
        data = options.dataset
        self.bad = BadImages(data.on_bad_image, log=folder.path / "skipped-images.jsonl" if folder.writable else None)
        red, green, blue = (min(255, round(255 * value)) for value in about.backbone.mean)
        view = DetectTransform(
            options.augment.sizes, options.augment.longest, options.augment.hflip, (red, green, blue)
        )
        masks = options.detector.masks
        samples = Samples(self.train_set, view, options.run.seed, masks=masks, skip=data.on_bad_image == "skip")
        self.common: dict[str, Any] = {
            "seed": options.run.seed,
            "workers": data.workers,
            "rank": world.rank,
            "world": world.size,
            "bad_images": self.bad,
            "pin_memory": world.device.type == "cuda",
        }
        self.loader = Loader(self.train_set, None, data.batch_size, train=True, samples=samples, **self.common)
        self.val_loader = self._val_loader()
        self.batches_per_epoch = len(self.loader)

    def _val_loader(self) -> Loader:
        ask = self.inference(self.module)
        skip = self.options.dataset.on_bad_image == "skip"
        samples = Samples(self.val_set, ask.transform, None, masks=False, skip=skip)
        return Loader(self.val_set, None, 1, train=False, samples=samples, **self.common)

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Training batches of an epoch from a place on."""
        about = self.about.backbone
        yield from Prefetcher(self.loader.epoch(epoch, start), self.world.device, about.mean, about.std)

    def size(self, batch: Batch) -> int:
        """Images in a batch."""
        return len(batch)

    def name(self, batch: Batch) -> list[str]:
        """Keys of a batch."""
        return list(batch.keys)

    def inference(self, module: nn.Module) -> Inference:
        """How validation asks the network."""
        detector: Any = module.detector
        return Inference.of(detector, self.about, resolve(self.options.find, self.options.augment))

    @torch.no_grad()
    def found(self, module: nn.Module) -> dict[int, Found]:
        """Objects of every validation image exactly once, over all processes, by number of the image."""
        was = module.training
        module.eval()
        ask, mine = self.inference(module), {}
        optim = self.options.optim
        dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[optim.amp_dtype]
        for batch in watched(self.val_loader.epoch(0), len(self.val_set), self.world):
            with torch.autocast(self.world.device.type, dtype, enabled=optim.amp):
                (answer,) = ask(batch, self.world.device)
            assert batch.indices is not None
            mine[int(batch.indices[0])] = answer
        module.train(was)
        return {k: v for part in self.world.gather(mine) for k, v in part.items()}

    def precision(self, found: dict[int, Found]) -> Precision:
        """Average precision of what was found."""
        data, _ = base_of(self.val_set, 0)
        return precision(data, {base_of(self.val_set, i)[1]: one for i, one in found.items()})

    def score(self, module: nn.Module) -> dict[str, float]:
        """Validation numbers; "score" is AP of masks, or of boxes if there are no masks."""
        made = self.precision(self.found(module))
        numbers = {f"val_{k.replace(' ', '_')}": round(v, 4) for k, v in made.numbers.items()}
        return {"score": max(made.main, 0.0), **numbers}

    def weights(self, state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The whole detector in one file."""
        return {"": {k.removeprefix(_PREFIX): v for k, v in state.items() if k.startswith(_PREFIX)}}

    def metadata(self) -> dict[str, str]:
        """The description that `load_detector` reads."""
        return self.about.to_metadata()

    def close(self) -> None:
        """End the loaders' workers."""
        self.loader.close()
        self.val_loader.close()


def _with_objects(data: DataSet) -> DataSet:
    """Without the images that have nothing to learn from."""
    keep = []
    for i in range(len(data)):
        base, number = base_of(data, i)
        if base.trained(number):
            keep.append(i)
    return data if len(keep) == len(data) else data.subset(np.array(keep, dtype=np.int64))


def train(options: DetectOptions) -> int:
    """Train. Returns the exit code: 0, or 130 and 143 after a signal."""
    if not options.data:
        raise EverytokenError("say which data to train on: everytoken detect train DATA --model NAME")
    check_loop(options)
    tool()  # say at once if it is missing
    if options.run.threads:
        torch.set_num_threads(options.run.threads)
    with join_world(options.run.device) as world:
        tell: Callable[[str], None] = say if world.is_main else lambda text: None
        torch.manual_seed(options.run.seed)  # of fresh weights
        sets = _open(options, tell)
        options = replace(options, find=resolve(options.find, options.augment))
        side = options.augment.sizes[-1]
        names = tuple(sets[0].class_names)
        detector, about = build_detector(options.model, options.detector, side, names)
        about = replace(about, find=asdict(options.find))
        folder = RunFolder(options.run.output or default_output(options, "detect"), writable=world.is_main)
        world.barrier()
        task = Detection(detector, about, sets, options, world, folder)
        updates = max(task.batches_per_epoch // options.optim.grad_accum_steps, 1)
        options = replace(options, optim=replace(options.optim, warmup_epochs=options.optim.warmup_iters / updates))
        with contextlib.closing(task):
            return drive(
                task, options, folder, world, lambda loop: _introduce(task, loop),
                lambda loop, summary, log: _finish(task, loop, folder, summary, log),
            )  # fmt: skip


def _open(options: DetectOptions, tell: Callable[[str], None]) -> tuple[DataSet, DataSet]:
    """Training and validation images."""
    sets = (
        open_instances(options.data, "train", options.dataset), open_instances(options.data, "val", options.dataset)
    )  # fmt: skip
    if not divided(options.data, options.dataset):
        share = options.dataset.val_split or DEFAULT_VAL_SPLIT
        tell(f"note: {options.data} has no validation part: {share:.0%} are held out (--val-split)")
    notes = [note for data in sets if len(data) for note in base_of(data, 0)[0].notes]
    for note in dict.fromkeys(notes):
        tell(f"note: {note}")
    first, second = sets
    if list(first.class_names) != list(second.class_names):
        raise EverytokenError("the categories of training and validation annotations differ; they must be the same")
    if not options.dataset.keep_empty:
        with_objects = _with_objects(first)
        if len(with_objects) < len(first):
            tell(f"note: {len(first) - len(with_objects)} training images without objects are left out (--keep-empty)")
        first = with_objects
    for data, what in ((first, "training"), (second, "validation")):
        if not len(data):
            raise EverytokenError(f"{options.data} has no {what} images")
    return first, second


def _introduce(task: Detection, loop: Loop) -> str:
    options = task.options
    count = sum(p.numel() for p in task.module.parameters() if p.requires_grad)
    kind = {"cascade": "Cascade ", "mask": ""}[options.detector.detector] + (
        "Mask R-CNN" if options.detector.masks else "R-CNN"
    )
    return (
        f"{len(task.train_set):,} training and {len(task.val_set):,} validation images, {len(task.about.class_names)} "
        f"classes; {kind} on {task.about.backbone.architecture}, {count / 1e6:.1f} M parameters, short side "
        f"{min(options.augment.sizes)} to {max(options.augment.sizes)}; global batch {loop.global_batch}, lr "
        f"{loop.lr:.3g}, {loop.epochs} epochs of {loop.updates_per_epoch} updates; run folder {loop.folder.path}"
    )


def _finish(
    task: Detection, loop: Loop, folder: RunFolder, summary: dict[str, Any], log: Callable[[str], None]
) -> None:
    module = loop.ema.module if loop.ema is not None else task.module
    if task.world.size == 1:
        found = task.found(module)
        made = task.precision(found)
        folder.write("classes.json", plain_json(made.classes))
        log(", ".join(f"{name} {value:.1f}" for name, value in made.numbers.items() if name[-1] not in "sml"))
        panels = []
        for i in sorted(found)[:_PICTURES]:
            base, number = base_of(task.val_set, i)
            panels.append(panel(base, number, found[i], _SURE))
        sheet(panels).save(folder.path / "pictures.jpg", quality=88)
    kind = "mask" if task.options.detector.masks else "box"
    log(f"best {kind} AP {summary['best']['score']:.2f} after epoch {summary['best']['epoch']}; weights: "
        f"{folder.path / 'best.safetensors'}")  # fmt: skip


def panel(data: InstanceSet, i: int, found: Found, sure: float) -> Any:
    """Truth and answer of an image, side by side."""
    image = np.asarray(data.picture(i).upright())
    return compare(image, truth_of(data, i, found.masks is not None), found.better_than(sure), data.class_names)
