"""`train` without a recipe: look at the photos and the machine, decide, write the decisions as a recipe, train.

What a run folder of this kind has besides the usual files:

features/        of the frozen backbones, by the content of the images; later runs on more photos use them too
linear/          the first model, a run folder of its own: the best linear classifier on these features
maps/            score maps of the training images by that classifier, if tokens are trained
exclude.txt      training images that are left out, and why
recipe.yaml      the decisions with their reasons; edit it and run it again with `recipe`
decisions.json   which images they were made for
plain/           with `compare`, the twin without token labels
result.json      what was measured on the held-out images

Fine-tuning starts from the linear head and has to beat it on the held-out images. Where these are many, the linear head
counts as the first of the epochs, of which the best is kept. Where they are few, they cannot tell epochs apart: the
last one is compared with the linear head, and kept unless it is clearly worse. The budget is turned into epochs once,
before training, and the recipe has them: a run that is continued does not decide anew.
If photos or classes were added since, the next run gets a folder of its own (`photos-2`) and goes on with the backbone,
the features and the head of the last one.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import shutil
import time
from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from everytoken import schema, stats
from everytoken.annotators.features import (
    Candidate,
    Choice,
    Features,
    FrozenBackbone,
    available_weights,
    candidates,
    choose_backbone,
    compute_features,
    fit_features,
)
from everytoken.annotators.fit import save_heads
from everytoken.annotators.fit_network import FOLDER, keys_hash
from everytoken.annotators.job import run_job, summarise
from everytoken.annotators.linear import LinearHead
from everytoken.annotators.options import AnnotateOptions
from everytoken.data.datasets import DEFAULT_VAL_SPLIT, DataSet, dataset_title
from everytoken.data.duplicates import alike, read_facts
from everytoken.engine.accuracy import AnyPredictions, MultiLabelPredictions, predictions_of
from everytoken.engine.checkpoint import write_weights
from everytoken.engine.distributed import World, best_device
from everytoken.engine.dryrun import step_seconds
from everytoken.engine.options import AutoOptions, TrainOptions
from everytoken.engine.recipe import apply, flat, read_recipe
from everytoken.engine.run_folder import Run, RunFolder, read_run
from everytoken.errors import EverytokenError
from everytoken.files import plain_json, write_atomically
from everytoken.machine import cores, free_disk, memory
from everytoken.models.open import Description, open_model, timm_config
from everytoken.tasks.build import build, log_shares, open_splits
from everytoken.tasks.classify import Classification, train_with

logger = logging.getLogger(__name__)
MINUTES = 20.0
"""For everything, if nothing else is said."""
MOST_EPOCHS, FEWEST_EPOCHS = 30, 2
USUAL_UPDATES, FEWEST_UPDATES = 120, 40
"""Of fine-tuning, whatever that is in epochs: with 24 updates, 2.3 points were lost on the linear head (one seed)."""
IMBALANCE, ADJUSTMENT = 1.5, 0.5
"""Largest class / smallest class from which on large classes are preferred less, and by how much (docs/photos.md)."""
FEW_HELD_OUT = 200
"""Held-out images with which one epoch cannot be told from another: half a point and more is a single image."""
_LOOKING = 0.2  # part of the time for features and the choice of a backbone, at most
_VALIDATING = 0.25  # of the time of training, at most
_BESIDE = 1.1  # a step with its optimizer, averages and checkpoints, which are not timed, against one without
_ENDING = 5.0  # seconds for the report and the choice of a model, besides the evaluation
_SIMILAR = 0.9  # cosine of the features of two images that may be the same
_TOKENS = {"token_labeling": {"beta": 0.5, "class_target": "truth"}}
_MACHINE = ("out", "device", "threads", "workers", "resume", "tensorboard", "wandb", "mlflow", "keep", "log_interval")


def _device(options: TrainOptions) -> torch.device:
    return torch.device(options.run.device or best_device())


@dataclass
class Decisions:
    """Options by name, each with its reason, and the lines that say so."""

    values: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """A line for the log and for the head of the recipe."""
        logger.info(text)
        self.lines.append(text)


@dataclass(frozen=True)
class Photos:
    """The images of a run, and what the backbone makes of them."""

    train: DataSet
    val: DataSet
    choice: Choice
    val_features: Features
    excluded: dict[str, str]


def train_photos(options: TrainOptions, asked: Set[str] = frozenset(), auto: AutoOptions | None = None) -> Run:
    """The best classifier that this machine can make of these photos in the given time.

    Args:
        options: those that were asked for; the rest is decided.
        asked: names of the options that were given.
        auto: budget, comparison.
    """
    auto = auto or AutoOptions()
    started = time.monotonic()
    data = keys_of(options)
    if (auto.compare or options.maps not in ("", "none")) and open_splits(options)[0].multi_label:
        raise EverytokenError(
            f"maps and compare label tokens with one class per photo, and photos of {options.data} have several "
            "labels: leave them out"
        )
    output, previous = _folder(options, data)
    if not (output / "recipe.yaml").is_file():
        _decide(options, asked, auto, output, previous, data, started)
    decided = _read_decisions(output, options)
    path = output / "result.json"
    result = schema.read_json(path, dict[str, Any]) if path.is_file() else {}
    if result:
        logger.info(f"{output} is finished: {result.get('text', 'see result.json')}")
    else:
        if decided.optim.epochs:
            train_with(decided)
        result = _choose(output, decided)
        write_atomically(path, plain_json(result).encode())
    if result["kept"] == "linear" and read_run(output).summary.get("best", {}).get("step") != 0:
        _keep_linear(output)
    if auto.compare and decided.optim.epochs and "plain" not in result:
        result |= _compare_with_plain(output, decided)
        write_atomically(path, plain_json(result).encode())
    return read_run(output)


def keys_of(options: TrainOptions) -> str:
    """Changes with the names and labels of the images, training and held-out ones."""
    if not options.data:
        raise EverytokenError("data is empty: name the images to train on (everytoken train DATA)")
    train, val, _ = open_splits(options)
    return keys_hash(train) + keys_hash(val)


def _folder(options: TrainOptions, data: str) -> tuple[Path, Path | None]:
    """The run's folder, and that of the last run on fewer images."""
    first = Path(options.run.out or Path("runs") / (Path(dataset_title(options.data)).stem or "photos"))
    folder, previous, number = first, None, 1
    while (folder / "decisions.json").is_file():
        content = schema.read_json(folder / "decisions.json", dict[str, Any])
        if content.get("images") == data:
            return folder, previous
        previous, number = folder, number + 1
        folder = first.with_name(f"{first.name}-{number}")
    if read_run(folder).config:
        raise EverytokenError(f"{folder} holds a run with a recipe of its own; choose another output.")
    return folder, previous


def _read_decisions(output: Path, options: TrainOptions) -> TrainOptions:
    """The recipe of the folder, on this machine."""
    path = output / "recipe.yaml"
    decided = replace(apply(TrainOptions(), read_recipe(str(path)), str(path)), recipe=str(path))
    machine = {name: value for name, value in flat(options).items() if name in _MACHINE}
    return apply(decided, {**machine, "out": str(output)}, "machine")


# -- deciding ----------------------------------------------------------------------------------------------------------


def _decide(
    options: TrainOptions,
    asked: Set[str],
    auto: AutoOptions,
    output: Path,
    previous: Path | None,
    data: str,
    started: float,
) -> None:
    """Write linear/, maps/ and recipe.yaml."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise EverytokenError(
            "training without a recipe is decided by one process: start it without torchrun first, stop it once it "
            f"trains, and start {output / 'recipe.yaml'} with many"
        )
    seconds = 60 * (auto.minutes or MINUTES)
    decisions = Decisions()
    device = _device(options)
    photos = _look(options, output, previous, decisions, seconds, device)
    strength = options.model.logit_adjustment if "logit_adjustment" in asked else _adjustment(photos.train)
    first = save_linear(options, photos, output / "linear", strength)
    accuracy = first.accuracy
    decisions.say(
        f"first model: a linear head, {_result(first)} (95 % interval "
        f"{accuracy.low:.1f} to {accuracy.high:.1f}), after {time.monotonic() - started:.0f} s: {output / 'linear'}"
    )
    values = _settings(options, asked, photos, output, device, decisions)
    if strength:
        counts = photos.train.class_counts()
        values["logit_adjustment"] = strength
        decisions.say(
            f"imbalance: the largest class has {counts.max() / max(1, counts.min()):.1f} times as many photos as the "
            f"smallest; logits are adjusted by {strength:g} of it, so that rare classes are found more often"
        )
    if options.maps not in ("", "none") or (auto.compare and options.maps != "none"):
        own = options.maps in ("", "auto")
        values["maps"] = _annotate(options, photos, output, device) if own else options.maps
        values["objectives"] = _TOKENS
        decisions.say(
            "tokens: every cell learns what the linear head says about it (beta 0.5), which also trains the masks; "
            f"photos are annotated by heads that have not seen them{_agreement(photos, output) if own else ''}"
        )
    values |= {k: v for k, v in flat(options).items() if k in asked and k not in (*_MACHINE, "maps", "weights")}
    if "epochs" not in asked:
        left = seconds - (time.monotonic() - started)
        chosen = apply(options, {"maps": "", **values}, "decisions")
        values |= _epochs(chosen, photos, output, left / 2 if auto.compare else left, decisions)
    epochs = values["epochs"]
    updates = epochs * max(1, len(photos.train) // (values["batch_size"] * values.get("grad_accum_steps", 1)))
    schedule = {
        "warmup_epochs": round(epochs / 10, 2),
        "model_ema_decay": round(1 - 1 / max(20, updates / 5), 4),
        "patience": max(3, epochs // 3, 2 * values.get("val_interval", 1)),
    }
    if few_held_out(len(photos.val)):
        schedule |= {"val_interval": 1000, "patience": 0}
    values |= {name: value for name, value in schedule.items() if name not in asked}
    values = {"data": options.data, **values}
    head = "".join(f"# {line}\n" for line in decisions.lines)
    path = output / "recipe.yaml"
    again = f"everytoken train {options.data} --recipe {path} --out NEW"
    again = f"# Run it again, edited or not: {again}\n" if epochs else f"# To fine-tune, add --epochs 10: {again}\n"
    text = head + again + "\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    facts = {
        "images": data,
        "backbone": photos.choice.backbone.name,
        "img_size": photos.choice.backbone.info.img_size[0],
    }
    write_atomically(output / "decisions.json", plain_json(facts).encode())
    write_atomically(output / "recipe.yaml", text.encode())  # last: it ends the deciding


def _look(
    options: TrainOptions,
    output: Path,
    previous: Path | None,
    decisions: Decisions,
    seconds: float,
    device: torch.device,
) -> Photos:
    """The photos, the machine, the weights; the backbone, features and linear head that follow from them."""
    train, val, notes = open_splits(options)
    counts = train.class_counts()
    if train.num_classes < 2 and not train.multi_label:
        raise EverytokenError(f"{options.data} has one class only: give every class a folder of its own, at least two")
    each = f"{counts.min():,}" if counts.min() == counts.max() else f"{counts.min():,} to {counts.max():,}"
    several = ", any number of them per photo" if train.multi_label else ""
    share = options.dataset.val_split or (DEFAULT_VAL_SPLIT if any("held out" in note for note in notes) else 0.0)
    held = f"{100 * share:g} % of each class, by their names" if share else "a part of their own"
    decisions.say(
        f"photos: {len(train):,} to train on, {train.num_classes} classes of {each}{several}{_usual_size(train)}; "
        f"{len(val):,} held out ({held})"
    )
    memory, disk = (f"{size / 2**30:.0f} GB" for size in (_free_memory(device), free_disk(output)))
    decisions.say(f"machine: {device.type}, {cores()} cores, {memory} of free memory, {disk} of free disk")
    weights = [options.model.weights] if options.model.weights else []
    offered = candidates(weights, options.model.img_size)
    cache = output / "features"
    start: tuple[LinearHead, tuple[str, ...]] | None = None
    if previous is not None:
        facts = schema.read_json(previous / "decisions.json", dict[str, Any])
        offered = [Candidate(str(facts["backbone"]), int(facts["img_size"]))]
        cache = _cache_of(previous)
        start = _old_head(previous / "linear")
        decisions.say(f"continuing {previous}: its backbone, its features, its head; only new photos are computed")
    choice = choose_backbone(
        train,
        offered,
        cache,
        seconds=seconds * _LOOKING,
        training_seconds=seconds * (1 - _LOOKING),
        seed=options.run.seed,
        device=device,
        workers=options.dataset.workers,
    )
    if cache.parent != output:
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / "features.txt", str(cache.resolve()).encode())
    trials = choice.trials if len(choice.trials) > 1 else ()
    tried = ", ".join(f"{trial.candidate} {trial.accuracy:.1%}" for trial in trials)
    name, size = choice.backbone.name, choice.backbone.info.img_size[0]
    reason = f"cross-validation of linear heads: {tried}" if tried else "as before" if previous else "as asked"
    best = min(choice.trials, key=lambda trial: trial.loss).candidate
    if best != Candidate(name, size):
        reason += f"; there is no time to fine-tune {best}"
    if len(offered) > 1 and not trials:
        reason = "the only one that there is time for"
    if not weights and not previous and len(offered) == 1:
        reason = f"all that is here ({', '.join(available_weights())})"
    decisions.say(f"backbone: {name} at {size} px: {reason}")
    if choice.skipped:
        decisions.say(f"not tried, for lack of time: {', '.join(choice.skipped)}")
    val_features = compute_features(val, choice.backbone, cache, workers=options.dataset.workers)
    excluded = _copies(train, choice.features, val, val_features)
    excluded |= {train.key(i): reason for i, reason in choice.features.failures.items()}
    if excluded:
        copies = len(excluded) - len(choice.features.failures)
        decisions.say(
            f"left out of training: unreadable photos: {len(choice.features.failures):,}, copies of held-out ones: "
            f"{copies:,} ({output / 'exclude.txt'})"
        )
    keep = np.array([i for i, key in enumerate(train.keys()) if key not in excluded])
    if len(keep) < len(train) or start is not None:
        features = _rows(choice.features, keep)
        train = train.subset(keep)
        head = None if start is None else _translate(start, train.class_names, choice.backbone.dim)
        choice = replace(
            choice, features=features, fit=fit_features(features, train, seed=options.run.seed, start=head)
        )
    return Photos(train, val, choice, val_features, excluded)


def _usual_size(data: DataSet, most: int = 25) -> str:
    """The sides of a middling photo, of a few."""
    areas = {}
    for i in range(0, len(data), max(1, len(data) // most)):
        with contextlib.suppress(EverytokenError, OSError):
            width, height = data.load(i).size
            areas[width * height] = f", mostly about {width} x {height} px"
    return areas[sorted(areas)[len(areas) // 2]] if areas else ""


def _cache_of(folder: Path) -> Path:
    """Where the features of a run are: in its folder, or in that of the first run."""
    pointer = folder / "features.txt"
    return Path(pointer.read_text()) if pointer.is_file() else folder / "features"


def _rows(features: Features, keep: np.ndarray) -> Features:
    failures = {new: features.failures[old] for new, old in enumerate(keep.tolist()) if old in features.failures}
    return replace(
        features, values=features.values[keep], digests=[features.digests[i] for i in keep], failures=failures
    )


def _copies(train: DataSet, train_features: Features, val: DataSet, val_features: Features) -> dict[str, str]:
    """Training images that are, or look like, held-out ones: key -> reason.

    Images with the same bytes have the same digest. Of the others, those with similar features are compared closely.
    """
    held = {digest: i for i, digest in enumerate(val_features.digests) if digest}
    copies = {
        train.key(i): f"the same as {val.key(held[digest])}"
        for i, digest in enumerate(train_features.digests)
        if digest in held
    }
    first, second = (_unit(f.values) for f in (train_features, val_features))
    for begin in range(0, len(second), 256):
        similar = first @ second[begin : begin + 256].T
        for place in range(similar.shape[1]):
            for i in np.argsort(-similar[:, place])[:3].tolist():
                if similar[i, place] < _SIMILAR or train.key(i) in copies:
                    continue
                if alike(read_facts(train, i), read_facts(val, begin + place)):
                    copies[train.key(i)] = f"looks like {val.key(begin + place)}"
    return copies


def _unit(values: np.ndarray) -> np.ndarray:
    centred = values - values.mean(0)
    unit: np.ndarray = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-9)
    return unit


def _old_head(folder: Path) -> tuple[LinearHead, tuple[str, ...]] | None:
    try:
        opened = open_model(folder)
    except EverytokenError:
        return None
    classifier: Any = opened.model.backbone.get_classifier()  # type: ignore[operator]
    return LinearHead(classifier.weight.detach(), classifier.bias.detach()), opened.class_names


def _translate(start: tuple[LinearHead, tuple[str, ...]], names: list[str], dim: int) -> LinearHead:
    """A head for other classes: rows of those that it knows, zeros for new ones."""
    head, old_names = start
    weight, bias = torch.zeros(len(names), dim), torch.zeros(len(names))
    for number, name in enumerate(names):
        if name in old_names:
            old = old_names.index(name)
            weight[number], bias[number] = head.weight[old], head.bias[old]
    return LinearHead(weight, bias)


def _settings(
    options: TrainOptions,
    asked: Set[str],
    photos: Photos,
    output: Path,
    device: torch.device,
    decisions: Decisions,
) -> dict[str, Any]:
    """How to fine-tune: the options but for the budget and the tokens."""
    info = photos.choice.backbone.info
    convolutional = photos.choice.backbone.model.family.layout == "nchw"
    gpu = device.type == "cuda"
    wanted = min(64 if gpu else 32, max(1, len(photos.train)))
    batch = _batch_in_memory(photos.choice.backbone, wanted, device)
    values: dict[str, Any] = {
        "model": info.architecture,
        "img_size": info.img_size[0],
        "weights": str(output / "linear"),
        "batch_size": batch,
        **({"grad_accum_steps": wanted // batch} if wanted > batch else {}),
        "opt": "adamw",
        "lr": 5e-4 if convolutional else 1e-4,
        "min_lr": 1e-6,
        "warmup_lr": 1e-6,
        "weight_decay": 0.05,
        **({} if convolutional else {"layer_decay": 0.8, "clip_grad": 1.0}),
        "norm_eval": True,
        "model_ema": True,
        "scale": [0.5, 1.0],
        "aa": "",
        "color_jitter": 0.2,
        "reprob": 0.0,
        "smoothing": 0.1,
        "val_first": not few_held_out(len(photos.val)),
        "amp": gpu,
        "channels_last": convolutional,
        "seed": options.run.seed,
    }
    rate = "5e-4 (3e-4 and 1e-3 did equally well, 1e-4 worse)" if convolutional else "1e-4 falling by 0.8 per layer"
    less = f" in {wanted // batch} parts, for lack of memory" if wanted > batch else ""
    decisions.say(
        f"fine-tuning from that head: batch {wanted}{less}, AdamW at {rate}; batch norms as they are, averaged "
        "weights, mild crops"
    )
    if few_held_out(len(photos.val)):
        decisions.say(
            f"held-out photos: {len(photos.val):,} are too few to choose an epoch, so the last one counts, unless the "
            "linear head is clearly better"
        )
    if photos.excluded:
        lines = "".join(f"{key}\t{reason}\n" for key, reason in sorted(photos.excluded.items()))
        write_atomically(output / "exclude.txt", lines.encode("utf-8", "surrogateescape"))
        values["exclude"] = str(output / "exclude.txt")
    if photos.val_features.failures:
        values["on_bad_image"] = "skip"
    return values


def _adjustment(train: DataSet) -> float:
    """How much of the log of the classes' shares is taken from their logits; several labels do not compete."""
    if train.multi_label:
        return 0.0
    counts = train.class_counts()
    return ADJUSTMENT if counts.max() > IMBALANCE * max(1, counts.min()) else 0.0


def few_held_out(count: int) -> bool:
    """Whether chance would choose the epoch."""
    return count < FEW_HELD_OUT


def _free_memory(device: torch.device) -> int:
    """Of the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = memory()
    return free if free is not None else 4 * 2**30


def _batch_in_memory(backbone: FrozenBackbone, wanted: int, device: torch.device) -> int:
    """The largest of wanted, wanted / 2, ... for which training takes at most 70 % of the free memory."""
    model = copy.deepcopy(backbone.model.backbone).requires_grad_(True)
    own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    images = torch.zeros(2, 3, *backbone.info.img_size, device=device)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(images)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    fixed, per_image = 5 * weights, 1.3 * sum(kept.values()) / 2  # what is kept for gradients, and some gradients
    batch = wanted
    while batch > 1 and fixed + batch * per_image > 0.7 * _free_memory(device):
        batch //= 2
    return batch


def _annotate(options: TrainOptions, photos: Photos, output: Path, device: torch.device) -> str:
    """Score maps of the training images by the heads of their folds; the store's folder."""
    place = output / "maps"
    settings = AnnotateOptions(workers=options.dataset.workers, val_split=options.dataset.val_split, device=str(device))
    fitted = place / FOLDER
    if not (fitted / "linear.json").is_file():
        save_heads((photos.choice, np.arange(len(photos.train))), photos.train, fitted, settings)
    run_job(photos.train, place, "fit", settings)
    return str(place)


def _agreement(photos: Photos, output: Path) -> str:
    """How often the maps that were made name the class of the folder; as often as the head, or something is wrong."""
    agree = summarise(output / "maps", photos.train, range(photos.train.num_classes)).images_agree or 0.0
    if agree < photos.choice.fit.accuracy / 2:
        raise EverytokenError(
            f"the maps in {output / 'maps'} name the class of {agree:.0%} of the photos only, and the head that they "
            f"come from {photos.choice.fit.accuracy:.0%}: they are not used. Train without maps, and please report this"
        )
    return f", and name the folder's class of {agree:.0%} of them"


def _epochs(options: TrainOptions, photos: Photos, output: Path, left: float, decisions: Decisions) -> dict[str, int]:
    """How many epochs fit into the time that is left, from a few timed steps, 0 if too few; how often to validate."""
    seconds, loading, batches = _time_steps(options, output)
    updates = max(1, batches // options.optim.grad_accum_steps)
    if _device(options).type == "cpu":  # which loads and trains with the same cores
        per_batch = _BESIDE * (seconds + loading / cores())
    else:
        per_batch = max(_BESIDE * seconds, loading / max(1, options.dataset.workers))
    forward = photos.choice.features.seconds / max(1, photos.choice.features.computed)
    validating = 2 * len(photos.val) * max(forward, seconds / options.dataset.batch_size / 4)
    weights = sum(p.numel() * p.element_size() for p in photos.choice.backbone.model.parameters())
    needed, free = 4 * (options.run.keep + 1) * weights, free_disk(output)  # weights, average, two moments
    if free < needed:
        decisions.say(f"no fine-tuning: its checkpoints take {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free")
        return {"epochs": 0}
    interval = max(1, math.ceil(validating / (batches * per_batch) / _VALIDATING))
    epoch = batches * per_batch + (0.0 if few_held_out(len(photos.val)) else validating / interval)
    left -= _ENDING + 2 * validating
    epochs = min(max(MOST_EPOCHS, math.ceil(USUAL_UPDATES / updates)), int(left / epoch))
    if epochs < FEWEST_EPOCHS or epochs * updates < FEWEST_UPDATES:
        decisions.say(
            f"no fine-tuning: {updates} updates, an epoch, take about {epoch:.0f} s, and {max(0, left):.0f} s are left"
        )
        return {"epochs": 0}
    early = "" if few_held_out(len(photos.val)) else "; it ends early after a third of them without progress"
    decisions.say(f"epochs: {epochs}, of about {epoch:.0f} s each{early}")
    return {"epochs": epochs, "val_interval": interval}


def _time_steps(options: TrainOptions, output: Path) -> tuple[float, float, int]:
    """(seconds of an update, seconds of loading its images in one process, updates per epoch)."""
    quick = replace(options, dataset=replace(options.dataset, workers=0))
    world = World(0, 1, _device(options))
    task = Classification(build(options, world), quick, world, RunFolder(output / ".timing", writable=False))
    return *step_seconds(task, quick), task.batches_per_epoch


# -- results -----------------------------------------------------------------------------------------------------------


def save_linear(options: TrainOptions, photos: Photos, folder: Path, strength: float = 0.0) -> AnyPredictions:
    """The linear head as a run folder, with out-of-fold answers for the training images; its held-out answers.

    Args:
        strength: how much of the log of the classes' shares is taken from the head's logits.
    """
    choice, train = photos.choice, photos.train
    head = choice.fit.head
    if strength:
        shares = torch.from_numpy(log_shares(train.labels, train.num_classes)).float()
        head = LinearHead(head.weight, head.bias - strength * shares)
    model, info = choice.backbone.with_head(head, train.class_names)
    info = replace(info, multi_label=train.multi_label)
    good = photos.val_features.readable
    logits = head(torch.from_numpy(photos.val_features.values[good]))
    answers = predictions_of(torch.from_numpy(good), torch.from_numpy(photos.val.labels[good]), logits)
    inside = choice.features.readable
    out_of_fold = torch.from_numpy(choice.fit.out_of_fold)
    unseen = predictions_of(torch.from_numpy(inside), torch.from_numpy(choice.fit.labels), out_of_fold)
    described = {"model": info.architecture, "img_size": info.img_size[0], "weights": choice.backbone.name}
    config = apply(options, {**described, "epochs": 1, "maps": ""}, "linear")
    if (folder / "best.safetensors").is_file():
        shutil.rmtree(folder)
    _write_run(folder, model, info, config, answers, photos.train.class_names)
    unseen.save(folder / "out-of-fold.npz", note=keys_hash(photos.train))
    return answers


def _write_run(
    folder: Path,
    model: torch.nn.Module,
    info: Description,
    options: TrainOptions,
    answers: AnyPredictions,
    class_names: list[str],
) -> None:
    """A finished run of no updates."""
    writer = RunFolder(folder)
    writer.write_config(flat(options), timm_config(model, info))
    summary = answers.summary()
    score = next(iter(summary.values()))
    numbers = {"score": score, **{f"val_{k}": round(v, 4) for k, v in summary.items()}}
    row = {"kind": "epoch", "step": 0, "epoch": 1, "seconds": 0.0, **numbers}
    writer.record(row)
    writer.write("classes.json", plain_json(answers.per_class(class_names)))
    write_weights(folder / "best.safetensors", model.state_dict(), info.to_metadata())
    best = {"score": score, "epoch": 1, "step": 0}
    writer.write("summary.json", plain_json({"best": best, "last": row, "epochs": 1, "updates": 0, "seconds": 0.0}))


def _keep_linear(output: Path) -> None:
    """Make the linear head the result of the run."""
    names = ("best.safetensors", "config.yaml", "config.json", "environment.json", "metrics.jsonl", "metrics.csv")
    for name in (*names, "classes.json", "summary.json"):  # last: it says that the run is finished
        if (output / "linear" / name).exists():  # folders of earlier versions have no config.json
            shutil.copyfile(output / "linear" / name, output / name)
    with RunFolder(output).surviving("report.html"):
        read_run(output).report(output / "report.html")


def clearly_worse(first: np.ndarray, last: np.ndarray) -> bool:
    """Whether a second model is worse than a first by more than a standard error, on the same images.

    Args:
        first, last: [n] bool, which images they get right.
    """
    lost, won = int((first & ~last).sum()), int((last & ~first).sum())
    return lost - won > (lost + won + 1) ** 0.5  # one more, since few differences say little about their number


def _choose(output: Path, options: TrainOptions) -> dict[str, Any]:
    """Keep the linear head or the fine-tuned model; held-out accuracy, and the interval of the difference."""
    _, val, _ = open_splits(options)
    first = predict(output / "linear", val, options)
    result: dict[str, Any] = {"held_out": len(first), "linear": first.accuracy.value, "kept": "linear"}
    text = f"kept: the linear head, {_result(first)}"
    if not options.optim.epochs:
        text += ", without fine-tuning"
    elif read_run(output).summary.get("best", {}).get("step") == 0:
        text += "; fine-tuning did not beat it"
    else:
        last = predict(output, val, options)
        gain, worse = _gain(first, last)
        result |= {"fine_tuned": last.accuracy.value, "gain": [gain.value, gain.low, gain.high]}
        points = f"{gain.value:+.1f} points (95 % interval {gain.low:+.1f} to {gain.high:+.1f})"
        if few_held_out(len(val)) and worse:
            text += f"; the fine-tuned model is clearly worse, {points}"
        else:
            result["kept"] = "fine-tuned"
            text = f"kept: the fine-tuned model, {_result(last)}, {points} to the linear head"
            text += ", which is within chance; fine-tuning is usually better" if gain.value < 0 else ""
    metric = "mAP" if isinstance(first, MultiLabelPredictions) else "top1"
    result[metric] = result["linear" if result["kept"] == "linear" else "fine_tuned"]
    result["text"] = text
    _log(output, text)
    return result


def _gain(first: AnyPredictions, last: AnyPredictions) -> tuple[stats.Estimate, bool]:
    """Of the second model over the first, in points, and whether it is clearly worse: by more than a standard error."""
    if isinstance(first, MultiLabelPredictions) and isinstance(last, MultiLabelPredictions):
        gain = last.difference(first)
        return gain, gain.value < -((gain.high or 0) - gain.value) / stats.Z
    return stats.paired_difference(first.correct, last.correct), clearly_worse(first.correct, last.correct)


def _result(answers: AnyPredictions) -> str:
    """The number that counts, in words."""
    value, photos = answers.accuracy.value, f"{len(answers):,} held-out photos"
    if isinstance(answers, MultiLabelPredictions):
        return f"mean average precision {value:.1f} % on {photos}"
    return f"right on {value:.1f} % of {photos}"


def _compare_with_plain(output: Path, options: TrainOptions) -> dict[str, Any]:
    """Train the twin without token labels for the same time, and say what the tokens brought."""
    plain = apply(options, {"objectives": {}, "mixing": {}, "maps": "", "out": str(output / "plain")}, "plain")
    seconds = read_run(output).seconds or 0.0
    if not (output / "plain/config.yaml").is_file():
        ratio = min(1.5, max(1.0, _time_steps(options, output)[0] / _time_steps(plain, output)[0]))
        plain = apply(plain, {"epochs": round(ratio * options.optim.epochs)}, "plain")
    else:
        plain = apply(plain, {"epochs": int(read_run(output / "plain").config["epochs"])}, "plain")
    run = train_with(plain)
    _, val, _ = open_splits(options)
    with_tokens, without = predict(output, val, options), predict(output / "plain", val, options)
    gain = stats.paired_difference(without.correct, with_tokens.correct)
    verdict = "" if gain.clear else ", so no difference can be seen; what tokens add are the masks"
    _log(
        output,
        f"tokens: {with_tokens.accuracy.value:.1f} %, the plain twin {without.accuracy.value:.1f} % ({seconds:.0f} and "
        f"{run.seconds or 0:.0f} s of training): {gain.value:+.1f} points (95 % interval {gain.low:+.1f} to "
        f"{gain.high:+.1f}, {len(without):,} photos, one seed){verdict}",
    )
    return {"plain": without.accuracy.value, "tokens_gain": [gain.value, gain.low, gain.high]}


def _log(output: Path, text: str) -> None:
    folder = RunFolder(output)
    with folder.open():
        folder.log(text)


def predict(source: Path, data: DataSet, options: TrainOptions) -> AnyPredictions:
    """Answers of the model of a run folder for all readable images."""
    from everytoken.evaluation import evaluate  # an application; it is used as any user would

    return evaluate(
        source,
        data,
        batch_size=options.dataset.val_batch_size or options.dataset.batch_size,
        workers=options.dataset.workers,
        device=options.run.device,
        on_bad_image="skip",
    ).predictions
