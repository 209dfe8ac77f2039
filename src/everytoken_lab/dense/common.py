"""What segmentation and detection share: datasets of files, weights that describe themselves, the task, evaluation.

A dense task is a `DenseTask` with its datasets, its network and its score. The weights file holds the whole network and
a description of it (a subclass of `DenseInfo`), so a trained network is evaluated as its run was validated.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from PIL import Image
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn

from everytoken.data.batch import Batch, Prefetcher
from everytoken.errors import EverytokenError
from everytoken.files import make_inside, plain_json
from everytoken.models.weights import load_weights
from everytoken_lab import schema
from everytoken_lab.data.datasets import DEFAULT_VAL_SPLIT, FileSet, split_off
from everytoken_lab.data.decode import ImageError
from everytoken_lab.data.loader import BadImages, BatchReader, Loader
from everytoken_lab.data.tree import gather_images, result_stems
from everytoken_lab.dense.backbone import Features, name_weights, rebuild_features
from everytoken_lab.draw import Card, Row, draw_sheet
from everytoken_lab.engine.distributed import World, pick_device
from everytoken_lab.engine.loop import run
from everytoken_lab.engine.optim import default_scaling
from everytoken_lab.engine.options import (
    DenseOptions,
    EvaluateOptions,
    PredictOptions,
    apply,
    check_rate,
    default_output,
    flat,
    overrides,
)
from everytoken_lab.engine.run_folder import Run, RunFolder, held_out
from everytoken_lab.engine.task import IMAGES, Task, pixels_of, watched
from everytoken_lab.models.description import Description, read_metadata
from everytoken_lab.models.open import find_weights

A = TypeVar("A")
SIDE = 360  # of a picture in batch.jpg, pixels
SPLITS = {
    "train": ("train", "training", "train2017"),
    "val": ("val", "validation", "valid", "val2017"),
    "test": ("test", "testing", "test2017"),
}


class TargetSet(FileSet):
    """Images of a folder, whose targets are not one class each."""

    def check_size(self, i: int, size: tuple[int, int], wanted: tuple[int, int], owner: str) -> None:
        """The image must have the (width, height) of what was drawn for it."""
        if size != wanted:
            hint = " Perhaps the image is turned by its EXIF tag." if size == wanted[::-1] else ""
            raise ImageError(
                f"{self.where(i)} is {size[0]} x {size[1]} pixels, and {owner} says {wanted[0]} x {wanted[1]}.{hint}"
            )

    def part(self, split: str, fraction: float) -> Self:
        """The training or the validation images of an undivided dataset. By name alone: the same for every seed."""
        kept, aside = split_off(self, fraction or DEFAULT_VAL_SPLIT, seed=0)
        return self.subset(kept if split == "train" else aside)


F = TypeVar("F", bound=TargetSet)


def resized(size: tuple[float, float], short: float, longest: float) -> tuple[int, int]:
    """(width, height) of an image whose short side becomes `short`, unless its long side would exceed `longest`."""
    factor = min(short / min(size), longest / max(size))
    return max(int(size[0] * factor + 0.5), 1), max(int(size[1] * factor + 0.5), 1)


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseInfo:
    """What somebody needs to know to use the weights of a dense task; subclasses add their head and evaluation."""

    METADATA: ClassVar[str]  # the key in the weights file
    HINT: ClassVar[str]  # what to do with weights that are something else

    backbone: Description  # img_size is that of training
    class_names: tuple[str, ...]

    def network(self, features: Features) -> Any:
        """The network on its backbone; its weights are random."""
        raise NotImplementedError


I = TypeVar("I", bound=DenseInfo)  # noqa: E741


def load_dense(source: str | Path, info_type: type[I]) -> tuple[Any, I]:
    """A trained network in evaluation mode and its description, from its run folder or a weights file of it."""
    path = find_weights(source)
    values = read_metadata(path, info_type.METADATA)
    if values is None:
        raise EverytokenError(f"{path} {info_type.HINT}")
    info = schema.parse(info_type, values, f"{path}, description of the weights")
    Description.from_values(values["backbone"], str(path))  # which checks architecture and arguments
    model = info.network(rebuild_features(info.backbone))
    report = load_weights(model, path)
    if report.missing or report.left_out:
        raise EverytokenError(f"{path} does not fit the network that it describes:\n{report}")
    return model.eval(), info


# -- training ---------------------------------------------------------------------------------------------------------


class Score(Generic[A]):
    """Adds up what the answers for the images of a dataset are worth."""

    def add(self, batch: Batch, answer: A) -> None:
        """Compare the answer for a batch of one image with the ground truth."""
        raise NotImplementedError

    def join(self, world: World) -> None:
        """Add what the other processes counted."""
        raise NotImplementedError

    def result(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Numbers by name, in percent, the most important one first; and a row for each class that occurs."""
        raise NotImplementedError


class DenseStep(nn.Module):
    """Batch -> loss terms by name, of a network with `losses(images, targets)`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        terms: dict[str, Tensor] = self.network.losses(batch.images, batch.targets)
        return terms


class DenseTask(Task):
    """Trains a dense task. Subclasses make readers and network, and say how a network is used and scored.

    Args:
        network: its `losses(images, targets)` are terms by name, of which "loss" is minimised.
        readers: of training and validation images.
    """

    command: ClassVar[str]
    inference: ClassVar[type[Any]]  # made of a network and its info: batch of one image -> answer

    def __init__(
        self,
        network: nn.Module,
        info: DenseInfo,
        readers: tuple[BatchReader[Any], BatchReader[Any]],
        options: DenseOptions,
        world: World,
        folder: RunFolder,
    ) -> None:
        if world.size > 1 and options.run.fsdp:
            raise EverytokenError("fsdp is for classification; leave it out, and every process holds the whole network")
        if world.size > 1 and world.device.type == "cuda":
            network = convert_sync_batchnorm(network)  # timm's: torch's would drop the activations of timm's norms
        super().__init__(DenseStep(network), options, world, folder)
        backbone = replace(info.backbone, amp="bfloat16" if options.optim.amp else "")
        self.info = replace(info, backbone=backbone)
        self.train_set, self.val_set = readers[0].data, readers[1].data
        self.train_loader = self.loader(readers[0], batch_size=options.dataset.batch_size, train=True)
        self.val_loader = self.loader(readers[1], train=False)
        self.batches_per_epoch = len(self.train_loader)

    @staticmethod
    def complete(options: Any) -> Any:
        """The options of a new run, with nothing left open."""
        raise NotImplementedError

    def score(self) -> Score[Any]:
        """An empty score for the validation images."""
        raise NotImplementedError

    def truth(self, pixels: np.ndarray, batch: Batch, i: int) -> Row:
        """Image i of a batch, uint8 [H, W, 3], and what is to be found in it."""
        raise NotImplementedError

    @property
    def backbone(self) -> nn.Module:
        network: Any = self.module.network
        backbone: nn.Module = network.features.backbone
        return backbone

    def train_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        info = self.info.backbone
        yield from Prefetcher(self.train_loader.epoch(epoch, start), self.world.device, info.mean, info.std)

    def validate(self, module: nn.Module) -> dict[str, float]:
        """All numbers, "score" being the most important one; classes.json becomes the table of classes."""
        score, network = self.score(), self.inference(module.network, self.info)
        for batch in watched(self.val_loader.epoch(0), len(self.val_set), self.world):
            with torch.no_grad(), self.autocast():
                answer = network(batch)
            score.add(batch, answer)
        score.join(self.world)
        numbers, classes = score.result()
        self.folder.write("classes.json", plain_json(classes))
        named = {f"val_{name.replace(' ', '_')}": round(value, 4) for name, value in numbers.items()}
        return {"score": max(next(iter(numbers.values())), 0.0), **named}

    def weights(self, state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        return {"": {name.removeprefix("network."): value for name, value in state.items()}}

    def metadata(self) -> dict[str, str]:
        """What `load_dense` reads."""
        return {self.info.METADATA: json.dumps(asdict(self.info))}

    def facts(self) -> dict[str, str]:
        return {
            "data": f"{len(self.train_set):,} training and {len(self.val_set):,} validation images",
            "classes": f"{len(self.info.class_names):,}",
        }

    def picture(self, batch: Batch) -> Image.Image:
        info, count = self.info.backbone, min(IMAGES, len(batch))
        images = pixels_of(batch.images[:count], info.mean, info.std)
        cards = [Card(batch.keys[i], [self.truth(pixels, batch, i)], side=SIDE) for i, pixels in enumerate(images)]
        return draw_sheet(f"The first batch: {count} of {len(batch)} images", "", cards, 2)


def open_parts(
    open_data: Callable[[str, str, Any], F], divided: bool, options: DenseOptions, folder: RunFolder
) -> tuple[F, F]:
    """Training and validation images; `divided`: whether the data has a validation part."""
    part: Any = options.dataset
    training, validation = (open_data(options.data, split, part) for split in ("train", "val"))
    if list(training.class_names) != list(validation.class_names):
        raise EverytokenError("the classes of the training and the validation part differ; they must be the same")
    for images, name in ((training, "training"), (validation, "validation")):
        if not len(images):
            raise EverytokenError(f"{options.data} has no {name} images")
    if not divided:
        fraction = part.val_split or DEFAULT_VAL_SPLIT
        folder.log(f"note: {options.data} has no validation part: {fraction:.0%} are held out (val_split)")
    return training, validation


def train_dense(
    task_type: type[DenseTask],
    options: Any,
    asked: Set[str] = frozenset({"model"}),
    assignments: Sequence[str] = (),
) -> Run:
    """Train a dense task, or continue the run in the output folder.

    Args:
        asked: names of the options that the user gave; others may be a recipe's, whose model the weights replace.
        assignments: of the kind `model_kwargs.depth=4`, which come last.
    """
    options = task_type.complete(apply(options, {}, "options"))
    asked = {*asked, *(text.partition("=")[0] for text in assignments)}
    options = replace(options, model=name_weights(options.model, "model" in asked))
    options = apply(options, overrides(assignments, flat(options)), "--set")
    if not options.data:
        raise EverytokenError(f"data is empty: name the images to train on (everytoken {task_type.command} train DATA)")
    check_rate(options.optim)
    output = options.run.out or default_output(options, task_type.command)
    optim = replace(options.optim, lr_scaling=default_scaling(options.optim, options.recipe))
    options = replace(options, optim=optim)
    return run(partial(task_type, options), options, output)


# -- evaluation and prediction ----------------------------------------------------------------------------------------


def check_classes(info: DenseInfo, data: TargetSet) -> None:
    """The data must have the classes that a network was trained on, in their order."""
    if tuple(data.class_names) != info.class_names:
        raise EverytokenError(
            f"{data.name} has other classes ({', '.join(data.class_names[:3])}, ...) than the network was trained on "
            f"({', '.join(info.class_names[:3])}, ...)"
        )


@dataclass(frozen=True)
class Evaluation:
    """A network on a dataset."""

    numbers: dict[str, float]  # by name, in percent; also images and images_per_second
    classes: list[dict[str, Any]]  # a row for each class that occurs
    notes: list[str]  # for the user
    skipped: dict[str, str]  # images that could not be read, with the reason


def answer_images(
    network: Callable[[Batch], A],
    reader: BatchReader[Any],
    options: EvaluateOptions | PredictOptions,
    info: Description,
    bad_images: BadImages | None = None,
) -> Iterator[tuple[Batch, A]]:
    """Each image with the network's answer, in the precision that it was validated in; see `Description.amp_dtype`."""
    loader = Loader(reader, train=False, workers=options.workers, bad_images=bad_images or BadImages("raise"))
    device, dtype = torch.device(pick_device(options.device)).type, info.amp_dtype(options.amp)
    with contextlib.closing(loader):
        for batch in loader.epoch(0):
            with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype is not None):
                answer = network(batch)
            yield batch, answer


def evaluate_dense(
    options: EvaluateOptions,
    network: Callable[[Batch], A],
    reader: BatchReader[Any],
    score: Score[A],
    info: Description,
    notes: list[str],
) -> Evaluation:
    """One pass over a dataset, an image at a time."""
    bad_images, images, started = BadImages(options.on_bad_image), 0, time.perf_counter()
    for batch, answer in answer_images(network, reader, options, info, bad_images):
        score.add(batch, answer)
        images += 1
    speed = {"images": images, "images_per_second": images / (time.perf_counter() - started)}
    numbers, classes = score.result()
    return Evaluation({**numbers, **speed}, classes, notes, dict(bad_images.seen))


def open_unseen(
    options: EvaluateOptions,
    part: Any,
    open_data: Callable[[str, str, Any], F],
    divided: bool,
    same: Callable[[Run], bool | None] | None = None,
    fraction: Callable[[Run], float] = lambda run: run.val_split,
) -> tuple[F, list[str]]:
    """The part of the data that is asked for, and notes; of undivided data, the images that the run held out.

    Args:
        part: options of the data, with `val_split`.
        same, fraction: whether a run was trained on this data, and how much of it it held out; see `held_out`.
    """
    apply(options, {}, "options")  # which checks them
    if options.split != "val" or part.val_split or divided:
        return open_data(options.data, options.split, part), []
    origin = held_out([options.source], options.data, same, fraction)
    opened = open_data(options.data, "val" if origin.fraction else "all", replace(part, val_split=origin.fraction))
    note = origin.note(options.data, len(opened))
    return opened, [note] if note else []


def open_predicted(options: PredictOptions, endings: Sequence[str]) -> tuple[TargetSet, Callable[[str, str], Path]]:
    """The images, and where to put what is made of each: (key, ending) -> path; never over an image."""
    apply(options, {}, "options")  # which checks them
    root, names = gather_images(options.images)
    stems = result_stems(root, names, Path(options.out), endings)
    Path(options.out).mkdir(parents=True, exist_ok=True)

    def place(key: str, ending: str) -> Path:
        make_inside(Path(options.out), stems[key].parent.relative_to(options.out))
        return stems[key].with_name(stems[key].name + ending)

    return TargetSet(root, names), place
