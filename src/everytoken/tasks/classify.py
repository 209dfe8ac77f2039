"""`train`: the classification task, and the run around it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from everytoken._json import plain_json
from everytoken.data.augment import TrainTransform
from everytoken.data.batch import Batch, Prefetcher
from everytoken.data.evaluation import EvalTransform
from everytoken.data.loader import BadImages, Loader
from everytoken.engine.checks import check_loop
from everytoken.engine.distributed import World, join_world
from everytoken.engine.drive import drive, say
from everytoken.engine.loop import Loop
from everytoken.engine.options import TrainOptions
from everytoken.engine.progress import watched
from everytoken.engine.runfolder import RunFolder
from everytoken.evaluation.accuracy import Predictions
from everytoken.tasks.build import Parts, build


class Classification:
    """What the loop needs to train a classifier; see `loop.Task`."""

    def __init__(self, parts: Parts, options: TrainOptions, world: World, folder: RunFolder) -> None:
        self.parts, self.options, self.world = parts, options, world
        self.module: nn.Module = parts.step
        self.backbone: nn.Module = parts.step.model.backbone
        data = options.dataset
        bad = BadImages(data.on_bad_image, log=folder.path / "skipped-images.jsonl" if folder.writable else None)
        common: dict[str, Any] = {
            "seed": options.run.seed,
            "workers": data.workers,
            "rank": world.rank,
            "world": world.size,
            "bad_images": bad,
            "pin_memory": world.device.type == "cuda",
        }
        self.loader = Loader(
            parts.train_set,
            TrainTransform(parts.augment),
            data.batch_size,
            train=True,
            store=parts.store,
            repeats=data.repeat_augment,
            **common,
        )
        size = data.val_batch_size or data.batch_size
        self.val_loader = Loader(parts.val_set, EvalTransform(parts.augment), size, train=False, **common)
        self.batches_per_epoch = len(self.loader)
        self.score_name = "top-1"
        self.latest: Predictions | None = None  # of the last validation

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Training batches on the device. Where maps are sampled is planned while placements are still on the host."""
        yield from self._on_device(batch.plan(self.parts.grid) for batch in self.loader.epoch(epoch, start))

    def _on_device(self, batches: Iterator[Batch]) -> Prefetcher:
        augment, last = self.parts.augment, self.options.model.channels_last
        return Prefetcher(batches, self.world.device, augment.mean, augment.std, channels_last=last)

    def size(self, batch: Batch) -> int:
        """Images in a batch."""
        return len(batch)

    def name(self, batch: Batch) -> list[str]:
        """Keys of a batch."""
        return list(batch.keys)

    @torch.no_grad()
    def predictions(self, module: nn.Module) -> Predictions:
        """Every validation image exactly once, over all processes."""
        was = module.training
        module.eval()
        parts = []
        for batch in watched(self._on_device(self.val_loader.epoch(0)), len(self.parts.val_set), self.world):
            logits = module(Batch(batch.images))["output"]
            assert batch.indices is not None
            assert batch.labels is not None
            parts.append(Predictions.of_batch(batch.indices, batch.labels, logits))
        if self.options.run.fsdp and self.world.size > 1:
            self._keep_in_step(module, len(parts))
        module.train(was)
        return Predictions.join([p for own in self.world.gather(parts) for p in own])

    def _keep_in_step(self, module: nn.Module, done: int) -> None:
        """Sharded weights are gathered in every pass, so a process with a batch less runs an empty one."""
        size = self.options.model.img_size
        for _ in range(done, max(self.world.gather(done))):
            module(Batch(torch.zeros(1, 3, size, size, device=self.world.device)))

    def score(self, module: nn.Module) -> dict[str, float]:
        """Validation numbers; "score" is top-1."""
        self.latest = self.predictions(module)
        summary = self.latest.summary()
        return {"score": summary["top1"], **{f"val_{k}": round(v, 4) for k, v in summary.items()}}

    def weights(self, state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The plain timm model and, if it is separate, the token head."""
        out: dict[str, dict[str, Tensor]] = {}
        for suffix, prefix in (("", "model.backbone."), (".token_head", "model.token_head.")):
            part = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            if part:
                out[suffix] = part
        return out

    def metadata(self) -> dict[str, str]:
        """The description that `open_model` reads."""
        return self.parts.description.to_metadata()

    def close(self) -> None:
        """End the loader's workers."""
        self.loader.close()
        self.val_loader.close()


def default_output(options: TrainOptions) -> str:
    """runs/<recipe>-<model>-<data>-seed<seed>, and the size of the images for one that starts from weights."""
    start = options.model.initial_checkpoint
    recipe = Path(options.recipe).stem if options.recipe else "finetune" if start else "train"
    size = f"-{options.model.img_size}px" if start else ""
    data = Path(options.data.split(":")[-1]).name or "data"
    return str(Path("runs") / f"{recipe}-{options.model.model}{size}-{data}-seed{options.run.seed}")


def train(options: TrainOptions, dry_run: bool = False) -> int:
    """Train, or print the plan. Returns the exit code: 0, or 130 and 143 after a signal."""
    check_loop(options)
    if options.run.threads:
        torch.set_num_threads(options.run.threads)
    with join_world(options.run.device) as world:
        tell: Callable[[str], None] = say if world.is_main else lambda text: None
        parts = build(options, world)
        for note in parts.notes:
            tell(f"note: {note}")
        if dry_run:
            from everytoken.engine.dryrun import print_plan

            print_plan(parts, options, world)
            return 0
        folder = RunFolder(options.run.output or default_output(options), writable=world.is_main)
        world.barrier()
        task = Classification(parts, options, world, folder)
        with contextlib.closing(task):
            return drive(
                task, options, folder, world, lambda loop: _introduce(task, loop),
                lambda loop, summary, log: _finish(task, loop, folder, summary, log),
            )  # fmt: skip


def _introduce(task: Classification, loop: Loop) -> str:
    parts = task.parts
    return (
        f"{len(parts.train_set):,} training and {len(parts.val_set):,} validation images, "
        f"{parts.train_set.num_classes} classes; {task.options.model.model}, token grid "
        f"{parts.grid[0]}x{parts.grid[1]}; "
        f"{', '.join(o.name for o in parts.step.objectives)}; global batch {loop.global_batch}, lr {loop.lr:.3g}, "
        f"{loop.epochs} epochs of {loop.updates_per_epoch} updates; run folder {loop.folder.path}"
    )


def _finish(
    task: Classification, loop: Loop, folder: RunFolder, summary: dict[str, Any], log: Callable[[str], None]
) -> None:
    predictions = task.latest  # of the last epoch, with averaged weights if there are any
    if predictions is None and task.world.size == 1:  # a run that was killed after its last checkpoint
        predictions = task.predictions(loop.ema.module if loop.ema is not None else task.module)
    if predictions is not None:
        names = task.parts.train_set.class_names
        folder.write("classes.json", plain_json(predictions.per_class(names)))
        low, high = predictions.interval()
        log(f"top-1 {predictions.summary()['top1']:.2f} % (95 % interval {low:.2f} to {high:.2f})")
    log(f"best top-1 {summary['best']['score']:.2f} % at epoch {summary['best']['epoch']}; weights: "
        f"{folder.path / 'best.safetensors'}")  # fmt: skip
