"""`annotate`: fill a store with an annotator's score maps: decode, score, keep the best k per cell, write.

Worker processes decode the next batches, this thread drives the network, and one more thread checks and writes the maps
of earlier batches. On a GPU, only the writing thread waits for it.

Every shard follows from the keys and the annotator (see `features.ImageReader`), so a job that was killed and started
again, or shared by several processes, ends in the same store (with the same device, threads, batch size and ONNX
Runtime: other sums round differently).

Paper: All Tokens Matter (token labeling), 4.1, keeps the five best logits of each cell in half precision.
Differently: any k, all of a few classes, exact class numbers, the whole image (the released script sees its central
square only).
Cost: 0.95 or more of the bare network's speed, benchmarks/annotate.py.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everytoken.data.batch import normalise
from everytoken.errors import EverytokenError
from everytoken.maps import Maps, MapWriter, StoreMeta
from everytoken.maps.format import find_plan
from everytoken.maps.writer import check_folder, mismatch
from everytoken_lab import schema
from everytoken_lab.annotators import AnnotateOptions, AnnotatorError
from everytoken_lab.annotators.annotator import Annotator, build_annotator, fit_annotator
from everytoken_lab.annotators.features import ImageBatch, ImageReader, read_batches
from everytoken_lab.classes import ClassPlan, plan_classes
from everytoken_lab.data.datasets import DataSet, open_dataset
from everytoken_lab.data.tree import hidden
from everytoken_lab.engine.distributed import World, join_world
from everytoken_lab.maps.summary import StoreSummary, sample_positions, summarize_store

Progress = Callable[[int, int], None]
_silent: Progress = lambda done, total: None  # noqa: E731
_FEW = 20  # up to this many classes, all scores are kept: dropped ones count as 0, which is more than some of ten have
_AHEAD = 3  # batches of maps that may wait for the writing thread
_LOOKED_AT = 5000  # maps of a summary, at most
_MANY = 200  # images for which an annotator is made faster first
_CROP_MODES = {"squash": "squash", "letterbox": "border", "center": "center"}
_ALONE = World(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Outcome:
    """What a job did.

    Attributes:
        plan: whose classes the store has.
        done: images annotated or skipped by this process in this run; seconds: that it took.
        notes: sentences the user should read.
        world: this process among those that shared the job.
    """

    data: DataSet
    plan: ClassPlan
    done: int
    seconds: float
    notes: tuple[str, ...]
    world: World


def annotate(
    data: str | Path | DataSet,
    out: str | Path,
    annotator: str | Annotator = "fit",
    *,
    progress: Progress = _silent,
    **options: Any,
) -> Maps:
    """Give every image of a dataset a score map; the same as `everytoken annotate`, with the same defaults.

        maps = lab.annotate("photos", "maps", "registry:efficientnet_lite0", img_size=448, foreign_classes=True)

    Calling it again with the same arguments continues a store that was begun.

    Args:
        data: folder of class folders (with or without train/ and val/), archive, torchvision:NAME; or a
            dataset.
        out: folder of the store, new or begun.
        annotator: timm:NAME, registry:efficientnet_lite0|1|2, fit, self:RUN; or an `Annotator`, for scores of your own.
        progress: called with (images done, images in all) of this process.
        options: fields of `AnnotateOptions`.
    """
    if isinstance(options.get("img_size"), int):  # a square, as in `lab.train`
        options["img_size"] = (options["img_size"],)
    run_job(data, Path(out), annotator, schema.from_keywords(AnnotateOptions, options, "annotate()"), progress)
    return Maps(out)


def run_job(
    data: str | Path | DataSet,
    out: Path,
    annotator: str | Annotator,
    options: AnnotateOptions,
    progress: Progress = _silent,
) -> Outcome:
    """Open the data, make the annotator, fill the store, with all processes that were started for it."""
    dataset = data
    if not isinstance(dataset, DataSet):
        dataset = open_dataset(dataset, options.split, val_split=options.val_split, class_list=options.class_list)
    _check_out(dataset, out, annotator if isinstance(annotator, str) else annotator.name)
    # processes wait for each other at the beginning and at the end only, and the end can be far
    with join_world(options.device, timeout_minutes=14 * 24 * 60) as world:
        if not world.shares(out):
            raise EverytokenError(f"the processes do not share the disk of {out}. Give a folder on a shared disk.")
        if annotator == "fit":  # fitted first, unless the store's folder has its heads already
            if options.weights:
                raise EverytokenError("the annotator fit trains its own weights; for yours use timm:NAME with weights")
            annotator = fit_annotator(dataset, out, options, world)
        elif isinstance(annotator, str):
            if options.fit_model or options.fit_size:
                raise EverytokenError(
                    f"fit_model and fit_size can only be used with the annotator fit, not with {annotator}"
                )
            annotator = build_annotator(annotator, options.img_size, options.weights)
        return fill_store(dataset, out, annotator, options, world, progress)


def _check_out(data: DataSet, out: Path, annotator: str) -> None:
    """Refuse a folder that cannot become the annotator's store of `data` before any work is done."""
    check_folder(out)
    images, place = Path(data.name).resolve(), out.resolve()
    inside = data.class_names and images.is_dir() and place.is_relative_to(images)
    if inside and not hidden(place.relative_to(images).as_posix()):
        what = f"the output {out} lies among the class folders of {data.name} and would be taken for a class"
        raise EverytokenError(f"{what} in training. Give a folder outside it.")
    if plan := find_plan(out):
        begun = str(plan.meta.annotator.get("name", "not known"))
        if begun.split(":")[0] != annotator.split(":")[0]:
            raise mismatch(out, [f"annotator: {begun} in the store, {annotator} now"])


def fill_store(
    data: DataSet,
    out: Path,
    annotator: Annotator,
    options: AnnotateOptions,
    world: World = _ALONE,
    progress: Progress = _silent,
) -> Outcome:
    """Give every image of `data` a score map in the store `out`, or continue a store that was begun.

    Args:
        progress: called with (images done, images in all) of this process, images of earlier runs included.
    """
    if not len(data):
        raise EverytokenError(f"{data.name} holds no images to annotate.")
    names, foreign = data.class_names, options.foreign_classes
    plan = plan_classes(annotator.name, annotator.classes, data.name, names, options.class_map, foreign)
    if options.top_k > plan.scored:
        raise EverytokenError(f"top_k {options.top_k} is more than the {plan.scored} classes that get scores.")
    top_k = options.top_k or (plan.scored if plan.scored <= _FEW else 5)
    annotator.to(world.device)
    grid = annotator.grid(world.device)
    amp_dtype = options.amp_dtype if options.amp else ""
    settings = {**annotator.describe(), "amp": amp_dtype, **plan.describe()}
    meta = StoreMeta(grid, top_k, plan.names, plan.count, options.resize, settings)
    part = {"rank": world.rank, "world": world.size}
    again, shard_size = options.retry_skipped, options.shard_size or None
    with MapWriter(out, data.keys(), meta, shard_size=shard_size, retry_skipped=again, **part) as writer:
        total = sum(len(writer.shard_range(i)) for i in range(world.rank, writer.plan.num_shards, world.size))
        todo = [writer.shard_range(shard) for shard in writer.pending_shards()]
        done = before = total - sum(map(len, todo))
        progress(done, total)
        started = time.perf_counter()
        if done < total:
            if writer.plan.total >= _MANY and not amp_dtype:  # by the whole store, so that continuing is the same
                annotator.accelerate()
            transform = replace(annotator.preprocessing, crop_pct=1.0, crop_mode=_CROP_MODES[options.resize])
            reader, size = ImageReader(data, store_order(data), transform), options.batch_size
            spans = [some[i : i + size] for some in todo for i in range(0, len(some), size)]
            stream = read_batches(reader, spans, options.workers, world.device.type == "cuda")
            with closing(fill(writer, annotator, plan, stream, amp_dtype, world.device)) as counts:
                for count in counts:
                    done += count
                    progress(done, total)
        seconds = time.perf_counter() - started
        world.barrier()
        if world.is_main:
            writer.finalize()
        world.barrier()
    return Outcome(data, plan, done - before, seconds, tuple(_notes(annotator, plan, grid)), world)


def store_order(data: DataSet) -> np.ndarray:
    """[n] index in the dataset of each position of the store, which sorts keys by their bytes."""
    keys = [key.encode("utf-8", "surrogateescape") for key in data.keys()]  # noqa: SIM118
    return np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)


def fill(
    writer: MapWriter,
    annotator: Annotator,
    plan: ClassPlan,
    stream: Iterable[ImageBatch],
    amp_dtype: str,
    device: torch.device,
) -> Generator[int, None, None]:
    """Score batches as they come and let a thread write them; yields the number of images of each.

    All are written when it ends or is closed.
    """
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1) as thread:
        for batch in stream:
            best = _score(annotator, plan, writer.plan.meta.top_k, batch, amp_dtype, device)
            batch = replace(batch, images=torch.empty(0))  # its pixels would take up memory
            waiting.append(thread.submit(_write, writer, annotator.name, amp_dtype, batch, *best))
            if len(waiting) > _AHEAD:
                waiting.popleft().result()
            yield len(batch)
        for written in waiting:
            written.result()


def _score(
    annotator: Annotator, plan: ClassPlan, top_k: int, batch: ImageBatch, amp_dtype: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(scores, classes), both [n, h, w, k], still on the device."""
    dtype = getattr(torch, amp_dtype) if amp_dtype else None
    try:
        with torch.inference_mode():
            moved, wanted = batch.images.to(device, non_blocking=True), annotator.preprocessing
            images = normalise(moved, wanted.mean, wanted.std, channels_last=True)
            with torch.autocast(device.type, dtype, enabled=dtype is not None):
                logits = annotator.score(images, batch.indices)
            best = plan.apply(logits).topk(top_k, dim=-1)
            return best.values, plan.class_ids(best.indices)
    except torch.OutOfMemoryError as error:
        raise EverytokenError(
            f"{device} has too little memory for {len(batch)} images of {annotator.preprocessing.size} pixels. Use a "
            "smaller --batch-size (or --img-size, or --amp); the same command then continues where it stopped."
        ) from error


def _write(writer: MapWriter, annotator: str, amp: str, batch: ImageBatch, scores: Tensor, classes: Tensor) -> None:
    values, ids = scores.float().cpu().numpy(), classes.cpu().numpy()  # on a GPU, this waits for the batch
    good = [place for place in range(len(batch)) if place not in batch.failures]
    fits = np.abs(values) <= np.finfo(np.float16).max  # False for nan and inf, too
    for place in good:
        if not fits[place].all():
            key, worst = writer.key(batch.positions[place]), values[place][~fits[place]][0]
            hint = "Leave out amp, or try amp_dtype bfloat16." if amp == "float16" else "Look at its weights."
            raise AnnotatorError(
                f"{annotator} gives {key!r} a score of {worst}, which half precision (65504 at most) cannot keep. "
                f"{hint} Finished shards are kept."
            )
    if good:
        positions = [batch.positions[place] for place in good]
        writer.put(positions, values[good], ids[good], batch.sizes[good], batch.areas[good])
    for place, reason in batch.failures.items():
        writer.skip(batch.positions[place], reason)


def _notes(annotator: Annotator, plan: ClassPlan, grid: tuple[int, int]) -> Iterator[str]:
    height, width = annotator.preprocessing.size
    if height % grid[0] or width % grid[1]:
        yield (
            f"{height} x {width} pixels are no multiple of the {grid[0]} x {grid[1]} cells, so cells at the border lie "
            "a little off; choose a multiple for img_size."
        )
    if plan.how == "by name" and plan.count < annotator.classes.count:
        yield (
            f"{plan.count} of the annotator's {annotator.classes.count} classes are those of the dataset (matched by "
            "name); the others are left out. foreign_classes keeps all."
        )
    if plan.scored < plan.count:
        yield f"{plan.count - plan.scored} classes of the dataset have no class of the annotator and get no scores."


def summarise(path: Path, data: DataSet, label_to_class: Sequence[int]) -> StoreSummary:
    """Look at a finished store of `data`: up to 5,000 maps spread over it, those of earlier runs too.

    Args:
        label_to_class: the store's class of each label, or -1.
    """
    maps = Maps(path)
    keys = {maps.key(i) for i in sample_positions(len(maps), _LOOKED_AT)}
    classes = {-1: -1, **dict(enumerate(label_to_class))}
    known = {key: classes.get(data.label(index), -1) for index, key in enumerate(data.keys()) if key in keys}
    return summarize_store(maps, _LOOKED_AT, lambda key: known[key] if known[key] >= 0 else None)
