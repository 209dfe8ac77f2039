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

Where the data has validation photos, they judge everything. Where it has none, both models are judged by
cross-validation and then trained on all photos: the linear head with five folds, fine-tuning with two, compared with
linear heads that were fitted on the same halves. Fine-tuning is kept if the 95 % interval of the difference in log loss
lies below zero; otherwise the simpler model is.

The budget is turned into updates once, before fine-tuning, and the recipe has them: a run that is continued does not
decide anew. If photos or classes were added since, the next run gets a folder of its own (`photos-2`) and goes on with
the backbone and the features of the last one.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everytoken.errors import EverytokenError
from everytoken.files import refuse_link
from everytoken_lab import schema
from everytoken_lab.annotators import AnnotateOptions
from everytoken_lab.annotators.annotator import FOLDER, save_heads
from everytoken_lab.annotators.features import (
    Candidate,
    Choice,
    Features,
    available_weights,
    candidates,
    choose_backbone,
    fit_features,
)
from everytoken_lab.annotators.job import run_job, summarise
from everytoken_lab.annotators.linear import FOLDS, LinearHead, fit_head
from everytoken_lab.calibration import calibrate, fit_temperature
from everytoken_lab.data.datasets import DataSet, keys_hash
from everytoken_lab.data.duplicates import alike, read_facts
from everytoken_lab.data.tree import dataset_title, network_address
from everytoken_lab.engine.accuracy import predictions_of
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.engine.loop import OutOfTime
from everytoken_lab.engine.options import AutoOptions, TrainOptions, apply, flat, how_to_run, read_recipe
from everytoken_lab.engine.run_folder import CROSS_VALIDATED, Run, RunFolder, read_run
from everytoken_lab.machine import cores, free_disk
from everytoken_lab.models.description import timm_config
from everytoken_lab.models.open import fetch_modern
from everytoken_lab.reports import ReportOptions
from everytoken_lab.schema import counted
from everytoken_lab.training import tuning
from everytoken_lab.training.build import Inputs, complete, excluded, has_validation
from everytoken_lab.training.classify import train_with
from everytoken_lab.training.tuning import Job, Story

METHOD = "logistic regression on frozen features"
MINUTES = 20.0
"""The default budget."""
_LOOKING = 0.25  # of the budget for features and the choice of a backbone, at most
_LATEST, _ENDING = 1.1, 15.0  # of the budget, at most, less some seconds for the report
_SIMILAR = 0.9  # cosine of the features of two photos that may be the same
SAMPLES = ReportOptions.samples  # photos with tokens and masks, about a second each
_TOKENS = {"token_labeling": {"beta": 0.5, "class_target": "truth"}}


def train_photos(options: TrainOptions, asked: Set[str], auto: AutoOptions, trust_code: bool, inputs: Inputs) -> Run:
    """The best classifier that this machine can make of these photos in the given time.

    Args:
        options: those that were asked for; the rest is decided.
        asked: names of the options that were given.
        auto: the budget.
        trust_code: whether a recipe.yaml that was edited may name objectives by import paths.
    """
    started, seconds = time.monotonic(), 60 * (auto.minutes or MINUTES)
    train, val = _open(options, inputs)
    images = keys_hash(train) + (keys_hash(val) if val is not None else "")
    output, previous = _folder(options, images)
    for name in ("features", "fine-tuned", "fold-1", "fold-2", "linear", "maps", "maps-1", "maps-2"):
        refuse_link(output / name)
    folder = RunFolder(output)
    with folder.open():
        story = Story.read(output) or Story(images)
        if story.images != images:  # another process was faster
            raise EverytokenError(f"{output} holds a run on other photos; choose another output.")
        if story.result:
            folder.log(f"{output} is finished. {story.result['text']}")
        else:
            job = Job(options, asked, inputs, train, val, output, story, seconds, started)
            _decide_and_train(job, folder, previous, auto, trust_code)
        if not (output / "report.html").exists():  # a start may have been interrupted before it
            photos = train if val is None else val
            if story.result["kept"] == "fine-tuned":
                recipe = complete(read_tuning(output, options, trust_code), inputs=inputs)
                photos = inputs.undivided(recipe) if val is None else inputs.splits(recipe)[1]
            folder.log("Writing the report ...")
            samples = min(SAMPLES, max(SAMPLES // 5, int(started + _LATEST * seconds - time.monotonic())))
            how: dict[str, Any] = {"data": network_address(options.data), "images": photos, "samples": samples}
            with folder.surviving("report.html"):
                read_run(output).report(output / "report.html", **how)
                folder.log(f"report: {output / 'report.html'}")
    return read_run(output)


def _decide_and_train(job: Job, folder: RunFolder, previous: Path | None, auto: AutoOptions, trust_code: bool) -> None:
    """Everything up to the model that is kept."""
    story, output, inputs = job.story, job.output, job.inputs
    deadline = math.inf if job.asked & {"epochs", "iters"} else job.started + _LATEST * job.seconds - _ENDING
    if story.updates is None:
        _look(job)
        choice, groups = _choose(job, previous, auto.offline)
        _fit(job, choice)
        if auto.linear:
            story.say("No fine-tuning, as asked (--linear).")
        story.updates = 0 if auto.linear else _plan(job, choice, groups)
        story.write(folder)
    try:
        recipe = None
        if story.updates:
            recipe = complete(read_tuning(output, job.options, trust_code), inputs=inputs)
            for which, part in tuning.trainings(inputs, job.val is None):
                train_with(tuning.training(recipe, output, which), part, reported=False, deadline=deadline)
        story.result = tuning.keep(output, recipe, inputs, deadline)
    except OutOfTime as late:
        story.say(f"Fine-tuning was given up for lack of time: {late}. The machine was faster when it was timed.")
        story.updates = 0
        story.result = tuning.keep(output, None, inputs)
    story.write(folder)
    folder.log(story.result["text"])


# -- look --------------------------------------------------------------------------------------------------------------


def _open(options: TrainOptions, inputs: Inputs) -> tuple[DataSet, DataSet | None]:
    if not options.data:
        raise EverytokenError("data is empty: name the images to train on (everytoken train DATA)")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        way = "Start it without torchrun; its recipe.yaml can then be trained with many (--recipe)"
        raise EverytokenError(f"training without a recipe runs in one process. {way}")
    train, val = inputs.splits(options)[:2] if has_validation(options) else (inputs.undivided(options), None)
    if options.maps not in ("", "none") and train.multi_label:
        raise EverytokenError(
            f"maps label tokens with one class per photo, and {options.data} is multi-label: leave --maps out"
        )
    return train, val


def _folder(options: TrainOptions, images: str) -> tuple[Path, Path | None]:
    """The run's folder, and that of the last run on other photos."""
    first = Path(options.run.out or Path("runs") / (Path(dataset_title(options.data)).stem or "photos"))
    folder, previous, number = first, None, 1
    while (story := Story.read(folder)) is not None:
        if story.images == images:
            return folder, previous
        previous, number = folder, number + 1
        folder = first.with_name(f"{first.name}-{number}")
    if read_run(folder).config:
        raise EverytokenError(f"{folder} holds a run with a recipe of its own; choose another output.")
    return folder, previous


def _look(job: Job) -> None:
    """Say what there is."""
    train, counts = job.train, job.train.class_counts()
    each = f"{counts.min():,}" if counts.min() == counts.max() else f"{counts.min():,} to {counts.max():,}"
    judged = f"{FOLDS}-fold cross-validation" if job.val is None else f"{len(job.val):,} validation photos"
    each += " of each (multi-label)" if train.multi_label else " of each"
    job.story.say(f"Photos: {len(train):,} of {train.num_classes} classes, {each}; judged by {judged}.")
    memory, disk = (f"{size / 2**30:.0f} GB" for size in (tuning.free_memory(job.device), free_disk(job.output)))
    job.story.say(f"Machine: {job.device.type}, {cores()} cores, {memory} of free memory, {disk} of free disk.")
    if job.adjustment:
        times = f"{counts.max() / max(1, counts.min()):.1f} times as many photos as the smallest"
        how = (
            f"Logits are adjusted by {job.adjustment:g} of the class priors, so that rare classes are found more often"
        )
        job.story.say(f"Imbalance: the largest class has {times}. {how}.")


# -- choose ------------------------------------------------------------------------------------------------------------


def _choose(job: Job, previous: Path | None, offline: bool) -> tuple[Choice, list[str]]:
    """The backbone with its features and head, and a name for each photo that its copies share."""
    story, model = job.story, job.options.model
    if not (offline or previous or model.weights):
        fetch_modern(job.seconds * _LOOKING / 2, len(job.train), story.say)
    offered = candidates([model.weights] if model.weights else [], model.img_size)
    if previous is not None and (before := Story.read(previous)) is not None and before.backbone:
        offered = [Candidate(before.backbone, before.img_size, before.squash)]
        story.features = str(Path(before.features or previous / "features").resolve())
        story.say(f"Continuing {previous}: its backbone and its features. Only new photos are computed.")
    how: dict[str, Any] = {"seed": job.options.run.seed, "workers": job.options.dataset.workers, "device": job.device}
    choice = choose_backbone(job.train, offered, job.cache, seconds=job.seconds * _LOOKING, **how)
    chosen = choice.backbone.candidate
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
        story.say(f"Not tried, as {_LOOKING:.0%} of the time are for choosing: {', '.join(choice.skipped)}.")
    return without_copies(choice, job.train, job.options.run.seed)


def without_copies(choice: Choice, data: DataSet, seed: int) -> tuple[Choice, list[str]]:
    """The choice with a head whose folds keep copies of a photo together, and the photos' groups by a name each.

    Photos with the same bytes have the same digest. Of the others, those with similar features are compared closely.
    """
    features = choice.features
    groups = list(features.digests)
    for one, other in _similar(features):
        if groups[one] != groups[other] and alike(read_facts(data, one), read_facts(data, other)):
            groups = [groups[one] if name == groups[other] else name for name in groups]
    if groups == features.digests:
        return choice, groups
    return replace(choice, fit=fit_features(features, data, seed=seed, groups=groups)), groups


def _similar(features: Features) -> Iterator[tuple[int, int]]:
    """Pairs of readable photos whose features are much alike: of each photo, the three nearest."""
    values = features.values - features.values[features.readable].mean(0)
    units = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-9)
    for begin in range(0, len(units), 256):
        similar = units @ units[begin : begin + 256].T
        for column, nearest in enumerate(np.argsort(-similar, axis=0)[:4].T.tolist(), begin):  # one may be itself
            for row in nearest:
                both = features.digests[row] and features.digests[column]
                if row < column and both and similar[row, column - begin] > _SIMILAR:
                    yield row, column


# -- fit ---------------------------------------------------------------------------------------------------------------


def _fit(job: Job, choice: Choice) -> None:
    """The linear head as a run folder, with its answers for photos that it was not fitted on."""
    train, fit, folder, offset = job.train, choice.fit, job.output / "linear", job.offset
    head = LinearHead(fit.head.weight, fit.head.bias - offset)
    data, features, logits = train, choice.features, torch.from_numpy(fit.out_of_fold) - offset
    answers = out_of_fold = predictions_of(features.readable, fit.labels, logits)
    skipped = {train.key(i): reason for i, reason in features.failures.items()}
    if job.val is not None:
        data, features = job.val, job.features(job.val, choice.backbone)
        skipped |= {data.key(i): reason for i, reason in features.failures.items()}
        logits = head(torch.from_numpy(features.values[features.readable]))
        answers = predictions_of(features.readable, data.labels[features.readable], logits)
    if skipped:
        key, reason = next(iter(skipped.items()))
        job.story.say(f"Left out: {counted(len(skipped), 'file')} that cannot be read, the first: {key} ({reason}).")
    if folder.exists():  # of a start that was killed
        shutil.rmtree(folder)
    writer, chosen = RunFolder(folder), vars(job.options.dataset)
    model, info = choice.backbone.with_head(head, train.class_names)
    info = replace(info, multi_label=train.multi_label)
    config: dict[str, Any] = {
        "method": METHOD,
        "data": job.options.data,
        **{name: chosen[name] for name in ("val_split", "exclude", "corrections") if chosen[name]},
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
    write_weights(folder / "best.safetensors", model.state_dict(), info.to_metadata())
    calibration = calibrate(logits.numpy(), data.labels[features.readable])
    nothing = {"epochs": 0, "updates": 0, "seconds": round(choice.features.seconds, 2)}
    tuning.save_answers(writer, tuning.Judged(data, answers, calibration, skipped), nothing)
    judged, seconds = tuning.words(answers, FOLDS if job.val is None else 0), time.monotonic() - job.started
    job.story.say(f"First model: a linear head on {choice.backbone.name}, {judged}, after {seconds:.0f} s: {folder}")


# -- fine-tune ---------------------------------------------------------------------------------------------------------


def _plan(job: Job, choice: Choice, groups: list[str]) -> int:
    """Write recipe.yaml and what fine-tuning starts from and is compared with; its updates, 0: there is none."""
    options, output, story, crossed = job.options, job.output, job.story, job.val is None
    timed = not {"epochs", "iters"} & job.asked
    tuned = tuning.tunable(job, choice, trainings=3 if crossed else 1) if timed else choice
    if tuned is None:
        return 0
    judges, held = job.train, choice.features
    if job.val is not None:
        judges, held = job.val, job.features(job.val, choice.backbone)
    left_out = _excluded(job, choice.features, groups, held)
    keep = np.array([i for i in range(len(job.train)) if job.train.key(i) not in left_out])
    folds = {"": (keep, held.readable)}  # rows of the photos to train on, and of those that judge
    if crossed:
        names = set(job.inputs.splits(apply(options, {"val_split": 0.5}, "halves"))[0].keys())
        judges, held = job.train.subset(keep), choice.features.rows(keep)
        inside = np.array([key in names for key in judges.keys()])  # noqa: SIM118
        folds = {"-1": (keep[inside], np.flatnonzero(~inside)), "-2": (keep[~inside], np.flatnonzero(inside))}
    images = min(len(rows) for rows, _ in folds.values())  # the smaller half fills a batch, too
    if images < 2 * job.train.num_classes:
        story.say(f"Skipping fine-tuning: {images} photos to train on are too few for {job.train.num_classes} classes.")
        return 0
    starts = _starts(job, choice, tuned, keep, folds, (judges, held))
    judging = sum(len(rest) for _, rest in folds.values())
    which = next(iter(folds))
    values = tuning.settings(job, tuned.backbone, images, judging)
    values |= {"weights": str(output / f"start{which}.safetensors"), **({"val_split": 0.5} if crossed else {})}
    values |= {"logit_adjustment": job.adjustment} if job.adjustment else {}
    if left_out:
        lines = "".join(f"{key}\t{reason}\n" for key, reason in sorted(left_out.items()))
        RunFolder(output).write("exclude.txt", lines)
        values["exclude"] = str(output / "exclude.txt")
        story.say(f"Left out of fine-tuning: {len(left_out):,} photos ({output / 'exclude.txt'} says why).")
    if held.failures:
        values["on_bad_image"] = "skip"
    if options.maps == "auto":
        agreed = [_annotate(job, tuned, rows, output / f"maps{name}") for name, rows in starts.items()]
        story.say(
            "Tokens: every cell learns what the linear head says about it, out of fold (beta 0.5); the maps name the "
            f"folder's class for {agreed[-1]:.0%} of the photos."
        )
    if options.maps not in ("", "none"):
        maps = str(output / f"maps{which}") if options.maps == "auto" else options.maps
        values |= {"maps": maps, "objectives": _TOKENS}
    others = {"maps", "weights", "exclude", *how_to_run()}
    values |= {k: v for k, v in flat(options).items() if k in job.asked and k not in others}
    updates = 1
    if timed:
        decided = apply(options, {"maps": "", **values}, "decisions")
        most = max(tuning.USUAL_UPDATES, tuning.MOST_EPOCHS * len(keep) // tuning.BATCH)
        updates = min(most, tuning.updates_in_time(job, decided, tuned.backbone, judging, len(starts)))
        values |= {"iters": updates}
    if updates:
        _write_recipe(job, values, images)
    return updates


def _starts(
    job: Job,
    choice: Choice,
    tuned: Choice,
    keep: np.ndarray,
    folds: dict[str, tuple[np.ndarray, np.ndarray]],
    judges: tuple[DataSet, Features],
) -> dict[str, np.ndarray]:
    """Write the linear classifiers that the trainings start from, and what their rivals say about the photos that
    judge; the trainings by name, with the rows of their photos."""
    data, held = judges
    logits, heads = torch.zeros(len(data), data.num_classes), dict[str, LinearHead]()
    starts = {name: rows for name, (rows, _) in folds.items()}
    for which, (rows, rest) in folds.items():
        rival = fitted_head(choice, job.train, rows)  # has seen what the fine-tuned model will have seen
        logits[rest] = rival(torch.from_numpy(held.values[rest])) - job.offset
        heads[which] = rival if tuned is choice else fitted_head(tuned, job.train, rows)
    if job.val is None:
        starts[""], heads[""] = keep, choice.fit.head if tuned is choice else fitted_head(tuned, job.train, keep)
    judged = np.sort(np.concatenate([rest for _, rest in folds.values()]))
    logits, labels = logits[judged], data.labels[judged]
    logits /= fit_temperature(logits.numpy(), labels)
    answers = predictions_of(judged, labels, logits)
    answers.save(job.output / "linear" / tuning.RIVAL, note=keys_hash(data))
    for which, head in heads.items():
        model, info = tuned.backbone.with_head(LinearHead(head.weight, head.bias - job.offset), job.train.class_names)
        info = replace(info, multi_label=job.train.multi_label)
        write_weights(job.output / f"start{which}.safetensors", model.state_dict(), info.to_metadata())
    return starts


def fitted_head(choice: Choice, train: DataSet, rows: np.ndarray) -> LinearHead:
    """A head on the same backbone that was fitted on some of the photos."""
    return fit_head(choice.features.values[rows], train.labels[rows], train.num_classes, choice.fit.strength)


def _excluded(job: Job, features: Features, groups: list[str], held: Features) -> dict[str, str]:
    """Photos that fine-tuning leaves out, and why: unreadable ones, copies, and those of the user's list.

    Of photos that are alike one is trained on, and none that is the same as a validation photo.
    """
    found = dict.fromkeys(excluded(job.options), f"in {job.options.dataset.exclude}")
    found |= {job.train.key(i): reason for i, reason in features.failures.items()}
    same = set() if job.val is None else set(held.digests) - {""}
    seen = {group for group, digest in zip(groups, features.digests, strict=True) if digest in same}
    kind = "a copy of another photo" if job.val is None else "a copy of a held-out photo"
    for i, group in enumerate(groups):
        if group in seen:
            found.setdefault(job.train.key(i), kind)
        elif group and job.val is None:
            seen.add(group)
    return found


def _annotate(job: Job, tuned: Choice, rows: np.ndarray, place: Path) -> float:
    """Score maps of some training photos by the heads of their folds; how often they name the class of the folder.

    As often as the head that they come from, or something is wrong.
    """
    data, train, features = job.options.dataset, job.train.subset(rows), tuned.features.rows(rows)
    start = replace(tuned, features=features, fit=fit_features(features, train, seed=job.options.run.seed))
    settings = AnnotateOptions(workers=data.workers, val_split=data.val_split, device=str(job.device))
    if not (place / FOLDER / "linear.json").is_file():
        save_heads(start, np.arange(len(train)), train, place / FOLDER, settings)
    run_job(train, place, "fit", settings)
    agree = summarise(place, train, range(train.num_classes)).images_agree or 0.0
    if agree < start.fit.accuracy / 2:
        what = (
            f"the maps in {place} name the class of {agree:.0%} of the photos, and their head {start.fit.accuracy:.0%}"
        )
        raise EverytokenError(f"{what}: they are not used. Train without maps, and please report this")
    return agree


def _write_recipe(job: Job, values: dict[str, Any], train: int) -> None:
    """recipe.yaml: the settings of fine-tuning under all decisions."""
    data, batch = job.options.data, values["batch_size"] * values.get("grad_accum_steps", 1)
    updates = values.get("iters") or max(1, train // batch) * int(values["epochs"])
    schedule = {"warmup_iters": max(1, updates // 10), "model_ema_decay": round(1 - 1 / max(20, updates / 5), 4)}
    halves = ", for each half of the photos and then for all" if job.val is None else ""
    job.story.say(f"Fine-tuning for {updates:,} updates of {batch} photos{halves}.")
    values = {"data": data, **values, **{name: v for name, v in schedule.items() if name not in job.asked}}
    path = job.output / "recipe.yaml"
    again = f"Run it again, edited or not: everytoken train {data} --recipe {path} --out NEW"
    again += " (with a smaller val_split it trains on more photos)" if job.val is None else ""
    head = "".join(f"# {line}\n" for line in (*job.story.lines, again))
    RunFolder(job.output).write(path.name, f"{head}\n{schema.to_yaml(values)}")


def read_tuning(output: Path, options: TrainOptions, trust_code: bool = False) -> TrainOptions:
    """The recipe of the folder, on this machine."""
    path = output / "recipe.yaml"
    decided = replace(apply(TrainOptions(), read_recipe(str(path), trust_code), str(path)), recipe=str(path))
    machine = {name: value for name, value in flat(options).items() if name in how_to_run()}
    return apply(decided, {**machine, "out": str(output / "fine-tuned")}, "machine")
