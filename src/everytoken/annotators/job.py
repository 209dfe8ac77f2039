"""The job that fills a store: decode, score, keep the best k per cell, write. Three stages that work side by side.

Worker processes decode the next batches, this thread drives the network, and one more thread checks and writes the
maps of earlier batches. On a GPU nothing here waits for it: the copy back is waited for in the writing thread.

Every shard's bytes follow from the plan and the annotator (see `reading`), so a job that was killed and started again,
or shared by several processes, ends in the same store, byte for byte. (On the same kind of device, with the same
number of threads and the same batch size: other sums round differently.)

Paper: All Tokens Matter (token labeling), 4.1, keeps the five best logits of each cell in half precision.
Differently: any k, all of a few classes, exact class numbers, the whole image (the released script sees its central
square only).
Cost: 0.95 or more of the bare network's speed, benchmarks/annotate.py.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everytoken.annotators.annotator import Annotator, AnnotatorError
from everytoken.annotators.reading import BatchReader, ImageBatch, batches, store_order
from everytoken.annotators.reuse import copy_known, open_known
from everytoken.classes import ClassPlan, plan_classes
from everytoken.data.datasets import DataSet, hidden
from everytoken.errors import EverytokenError
from everytoken.machine import default_workers
from everytoken.maps import Manifest, MapWriter, StoreMeta
from everytoken.maps.format import MANIFEST
from everytoken.maps.writer import check_folder, mismatch

_FEW = 20  # of so few classes all are kept: those that are not count as 0, and the fifth best of ten often has less
_AHEAD = 3  # batches of maps that may wait for the writing thread


@dataclass(frozen=True)
class JobOptions:
    """How to annotate.

    Attributes:
        top_k: classes kept per cell; 0: five, but all where there are no more than 20.
        resize: "squash" (whole image, stretched) or "letterbox" (aspect kept, padded).
        batch_size: images per step, within a shard. Changing it changes scores in the last bit.
        workers: decoding processes; 0 decodes in the main process.
        amp_dtype: "" for full precision, "float16" or "bfloat16".
        class_map: file, or "order"; see `classes`.
        foreign_classes: keep the annotator's classes.
        shard_size: images per shard; 0: the store's choice.
        retry_skipped: try images again that were skipped.
        reuse: another store; maps that it has are copied, see `reuse`.
    """

    top_k: int = 0
    resize: str = "squash"
    batch_size: int = 32
    workers: int = field(default_factory=default_workers)
    amp_dtype: str = ""
    class_map: str = ""
    foreign_classes: bool = False
    shard_size: int = 0
    retry_skipped: bool = False
    reuse: str = ""

    def __post_init__(self) -> None:
        for name, least in (("top_k", 0), ("batch_size", 1), ("workers", 0), ("shard_size", 0)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise EverytokenError(f"--{flag} must be at least {least}, got {getattr(self, name)}.")


@dataclass(frozen=True)
class Team:
    """This process among those that fill the store together.

    Attributes:
        rank, size: which of how many.
        device: where it computes.
        meet: wait for all.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    meet: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Outcome:
    """What a run of the job did.

    Attributes:
        plan: whose classes the store has.
        done: images annotated or skipped by this process in this run.
        seconds: that it took.
        notes: sentences the user should read.
        copied: maps that came from another store.
    """

    plan: ClassPlan
    done: int
    seconds: float
    notes: tuple[str, ...] = ()
    copied: int = 0


def check_out(data: DataSet, out: Path, annotator: str) -> None:
    """Refuse a folder that cannot become the store of `data` before any work is done; nothing is written.

    Args:
        out: where the store shall be.
        annotator: its name; a store that another kind of annotator began is refused.
    """
    check_folder(out)
    images, place = Path(data.name).resolve(), out.resolve()
    inside = data.class_names and images.is_dir() and place.is_relative_to(images)
    if inside and not hidden(place.relative_to(images).as_posix()):
        raise EverytokenError(
            f"--out {out} lies among the class folders of {data.name} and would be taken for a class in training. "
            "Give a folder outside it."
        )
    if (out / MANIFEST).is_file():
        begun = str(Manifest.read(out).annotator.get("name", "not known"))
        if begun.split(":")[0] != annotator.split(":")[0]:
            raise mismatch(out, [f"annotator: {begun} in the store, {annotator} now"])


def annotate(
    data: DataSet,
    out: Path,
    annotator: Annotator,
    options: JobOptions,
    team: Team | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Give every image of `data` a score map in the store `out`, or go on with a store that was begun.

    Args:
        progress: called with (images done, images in all) of this process, images of earlier runs included.
    """
    team = team or Team()
    if not len(data):
        raise EverytokenError(f"{data.name} holds no images to annotate.")
    check_out(data, out, annotator.name)
    plan = plan_classes(
        annotator.name, annotator.classes, data.name, data.class_names, options.class_map, options.foreign_classes
    )
    top_k = _top_k(options.top_k, plan)
    annotator.to(team.device)
    grid = annotator.grid(team.device)
    settings = {**annotator.describe(), "amp": options.amp_dtype, **plan.describe()}
    meta = StoreMeta(grid, top_k, plan.names, plan.count, options.resize, settings)
    known = open_known(Path(options.reuse), out, meta) if options.reuse else None
    with MapWriter(
        out,
        data.keys(),
        meta,
        shard_size=options.shard_size or None,
        rank=team.rank,
        world=team.size,
        retry_skipped=options.retry_skipped,
    ) as writer:
        team.meet()
        shards = writer.pending_shards()
        mine = range(team.rank, writer.manifest.num_shards, team.size)
        total = sum(len(writer.shard_range(i)) for i in mine)
        done = total - sum(len(writer.shard_range(i)) for i in shards)
        copied = frozenset() if known is None else copy_known(writer, shards, known)
        done = before = done + len(copied)
        tell = progress or (lambda _done, _total: None)
        tell(done, total)
        started = time.perf_counter()
        if done < total:
            reader = BatchReader(data, store_order(data), annotator.preprocessing, options.resize)
            pin = team.device.type == "cuda"
            stream = batches(reader, writer, shards, options.batch_size, options.workers, pin, copied)
            with closing(fill(writer, annotator, plan, stream, options.amp_dtype, team.device)) as counts:
                for count in counts:
                    done += count
                    tell(done, total)
        seconds = time.perf_counter() - started
        team.meet()
        if team.rank == 0:
            writer.finalize()
        team.meet()
    return Outcome(plan, done - before, seconds, tuple(_notes(annotator, plan, grid)), len(copied))


def fill(
    writer: MapWriter,
    annotator: Annotator,
    plan: ClassPlan,
    stream: Iterable[ImageBatch],
    amp_dtype: str,
    device: torch.device,
) -> Generator[int, None, None]:
    """Score and write batches as they come; yields the number of images of each. All are written when it ends or is
    closed."""
    with _writing(writer, annotator.name, amp_dtype) as put:
        for batch in stream:
            put(batch, *_score(annotator, plan, writer.manifest.top_k, batch, amp_dtype, device))
            yield len(batch)


def _top_k(wanted: int, plan: ClassPlan) -> int:
    if wanted > plan.scored:
        raise EverytokenError(
            f"--top-k {wanted} is more than the {plan.scored} classes that get scores; use at most {plan.scored}."
        )
    return wanted or (plan.scored if plan.scored <= _FEW else 5)


def _notes(annotator: Annotator, plan: ClassPlan, grid: tuple[int, int]) -> Iterator[str]:
    height, width = annotator.preprocessing.size
    if height % grid[0] or width % grid[1]:
        yield (
            f"{height} x {width} pixels are not a whole number of pixels for each of the {grid[0]} x {grid[1]} cells, "
            "so cells at the border lie a little off; choose a multiple for --img-size."
        )
    if plan.how == "by name" and plan.count < annotator.classes.count:
        yield (
            f"{plan.count} of the annotator's {annotator.classes.count} classes are those of the data set (matched by "
            "name); the others are left out. --foreign-classes keeps all."
        )
    if plan.scored < plan.count:
        yield f"{plan.count - plan.scored} classes of the data set have no class of the annotator and get no scores."


def _score(
    annotator: Annotator, plan: ClassPlan, top_k: int, batch: ImageBatch, amp_dtype: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(scores, classes), both [n, h, w, k], still on the device."""
    autocast = nullcontext()
    if amp_dtype:
        autocast = torch.autocast(device.type, getattr(torch, amp_dtype))  # type: ignore[assignment]
    try:
        with torch.inference_mode():
            images = annotator.preprocessing.normalise(batch.pixels.to(device, non_blocking=True))
            with autocast:
                logits = annotator.score(images, batch.indices)
            best = plan.apply(logits).topk(top_k, dim=-1)
            return best.values, plan.class_ids(best.indices)
    except torch.OutOfMemoryError as error:
        raise EverytokenError(
            f"{device} has too little memory for {len(batch)} images of {annotator.preprocessing.size} pixels. Use a "
            "smaller --batch-size (or --img-size, or --amp); the same command then goes on where it stopped."
        ) from error


@contextmanager
def _writing(writer: MapWriter, annotator: str, amp: str) -> Iterator[Callable[[ImageBatch, Tensor, Tensor], None]]:
    """A function that hands maps to a writing thread; at the end all of them are written.

    What goes wrong in the thread is raised here, at the next call or at the end.
    """
    waiting: queue.Queue[tuple[ImageBatch, Tensor, Tensor] | None] = queue.Queue(_AHEAD)
    trouble: list[BaseException] = []

    def work() -> None:
        while (item := waiting.get()) is not None:
            if not trouble:  # after a failure, only empty the queue, so that nobody waits for a place in it
                try:
                    _write(writer, annotator, amp, *item)
                except BaseException as error:
                    trouble.append(error)

    def put(batch: ImageBatch, scores: Tensor, classes: Tensor) -> None:
        if trouble:
            raise trouble[0]
        waiting.put((replace(batch, pixels=batch.pixels[:0]), scores, classes))  # pixels would only take up memory

    thread = threading.Thread(target=work, name="everytoken-writer", daemon=True)
    thread.start()
    try:
        yield put
    finally:
        waiting.put(None)
        thread.join()
    if trouble:
        raise trouble[0]


def _write(writer: MapWriter, annotator: str, amp: str, batch: ImageBatch, scores: Tensor, classes: Tensor) -> None:
    values = scores.float().cpu().numpy()  # on a GPU, this waits for the batch
    ids = classes.cpu().numpy()
    good = [place for place in range(len(batch)) if place not in batch.failures]
    _check(writer, annotator, amp, batch, good, values)
    if good:
        at = np.array([batch.positions[place] for place in good])
        writer.put(at.tolist(), values[good], ids[good], batch.sizes[good], batch.areas[good])
    for place, reason in batch.failures.items():
        writer.skip(batch.positions[place], reason)


def _check(
    writer: MapWriter, annotator: str, amp: str, batch: ImageBatch, good: list[int], values: np.ndarray[Any, Any]
) -> None:
    fits = (np.abs(values) <= np.finfo(np.float16).max).all(axis=(1, 2, 3))  # False for nan and inf, too
    bad = next((place for place in good if not fits[place]), None)
    if bad is None:
        return
    key, worst = writer.key(batch.positions[bad]), values[bad].ravel()
    worst = worst[~(np.abs(worst) <= np.finfo(np.float16).max)][0]
    hint = f"Leave out --amp, or try --amp-dtype bfloat16 (now {amp})." if amp == "float16" else "Look at its weights."
    raise AnnotatorError(
        f"{annotator} gives {key!r} a score of {worst}, which half precision (65504 at most) cannot keep. {hint} "
        "Finished shards are kept."
    )
