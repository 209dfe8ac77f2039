"""What segmentation and detection share: datasets of files, batches, weights that describe themselves, task, inference.

A dense task is a `DenseTask` with its datasets, its network and its score. The
weights file holds the whole network and a description of it (a subclass of `DenseInfo`), so `load_dense` needs nothing
else, and a trained network is evaluated as its run was validated.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from everytoken import schema
from everytoken.data.batch import Batch, Prefetcher
from everytoken.data.datasets import DEFAULT_VAL_SPLIT, DataError, DataSet, Strings, split_off
from everytoken.data.decode import ImageError
from everytoken.data.loader import BadImages, Loader, Request
from everytoken.draw import Card, draw_sheet
from everytoken.engine.distributed import World
from everytoken.engine.dryrun import plan
from everytoken.engine.held_out import HeldOut
from everytoken.engine.loop import run
from everytoken.engine.progress import watched
from everytoken.engine.run_folder import Run, RunFolder
from everytoken.engine.task import Task
from everytoken.errors import EverytokenError
from everytoken.models.open import Description, find_weights, parse_metadata, read_metadata
from everytoken.models.weights import load_weights
from everytoken.tasks.backbone import Features, name_weights, rebuild_features
from everytoken.tasks.options import DenseOptions, check_rate, default_output

A = TypeVar("A")
V = TypeVar("V")
N = TypeVar("N", bound=nn.Module)
PICTURES = 8  # of validation images, at the end of a run


# -- datasets and batches ---------------------------------------------------------------------------------------------


class FileSet(DataSet):
    """Images of a folder, whose targets are not one class each.

    Args:
        root: the folder; images: paths below it.
        class_names: of whatever the targets are made of.
    """

    def __init__(self, root: Path, images: Sequence[str], class_names: Sequence[str], name: str = "") -> None:
        self.root, self.name = root, name or str(root)
        self.images, self.class_names = Strings(images), list(class_names)
        self.labels = np.full(len(images), -1, dtype=np.int64)  # of whole images: none

    def key(self, i: int) -> str:
        """The image's path below the root."""
        return self.images[i]

    def where(self, i: int) -> str:
        """The image's path."""
        return f"{self.root}/{self.images[i]}"

    def open_bytes(self, i: int) -> bytes:
        """The image file."""
        return Path(self.where(i)).read_bytes()


def split_by_name(data: DataSet, split: str, fraction: float) -> DataSet:
    """The training or the validation images of a dataset without parts. By name alone: the same for every seed."""
    kept, aside = split_off(data, fraction or DEFAULT_VAL_SPLIT, seed=0)
    return data.subset(kept if split == "train" else aside)


def whole_set(data: Any, i: int, kind: type[V]) -> tuple[V, int]:
    """The whole dataset, and the number of sample i in it, of a dataset or of a subset of one."""
    while not isinstance(data, kind):
        data, i = data.base, int(data.indices[i])
    return data, i


def check_relative(name: str, where: str) -> str:
    """The path of a file as an annotation file names it; refused where it would lead out of the folder of images."""
    parts = re.split(r"[/\\]", name)
    if not name or "\0" in name or ".." in parts or parts[0] == "" or re.match(r"[A-Za-z]:", name):
        raise DataError(f"{where} names the file {name!r}; files are named relative to their folder and inside it")
    return name


class Views(Generic[V]):
    """Makes batches for the loader; lives in each of its workers. Images that cannot be read are left out if asked."""

    def __init__(self, data: DataSet, skip: bool = False) -> None:
        self.data, self.skip = data, skip

    def __len__(self) -> int:
        return len(self.data)

    def view(self, request: Request, key: str) -> V:
        """One image as the network gets it."""
        raise NotImplementedError

    def collate(self, views: list[V]) -> tuple[np.ndarray, np.ndarray, Any]:
        """(images uint8 [B, 3, H, W], placement [B, 2, 3], targets) of a batch, which may be empty."""
        raise NotImplementedError

    def __getitems__(self, requests: list[Request]) -> Batch:
        views: list[V] = []
        kept: list[int] = []
        skipped: list[tuple[str, str]] = []
        for request in requests:
            key = self.data.key(request.sample)
            try:
                views.append(self.view(request, key))
            except ImageError as error:
                if not self.skip:
                    raise
                skipped.append((key, str(error)))
                continue
            kept.append(request.sample)
        images, placement, targets = self.collate(views)
        return Batch(
            images=torch.from_numpy(images),
            labels=torch.from_numpy(self.data.labels[kept]),
            placement=torch.from_numpy(placement.astype(np.float32).reshape(-1, 2, 3)),
            indices=torch.tensor(kept, dtype=torch.int64),
            keys=tuple(self.data.key(i) for i in kept),
            targets=targets,
            skipped=tuple(skipped),
        )


def resized(size: tuple[float, float], short: float, longest: float) -> tuple[int, int]:
    """(width, height) of an image whose short side becomes `short`, unless its long side would exceed `longest`."""
    factor = min(short / min(size), longest / max(size))
    return max(int(size[0] * factor + 0.5), 1), max(int(size[1] * factor + 0.5), 1)


def fill_colour(mean: Sequence[float]) -> tuple[int, int, int]:
    """The mean colour of a network's normalisation, as bytes."""
    red, green, blue = (min(255, round(255 * value)) for value in mean)
    return red, green, blue


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseInfo:
    """What somebody needs to know to use the weights of a dense task; subclasses add their head and evaluation.

    Attributes:
        backbone: how its timm model was made, and the input's normalisation; img_size is that of training.
        class_names: of the answers. taps: blocks of a plain transformer.
    """

    METADATA: ClassVar[str]  # the key in the weights file
    HINT: ClassVar[str]  # what to do with weights that are something else

    backbone: Description
    class_names: tuple[str, ...]
    taps: tuple[int, ...]

    def to_metadata(self) -> dict[str, str]:
        """As safetensors keeps it, in one entry."""
        return {self.METADATA: json.dumps(asdict(self))}

    @classmethod
    def upgrade(cls, values: dict[str, Any]) -> dict[str, Any]:
        """What older versions wrote, as it is written now."""
        return values


I = TypeVar("I", bound=DenseInfo)  # noqa: E741


def load_dense(source: str | Path, info_type: type[I], build: Callable[[Features, I], N]) -> tuple[N, I]:
    """A trained network in evaluation mode and its description, from its run folder or a weights file of it."""
    path = find_weights(source)
    values = parse_metadata(read_metadata(path), info_type.METADATA, path)
    if values is None:
        raise EverytokenError(f"{path} {info_type.HINT}")
    if isinstance(values, dict):
        values = info_type.upgrade(values)
    info = schema.parse(info_type, values, f"{path}, description of the weights")
    Description.from_values(values["backbone"], str(path))  # which checks architecture and arguments
    model = build(rebuild_features(info.backbone, info.taps), info)
    report = load_weights(model, path)
    if report.missing or report.left_out:
        raise EverytokenError(f"{path} does not fit the network that it describes:\n{report}")
    return model.eval(), info


# -- training ---------------------------------------------------------------------------------------------------------


class DenseTask(Task):
    """Trains a dense task. Subclasses make datasets, views and network, and say how a network is used and scored.

    Args:
        step: turns a batch into loss terms; its attribute `network_name` is the network that is trained.
        info: what the weights say about themselves. sets: training and validation images.
    """

    network_name: ClassVar[str]

    def __init__(
        self,
        step: nn.Module,
        info: DenseInfo,
        sets: tuple[DataSet, DataSet],
        options: DenseOptions,
        world: World,
        folder: RunFolder,
    ) -> None:
        if world.size > 1 and world.device.type == "cuda":
            step = nn.SyncBatchNorm.convert_sync_batchnorm(step)
        super().__init__(step, options, world, folder)
        self.info = info
        self.train_set, self.val_set = sets
        skip = options.dataset.on_bad_image == "skip"
        batch_size = options.dataset.batch_size
        self.train_loader = self.loader(self.train_views(skip), batch_size=batch_size, train=True)
        self.val_loader = self.loader(self.val_views(skip), train=False)
        self.batches_per_epoch = len(self.train_loader)

    def network(self, module: nn.Module) -> Any:
        """The network inside the trained module, or inside a copy of it."""
        return getattr(module, self.network_name)

    @property
    def backbone(self) -> nn.Module:
        """The timm model."""
        backbone: nn.Module = self.network(self.module).features.backbone
        return backbone

    def train_views(self, skip: bool) -> Views[Any]:
        """Of the training images."""
        raise NotImplementedError

    def val_views(self, skip: bool) -> Views[Any]:
        """Of the validation images."""
        raise NotImplementedError

    def inference(self, module: nn.Module) -> Callable[[Batch], Any]:
        """How validation uses a network: batch of one image -> answer."""
        raise NotImplementedError

    def answers(self, module: nn.Module) -> Iterator[tuple[Batch, Any]]:
        """This process's validation images, each with the network's answer."""
        batches = watched(self.val_loader.epoch(0), len(self.val_set), self.world)
        return answers(self.inference(module), batches, self.autocast)

    def train_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Training batches of an epoch from a position on."""
        info = self.info.backbone
        yield from Prefetcher(self.train_loader.epoch(epoch, start), self.world.device, info.mean, info.std)

    def weights(self, state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """The whole network in one file."""
        prefix = self.network_name + "."
        return {"": {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}}

    def metadata(self) -> dict[str, str]:
        """What `load_dense` reads."""
        return self.info.to_metadata()

    def summary(self, network: str) -> str:
        """Data and model in a few words; `network` names the latter."""
        count = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        return (
            f"{len(self.train_set):,} training and {len(self.val_set):,} validation images, "
            f"{len(self.info.class_names)} classes; {network}, {count / 1e6:.1f} M parameters"
        )


def train_dense(options: Any, name: str, task_type: Callable[[Any, World, RunFolder], DenseTask]) -> Run:
    """Train a dense task, or continue the run in the output folder."""
    options = replace(options, model=name_weights(options.model))
    return run(partial(task_type, options), options, _checked_output(options, name))


def plan_dense(options: Any, name: str, task_type: Callable[[Any, World, RunFolder], DenseTask]) -> dict[str, Any]:
    """What would be trained, and how long it would take from a few timed steps; nothing is written."""
    quick = replace(options, dataset=replace(options.dataset, workers=0))
    return plan(partial(task_type, quick), options, _checked_output(options, name))


def _checked_output(options: DenseOptions, name: str) -> str:
    """The run folder; raises on options that do not make a run."""
    if not options.data:
        raise EverytokenError(f"data is empty: name the images to train on (everytoken {name} train DATA)")
    check_rate(options.optim)
    return options.run.output or default_output(options, name)


def held_out_note(data: str, val_split: float) -> str:
    """What to say where a part of the images is held out."""
    return f"note: {data} has no validation part: {val_split or DEFAULT_VAL_SPLIT:.0%} are held out (val_split)"


# -- inference --------------------------------------------------------------------------------------------------------


def answers(
    network: Callable[[Batch], A],
    batches: Iterable[Batch],
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Iterator[tuple[Batch, A]]:
    """Each batch with the network's answer."""
    for batch in batches:
        with torch.no_grad(), autocast():
            answer = network(batch)
        yield batch, answer


@dataclass(frozen=True)
class Evaluation:
    """A network on a dataset.

    Attributes:
        numbers: by name, in percent; also images and images_per_second. classes: a row for each class that occurs.
        notes: what the user should know. skipped: images that could not be read, with the reason.
    """

    numbers: dict[str, float]
    classes: list[dict[str, Any]]
    notes: list[str]
    skipped: dict[str, str]


class EvalPass(Generic[A]):
    """One pass over a dataset, an image at a time: what was answered, how fast, and what could not be read."""

    def __init__(self, views: Views[Any], workers: int, on_bad_image: str = "raise") -> None:
        self.bad_images = BadImages(on_bad_image)
        self.loader = Loader(views, train=False, workers=workers, bad_images=self.bad_images)
        self.images, self.seconds = 0, 0.0

    def run(self, network: Callable[[Batch], A], device: str, amp: bool) -> Iterator[tuple[Batch, A]]:
        """Each image with its answer."""
        started = time.perf_counter()
        precision = partial(torch.autocast, torch.device(device).type, torch.bfloat16, enabled=amp)
        with contextlib.closing(self.loader):
            for batch, answer in answers(network, self.loader.epoch(0), precision):
                self.images += 1
                self.seconds = time.perf_counter() - started
                yield batch, answer

    @property
    def numbers(self) -> dict[str, float]:
        """images, and images_per_second."""
        return {"images": self.images, "images_per_second": self.images / max(self.seconds, 1e-9)}


def unseen_part(origin: HeldOut, data: str, open_data: Callable[[str, float], DataSet]) -> tuple[DataSet, list[str]]:
    """Of data without parts, the images that the run held out, or all of them; and what to say about that.

    Args:
        open_data: (split, val_split) -> dataset.
    """
    opened = open_data("val" if origin.share else "all", origin.share)
    note = origin.note(data, len(opened))
    return opened, [note] if note else []


def save_sheet(cards: Sequence[Card], path: str | Path, subtitle: str) -> None:
    """Truth and answer of some images, as a JPEG."""
    if cards:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        draw_sheet("Truth and answer", subtitle, cards).save(path, quality=88)
