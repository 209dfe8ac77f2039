"""`train` without a recipe: look at the photos, choose a backbone, fit a linear head, fine-tune, keep the better model.

    linear/        the first model, a run folder of its own: logistic regression on the best frozen backbone
    fine-tuned/    the second one, if there is time for it and it is better
    fold-1/, -2/   the same training on one half of the photos each, judged on the other half
    features/      of the frozen backbones, by the content of the images; later runs on more photos use them too
    maps/          score maps of the photos to fine-tune on, if tokens are trained
    exclude.txt    photos that fine-tuning leaves out, and why
    recipe.yaml    how it is fine-tuned, with all decisions and their reasons; edit it and run it again with `recipe`
    auto.json      what was decided and measured so far: a run that was interrupted goes on from here
    (the rest)     the run of the model that was kept

**What the numbers are estimates of.** Where the data has validation photos, they judge everything. Where it has none,
both models are judged by cross-validation and then trained on all photos. The linear head has five folds: its estimate
is that of heads which saw four fifths of the photos. Fine-tuning has two, and is compared with linear heads that were
fitted on the same halves. If the 95 % interval of the difference in log loss lies below zero, it is repeated on all
photos and kept: its estimate is that of models which saw half of them. Otherwise the linear head is kept: the simpler
model wins where the evidence does not decide.

**What is fine-tuned.** Convolutional networks from their middle on: the first half of the stages has a few percent of
the weights and most of the cost. What is judged and kept is a mean with the initial weights, which keeps more of what
the backbone knew (Wortsman et al., "Robust fine-tuning of zero-shot models", 2022).

The budget is turned into updates once, before fine-tuning, and the recipe has them: a run that is continued does not
decide anew. If photos or classes were added since, the next run gets a folder of its own (`photos-2`) and goes on with
the backbone and the features of the last one.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from everytoken.errors import EverytokenError
from everytoken.files import plain_json, refuse_link, write_atomically
from everytoken.models.weights import read_weights
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
from everytoken_lab.annotators.linear import FOLDS, LinearHead, fit_head
from everytoken_lab.annotators.options import AnnotateOptions
from everytoken_lab.calibration import Calibration, calibrate, fit_temperature
from everytoken_lab.data.augment import eval_view
from everytoken_lab.data.datasets import DataSet, dataset_title, keys_hash, network_address
from everytoken_lab.data.duplicates import alike, read_facts
from everytoken_lab.engine.accuracy import AnyPredictions, MultiLabelPredictions, Predictions, predictions_of
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.engine.distributed import World, best_device
from everytoken_lab.engine.dryrun import step_seconds
from everytoken_lab.engine.options import AutoOptions, TrainOptions, how_to_run
from everytoken_lab.engine.recipe import apply, flat, read_recipe
from everytoken_lab.engine.run_folder import CROSS_VALIDATED, Run, RunFolder, read_run
from everytoken_lab.evaluation.calibrated import keep_calibration
from everytoken_lab.evaluation.run import EvalOptions, Inference, Voter
from everytoken_lab.machine import cores, free_disk, memory
from everytoken_lab.models.open import describe, open_model, timm_config
from everytoken_lab.reports.predictions import CACHE, stamp
from everytoken_lab.training.build import build, freeze_first, layer_groups, log_priors
from everytoken_lab.training.classify import Classification, train_with
from everytoken_lab.training.inputs import Inputs, complete, has_validation

logger = logging.getLogger(__name__)
STATE = "auto.json"
METHOD = "logistic regression on frozen features"
MINUTES = 20.0
"""The default budget."""
MOST_EPOCHS, USUAL_UPDATES, FEWEST_UPDATES = 30, 100, 40
"""Of fine-tuning: at most, as a rule, at least."""
LEAD = 0.04
"""A backbone whose linear head is further behind the best one (besides chance) is not fine-tuned."""
IMBALANCE, ADJUSTMENT = 1.5, 0.5
"""Largest class / smallest class from which on large classes are preferred less, and by how much (docs/photos.md)."""
MIX = 0.75
"""How far to go from the initial weights to the fine-tuned ones: 0.5 was better on Caltech-101, 1 on Grocery Store."""
_BATCH = 32  # on the CPU
_LOOKING = 0.25  # of the budget for features and the choice of a backbone, at most
_READING = 1.2  # of the time of the network alone, to estimate that of training with reading photos
_OVERHEAD = 1.1  # of a step, for optimizer, averages and checkpoints, which are not timed
_ENDING = 5.0  # seconds for the report and the choice of a model, besides the evaluation
_SIMILAR = 0.9  # cosine of the features of two photos that may be the same
_TOKENS = {"token_labeling": {"beta": 0.5, "class_target": "truth"}}


@dataclass
class Story:
    """What was decided and measured so far, in auto.json.

    Attributes:
        images: changes with the names and labels of the photos.
        lines: every decision with its reason.
        backbone, img_size, squash: the chosen candidate.
        features: where its features are, if that is the folder of an earlier run.
        updates: of fine-tuning; None until it is decided.
        result: what was kept, and its numbers; empty until the end.
    """

    images: str
    lines: list[str] = field(default_factory=list)
    backbone: str = ""
    img_size: int = 0
    squash: bool = False
    features: str = ""
    updates: int | None = None
    result: dict[str, Any] = field(default_factory=dict)

    def say(self, text: str) -> None:
        """A line for the log and for the head of the recipe."""
        logger.info(text)
        self.lines.append(text)


@dataclass
class Job:
    """One run.

    Attributes:
        asked: names of the options that the user gave.
        train: photos that the linear head is fitted on. val: those that judge it; None: cross-validation does.
        seconds: the budget, from `started` on.
    """

    options: TrainOptions
    asked: Set[str]
    inputs: Inputs
    train: DataSet
    val: DataSet | None
    output: Path
    story: Story
    seconds: float
    started: float

    @property
    def device(self) -> torch.device:
        return torch.device(self.options.run.device or best_device())

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.seconds - (time.monotonic() - self.started)

    @property
    def adjustment(self) -> float:
        """How much of the log of the class priors is taken from their logits; multi-label classes do not compete."""
        if "logit_adjustment" in self.asked:
            return self.options.model.logit_adjustment
        counts = self.train.class_counts()
        unequal = counts.max() > IMBALANCE * max(1, counts.min()) and not self.train.multi_label
        return ADJUSTMENT if unequal else 0.0

    @property
    def cache(self) -> Path:
        """Where features are kept."""
        return Path(self.story.features or self.output / "features")

    def features(self, data: DataSet, backbone: FrozenBackbone, digests: list[str] | None = None) -> Features:
        """Of all photos of a set, from the cache or computed."""
        workers = self.options.dataset.workers
        return compute_features(data, backbone, self.cache, digests=digests, workers=workers)


def train_photos(
    options: TrainOptions,
    asked: Set[str] = frozenset(),
    auto: AutoOptions | None = None,
    trust_code: bool = False,
    inputs: Inputs | None = None,
) -> Run:
    """The best classifier that this machine can make of these photos in the given time.

    Args:
        options: those that were asked for; the rest is decided.
        asked: names of the options that were given.
        auto: the budget.
        trust_code: whether a recipe.yaml that was edited may name objectives by import paths.
    """
    auto, started, inputs = auto or AutoOptions(), time.monotonic(), inputs or Inputs()
    train, val = _open(options, inputs)
    images = keys_hash(train) + (keys_hash(val) if val is not None else "")
    output, previous = _folder(options, images)
    for name in ("features", "fine-tuned", "fold-1", "fold-2", "linear", "maps", "maps-1", "maps-2"):
        refuse_link(output / name)
    folder = RunFolder(output)
    with folder.open():
        story = _read(output) or Story(images)
        if story.result:
            logger.info(f"{output} is finished. {story.result['text']}")
            return read_run(output)
        job = Job(options, asked, inputs, train, val, output, story, 60 * (auto.minutes or MINUTES), started)
        if story.updates is None:
            _decide(job, previous, auto.linear)
            folder.write(STATE, plain_json(vars(story)))
        tuning, judges = None, train if val is None else val
        if story.updates:
            tuning = complete(_fine_tuning(output, options, trust_code), inputs=inputs)
            for which, part in _trainings(inputs, val is None):
                train_with(_training(tuning, output, which), part, reported=False)
        story.result = _keep(output, tuning, inputs)
        folder.write(STATE, plain_json(vars(story)))
        folder.log(story.result["text"])
        if tuning is not None and story.result["kept"] == "fine-tuned":
            judges = _judges(tuning, inputs, val is None)
        with folder.surviving("report.html"):
            read_run(output).report(output / "report.html", data=network_address(options.data), images=judges)
    return read_run(output)


# -- looking -----------------------------------------------------------------------------------------------------------


def _open(options: TrainOptions, inputs: Inputs) -> tuple[DataSet, DataSet | None]:
    if not options.data:
        raise EverytokenError("data is empty: name the images to train on (everytoken train DATA)")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise EverytokenError(
            "training without a recipe runs in one process. Start it without torchrun; its recipe.yaml can then be "
            "trained with many (--recipe)"
        )
    train, val = inputs.splits(options)[:2] if has_validation(options) else (inputs.undivided(options), None)
    if train.num_classes < 2 and not train.multi_label:
        raise EverytokenError(f"{options.data} has one class only: give every class a folder of its own, at least two")
    if options.maps not in ("", "none") and train.multi_label:
        raise EverytokenError(
            f"maps label tokens with one class per photo, and {options.data} is multi-label: leave --maps out"
        )
    return train, val


def _folder(options: TrainOptions, images: str) -> tuple[Path, Path | None]:
    """The run's folder, and that of the last run on other photos."""
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


def _decide(job: Job, previous: Path | None, linear: bool) -> None:
    """Choose a backbone, write linear/, plan the fine-tuning."""
    story, counts = job.story, job.train.class_counts()
    each = f"{counts.min():,}" if counts.min() == counts.max() else f"{counts.min():,} to {counts.max():,}"
    judged = f"{FOLDS}-fold cross-validation" if job.val is None else f"{len(job.val):,} validation photos"
    story.say(
        f"Photos: {len(job.train):,} of {job.train.num_classes} classes, {each} of each"
        f"{' (multi-label)' if job.train.multi_label else ''}{_usual_size(job.train)}; judged by {judged}."
    )
    memory, disk = (f"{size / 2**30:.0f} GB" for size in (_free_memory(job.device), free_disk(job.output)))
    story.say(f"Machine: {job.device.type}, {cores()} cores, {memory} of free memory, {disk} of free disk.")
    choice = _choose(job, previous)
    choice, groups = _without_copies(choice, job.train, job.options.run.seed)
    if job.adjustment:
        story.say(
            f"Imbalance: the largest class has {counts.max() / max(1, counts.min()):.1f} times as many photos as the "
            f"smallest. Logits are adjusted by {job.adjustment:g} of the class priors, so that rare classes are found "
            "more often."
        )
    answers = _save_linear(job, choice)
    story.say(
        f"First model: a linear head on {choice.backbone.name}, {_words(answers, FOLDS if job.val is None else 0)}, "
        f"after {time.monotonic() - job.started:.0f} s: {job.output / 'linear'}"
    )
    if linear:
        story.say("No fine-tuning, as asked (--linear).")
        story.updates = 0
    else:
        story.updates = _plan(job, choice, groups)


def _usual_size(data: DataSet, most: int = 25) -> str:
    """The sides of a middling photo, of a few."""
    areas = {}
    for i in range(0, len(data), max(1, len(data) // most)):
        with contextlib.suppress(EverytokenError, OSError):
            width, height = data.load(i).size
            areas[width * height] = f", mostly about {width} x {height} px"
    return areas[sorted(areas)[len(areas) // 2]] if areas else ""


def _free_memory(device: torch.device) -> int:
    """Of the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return memory() or 4 * 2**30


# -- choosing ----------------------------------------------------------------------------------------------------------


def _choose(job: Job, previous: Path | None) -> Choice:
    """The backbone with its features and head."""
    story, model = job.story, job.options.model
    offered = candidates([model.weights] if model.weights else [], model.img_size)
    if previous is not None and (before := _read(previous)) is not None and before.backbone:
        offered = [Candidate(before.backbone, before.img_size, before.squash)]
        story.features = str(Path(before.features or previous / "features").resolve())
        story.say(f"Continuing {previous}: its backbone and its features. Only new photos are computed.")
    choice = choose_backbone(
        job.train,
        offered,
        job.cache,
        seconds=job.seconds * _LOOKING,
        seed=job.options.run.seed,
        device=job.device,
        workers=job.options.dataset.workers,
    )
    chosen = _candidate(choice.backbone)
    story.backbone, story.img_size, story.squash = chosen.name, chosen.img_size, chosen.squash
    if len(choice.trials) > 1:
        tried = ", ".join(f"{trial.candidate} {trial.accuracy:.1%}" for trial in choice.trials)
        reason = f"the best in cross-validation of linear heads on {choice.trials[0].images:,} photos ({tried})"
    elif len(offered) > 1:
        reason = "the only candidate that fits the time budget"
    elif previous or model.weights:
        reason = "as before" if previous else "as asked"
    else:
        reason = f"all that is on this machine ({', '.join(available_weights())})"
    story.say(f"Backbone: {chosen}: {reason}.")
    if choice.skipped:
        story.say(f"Not tried, for lack of time: {', '.join(choice.skipped)}.")
    return choice


def _candidate(backbone: FrozenBackbone) -> Candidate:
    return Candidate(backbone.name, backbone.info.img_size[0], backbone.info.crop_mode == "squash")


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


# -- the linear head ---------------------------------------------------------------------------------------------------


def _save_linear(job: Job, choice: Choice) -> AnyPredictions:
    """The linear head as a run folder; its answers for photos that it was not fitted on."""
    train, fit, folder = job.train, choice.fit, job.output / "linear"
    offset = _offset(train, job.adjustment)
    head = LinearHead(fit.head.weight, fit.head.bias - offset)
    data, features, logits = train, choice.features, torch.from_numpy(fit.out_of_fold) - offset
    answers = out_of_fold = _judged(features, torch.from_numpy(fit.labels), logits)
    skipped = {train.key(i): reason for i, reason in features.failures.items()}
    if job.val is not None:
        data, features = job.val, job.features(job.val, choice.backbone)
        skipped |= {data.key(i): reason for i, reason in features.failures.items()}
        logits = head(torch.from_numpy(features.values[features.readable]))
        answers = _judged(features, torch.from_numpy(data.labels[features.readable]), logits)
    if folder.exists():  # of a start that was killed
        shutil.rmtree(folder)
    writer, weights = RunFolder(folder), folder / "best.safetensors"
    model, info = choice.backbone.with_head(head, train.class_names)
    info = replace(info, multi_label=train.multi_label)
    chosen = {name: getattr(job.options.dataset, name) for name in ("val_split", "exclude", "corrections")}
    config: dict[str, Any] = {
        "method": METHOD,
        "data": job.options.data,
        **{name: value for name, value in chosen.items() if value},
        "validation": CROSS_VALIDATED if job.val is None else "held-out images",
        "model": info.architecture,
        "weights": choice.backbone.name,
        "img_size": info.img_size[0],
        "penalty": fit.strength,
        "logit_adjustment": job.adjustment,
        "seed": job.options.run.seed,
    }
    writer.write_config(config, timm_config(model, info))
    out_of_fold.save(folder / "out-of-fold.npz", note=keys_hash(train))
    write_weights(weights, model.state_dict(), info.to_metadata())
    answers.save(folder / CACHE, stamp(weights, data), skipped)
    keep_calibration(read_run(folder), weights, calibrate(logits.numpy(), data.labels[features.readable]))
    nothing = {"epochs": 0, "updates": 0, "seconds": round(choice.features.seconds, 2)}
    _record(writer, answers, train.class_names, nothing)
    return answers


def _record(writer: RunFolder, answers: AnyPredictions, names: Sequence[str], summary: Mapping[str, Any]) -> None:
    """Write the numbers of a model; the summary, which says that the run is finished, comes last."""
    found = answers.summary()
    at = {"score": next(iter(found.values())), "epoch": summary["epochs"], "step": summary["updates"]}
    numbers = {f"val_{name}": round(value, 4) for name, value in found.items()}
    row = {"kind": "epoch", "seconds": summary["seconds"], **at, **numbers}
    writer.record(row)
    writer.write("classes.json", plain_json(answers.per_class(names)))
    writer.write("summary.json", plain_json({**summary, "best": at, "last": row}))


def _offset(train: DataSet, strength: float) -> torch.Tensor:
    """[K] what an adjusted head takes from its logits."""
    if not strength:
        return torch.zeros(train.num_classes)
    return strength * torch.from_numpy(log_priors(train.labels, train.num_classes)).float()


def _judged(features: Features, labels: torch.Tensor, logits: torch.Tensor) -> AnyPredictions:
    return predictions_of(torch.from_numpy(features.readable), labels, logits)


# -- fine-tuning -------------------------------------------------------------------------------------------------------


def _trainings(inputs: Inputs, crossed: bool) -> list[tuple[str, Inputs]]:
    """What judges fine-tuning: one training if there are validation photos, else one on each half of the photos."""
    return [("-1", inputs.only("train")), ("-2", inputs.only("held out"))] if crossed else [("", inputs.only("train"))]


def _training(options: TrainOptions, output: Path, which: str = "") -> TrainOptions:
    """One of the trainings: -1 and -2 on half of the photos, "" on all that there are to train on."""
    values = {"weights": str(output / f"start{which}.safetensors")}
    values["out"] = str(output / (f"fold{which}" if which else "fine-tuned"))
    if options.maps and Path(options.maps).parent == output:
        values["maps"] = str(output / f"maps{which}")
    return apply(options, values, "auto")


def _plan(job: Job, choice: Choice, groups: list[str]) -> int:
    """Write recipe.yaml and what fine-tuning starts from and is compared with; its updates, 0: there is none."""
    options, output, story, crossed = job.options, job.output, job.story, job.val is None
    first = job.inputs.splits(apply(options, {"val_split": 0.5}, "halves") if crossed else options)[0]
    asked = bool({"epochs", "iters"} & job.asked)
    tuned = choice if asked else _tunable(job, choice, trainings=3 if crossed else 1)
    if tuned is None:
        return 0
    judges, held = job.train, choice.features
    if job.val is not None:
        judges, held = job.val, job.features(job.val, choice.backbone)
    excluded = _excluded(job, choice.features, groups, held)
    keep = np.array([i for i in range(len(job.train)) if job.train.key(i) not in excluded])
    folds = {"": (keep, held.readable)}  # rows of the photos to train on, and of those that judge
    if crossed:
        judges, held, names = job.train.subset(keep), _rows(choice.features, keep), set(first.keys())
        inside = np.array([key in names for key in judges.keys()])  # noqa: SIM118
        folds = {"-1": (keep[inside], np.flatnonzero(~inside)), "-2": (keep[~inside], np.flatnonzero(inside))}
    images = min(len(rows) for rows, _ in folds.values())  # the smaller half fills a batch, too
    if images < 2 * job.train.num_classes:
        story.say(f"Skipping fine-tuning: {images} photos to train on are too few for {job.train.num_classes} classes.")
        return 0
    logits, offset = torch.zeros(len(judges), job.train.num_classes), _offset(job.train, job.adjustment)
    starts: dict[str, LinearHead] = {}
    for which, (rows, rest) in folds.items():
        rival = _head(choice, job.train, rows)  # has seen what the fine-tuned model will have seen
        logits[rest] = rival(torch.from_numpy(held.values[rest])) - offset
        starts[which] = rival if tuned is choice else _head(tuned, job.train, rows)
    if crossed:
        starts[""] = choice.fit.head if tuned is choice else _head(tuned, job.train, keep)
    judged = np.sort(np.concatenate([rest for _, rest in folds.values()]))
    logits, labels = logits[judged], judges.labels[judged]
    logits /= fit_temperature(logits.numpy(), labels)
    answers = predictions_of(torch.from_numpy(judged), torch.from_numpy(labels), logits)
    answers.save(output / "linear" / "on-held-out.npz", note=keys_hash(judges))
    for which, start in starts.items():
        model, info = tuned.backbone.with_head(LinearHead(start.weight, start.bias - offset), job.train.class_names)
        info = replace(info, multi_label=job.train.multi_label)
        write_weights(output / f"start{which}.safetensors", model.state_dict(), info.to_metadata())
    which = next(iter(folds))
    values = _settings(job, tuned.backbone, images, len(judged))
    values |= {"weights": str(output / f"start{which}.safetensors"), **({"val_split": 0.5} if crossed else {})}
    values |= {"logit_adjustment": job.adjustment} if job.adjustment else {}
    if excluded:
        lines = "".join(f"{key}\t{reason}\n" for key, reason in sorted(excluded.items()))
        RunFolder(output).write("exclude.txt", lines)
        values["exclude"] = str(output / "exclude.txt")
        story.say(f"Left out of fine-tuning: {len(excluded):,} photos ({output / 'exclude.txt'} says why).")
    if held.failures:
        values["on_bad_image"] = "skip"
    if options.maps == "auto":
        for name in starts:
            agreement = _annotate(job, tuned, folds[name][0] if name in folds else keep, output / f"maps{name}")
        story.say(f"Tokens: every cell learns what the linear head says about it, out of fold (beta 0.5){agreement}.")
    if options.maps not in ("", "none"):
        maps = str(output / f"maps{which}") if options.maps == "auto" else options.maps
        values |= {"maps": maps, "objectives": _TOKENS}
    others = {"maps", "weights", "exclude", *how_to_run()}
    values |= {k: v for k, v in flat(options).items() if k in job.asked and k not in others}
    updates = 1
    if not asked:
        decided = apply(options, {"maps": "", **values}, "decisions")
        weights = sum(p.numel() * p.element_size() for p in tuned.backbone.model.parameters())
        most = max(USUAL_UPDATES, MOST_EPOCHS * len(keep) // _BATCH)
        seconds = _time_steps(decided, output, job.inputs)
        updates = min(most, _updates(job, decided, seconds, weights, len(judged), len(starts)))
        values |= {"iters": updates}
    if updates:
        _write_recipe(job, values, images)
    return updates


def _excluded(job: Job, features: Features, groups: list[str], held: Features) -> dict[str, str]:
    """Photos that fine-tuning leaves out, and why: unreadable ones, copies, and those of the user's list.

    Of photos that are alike one is trained on, and none that is like a validation photo.
    """
    file, found = job.options.dataset.exclude, {}
    for line in Path(file).read_text(encoding="utf-8", errors="surrogateescape").splitlines() if file else ():
        found[line.partition("\t")[0]] = f"in {file}"
    found |= {job.train.key(i): reason for i, reason in features.failures.items()}
    seen = set[str]() if job.val is None else _copies(job.train, features, groups, job.val, held)
    kind = "a copy of another photo" if job.val is None else "a copy of a held-out photo"
    for i, group in enumerate(groups):
        if group in seen:
            found.setdefault(job.train.key(i), kind)
        elif group and job.val is None:
            seen.add(group)
    return found


def _head(choice: Choice, train: DataSet, rows: np.ndarray) -> LinearHead:
    """A head on the same backbone that was fitted on some of the photos."""
    return fit_head(choice.features.values[rows], train.labels[rows], train.num_classes, choice.fit.strength)


def _rows(features: Features, keep: np.ndarray) -> Features:
    failures = {new: features.failures[old] for new, old in enumerate(keep.tolist()) if old in features.failures}
    digests = [features.digests[i] for i in keep]
    return replace(features, values=features.values[keep], digests=digests, failures=failures)


def _tunable(job: Job, choice: Choice, trainings: int) -> Choice | None:
    """The backbone to fine-tune: the best one for which there is time, if it can catch up with the best linear head.

    One that gets `USUAL_UPDATES` is preferred to a better one that gets fewer.
    """
    name, seconds = choice.backbone.name, job.left
    best = next(t for t in choice.trials if t.candidate == _candidate(choice.backbone))
    if len(choice.trials) == 1:
        return choice  # how long it takes is timed anyway

    def needed(trial: Trial, updates: int = FEWEST_UPDATES) -> float:
        return _READING * trial.training_seconds * trainings * updates * _BATCH / (0.5 * cores() + 0.5)

    able = [t for t in choice.trials if needed(t) < seconds and t.accuracy > best.accuracy - LEAD - t.standard_error]
    if not able:
        least, more = min(choice.trials, key=needed), ""
        if needed(least) < seconds:
            behind = 100 * (best.accuracy - least.accuracy)
            more = f"; {least.candidate} would fit, but its linear head is {behind:.1f} points behind"
        job.story.say(
            f"Skipping fine-tuning: {FEWEST_UPDATES} updates of {name} need about {needed(best):.0f} s, and "
            f"{seconds:.0f} s of the budget remain{more}. More minutes would allow it (--minutes)."
        )
        return None
    enough = [t for t in able if needed(t, USUAL_UPDATES) < seconds] or [min(able, key=needed)]
    chosen = best if best in enough else min(enough, key=lambda trial: trial.loss)
    if chosen is best:
        return choice
    job.story.say(
        f"Fine-tuning {chosen.candidate}: {USUAL_UPDATES} updates of {name} need about "
        f"{needed(best, USUAL_UPDATES):.0f} s, and {seconds:.0f} s of the budget remain."
    )
    which = chosen.candidate
    backbone = FrozenBackbone(which.name, which.img_size, choice.backbone.device, which.squash)
    return replace(choice, backbone=backbone, features=job.features(job.train, backbone, choice.features.digests))


def _settings(job: Job, backbone: FrozenBackbone, train: int, val: int) -> dict[str, Any]:
    """How to fine-tune: the options but for the budget and the tokens."""
    convolutional, gpu = backbone.model.family.layout == "nchw", job.device.type == "cuda"
    wanted = min(64 if gpu else _BATCH, max(1, train))
    freeze = (max(layer_groups(backbone.model.backbone).values()) + 1) // 2 if convolutional else 0
    batch = _batch_in_memory(backbone, wanted, job.device, freeze)
    rate = f"1e-3, the first {freeze} layer groups frozen" if convolutional else "1e-4 falling by 0.8 per layer"
    less = f" in {wanted // batch} accumulated steps, for lack of memory" if wanted > batch else ""
    job.story.say(
        f"Fine-tuning from a linear head: {train:,} photos, batch {wanted}{less}, AdamW at {rate}, batch norms frozen, "
        f"averaged weights, mild crops; judged on {val:,} photos that it has not seen."
    )
    return {
        "model": backbone.info.architecture,
        "img_size": backbone.info.img_size[0],
        "batch_size": batch,
        **({"grad_accum_steps": wanted // batch} if wanted > batch else {}),
        "opt": "adamw",
        "lr": 1e-3 if convolutional else 1e-4,
        "min_lr": 1e-6,
        "warmup_lr": 1e-6,
        "weight_decay": 0.05,
        **({"freeze": freeze} if convolutional else {"layer_decay": 0.8, "clip_grad": 1.0}),
        "norm_eval": True,
        "model_ema": True,
        "scale": [0.5, 1.0],
        "aa": "",
        "color_jitter": 0.2,
        "reprob": 0.0,
        "smoothing": 0.1,
        "amp": gpu,
        "channels_last": convolutional,
        "seed": job.options.run.seed,
    }


def _batch_in_memory(backbone: FrozenBackbone, wanted: int, device: torch.device, freeze: int = 0) -> int:
    """The largest of wanted, wanted / 2, ... for which training takes at most 70 % of the free memory."""
    model = copy.deepcopy(backbone.model.backbone).requires_grad_(True)
    freeze_first(model, freeze)
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


def _annotate(job: Job, tuned: Choice, rows: np.ndarray, place: Path) -> str:
    """Score maps of the training photos by the heads of their folds; how often they agree, in words."""
    data, train, features = job.options.dataset, job.train.subset(rows), _rows(tuned.features, rows)
    start = replace(tuned, features=features, fit=fit_features(features, train, seed=job.options.run.seed))
    settings = AnnotateOptions(workers=data.workers, val_split=data.val_split, device=str(job.device))
    if not (place / FOLDER / "linear.json").is_file():
        save_heads((start, np.arange(len(train))), train, place / FOLDER, settings)
    run_job(train, place, "fit", settings)
    return _agreement(train, start, place)


def _agreement(train: DataSet, start: Choice, maps: Path) -> str:
    """How often the maps that were made name the class of the folder; as often as the head, or something is wrong."""
    agree = summarise(maps, train, range(train.num_classes)).images_agree or 0.0
    if agree < start.fit.accuracy / 2:
        raise EverytokenError(
            f"the maps in {maps} name the class of {agree:.0%} of the photos only, and the head that they come from "
            f"{start.fit.accuracy:.0%}: they are not used. Train without maps, and please report this"
        )
    return f"; the maps name the folder's class for {agree:.0%} of the photos"


def _time_steps(options: TrainOptions, output: Path, inputs: Inputs) -> tuple[float, float]:
    """(seconds of a step, seconds of loading its images in one process)."""
    quick = replace(options, dataset=replace(options.dataset, workers=0))
    world = World(0, 1, torch.device(options.run.device or best_device()))
    setup = build(options, world, inputs)
    task = Classification(setup, quick, world, RunFolder(output / ".timing", writable=False))
    return step_seconds(task, quick)


def _updates(
    job: Job, options: TrainOptions, timed: tuple[float, float], weights: int, judging: int, trainings: int
) -> int:
    """How many updates fit into the time that is left, 0 if too few.

    Args:
        timed: seconds of a step, and of loading its images in one process. weights: bytes of the network.
        judging: photos to evaluate at the end. trainings: how many there are.
    """
    seconds, loading = timed
    if job.device.type == "cpu":  # which loads and trains with the same cores
        step = _OVERHEAD * (seconds + loading / cores())
    else:
        step = max(_OVERHEAD * seconds, loading / max(1, options.dataset.workers))
    needed = 4 * trainings * (options.run.keep + 1) * weights  # weights, average, two moments
    if (free := free_disk(job.output)) < needed:
        job.story.say(
            f"Skipping fine-tuning: its checkpoints need {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free."
        )
        return 0
    update = step * options.optim.grad_accum_steps
    left = job.left - _ENDING - judging * seconds / options.dataset.batch_size / 2
    updates = int(left / update / trainings)
    if updates < FEWEST_UPDATES:
        job.story.say(
            f"Skipping fine-tuning: {FEWEST_UPDATES} updates need about {trainings * FEWEST_UPDATES * update:.0f} s, "
            f"and {max(0, left):.0f} s of the budget remain. More minutes would allow it (--minutes)."
        )
        return 0
    return updates


def _write_recipe(job: Job, values: dict[str, Any], train: int) -> None:
    """recipe.yaml: the settings of fine-tuning under all decisions."""
    data, per_epoch = job.options.data, max(1, train // (values["batch_size"] * values.get("grad_accum_steps", 1)))
    updates = values.get("iters") or per_epoch * int(values["epochs"])
    schedule = {"warmup_iters": max(1, updates // 10), "model_ema_decay": round(1 - 1 / max(20, updates / 5), 4)}
    shown = f"{updates:,} updates of {values['batch_size'] * values.get('grad_accum_steps', 1)} photos"
    halves = ", for each half of the photos and then for all" if job.val is None else ""
    job.story.say(f"Fine-tuning for {shown}{halves}.")
    values = {"data": data, **values, **{name: v for name, v in schedule.items() if name not in job.asked}}
    path = job.output / "recipe.yaml"
    again = f"Run it again, edited or not: everytoken train {data} --recipe {path} --out NEW"
    again += " (with a smaller val_split it trains on more photos)" if job.val is None else ""
    head = "".join(f"# {line}\n" for line in (*job.story.lines, again))
    RunFolder(job.output).write(path.name, f"{head}\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}")


def _fine_tuning(output: Path, options: TrainOptions, trust_code: bool = False) -> TrainOptions:
    """The recipe of the folder, on this machine."""
    path = output / "recipe.yaml"
    decided = replace(apply(TrainOptions(), read_recipe(str(path), trust_code), str(path)), recipe=str(path))
    machine = {name: value for name, value in flat(options).items() if name in how_to_run()}
    return apply(decided, {**machine, "out": str(output / "fine-tuned")}, "machine")


# -- keeping -----------------------------------------------------------------------------------------------------------


def _keep(output: Path, tuning: TrainOptions | None, inputs: Inputs) -> dict[str, Any]:
    """Make the better model the result of the run; what is kept, its number and what it is a number of.

    Args:
        tuning: options of the fine-tuning, if there was one.
    """
    crossed = read_run(output / "linear").cross_validated
    answers, folds = _answers(output / "linear" / CACHE), FOLDS if crossed else 0
    result: dict[str, Any] = {"kept": "linear", "linear": answers.accuracy.value}
    text, better = "Kept: the linear head", False
    if tuning is not None:
        judged = _judge(output, tuning, inputs, crossed)
        verdict = compared(_answers(output / "linear" / "on-held-out.npz"), judged.calibrated)
        gain, better = verdict.accuracy, verdict.better
        result |= {"fine-tuned": judged.answers.accuracy.value, "gain": [gain.value, gain.low, gain.high]}
        text += f". Fine-tuning {'made it worse' if verdict.worse else 'made no clear difference'}: {verdict.words}"
    if tuning is None or not better:
        _copy(output / "linear", output)
    else:
        answers, folds = judged.answers, 2 if crossed else 0
        text = f"Kept: the fine-tuned model, which is better: {verdict.words}"
        result |= {"kept": "fine-tuned"}
        if crossed:
            train_with(_training(tuning, output), inputs.only("all"), reported=False)
        _save_tuned(output, judged, _judges(tuning, inputs, crossed), crossed)
    estimate = answers.accuracy
    metric = "mAP" if isinstance(answers, MultiLabelPredictions) else "top1"
    how = f"; models of cross-validation saw {100 - 100 // folds} % of the photos, this one all" if folds else ""
    result |= {"judged on": len(answers), "cross-validated": crossed}
    result |= {metric: estimate.value, "interval": [estimate.low, estimate.high]}
    return {**result, "text": f"{text}. Expected on new photos: {_words(answers, folds)}{how}."}


def _judges(options: TrainOptions, inputs: Inputs, crossed: bool) -> DataSet:
    """The photos that judge fine-tuning."""
    return inputs.undivided(options) if crossed else inputs.splits(options)[1]


@dataclass(frozen=True)
class Judged:
    """Answers of fine-tuned models for photos that they were not trained on."""

    answers: AnyPredictions
    calibrated: AnyPredictions
    calibration: Calibration
    skipped: dict[str, str]


def _judge(output: Path, options: TrainOptions, inputs: Inputs, crossed: bool) -> Judged:
    judges = _judges(options, inputs, crossed)
    row = {key: i for i, key in enumerate(judges.keys())}
    parts: list[tuple[torch.Tensor, ...]] = []
    skipped: dict[str, str] = {}
    for which, part in _trainings(inputs, crossed):
        own = _training(options, output, which)
        seen = set(part.splits(own)[0].keys()) if crossed else set()
        rows = torch.tensor([i for key, i in row.items() if key not in seen])
        weights, start = Path(own.run.out) / "best.safetensors", Path(own.model.weights)
        opened = open_model(weights)
        opened.model.to(options.run.device or best_device())
        opened.model.backbone.load_state_dict(_between(start, weights))
        data, settings = judges.subset(rows.numpy()), EvalOptions(workers=own.dataset.workers, on_bad_image="skip")
        model, view = Voter(opened).eval(), eval_view(opened.info)
        inference = Inference(model, data, view, settings, opened.info.amp_dtype())
        kept: list[tuple[torch.Tensor, ...]] = []
        labels = torch.arange(data.num_classes)
        inference.predictions(labels, keep=lambda *batch: kept.append(batch), multi_label=data.multi_label)  # noqa: B023
        parts += [(rows[index.cpu()], truth.cpu(), logits.cpu()) for index, truth, logits in kept]
        skipped |= inference.bad_images.seen
    index, truth, logits = (torch.cat(values) for values in zip(*parts, strict=True))
    order = index.argsort()
    index, truth, logits = index[order], truth[order], logits[order]
    calibration = calibrate(logits.numpy(), truth.numpy())
    calibrated = predictions_of(index, truth, logits / calibration.temperature)
    return Judged(predictions_of(index, truth, logits), calibrated, calibration, skipped)


def _between(start: Path, end: Path) -> dict[str, torch.Tensor]:
    """Weights on the way from the first to the second file; what only the second has is its own."""
    first, last = read_weights(start), read_weights(end)
    for name, value in last.items():
        if name in first and value.is_floating_point():
            last[name] = torch.lerp(first[name], value, MIX)
    return last


def _save_tuned(output: Path, judged: Judged, judges: DataSet, crossed: bool) -> None:
    """The fine-tuned model as the run of the folder, with the answers that judged it."""
    source, writer, weights = output / "fine-tuned", RunFolder(output), output / "best.safetensors"
    answers = judged.answers
    last = source / weights.name
    about = describe(last)
    assert about is not None
    write_weights(weights, _between(output / "start.safetensors", last), about.to_metadata())
    _copy(source, output, leave=(weights.name, "summary.json"))
    config = {**read_run(output).config, "mix": MIX, **({"validation": CROSS_VALIDATED} if crossed else {})}
    writer.write("config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    answers.save(output / CACHE, stamp(weights, judges), judged.skipped)
    keep_calibration(read_run(output), weights, judged.calibration)
    _record(writer, answers, judges.class_names, read_run(source).summary)


@dataclass(frozen=True)
class Verdict:
    """Two models on the same photos: what the second has more in points, whether it is better, and in words."""

    accuracy: stats.Estimate
    better: bool
    worse: bool
    words: str


def compared(first: AnyPredictions, last: AnyPredictions) -> Verdict:
    """The second model against the first, over the photos that both have answers for.

    Log loss decides, which tells models apart with fewer photos than counting right answers does; mAP in multi-label
    data. A model whose accuracy is clearly worse is never better.
    """
    _, one, other = np.intersect1d(first.index, last.index, return_indices=True)
    a, b = first.rows(one), last.rows(other)
    where = f"against a linear head that was fitted on the same photos, on {len(a):,} held-out photos"
    if isinstance(a, MultiLabelPredictions) and isinstance(b, MultiLabelPredictions):
        gain = b.difference(a)
        better, worse = gain.clear and gain.value > 0, gain.clear and gain.value < 0
        words = f"mAP {_interval(gain, 1, ' points')} {where}"
    else:
        assert isinstance(a, Predictions)
        assert isinstance(b, Predictions)
        gain, loss = stats.paired_difference(a.correct, b.correct), stats.mean((b.loss - a.loss).tolist())
        worse = (loss.clear and loss.value > 0) or (gain.clear and gain.value < 0)
        better = loss.clear and not worse
        words = f"log loss {_interval(loss, 2)}, accuracy {_interval(gain, 1, ' points')} {where}"
    return Verdict(gain, better, worse, words)


def _interval(estimate: stats.Estimate, digits: int, unit: str = "") -> str:
    value = f"{estimate.value:+.{digits}f}{unit}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} (95 % interval {estimate.low:+.{digits}f} to {estimate.high:+.{digits}f})"


def _answers(path: Path) -> AnyPredictions:
    """What was saved by `_save_linear` or `_plan`, whichever kind it is."""
    saved = MultiLabelPredictions.saved(path) or Predictions.saved(path)
    if saved is None:
        raise EverytokenError(f"{path} cannot be read; delete {path.parent.parent} and train again")
    return saved[0]


def _words(answers: AnyPredictions, folds: int) -> str:
    """The number that counts, its interval, and on what."""
    estimate = answers.accuracy
    what = "mAP" if isinstance(answers, MultiLabelPredictions) else "accuracy"
    interval = "" if estimate.low is None else f" (95 % interval {estimate.low:.1f} to {estimate.high:.1f})"
    where = f"in {folds}-fold cross-validation of {len(answers):,}" if folds else f"on {len(answers):,} held-out"
    return f"{what} {estimate.value:.1f} %{interval} {where} photos"


def _copy(source: Path, output: Path, leave: tuple[str, ...] = ()) -> None:
    """Make the run in `source` the run of the folder."""
    names = [
        *("best.safetensors", "best.token_head.safetensors", "config.yaml", "config.json", "environment.json"),
        *("metrics.jsonl", "classes.json", "batch.jpg", CACHE, "calibration.json", "summary.json"),
    ]
    for name in names:  # the summary last: it says that the run is finished
        if name not in leave and (source / name).is_file():
            write_atomically(output / name, (source / name).read_bytes())
