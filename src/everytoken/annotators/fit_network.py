"""`fit` where there are no pretrained weights: an annotator that is trained on the dataset from scratch.

A small ResNet (see `small_cnn`), or any timm model by name; AdamW with one cycle of the learning rate, random crops,
flips and light colour changes, plain cross entropy: what counts are the soft labels, and smoothing would flatten them.
Everything random is keyed by the seed, so the same data gives the same network on the same machine, also after a kill.

What is held out: the images that `train` sets aside for validation by default are never learnt from, so that maps do
not carry their labels into a training that validates on them. With k folds each of the other images is annotated by
the network that did not train on it (cross-fitting), for k times the training: a network that has memorised an image
gives it a label that says no more than its folder.

A finished network is kept in the store's folder (`annotator/fold-0.safetensors` and `.json`) and is not trained again.
Cost: as measured on 2 CPU cores, see docs/annotate.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import resolve_data_config
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn

from everytoken import schema
from everytoken.annotators.annotator import Annotator, AnnotatorError, CellScores, Preprocessing, weights_hash
from everytoken.annotators.options import AnnotateOptions, pair
from everytoken.annotators.reading import BatchReader, eval_view, read_batches
from everytoken.classes import ClassList
from everytoken.data.augment import AugmentOptions, TrainTransform
from everytoken.data.batch import Batch, Prefetcher
from everytoken.data.datasets import DEFAULT_VAL_SPLIT, DataSet, split_off
from everytoken.data.loader import BadImages
from everytoken.engine.distributed import World
from everytoken.engine.loop import BadLossError, Loop
from everytoken.engine.options import DataOptions, ModelOptions, OptimOptions, RunOptions, TrainOptions
from everytoken.engine.run_folder import RunFolder
from everytoken.engine.task import Task
from everytoken.errors import EverytokenError
from everytoken.files import write_atomically
from everytoken.keyed import digest, uniform
from everytoken.models import family_of
from everytoken.models.open import check_architecture, create_sized, with_own_head
from everytoken.models.weights import WeightsError, encode_weights, read_weights

logger = logging.getLogger(__name__)
FOLDER = "annotator"
"""Where in a store's folder the networks are kept."""
CNN = "cnn"
"""How the user calls the small network."""
WEIGHT_DECAY = 0.05


@dataclass(frozen=True)
class Fold:
    """One network to train: indices into the dataset, to train on and to hold out."""

    number: int
    train: np.ndarray
    held_out: np.ndarray


def make_folds(data: DataSet, count: int, seed: int, for_training: bool = True) -> tuple[list[Fold], np.ndarray]:
    """The networks to train, and for each image the number of the one that annotates it.

    No network learns from the images that training sets aside for validation. Within each class the others are ranked
    by a hash of seed and key and dealt out to the folds in turn, so folds have the same share of every class and do not
    depend on the order of files.

    Args:
        count: 1: one network annotates everything. k >= 2: cross-fitting.
        for_training: the images include those that training sets aside by default; False: they were left out before,
            and a tenth of the others is held out to measure the network.
    """
    if count < 1:
        raise EverytokenError(f"folds is {count}; it must be at least 1")
    for label, images in zip(*np.unique(data.labels, return_counts=True), strict=True):
        if images < 2:
            raise EverytokenError(
                f"class {data.class_names[label]!r} has only {images} image; `fit` needs two of each class at least, "
                "one to train on and one to hold out."
            )
    learnt, validation = split_off(data, DEFAULT_VAL_SPLIT, seed=0 if for_training else 1)
    part = np.zeros(len(data), dtype=np.int64)
    if count == 1:
        return [Fold(0, learnt, validation)], part
    if not for_training:
        learnt = np.arange(len(data))
    draws = np.array([uniform(seed, "fold", key) for key in data.keys()])  # noqa: SIM118
    for label in np.unique(data.labels):
        members = np.flatnonzero(data.labels == label)
        ranks = np.argsort(np.argsort(draws[members], kind="stable"), kind="stable")
        part[members] = (ranks + label) % count  # shifted, so that small classes do not all lack the same fold
    folds = [Fold(number, learnt[part[learnt] != number], np.flatnonzero(part == number)) for number in range(count)]
    if not all(len(fold.held_out) and len(fold.train) for fold in folds):
        raise EverytokenError(f"{len(data)} images are too few for {count} folds; use fewer folds.")
    return folds, part


@dataclass
class FitAnnotator(Annotator):
    """Networks that were trained on the dataset; `part` [n] says which of them annotates each image."""

    models: list[nn.Module] = field(default_factory=list)
    part: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def score(self, images: Tensor, indices: np.ndarray) -> Tensor:
        """Logits of every cell, each image asked of its own network."""
        part = self.part[indices]
        if (part == part[0]).all():
            logits: Tensor = self.models[int(part[0])](images)
            return logits
        out: Tensor | None = None
        for number in np.unique(part).tolist():
            places = torch.from_numpy(np.flatnonzero(part == number)).to(images.device)
            scores = self.models[number](images[places])
            out = scores.new_empty(len(images), *scores.shape[1:]) if out is None else out
            out[places] = scores
        if out is None:
            raise AnnotatorError("there are no images to score")
        return out

    def to(self, device: torch.device) -> None:
        """Move all networks."""
        for model in self.models:
            model.to(device).to(memory_format=torch.channels_last).eval().requires_grad_(False)


class FitStep(nn.Module):
    """Batch -> cross entropy."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Loss; zero for a single image, which batch norm cannot work with."""
        images, labels = batch.images, batch.labels
        if len(images) < 2:
            return {"loss": torch.stack([p.sum() for p in self.network.parameters()]).sum() * 0}
        assert labels is not None
        return {"loss": F.cross_entropy(self.network(images), labels)}


class FitTask(Task):
    """Train the network of one fold."""

    score_name = "held-out accuracy"
    is_reported = False
    options: TrainOptions

    def __init__(
        self,
        data: DataSet,
        fold: Fold,
        network: nn.Module,
        view: Preprocessing,
        size: tuple[int, int],
        resize: str,
        options: TrainOptions,
        world: World,
        folder: RunFolder,
    ) -> None:
        super().__init__(FitStep(network.to(memory_format=torch.channels_last)), options, world, folder)
        self.data, self.fold, self.view, self.resize = data, fold, view, resize
        scale = (0.35, 1.0) if min(size) <= 48 else (0.25, 1.0)
        augment = AugmentOptions(scale=scale, aa="", color_jitter=0.2, reprob=0.0)
        transform = TrainTransform(size, augment, mean=view.mean, std=view.std)
        images = data.subset(fold.train)
        self.train_loader = self.loader(images, transform, options.dataset.batch_size, train=True)
        self.train_loader.bad_images = BadImages("skip", quota=1.0)  # they are named when they are to be annotated
        self.batches_per_epoch = len(self.train_loader)
        self.correct: np.ndarray | None = None

    @property
    def backbone(self) -> nn.Module:
        """The network."""
        step: Any = self.module
        network: nn.Module = step.network
        return network

    def train_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Augmented batches."""
        batches = self.train_loader.epoch(epoch, start)
        yield from Prefetcher(batches, self.world.device, self.view.mean, self.view.std, channels_last=True)

    def validate(self, module: nn.Module) -> dict[str, float]:
        """Whether the mean of the map is highest for the image's label; unreadable images are left out."""
        network: Any = module.network
        scores, total = CellScores(with_own_head(network, None)).eval(), len(self.fold.held_out)
        spans = [range(start, min(start + 64, total)) for start in range(0, total, 64)]
        reader = BatchReader(self.data, self.fold.held_out, eval_view(self.view, self.resize))
        correct: list[bool] = []
        for batch in read_batches(reader, spans, self.options.dataset.workers):
            images = self.view.normalise(batch.pixels.to(self.world.device))
            answers = scores(images).mean((1, 2)).argmax(1).cpu().numpy()
            for place, index in enumerate(batch.indices.tolist()):
                if place not in batch.failures:
                    correct.append(bool(answers[place] == self.data.label(index)))
        if not correct:
            raise AnnotatorError("none of the held-out images can be read.")
        self.correct = np.array(correct)
        return {"score": 100 * float(self.correct.mean())}

    def describe(self) -> str:
        """What is trained."""
        return f"training an annotator on {len(self.fold.train):,} images at {self.options.model.img_size} pixels"


def train_annotator(data: DataSet, out: Path, options: AnnotateOptions, world: World) -> FitAnnotator:
    """Train what is not trained yet, and return the annotator.

    Args:
        out: the store's folder; networks are kept in `out/annotator`.
        options: of the annotation.
        world: folds are shared by its processes.
    """
    fit = options.fit
    folds, part = make_folds(data, fit.folds, fit.seed, for_training=not options.val_split)
    side = pair(fit.fit_size) or _usual_size(data)
    plan = _plan(data, options, side)
    folder = out / FOLDER
    size = pair(options.img_size) or side
    for fold in folds[world.rank :: world.size]:
        if load_fold(folder, fold.number, plan) is None:
            if len(folds) > 1:
                logger.info(f"network {fold.number + 1} of {len(folds)}")
            network, view = build_model(plan["model"], len(data.class_names), side, fit.seed)
            _train_fold(data, fold, network, view.resized(size), plan, options, world, folder)
    world.barrier()
    models: list[nn.Module] = []
    correct = held_out = 0
    for fold in folds:
        saved = load_fold(folder, fold.number, plan)
        if saved is None:
            raise AnnotatorError(f"{folder} lacks fold {fold.number}; was it removed while this command ran?")
        network, view = build_model(plan["model"], len(data.class_names), side, fit.seed)
        load_network(network, saved, folder)
        models.append(CellScores(with_own_head(network, None)))
        correct, held_out = correct + saved.facts["held_out_right"], held_out + saved.facts["held_out"]
        plan = saved.plan  # that of an older version says nothing about what was held out
    what = f"{len(folds)} networks, each image held out once" if len(folds) > 1 else "one network"
    logger.info(
        f"annotator trained on this dataset: {what}; held-out accuracy {correct / held_out:.1%} ({held_out:,} images)"
    )
    names = tuple(data.class_names)
    settings = {
        "fit": {k: v for k, v in plan.items() if k != "data_sha256"},
        "weights_sha256": [weights_hash(m) for m in models],
        "held_out_accuracy": round(correct / held_out, 4),
    }
    return FitAnnotator("fit", view.resized(size), ClassList(len(names), names), settings, models, part)


def _train_fold(
    data: DataSet,
    fold: Fold,
    network: nn.Module,
    view: Preprocessing,
    plan: Mapping[str, Any],
    options: AnnotateOptions,
    world: World,
    folder: Path,
) -> None:
    """Train one network in this process alone, in a run folder that is removed when the network is saved."""
    lr, epochs = plan["lr"], plan["epochs"]
    settings = TrainOptions(
        data=data.name,
        model=ModelOptions(img_size=max(plan["size"])),
        dataset=DataOptions(
            batch_size=min(plan["batch_size"], len(fold.train)), workers=options.workers, on_bad_image="skip"
        ),
        optim=OptimOptions(
            epochs=epochs,
            lr=lr,
            weight_decay=plan["weight_decay"],
            warmup_epochs=0.2 * epochs,
            warmup_lr=lr / 25,
            min_lr=lr / 250_000,
            clip_grad=5.0,
        ),
        run=RunOptions(seed=plan["seed"], val_interval=epochs, keep=1, out=str(folder / f"fold-{fold.number}")),
    )
    run_folder = RunFolder(settings.run.out)
    alone = World(0, 1, world.device)
    size = (plan["size"][0], plan["size"][1])
    task = FitTask(data, fold, network, view, size, options.resize, settings, alone, run_folder)
    with run_folder.open(), torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        try:
            Loop(task, settings, run_folder, alone).run()
        except BadLossError as error:
            raise AnnotatorError(
                f"the annotator cannot be trained: its loss is not finite. Try a smaller fit_lr (now {lr:g})."
            ) from error
        finally:
            task.close()
        if task.correct is None:  # killed after the last checkpoint
            with torch.no_grad():
                task.validate(task.module.eval())
    assert task.correct is not None
    seconds = run_folder.read().summary.get("seconds", 0.0)
    facts = {"seconds": seconds, "trained_on": len(fold.train)}
    facts |= {"held_out_right": int(task.correct.sum()), "held_out": len(task.correct)}
    save_fold(folder, fold.number, network, plan, facts)
    shutil.rmtree(run_folder.path, ignore_errors=True)


def _usual_size(data: DataSet) -> tuple[int, int]:
    """A square that fits the images: the median of their shorter sides, rounded; 128 at most, to stay quick."""
    sides = []
    for i in range(0, len(data), max(1, len(data) // 64)):
        try:
            sides.append(min(data.picture(i).size))
        except EverytokenError:
            continue
    usual = float(np.median(sides)) if sides else 128
    side = 32 if usual <= 48 else 64 if usual <= 96 else 128
    return side, side


def _usual_epochs(images: int, side: tuple[int, int], pretrained: bool) -> int:
    """So many that a laptop is done in minutes: 120,000 images in all, fewer large ones, but 12 to 100 times each."""
    shown = 120_000 if max(side) <= 96 else 72_000
    if pretrained:
        return max(4, min(15, round(shown / 4 / images)))
    return max(12, min(100, round(shown / images)))


def _plan(data: DataSet, options: AnnotateOptions, side: tuple[int, int]) -> dict[str, Any]:
    """Everything a trained network depends on; a finished one is used again only if this is equal."""
    fit = options.fit
    starts_trained = fit.fit_pretrained or fit.fit_model.startswith("registry:")
    return {
        "model": "" if fit.fit_model == CNN else fit.fit_model,
        "pretrained": fit.fit_pretrained,
        "size": list(side),
        "epochs": fit.fit_epochs or _usual_epochs(len(data), side, starts_trained),
        "batch_size": fit.fit_batch_size or (32 if len(data) < 2000 else 64),
        "lr": fit.fit_lr or (5e-4 if starts_trained else 2e-3),
        "weight_decay": WEIGHT_DECAY,
        "folds": fit.folds,
        "seed": fit.seed,
        "held_out": options.val_split or DEFAULT_VAL_SPLIT,
        "class_names": list(data.class_names),
        "data_sha256": keys_hash(data),
    }


def keys_hash(data: DataSet) -> str:
    """Changes with the names of the images and their labels."""
    content = hashlib.sha256()
    for key, label in zip(data.keys(), data.labels.tolist(), strict=True):
        content.update(f"{label} {key}\n".encode("utf-8", "surrogateescape"))
    return content.hexdigest()


def build_model(name: str, num_classes: int, size: tuple[int, int], seed: int) -> tuple[nn.Module, Preprocessing]:
    """A network with fresh weights, which depend on the seed alone, and its input."""
    mean = std = (0.5, 0.5, 0.5)
    if name.startswith("registry:"):  # of stores of the first version
        name, registry = f"tf_{name.removeprefix('registry:')}", True
    else:
        registry = False
    with torch.random.fork_rng([]):
        torch.manual_seed(int.from_bytes(digest(seed, "fit-init")[:7], "little"))
        if not name:
            return (small_cnn(num_classes, max(size)), Preprocessing(size))
        check_architecture(name)
        model, _ = create_sized(name, {"num_classes": num_classes, "img_size": size})
        family_of(model)  # raises for models without a token view, before they are trained
        if registry:
            return (model, Preprocessing(size, mean, std))
        config = resolve_data_config({}, model=model)
        return (model, Preprocessing(size, config["mean"], config["std"], config["interpolation"]))


@dataclass(frozen=True)
class SavedFold:
    """A finished network: its weights, what it was trained with, and what was measured."""

    weights: dict[str, Tensor]
    plan: dict[str, Any]
    facts: dict[str, Any]


def load_network(model: nn.Module, fold: SavedFold, where: Path) -> None:
    """Give a network the weights of a finished fold."""
    try:
        model.load_state_dict(fold.weights)
    except RuntimeError as error:
        raise AnnotatorError(
            f"the networks in {where} are of another kind than those that `fit` trains now (they come from another "
            "version of everytoken or of timm). The maps can be used; to annotate or to teach, fit a new store."
        ) from error


def save_fold(folder: Path, number: int, model: nn.Module, plan: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Weights first, then the note that makes them count: a kill in between costs time, nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"fold-{number}.safetensors", encode_weights(model.state_dict(), {}))
    note = json.dumps({"plan": plan, "facts": dict(facts)}, indent=1, sort_keys=True)
    write_atomically(folder / f"fold-{number}.json", note.encode())


def read_fold(folder: Path, number: int) -> SavedFold | None:
    """A finished network, or None."""
    note, path = folder / f"fold-{number}.json", folder / f"fold-{number}.safetensors"
    if not note.is_file() or not path.is_file():
        return None
    try:
        content = schema.read_json(note, dict[str, dict[str, Any]])
        return SavedFold(read_weights(path), content["plan"], content["facts"])
    except (schema.SchemaError, KeyError, WeightsError) as error:
        raise AnnotatorError(
            f"{note} or {path.name} is damaged ({error}). Remove both; it will be trained again."
        ) from error


def load_fold(folder: Path, number: int, plan: Mapping[str, Any]) -> SavedFold | None:
    """A finished network, or None. One that was trained otherwise is an error, not a surprise."""
    saved = read_fold(folder, number)
    if saved is None:
        return None
    plan = json.loads(json.dumps(plan))
    different = [name for name in plan.keys() | saved.plan.keys() if plan.get(name) != saved.plan.get(name)]
    if "held_out" not in saved.plan:  # the first version held out a tenth of its own, and did not say so
        different = [name for name in different if name != "held_out"]
    if different:
        what = "the images or their classes" if "data_sha256" in different else ", ".join(sorted(different))
        raise AnnotatorError(
            f"{folder} holds an annotator that was trained with other settings ({what} changed). Use the old settings, "
            "another output folder, or remove that folder."
        )
    return saved


def trained_network(store: Path) -> tuple[nn.Module, Preprocessing, tuple[str, ...]]:
    """The (first) network that was trained for a store, its input, and its classes."""
    folder = store / FOLDER
    saved = read_fold(folder, 0)
    if saved is None:
        raise AnnotatorError(
            f"{store} keeps no network of its own ({folder / 'fold-0.json'} is missing): its annotator was not made "
            "with `fit`."
        )
    try:
        plan = saved.plan
        names, size = tuple(plan["class_names"]), (int(plan["size"][0]), int(plan["size"][1]))
        network, view = build_model(plan["model"], len(names), size, plan["seed"])
    except (LookupError, TypeError, ValueError) as error:
        raise AnnotatorError(
            f"{folder / 'fold-0.json'} is damaged ({error}); annotate again to have it trained anew."
        ) from error
    load_network(network, saved, folder)
    return network, view, names


WIDTHS = (48, 96, 192)


def small_cnn(num_classes: int, side: int, drop: float = 0.1) -> ResNet:
    """The network that `fit` trains by default: a small ResNet whose score maps have 8x8 cells or more.

    Three stages of one block (48, 96 and 192 channels) and a stem that fits the image: the first 8x8 map is reached
    with a stride of 4 at 32 pixels, 8 at 64 and 16 at 128 and above. The last stage keeps the resolution of the second
    and sees further by dilation, except above 96 pixels, where it halves once more.

    Differently from a usual ResNet, every step down has an even kernel (2x2 or 4x4), whose outputs lie in the middle of
    the pixels that they replace. Outputs of 3x3 steps with padding on all sides lie half a step left and above, and
    with two of them a cell would describe a place that is 0.4 cells away from its own. About 0.8 M parameters; 0.06 G
    multiply-adds at 32 and 64 pixels, 0.15 G at 128, 0.45 G at 224.

    Args:
        num_classes: outputs.
        side: of the square images, about.
        drop: dropout before the classifier.
    """
    large = side > 96
    model = ResNet(
        BasicBlock,
        layers=(1, 1, 1),
        channels=WIDTHS,
        num_classes=num_classes,
        output_stride=16 if large else 8,
        drop_rate=drop,
        avg_down=True,
    )
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False) if side <= 48 else _half(3, 64)
    model.maxpool = nn.MaxPool2d(2)
    model.layer2[0].conv1 = _half(WIDTHS[0], WIDTHS[1])
    if large:
        model.layer3[0].conv1 = _half(WIDTHS[1], WIDTHS[2])
    else:
        model.layer3[0].downsample[0] = nn.Identity()  # timm takes means of 2x2 there, though nothing gets smaller
    for conv in (model.conv1, model.layer2[0].conv1, model.layer3[0].conv1):
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    model.layer4 = nn.Identity()  # timm's ResNet runs four stages
    return model


def _half(channels: int, out: int) -> nn.Conv2d:
    """A convolution that halves the resolution and keeps things in their place."""
    return nn.Conv2d(channels, out, 4, stride=2, padding=1, bias=False)
