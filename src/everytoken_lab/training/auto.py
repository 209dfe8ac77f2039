"""`train` without a recipe: look at the photos, choose a backbone, fit a linear head, fine-tune, keep the better model.

    linear/        the first model, a run folder of its own: logistic regression on the best frozen backbone
    fine-tuned/    the second one, if there is time for it
    features/      of the frozen backbones, by the content of the images; later runs on more photos use them too
    maps/          score maps of the photos to fine-tune on, if tokens are trained
    exclude.txt    photos that fine-tuning leaves out, and why
    recipe.yaml    how it is fine-tuned, with all decisions and their reasons; edit it and run it again with `recipe`
    auto.json      what was decided and measured so far: a run that was interrupted goes on from here
    (the rest)     the run of the model that was kept

**What the numbers are estimates of.** Where the data has validation photos, they judge everything. Where it has none,
the linear head is judged by cross-validation and then fitted on all photos: its estimate is that of heads which saw
four fifths of them. Fine-tuning cannot be repeated five times, so it holds out a fifth (a tenth of 2,000 photos or
more), and is compared on these with a linear head that was fitted on the same photos as itself. It is kept only if the
95 % interval of the difference lies above zero; the simpler model wins where the evidence does not decide.

The budget is turned into epochs once, before fine-tuning, and the recipe has them: a run that is continued does not
decide anew. If photos or classes were added since, the next run gets a folder of its own (`photos-2`) and goes on with
the backbone and the features of the last one.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from everytoken.errors import EverytokenError
from everytoken.files import plain_json, refuse_link, write_atomically
from everytoken_lab import schema, stats
from everytoken_lab.annotators.features import (
    Candidate,
    Choice,
    Features,
    FrozenBackbone,
    Trial,
    available_weights,
    candidates,
    choose_backbone,
    compute_features,
    fit_features,
)
from everytoken_lab.annotators.fit import FOLDER, save_heads
from everytoken_lab.annotators.job import run_job, summarise
from everytoken_lab.annotators.linear import FOLDS, LinearHead
from everytoken_lab.annotators.options import AnnotateOptions
from everytoken_lab.calibration import calibrate, calibrate_several
from everytoken_lab.data.datasets import DataSet, dataset_title, keys_hash, network_address
from everytoken_lab.data.duplicates import alike, read_facts
from everytoken_lab.engine.accuracy import AnyPredictions, MultiLabelPredictions, Predictions, predictions_of
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.engine.distributed import World, best_device
from everytoken_lab.engine.dryrun import step_seconds
from everytoken_lab.engine.options import AutoOptions, TrainOptions
from everytoken_lab.engine.recipe import apply, flat, read_recipe
from everytoken_lab.engine.run_folder import CROSS_VALIDATED, Run, RunFolder, read_run
from everytoken_lab.evaluation.calibrated import keep_calibration
from everytoken_lab.machine import cores, free_disk, memory
from everytoken_lab.models.open import timm_config
from everytoken_lab.reports.predictions import CACHE, stamp
from everytoken_lab.training.build import build, has_validation, log_shares, open_splits, open_undivided
from everytoken_lab.training.classify import Classification, train_with

logger = logging.getLogger(__name__)
STATE = "auto.json"
METHOD = "logistic regression on frozen features"
MINUTES = 20.0
"""For everything, if nothing else is said."""
MOST_EPOCHS, FEWEST_EPOCHS = 30, 2
USUAL_UPDATES, FEWEST_UPDATES = 120, 40
"""Of fine-tuning, whatever that is in epochs: with 24 updates, 2.3 points were lost on the linear head (one seed)."""
LEAD = 0.04
"""Fine-tuning rarely gains more than this on a linear head, so a backbone that is further behind is not fine-tuned."""
IMBALANCE, ADJUSTMENT = 1.5, 0.5
"""Largest class / smallest class from which on large classes are preferred less, and by how much (docs/photos.md)."""
FEW_HELD_OUT = 200
"""Held-out photos with which one epoch cannot be told from another: half a point and more is a single photo."""
_BATCH = 32  # on the CPU
_LOOKING = 0.7  # of the time for features and the choice of a backbone, at most
_VALIDATING = 0.25  # of the time of training, at most
_BESIDE = 1.1  # a step with its optimizer, averages and checkpoints, which are not timed, against one without
_ENDING = 5.0  # seconds for the report and the choice of a model, besides the evaluation
_SIMILAR = 0.9  # cosine of the features of two photos that may be the same
_TOKENS = {"token_labeling": {"beta": 0.5, "class_target": "truth"}}
_MACHINE = ("out", "device", "threads", "workers", "resume", "tensorboard", "wandb", "mlflow", "keep", "log_interval")


@dataclass
class Story:
    """What was decided and measured so far, in auto.json.

    Attributes:
        images: changes with the names and labels of the photos.
        lines: every decision with its reason.
        backbone, img_size, squash: the chosen candidate.
        epochs: of fine-tuning; None until it is decided.
        result: what was kept, and its numbers; empty until the end.
    """

    images: str
    lines: list[str] = field(default_factory=list)
    backbone: str = ""
    img_size: int = 0
    squash: bool = False
    epochs: int | None = None
    result: dict[str, Any] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """A line for the log and for the head of the recipe."""
        logger.info(text)
        self.lines.append(text)


@dataclass(frozen=True)
class Photos:
    """The photos of a run.

    Attributes:
        train: that the linear head is fitted on. val: that judge it; None: cross-validation does.
    """

    train: DataSet
    val: DataSet | None


def train_photos(
    options: TrainOptions, asked: Set[str] = frozenset(), auto: AutoOptions | None = None, trust_code: bool = False
) -> Run:
    """The best classifier that this machine can make of these photos in the given time.

    Args:
        options: those that were asked for; the rest is decided.
        asked: names of the options that were given.
        auto: the budget.
        trust_code: whether a recipe.yaml that was edited may name objectives by import paths.
    """
    auto, started = auto or AutoOptions(), time.monotonic()
    photos = _open(options)
    images = keys_hash(photos.train) + (keys_hash(photos.val) if photos.val is not None else "")
    output, previous = _folder(options, images)
    folder = RunFolder(output)
    for name in ("features", "fine-tuned", "linear", "maps"):
        refuse_link(output / name)
    with folder.open():
        story = _read(output) or Story(images)
        if story.result:
            logger.info(f"{output} is finished. {story.result['text']}")
            return read_run(output)
        if story.epochs is None:
            _decide(options, asked, auto, photos, output, previous, story, started)
            _write(output, story)
        if story.epochs:
            train_with(_fine_tuning(output, options, trust_code))
        story.result = _keep(output, options, story)
        _write(output, story)
        folder.log(story.result["text"])
        with folder.surviving("report.html"):
            read_run(output).report(output / "report.html", data=network_address(options.data))
    return read_run(output)


# -- looking -----------------------------------------------------------------------------------------------------------


def _open(options: TrainOptions) -> Photos:
    if not options.data:
        raise EverytokenError("data is empty: name the images to train on (everytoken train DATA)")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise EverytokenError(
            "training without a recipe runs in one process. Start it without torchrun; its recipe.yaml can then be "
            "trained with many (--recipe)"
        )
    if has_validation(options):
        train, val, _ = open_splits(options)
    else:
        train, val = open_undivided(options), None
    if train.num_classes < 2 and not train.multi_label:
        raise EverytokenError(f"{options.data} has one class only: give every class a folder of its own, at least two")
    if options.maps not in ("", "none") and train.multi_label:
        raise EverytokenError(
            f"maps label tokens with one class per photo, and photos of {options.data} have several labels: leave "
            "--maps out"
        )
    return Photos(train, val)


def _folder(options: TrainOptions, images: str) -> tuple[Path, Path | None]:
    """The run's folder, and that of the last run on fewer photos."""
    first = Path(options.run.out or Path("runs") / (Path(dataset_title(options.data)).stem or "photos"))
    folder, previous, number = first, None, 1
    while (story := _read(folder)) is not None:
        if story.images == images:
            return folder, previous
        previous, number = folder, number + 1
        folder = first.with_name(f"{first.name}-{number}")
    if read_run(folder).config:
        raise EverytokenError(f"{folder} holds a run with a recipe of its own; choose another output.")
    return folder, previous


def _read(folder: Path) -> Story | None:
    path = folder / STATE
    return schema.read_json(path, Story) if path.is_file() else None


def _write(folder: Path, story: Story) -> None:
    RunFolder(folder).write(STATE, plain_json(vars(story)))


# -- deciding ----------------------------------------------------------------------------------------------------------


def _decide(
    options: TrainOptions,
    asked: Set[str],
    auto: AutoOptions,
    photos: Photos,
    output: Path,
    previous: Path | None,
    story: Story,
    started: float,
) -> None:
    """Choose a backbone, write linear/, plan the fine-tuning."""
    seconds, device = 60 * (auto.minutes or MINUTES), torch.device(options.run.device or best_device())
    counts = photos.train.class_counts()
    each = f"{counts.min():,}" if counts.min() == counts.max() else f"{counts.min():,} to {counts.max():,}"
    judged = f"{FOLDS}-fold cross-validation" if photos.val is None else f"{len(photos.val):,} validation photos"
    story.say(
        f"Photos: {len(photos.train):,} of {photos.train.num_classes} classes, {each} of each"
        f"{' (several labels per photo)' if photos.train.multi_label else ''}{_usual_size(photos.train)}; "
        f"judged by {judged}."
    )
    memory, disk = (f"{size / 2**30:.0f} GB" for size in (_free_memory(device), free_disk(output)))
    story.say(f"Machine: {device.type}, {cores()} cores, {memory} of free memory, {disk} of free disk.")
    choice, cache = _choose(options, photos, output, previous, story, seconds, device)
    choice, groups = _without_copies(choice, photos.train, options.run.seed)
    strength = options.model.logit_adjustment if "logit_adjustment" in asked else _adjustment(photos.train)
    if strength:
        story.say(
            f"Imbalance: the largest class has {counts.max() / max(1, counts.min()):.1f} times as many photos as the "
            f"smallest. Logits are adjusted by {strength:g} of the class priors, so that rare classes are found more "
            "often."
        )
    answers = _save_linear(options, photos, choice, cache, strength, output / "linear")
    story.say(
        f"First model: a linear head on {choice.backbone.name}, {_words(answers, photos.val is None)}, after "
        f"{time.monotonic() - started:.0f} s: {output / 'linear'}"
    )
    chosen = _candidate(choice.backbone)
    story.backbone, story.img_size, story.squash = chosen.name, chosen.img_size, chosen.squash
    if auto.linear:
        story.say("No fine-tuning, as asked (--linear).")
        story.epochs = 0
        return
    _plan(options, asked, photos, choice, cache, groups, output, story, seconds - (time.monotonic() - started), device)


def _choose(
    options: TrainOptions,
    photos: Photos,
    output: Path,
    previous: Path | None,
    story: Story,
    seconds: float,
    device: torch.device,
) -> tuple[Choice, Path]:
    """The backbone with its features and head, and where features are kept."""
    weights = [options.model.weights] if options.model.weights else []
    offered = candidates(weights, options.model.img_size)
    cache = output / "features"
    if previous is not None and (before := _read(previous)) is not None and before.backbone:
        offered = [Candidate(before.backbone, before.img_size, before.squash)]
        cache = _cache_of(previous)
        RunFolder(output).write("features.txt", str(cache.resolve()))
        story.say(f"Continuing {previous}: its backbone and its features. Only new photos are computed.")
    choice = choose_backbone(
        photos.train,
        offered,
        cache,
        seconds=seconds * _LOOKING,
        seed=options.run.seed,
        device=device,
        workers=options.dataset.workers,
    )
    if len(choice.trials) > 1:
        tried = ", ".join(f"{trial.candidate} {trial.accuracy:.1%}" for trial in choice.trials)
        reason = f"the best in cross-validation of linear heads on {choice.trials[0].images:,} photos ({tried})"
    elif len(offered) > 1:
        reason = "the only candidate that fits the time budget"
    elif previous or weights:
        reason = "as before" if previous else "as asked"
    else:
        reason = f"all that is on this machine ({', '.join(available_weights())})"
    story.say(f"Backbone: {_candidate(choice.backbone)}: {reason}.")
    if choice.skipped:
        story.say(f"Not tried, for lack of time: {', '.join(choice.skipped)}.")
    return choice, cache


def _candidate(backbone: FrozenBackbone) -> Candidate:
    info = backbone.info
    return Candidate(backbone.name, info.img_size[0], info.crop_mode == "squash")


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


def _without_copies(choice: Choice, data: DataSet, seed: int) -> tuple[Choice, list[str]]:
    """The choice with a head whose folds keep copies of a photo together, and the photos' groups by a name each.

    Photos with the same bytes have the same digest. Of the others, those with similar features are compared closely.
    """
    features = choice.features
    groups = list(features.digests)
    for one, other in _similar(features, features):
        if one < other and groups[one] != groups[other] and alike(read_facts(data, one), read_facts(data, other)):
            groups = [groups[one] if name == groups[other] else name for name in groups]
    if groups == features.digests:
        return choice, groups
    return replace(choice, fit=fit_features(features, data, seed=seed, groups=groups)), groups


def _similar(first: Features, second: Features) -> Iterator[tuple[int, int]]:
    """Pairs of readable photos whose features are much alike: of each photo in `second`, the three nearest."""
    centre = first.values[first.readable].mean(0)
    units = []
    for values in (first.values - centre, second.values - centre):
        units.append(values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-9))
    for begin in range(0, len(units[1]), 256):
        similar = units[0] @ units[1][begin : begin + 256].T
        for column in range(similar.shape[1]):
            for row in np.argsort(-similar[:, column])[:4].tolist():  # one of them may be itself
                if similar[row, column] > _SIMILAR and first.digests[row] and second.digests[begin + column]:
                    yield row, begin + column


def _copies(train: DataSet, features: Features, groups: list[str], val: DataSet, held: Features) -> set[str]:
    """The groups of training photos that validation photos belong to."""
    found = set(held.digests) - {""}
    for one, other in _similar(features, held):
        if groups[one] not in found and alike(read_facts(train, one), read_facts(val, other)):
            found.add(groups[one])
    return found


def _adjustment(train: DataSet) -> float:
    """How much of the log of the class priors is taken from their logits; several labels do not compete."""
    if train.multi_label:
        return 0.0
    counts = train.class_counts()
    return ADJUSTMENT if counts.max() > IMBALANCE * max(1, counts.min()) else 0.0


# -- the linear head ---------------------------------------------------------------------------------------------------


def _save_linear(
    options: TrainOptions, photos: Photos, choice: Choice, cache: Path, strength: float, folder: Path
) -> AnyPredictions:
    """The linear head as a run folder; its answers for photos that it was not fitted on.

    Args:
        strength: how much of the log of the class priors is taken from its logits.
    """
    train, fit = photos.train, choice.fit
    offset = _offset(train, strength)
    head = LinearHead(fit.head.weight, fit.head.bias - offset)
    good = choice.features.readable
    unseen = torch.from_numpy(fit.out_of_fold) - offset
    out_of_fold = predictions_of(torch.from_numpy(good), torch.from_numpy(fit.labels), unseen)
    data, answers, logits = train, out_of_fold, unseen
    skipped = {train.key(i): reason for i, reason in choice.features.failures.items()}
    if photos.val is not None:
        data = photos.val
        features = compute_features(data, choice.backbone, cache, workers=options.dataset.workers)
        good = features.readable
        skipped |= {data.key(i): reason for i, reason in features.failures.items()}
        logits = head(torch.from_numpy(features.values[good]))
        answers = predictions_of(torch.from_numpy(good), torch.from_numpy(data.labels[good]), logits)
    if folder.exists():  # of a start that was killed
        shutil.rmtree(folder)
    model, info = choice.backbone.with_head(head, train.class_names)
    info = replace(info, multi_label=train.multi_label)
    writer = RunFolder(folder)
    config: dict[str, Any] = {
        "method": METHOD,
        "data": options.data,
        **({"val_split": options.dataset.val_split} if options.dataset.val_split else {}),
        **{
            name: value for name, value in vars(options.dataset).items() if name in ("exclude", "corrections") and value
        },
        "validation": CROSS_VALIDATED if photos.val is None else "held-out images",
        "model": info.architecture,
        "weights": choice.backbone.name,
        "img_size": info.img_size[0],
        "penalty": fit.strength,
        "logit_adjustment": strength,
        "seed": options.run.seed,
    }
    writer.write_config(config, timm_config(model, info))
    summary = answers.summary()
    score = next(iter(summary.values()))
    numbers = {"score": score, **{f"val_{k}": round(v, 4) for k, v in summary.items()}}
    row = {"kind": "epoch", "step": 0, "epoch": 0, "seconds": round(choice.features.seconds, 2), **numbers}
    writer.record(row)
    writer.write("classes.json", plain_json(answers.per_class(train.class_names)))
    out_of_fold.save(folder / "out-of-fold.npz", note=keys_hash(train))
    weights = folder / "best.safetensors"
    write_weights(weights, model.state_dict(), info.to_metadata())
    answers.save(folder / CACHE, stamp(weights, data), skipped)
    truth = data.labels[good]
    calibration = (
        calibrate_several(logits.numpy(), truth > 0) if train.multi_label else calibrate(logits.numpy(), truth)
    )
    keep_calibration(read_run(folder), weights, calibration)
    best = {"score": score, "epoch": 0, "step": 0}
    writer.write("summary.json", plain_json({"best": best, "last": row, "epochs": 0, "updates": 0, "seconds": 0.0}))
    return answers


def _offset(train: DataSet, strength: float) -> torch.Tensor:
    """[K] what an adjusted head takes from its logits."""
    if not strength:
        return torch.zeros(train.num_classes)
    return strength * torch.from_numpy(log_shares(train.labels, train.num_classes)).float()


# -- fine-tuning -------------------------------------------------------------------------------------------------------


def _plan(
    options: TrainOptions,
    asked: Set[str],
    photos: Photos,
    choice: Choice,
    cache: Path,
    groups: list[str],
    output: Path,
    story: Story,
    seconds: float,
    device: torch.device,
) -> None:
    """Write recipe.yaml and what fine-tuning starts from and is compared with; `story.epochs`."""
    started = time.monotonic()
    fraction = 0.0 if photos.val is not None else 0.2 if len(photos.train) < 10 * FEW_HELD_OUT else 0.1
    divided = apply(options, {"val_split": fraction}, "split") if fraction else options
    train, val, _ = open_splits(divided)
    tuned = choice if "epochs" in asked else _tunable(choice, len(train), seconds, cache, photos.train, options, story)
    if tuned is None:
        story.epochs = 0
        return
    # a linear head that has seen what the fine-tuned model will have seen, and nothing else
    row = {key: i for i, key in enumerate(photos.train.keys())}
    if fraction:
        held = _rows(choice.features, np.array([row[val.key(i)] for i in range(len(val))]))
        copies = {groups[row[val.key(i)]] for i in range(len(val))} - {""}
    else:
        held = compute_features(val, choice.backbone, cache, workers=options.dataset.workers)
        copies = _copies(photos.train, choice.features, groups, val, held)
    inside = np.array([row[train.key(i)] for i in range(len(train))])
    excluded = {
        train.key(i): choice.features.failures.get(at, "a copy of a held-out photo")
        for i, at in enumerate(inside.tolist())
        if at in choice.features.failures or groups[at] in copies
    }
    keep = np.array([i for i in range(len(train)) if train.key(i) not in excluded])
    train, inside = train.subset(keep), inside[keep]
    strength = options.model.logit_adjustment if "logit_adjustment" in asked else _adjustment(photos.train)
    offset = _offset(train, strength)
    rival = _part(choice, train, inside, options.run.seed)
    good = held.readable
    logits = rival.fit.head(torch.from_numpy(held.values[good])) - offset
    answers = predictions_of(torch.from_numpy(good), torch.from_numpy(val.labels[good]), logits)
    answers.save(output / "linear" / "on-held-out.npz", note=keys_hash(val))
    start = rival if tuned is choice else _part(tuned, train, inside, options.run.seed)
    head = LinearHead(start.fit.head.weight, start.fit.head.bias - offset)
    model, info = start.backbone.with_head(head, train.class_names)
    write_weights(
        output / "start.safetensors", model.state_dict(), replace(info, multi_label=train.multi_label).to_metadata()
    )
    values = _settings(options, start, len(train), len(val), output, device, story)
    if fraction:
        values["val_split"] = fraction
    if strength:
        values["logit_adjustment"] = strength
    if excluded:
        lines = "".join(f"{key}\t{reason}\n" for key, reason in sorted(excluded.items()))
        RunFolder(output).write("exclude.txt", lines)
        values["exclude"] = str(output / "exclude.txt")
        story.say(f"Left out of fine-tuning: {len(excluded):,} unreadable photos or copies ({output / 'exclude.txt'}).")
    if held.failures:
        values["on_bad_image"] = "skip"
    if options.maps not in ("", "none"):
        own = options.maps == "auto"
        values["maps"] = _annotate(options, train, start, output, device) if own else options.maps
        values["objectives"] = _TOKENS
        agreement = _agreement(train, start, output) if own else ""
        story.say(f"Tokens: every cell learns what the linear head says about it, out of fold (beta 0.5){agreement}.")
    values |= {
        k: v for k, v in flat(options).items() if k in asked and k not in (*_MACHINE, "maps", "weights", "exclude")
    }
    if "epochs" not in asked:
        left = seconds - (time.monotonic() - started)
        chosen = apply(options, {"maps": "", **values}, "decisions")
        values |= _epochs(chosen, start, len(val), output, left, story)
    story.epochs = int(values["epochs"])
    if story.epochs:
        _write_recipe(options, asked, values, len(train), len(val), output, story)


def _part(choice: Choice, train: DataSet, inside: np.ndarray, seed: int) -> Choice:
    """The same backbone with a head that was fitted on a part of the photos."""
    features = _rows(choice.features, inside)
    return replace(choice, features=features, fit=fit_features(features, train, seed=seed))


def _rows(features: Features, keep: np.ndarray) -> Features:
    failures = {new: features.failures[old] for new, old in enumerate(keep.tolist()) if old in features.failures}
    return replace(
        features, values=features.values[keep], digests=[features.digests[i] for i in keep], failures=failures
    )


def _tunable(
    choice: Choice, images: int, seconds: float, cache: Path, data: DataSet, options: TrainOptions, story: Story
) -> Choice | None:
    """The backbone to fine-tune: the best one for which there is time, if it can catch up with the best linear head."""
    name = choice.backbone.name
    best = next(t for t in choice.trials if t.candidate == _candidate(choice.backbone))
    if len(choice.trials) == 1:
        return choice  # how long it takes is timed anyway

    def needed(trial: Trial) -> float:
        return trial.training_seconds * max(FEWEST_EPOCHS * images, FEWEST_UPDATES * _BATCH) / (0.5 * cores() + 0.5)

    able = [t for t in choice.trials if needed(t) < seconds and t.accuracy > best.accuracy - LEAD - t.standard_error]
    if not able:
        least = min(choice.trials, key=needed)
        story.say(
            f"Skipping fine-tuning: {FEWEST_UPDATES} updates of {name} need about {needed(best):.0f} s, and "
            f"{seconds:.0f} s of the budget remain"
            + (
                f"; {least.candidate} would fit, but its linear head is {100 * (best.accuracy - least.accuracy):.1f} "
                "points behind"
                if needed(least) < seconds
                else ""
            )
            + ". More minutes would allow it (--minutes)."
        )
        return None
    chosen = best if best in able else min(able, key=lambda trial: trial.loss)
    if chosen is best:
        return choice
    story.say(
        f"Fine-tuning {chosen.candidate}, since {name} would take {needed(best):.0f} s and {seconds:.0f} s remain."
    )
    backbone = FrozenBackbone(
        chosen.candidate.name, chosen.candidate.img_size, choice.backbone.device, chosen.candidate.squash
    )
    features = compute_features(data, backbone, cache, digests=choice.features.digests, workers=options.dataset.workers)
    return replace(choice, backbone=backbone, features=features)


def _settings(
    options: TrainOptions, start: Choice, train: int, val: int, output: Path, device: torch.device, story: Story
) -> dict[str, Any]:
    """How to fine-tune: the options but for the budget and the tokens."""
    info = start.backbone.info
    convolutional = start.backbone.model.family.layout == "nchw"
    gpu = device.type == "cuda"
    wanted = min(64 if gpu else _BATCH, max(1, train))
    batch = _batch_in_memory(start.backbone, wanted, device)
    rate = "5e-4 (3e-4 and 1e-3 did equally well, 1e-4 worse)" if convolutional else "1e-4 falling by 0.8 per layer"
    less = f" in {wanted // batch} accumulated parts, for lack of memory" if wanted > batch else ""
    last = " The last epoch counts: so few cannot tell epochs apart." if val < FEW_HELD_OUT else ""
    story.say(
        f"Fine-tuning from a linear head: {train:,} photos, batch {wanted}{less}, AdamW at {rate}, batch norms frozen, "
        f"averaged weights, mild crops; judged on {val:,} held-out photos.{last}"
    )
    return {
        "model": info.architecture,
        "img_size": info.img_size[0],
        "weights": str(output / "start.safetensors"),
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
        "val_first": val >= FEW_HELD_OUT,
        "amp": gpu,
        "channels_last": convolutional,
        "seed": options.run.seed,
    }


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


def _annotate(options: TrainOptions, train: DataSet, start: Choice, output: Path, device: torch.device) -> str:
    """Score maps of the training photos by the heads of their folds; the store's folder."""
    place = output / "maps"
    settings = AnnotateOptions(workers=options.dataset.workers, val_split=options.dataset.val_split, device=str(device))
    fitted = place / FOLDER
    if not (fitted / "linear.json").is_file():
        save_heads((start, np.arange(len(train))), train, fitted, settings)
    run_job(train, place, "fit", settings)
    return str(place)


def _agreement(train: DataSet, start: Choice, output: Path) -> str:
    """How often the maps that were made name the class of the folder; as often as the head, or something is wrong."""
    agree = summarise(output / "maps", train, range(train.num_classes)).images_agree or 0.0
    if agree < start.fit.accuracy / 2:
        raise EverytokenError(
            f"the maps in {output / 'maps'} name the class of {agree:.0%} of the photos only, and the head that they "
            f"come from {start.fit.accuracy:.0%}: they are not used. Train without maps, and please report this"
        )
    return f"; the maps name the folder's class for {agree:.0%} of the photos"


def _epochs(options: TrainOptions, start: Choice, val: int, output: Path, left: float, story: Story) -> dict[str, int]:
    """How many epochs fit into the time that is left, from a few timed steps, 0 if too few; how often to validate."""
    seconds, loading, batches = _time_steps(options, output)
    updates = max(1, batches // options.optim.grad_accum_steps)
    if torch.device(options.run.device or best_device()).type == "cpu":  # which loads and trains with the same cores
        per_batch = _BESIDE * (seconds + loading / cores())
    else:
        per_batch = max(_BESIDE * seconds, loading / max(1, options.dataset.workers))
    validating = 2 * val * seconds / options.dataset.batch_size / 3
    weights = sum(p.numel() * p.element_size() for p in start.backbone.model.parameters())
    needed, free = 4 * (options.run.keep + 1) * weights, free_disk(output)  # weights, average, two moments
    if free < needed:
        story.say(
            f"Skipping fine-tuning: its checkpoints need {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free."
        )
        return {"epochs": 0}
    interval = max(1, math.ceil(validating / (batches * per_batch) / _VALIDATING))
    epoch = batches * per_batch + (0.0 if val < FEW_HELD_OUT else validating / interval)
    left -= _ENDING + 2 * validating
    epochs = min(max(MOST_EPOCHS, math.ceil(USUAL_UPDATES / updates)), int(left / epoch))
    least = max(FEWEST_EPOCHS, math.ceil(FEWEST_UPDATES / updates))
    if epochs < least:
        story.say(
            f"Skipping fine-tuning: the {least} epochs that it takes at least need about {least * epoch:.0f} s, and "
            f"{max(0, left):.0f} s of the budget remain. More minutes would allow it (--minutes)."
        )
        return {"epochs": 0}
    early = "" if val < FEW_HELD_OUT else "; it stops after a third of them without progress"
    story.say(f"Epochs: {epochs}, about {epoch:.0f} s each{early}.")
    return {"epochs": epochs, "val_interval": interval}


def _time_steps(options: TrainOptions, output: Path) -> tuple[float, float, int]:
    """(seconds of an update, seconds of loading its images in one process, updates per epoch)."""
    quick = replace(options, dataset=replace(options.dataset, workers=0))
    world = World(0, 1, torch.device(options.run.device or best_device()))
    task = Classification(build(options, world), quick, world, RunFolder(output / ".timing", writable=False))
    return *step_seconds(task, quick), task.batches_per_epoch


def _write_recipe(
    options: TrainOptions, asked: Set[str], values: dict[str, Any], train: int, val: int, output: Path, story: Story
) -> None:
    """recipe.yaml: the settings of fine-tuning under all decisions."""
    epochs = int(values["epochs"])
    updates = epochs * max(1, train // (values["batch_size"] * values.get("grad_accum_steps", 1)))
    schedule = {
        "warmup_epochs": round(epochs / 10, 2),
        "model_ema_decay": round(1 - 1 / max(20, updates / 5), 4),
        "patience": max(3, epochs // 3, 2 * values.get("val_interval", 1)),
    }
    if val < FEW_HELD_OUT:
        schedule |= {"val_interval": epochs, "patience": 0}
    values = {"data": options.data, **values, **{name: v for name, v in schedule.items() if name not in asked}}
    head = "".join(f"# {line}\n" for line in story.lines)
    again = (
        f"# Run it again, edited or not: everytoken train {options.data} --recipe {output / 'recipe.yaml'} --out NEW\n"
    )
    text = head + again + "\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    RunFolder(output).write("recipe.yaml", text)


def _fine_tuning(output: Path, options: TrainOptions, trust_code: bool = False) -> TrainOptions:
    """The recipe of the folder, on this machine."""
    path = output / "recipe.yaml"
    decided = replace(apply(TrainOptions(), read_recipe(str(path), trust_code), str(path)), recipe=str(path))
    machine = {name: value for name, value in flat(options).items() if name in _MACHINE}
    return apply(decided, {**machine, "out": str(output / "fine-tuned")}, "machine")


# -- keeping -----------------------------------------------------------------------------------------------------------


def _keep(output: Path, options: TrainOptions, story: Story) -> dict[str, Any]:
    """Make the better model the result of the run; what is kept, its number and what it is a number of."""
    linear = read_run(output / "linear")
    crossed = linear.config["validation"] == CROSS_VALIDATED
    first = _answers(output / "linear" / CACHE)
    result: dict[str, Any] = {"kept": "linear", "linear": first.accuracy.value, "judged on": len(first)}
    text = "Kept: the linear head"
    source, answers = output / "linear", first
    if story.epochs:
        decided = _fine_tuning(output, options, True)  # its objectives are not built: it is only evaluated
        _, val, _ = open_splits(decided)
        last = evaluated(output / "fine-tuned", val, decided)
        rival = _answers(output / "linear" / "on-held-out.npz")
        gain = compared(rival, last)
        result |= {"fine-tuned": last.accuracy.value, "gain": [gain.value, gain.low, gain.high]}
        points = (
            f"{gain.value:+.1f} points (95 % interval {gain.low:+.1f} to {gain.high:+.1f}) to a linear head that was "
            f"fitted on the same photos, on {len(last):,} held-out photos"
        )
        if gain.low is not None and gain.low > 0:
            source, answers, crossed = output / "fine-tuned", last, False
            result |= {"kept": "fine-tuned", "judged on": len(last)}
            text = f"Kept: the fine-tuned model, which is better: {points}"
        else:
            worse = gain.high is not None and gain.high < 0
            text += f". Fine-tuning {'made it worse' if worse else 'made no clear difference'}: {points}"
    _copy(source, output)
    estimate = answers.accuracy
    metric = "mAP" if isinstance(answers, MultiLabelPredictions) else "top1"
    how = f"; the heads of cross-validation saw {100 - 100 // FOLDS} % of the photos, this one all" if crossed else ""
    result |= {metric: estimate.value, "interval": [estimate.low, estimate.high], "cross-validated": crossed}
    return {**result, "text": f"{text}. Expected on new photos: {_words(answers, crossed)}{how}."}


def compared(first: AnyPredictions, last: AnyPredictions) -> stats.Estimate:
    """Gain of the second model on the first in points, over the photos that both have answers for."""
    _, one, other = np.intersect1d(first.index, last.index, return_indices=True)
    a, b = (_only(answers, rows) for answers, rows in ((first, one), (last, other)))
    if isinstance(a, MultiLabelPredictions) and isinstance(b, MultiLabelPredictions):
        return b.difference(a)
    return stats.paired_difference(a.correct, b.correct)


def _only(answers: AnyPredictions, rows: np.ndarray) -> AnyPredictions:
    return type(answers)(**{name: value[rows] for name, value in vars(answers).items()})


def _answers(path: Path) -> AnyPredictions:
    """What was saved by `_save_linear` or `_plan`, whichever kind it is."""
    with np.load(path, allow_pickle=False) as arrays:
        kind = MultiLabelPredictions if "logits" in arrays else Predictions
        saved = kind.saved(path, str(arrays["note"]))
    assert saved is not None
    return saved[0]


def _words(answers: AnyPredictions, crossed: bool) -> str:
    """The number that counts, its interval, and on what."""
    estimate = answers.accuracy
    what = "mAP" if isinstance(answers, MultiLabelPredictions) else "accuracy"
    interval = "" if estimate.low is None else f" (95 % interval {estimate.low:.1f} to {estimate.high:.1f})"
    where = f"in {FOLDS}-fold cross-validation of {len(answers):,}" if crossed else f"on {len(answers):,} held-out"
    return f"{what} {estimate.value:.1f} %{interval} {where} photos"


def _copy(source: Path, output: Path) -> None:
    """Make the run in `source` the run of the folder."""
    names = [
        *("best.safetensors", "best.token_head.safetensors", "config.yaml", "config.json", "environment.json"),
        *("metrics.jsonl", "metrics.csv", "classes.json", "batch.jpg", CACHE, "calibration.json", "summary.json"),
    ]
    for name in names:  # the summary last: it says that the run is finished
        if (source / name).is_file():
            write_atomically(output / name, (source / name).read_bytes())


def evaluated(source: Path, data: DataSet, options: TrainOptions) -> AnyPredictions:
    """Answers of the model of a run folder for all readable images."""
    from everytoken_lab.evaluation import evaluate  # an application; it is used as any user would

    return evaluate(
        source,
        data,
        batch_size=options.dataset.val_batch_size or options.dataset.batch_size,
        workers=options.dataset.workers,
        device=options.run.device,
        on_bad_image="skip",
    ).predictions
