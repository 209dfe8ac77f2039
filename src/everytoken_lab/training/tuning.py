"""Training without a recipe: what it has decided so far (`Story`), how it fine-tunes (which backbone, with which
settings, for how long), and which model it keeps.

Convolutional networks are trained from their middle on: the first half of the stages has a few percent of the weights
and most of the cost.

The fine-tuned model is judged against the linear head by log loss, which tells models apart with fewer photos than
counting right answers does; by mAP in multi-label data. What is judged and kept is a mean with the initial weights,
which keeps more of what the backbone knew (Wortsman et al., "Robust fine-tuning of zero-shot models", 2022).
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import time
import timeit
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from everytoken.errors import EverytokenError
from everytoken.files import plain_json, read_bytes, write_atomically
from everytoken.keyed import StepKey
from everytoken_lab import schema, stats
from everytoken_lab.annotators.features import Choice, Features, FrozenBackbone, Trial, compute_features
from everytoken_lab.annotators.linear import FOLDS
from everytoken_lab.calibration import Calibration, calibrate
from everytoken_lab.data.augment import eval_view
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.engine.accuracy import AnyPredictions, MultiLabelPredictions, Predictions, predictions_of
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.engine.distributed import World, pick_device
from everytoken_lab.engine.options import TrainOptions, apply
from everytoken_lab.engine.run_folder import CROSS_VALIDATED, RunFolder, read_run
from everytoken_lab.evaluation import EvalOptions
from everytoken_lab.evaluation.run import ANSWERS, CALIBRATION, Inference, Voter, keep_calibration, stamp
from everytoken_lab.machine import cores, free_disk, memory
from everytoken_lab.models.description import describe
from everytoken_lab.models.open import OpenModel, open_model
from everytoken_lab.training.build import Inputs, build, freeze_first, layer_groups, log_priors
from everytoken_lab.training.classify import Classification, train_with

logger = logging.getLogger(__name__)
STATE = "auto.json"
IMBALANCE, ADJUSTMENT = 1.5, 0.5
"""Largest class / smallest class from which on large classes are preferred less, and by how much (docs/photos.md)."""
MOST_EPOCHS, USUAL_UPDATES, FEWEST_UPDATES = 30, 100, 40
"""Of fine-tuning: at most, as a rule, at least."""
LEAD = 0.04
"""A backbone whose linear head is further behind the best one (besides chance) is not fine-tuned."""
BATCH = 32
"""On the CPU."""
_READING = 1.2  # of the time of the network alone, to estimate that of training with reading photos
_OVERHEAD = 1.1  # of a step: optimizer, averages and checkpoints are not timed
_ENDING = 5.0  # seconds for the report and the choice of a model, besides the evaluation


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

    @staticmethod
    def read(folder: Path) -> Story | None:
        """The story of a folder; None if it has none."""
        path = folder / STATE
        return schema.read_json(path, Story) if path.is_file() else None

    def write(self, folder: RunFolder) -> None:
        """Keep it, for a start that goes on from here."""
        folder.write(STATE, plain_json(vars(self)))

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
        return torch.device(pick_device(self.options.run.device))

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
    def offset(self) -> torch.Tensor:
        """[K] what an adjusted head takes from its logits."""
        if not self.adjustment:
            return torch.zeros(self.train.num_classes)
        return self.adjustment * torch.from_numpy(log_priors(self.train.labels, self.train.num_classes)).float()

    @property
    def cache(self) -> Path:
        """Where features are kept."""
        return Path(self.story.features or self.output / "features")

    def features(self, data: DataSet, backbone: FrozenBackbone, digests: list[str] | None = None) -> Features:
        """Of all photos of a set, from the cache or computed."""
        return compute_features(data, backbone, self.cache, digests=digests, workers=self.options.dataset.workers)


def free_memory(device: torch.device) -> int:
    """Of the device, in bytes."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory() or 4 * 2**30


# -- how to fine-tune -------------------------------------------------------------------------------------------------


def tunable(job: Job, choice: Choice, trainings: int) -> Choice | None:
    """The backbone to fine-tune: the best one for which there is time, if it can catch up with the best linear head.

    One that gets `USUAL_UPDATES` is preferred to a better one that gets fewer.
    """
    name, seconds = choice.backbone.name, job.left
    if len(choice.trials) == 1:
        return choice  # how long it takes is timed anyway
    best = next(t for t in choice.trials if t.candidate == choice.backbone.candidate)

    def needed(trial: Trial, updates: int = FEWEST_UPDATES) -> float:
        return _READING * trial.training_seconds * trainings * updates * BATCH / (0.5 * cores() + 0.5)

    able = [t for t in choice.trials if needed(t) < seconds and t.accuracy > best.accuracy - LEAD - t.standard_error]
    if not able:
        job.story.say(_too_slow(f" of {name}", needed(best), seconds))
        return None
    enough = [t for t in able if needed(t, USUAL_UPDATES) < seconds] or [min(able, key=needed)]
    chosen = best if best in enough else min(enough, key=lambda trial: trial.loss)
    if chosen is best:
        return choice
    job.story.say(
        f"Fine-tuning {chosen.candidate}: {USUAL_UPDATES} updates of {name} need about "
        f"{needed(best, USUAL_UPDATES):.0f} s, and {seconds:.0f} s of the budget remain."
    )
    backbone = chosen.candidate.open(choice.backbone.device)
    return replace(choice, backbone=backbone, features=job.features(job.train, backbone, choice.features.digests))


def _too_slow(what: str, needed: float, left: float) -> str:
    times = f"{FEWEST_UPDATES} updates{what} need about {needed:.0f} s, and {max(0, left):.0f} s of the budget remain"
    return f"Skipping fine-tuning: {times}. More minutes would allow it (--minutes)."


def settings(job: Job, backbone: FrozenBackbone, train: int, val: int) -> dict[str, Any]:
    """How to fine-tune: the options but for the budget and the tokens."""
    convolutional, gpu = backbone.model.family.layout == "nchw", job.device.type == "cuda"
    wanted = min(64 if gpu else BATCH, max(1, train))
    freeze = (max(layer_groups(backbone.model.backbone).values()) + 1) // 2 if convolutional else 0
    batch = batch_in_memory(backbone, wanted, job.device, freeze)
    rate = f"1e-3, the first {freeze} layer groups frozen" if convolutional else "1e-4 falling by 0.8 per layer"
    less = f" in {wanted // batch} accumulated steps, for lack of memory" if wanted > batch else ""
    photos, judges = f"{train:,} photos", f"judged on {val:,} photos that it has not seen"
    if job.val is None:
        photos, judges = f"each half of the photos ({train:,} or more)", "judged on the other half"
    job.story.say(
        f"Fine-tuning from a linear head: {photos}, batch {wanted}{less}, AdamW at {rate}, batch norms frozen, "
        f"averaged weights, mild crops; {judges}."
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


def batch_in_memory(backbone: FrozenBackbone, wanted: int, device: torch.device, freeze: int = 0) -> int:
    """The largest of wanted, wanted / 2, ... for which training takes at most 70 % of the free memory."""
    model = copy.deepcopy(backbone.model.backbone).requires_grad_(True)
    freeze_first(model, freeze)
    own, kept = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}, dict[int, int]()

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
    while batch > 1 and fixed + batch * per_image > 0.7 * free_memory(device):
        batch //= 2
    return batch


def updates_in_time(job: Job, options: TrainOptions, backbone: FrozenBackbone, judging: int, trainings: int) -> int:
    """How many updates fit into the time and onto the disk that are left, 0 if too few.

    Args:
        judging: photos to evaluate at the end. trainings: how many there are.
    """
    weights = sum(p.numel() * p.element_size() for p in backbone.model.parameters())
    needed = 4 * trainings * (options.run.keep + 1) * weights  # weights, average, two moments
    if (free := free_disk(job.output)) < needed:
        sizes = f"its checkpoints need {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free"
        job.story.say(f"Skipping fine-tuning: {sizes}.")
        return 0
    seconds, loading = step_seconds(job, options)
    if job.device.type == "cpu":  # which loads and trains with the same cores
        step = _OVERHEAD * (seconds + loading / cores())
    else:
        step = max(_OVERHEAD * seconds, loading / max(1, options.dataset.workers))
    update = step * options.optim.grad_accum_steps
    left = job.left - _ENDING - judging * seconds / options.dataset.batch_size / 2
    updates = int(left / update / trainings)
    if updates < FEWEST_UPDATES:
        job.story.say(_too_slow("", trainings * FEWEST_UPDATES * update, left))
        return 0
    return updates


def step_seconds(job: Job, options: TrainOptions, steps: int = 3) -> tuple[float, float]:
    """Median seconds of some training steps, and of loading a batch in one process."""
    options = replace(options, dataset=replace(options.dataset, workers=0))
    world, folder = World(0, 1, job.device), RunFolder(job.output / ".timing", writable=False)
    task = Classification(build(options, world, job.inputs), options, world, folder)
    batches, count = task.train_loader.epoch(0), min(steps + 1, task.batches_per_epoch)
    loading, working = timeit.repeat(lambda: next(batches), number=1, repeat=count), []
    task.train()
    for number, batch in enumerate(itertools.islice(task.train_batches(0, 0), len(loading))):
        started = time.perf_counter()
        with task.autocast():
            terms = task(replace(batch, key=StepKey(options.run.seed, number)))
        terms["loss"].backward()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        working.append(time.perf_counter() - started)
        task.zero_grad(set_to_none=True)
    task.close()
    return median(working), median(loading)


# -- which model to keep -----------------------------------------------------------------------------------------------


MIX = 0.75
"""How far to go from the initial weights to the fine-tuned ones: 0.5 was better on Caltech-101, 1 on Grocery Store."""
RIVAL = "on-held-out.npz"
"""In linear/: answers of heads that were fitted on the photos that the fine-tuned model is trained on."""
_KEPT = (
    *("best.safetensors", "best.token_head.safetensors", "config.yaml", "config.json", "environment.json"),
    *("metrics.jsonl", "classes.json", "batch.jpg", ANSWERS, CALIBRATION, "summary.json"),
)  # the summary last: it says that the run is finished


def trainings(inputs: Inputs, crossed: bool) -> list[tuple[str, Inputs]]:
    """What judges fine-tuning: one training if there are validation photos, else one on each half of the photos."""
    return [("-1", inputs.only("train")), ("-2", inputs.only("held out"))] if crossed else [("", inputs.only("train"))]


def training(options: TrainOptions, output: Path, which: str = "") -> TrainOptions:
    """One of the trainings: -1 and -2 on half of the photos, "" on all that there are to train on."""
    folder = output / (f"fold{which}" if which else "fine-tuned")
    values = {"weights": str(output / f"start{which}.safetensors"), "out": str(folder)}
    if options.maps and Path(options.maps).parent == output:
        values["maps"] = str(output / f"maps{which}")
    return apply(options, values, "auto")


def keep(output: Path, tuning: TrainOptions | None, inputs: Inputs, deadline: float = math.inf) -> dict[str, Any]:
    """Make the better model the result of the run; what is kept, its number and what it is a number of.

    Args:
        tuning: options of the fine-tuning, if there was one.
        deadline: at which fine-tuning gives up.
    """
    crossed = read_run(output / "linear").cross_validated
    answers, folds = saved_answers(output / "linear" / ANSWERS), FOLDS if crossed else 0
    result: dict[str, Any] = {"kept": "linear", "linear": answers.accuracy.value}
    text, verdict = "Kept: the linear head", ""
    if tuning is not None:
        judged, calibrated, model = judge(output, tuning, inputs, crossed)
        gain, verdict, how = compared(saved_answers(output / "linear" / RIVAL), calibrated)
        result |= {"fine-tuned": judged.answers.accuracy.value, "gain": [gain.value, gain.low, gain.high]}
        text += f". Fine-tuning {'made it worse' if verdict == 'worse' else 'made no clear difference'}: {how}"
    if tuning is None or verdict != "better":
        _copy(output / "linear", output)
    else:
        answers, folds = judged.answers, 2 if crossed else 0
        text = f"Kept: the fine-tuned model, which is better: {how}"
        result |= {"kept": "fine-tuned"}
        if crossed:
            own = training(tuning, output)
            train_with(own, inputs.only("all"), reported=False, deadline=deadline)
            model = mean_model(own, inputs)
        _save_tuned(output, model, judged, crossed)
    metric = "mAP" if isinstance(answers, MultiLabelPredictions) else "top1"
    saw = f"; models of cross-validation saw {100 - 100 // folds} % of the photos, this one all" if folds else ""
    result |= {"judged on": len(answers), "cross-validated": crossed}
    result |= {metric: answers.accuracy.value, "interval": [answers.accuracy.low, answers.accuracy.high]}
    return {**result, "text": f"{text}. Expected on new photos: {words(answers, folds)}{saw}."}


@dataclass(frozen=True)
class Judged:
    """Answers for photos that a model was not trained on, and the photos that could not be read (key -> reason)."""

    photos: DataSet
    answers: AnyPredictions
    calibration: Calibration
    skipped: dict[str, str]


def judge(
    output: Path, options: TrainOptions, inputs: Inputs, crossed: bool
) -> tuple[Judged, AnyPredictions, OpenModel]:
    """Validation photos by the fine-tuned model; without them, each half of the photos by the model of the other.

    Also the calibrated answers, and the last of these models.
    """
    judges = inputs.undivided(options) if crossed else inputs.splits(options)[1]
    parts, skipped = list[tuple[torch.Tensor, ...]](), dict[str, str]()
    for which, part in trainings(inputs, crossed):
        own = training(options, output, which)
        seen = set(part.splits(own)[0].keys()) if crossed else set()
        rows = torch.tensor([i for i, key in enumerate(judges.keys()) if key not in seen])
        opened = mean_model(own, inputs)
        data, settings = judges.subset(rows.numpy()), EvalOptions(workers=own.dataset.workers, on_bad_image="skip")
        model, view = Voter(opened).eval(), eval_view(opened.info)
        inference = Inference(model, data, view, settings, opened.info.amp_dtype())
        for batch, logits in inference.batches():
            assert batch.indices is not None
            assert batch.labels is not None
            parts.append((rows[batch.indices.cpu()], batch.labels.cpu(), logits.cpu()))
        skipped |= inference.bad_images.seen
    order = torch.cat([rows for rows, *_ in parts]).argsort()
    index, truth, logits = (torch.cat(values)[order] for values in zip(*parts, strict=True))
    calibration = calibrate(logits.numpy(), truth.numpy())
    calibrated = predictions_of(index, truth, logits / calibration.temperature)
    return Judged(judges, predictions_of(index, truth, logits), calibration, skipped), calibrated, opened


@torch.no_grad()
def mean_model(options: TrainOptions, inputs: Inputs) -> OpenModel:
    """The best model of a training, on the way from its initial weights; what only the last one has is its own."""
    opened = open_model(Path(options.run.out) / "best.safetensors")
    first = inputs.weights(options.model.weights).read()
    for name, value in opened.model.backbone.state_dict().items():
        if name in first and value.is_floating_point():
            value.copy_(torch.lerp(first[name], value, MIX))
    opened.model.to(pick_device(options.run.device))
    return opened


def _save_tuned(output: Path, model: OpenModel, judged: Judged, crossed: bool) -> None:
    """The fine-tuned model as the run of the folder, with the answers that judged it."""
    source, writer, weights = output / "fine-tuned", RunFolder(output), output / "best.safetensors"
    about = describe(source / weights.name)
    assert about is not None
    write_weights(weights, model.model.backbone.state_dict(), about.to_metadata())
    _copy(source, output, leave=(weights.name, "summary.json"))
    config = {**read_run(output).config, "mix": MIX, **({"validation": CROSS_VALIDATED} if crossed else {})}
    writer.write("config.yaml", schema.to_yaml(config))
    save_answers(writer, judged, read_run(source).summary)


def save_answers(writer: RunFolder, judged: Judged, summary: Mapping[str, Any]) -> None:
    """Write the numbers of a model; the summary, which says that the run is finished, comes last."""
    run, answers = writer.read(), judged.answers
    weights, found = run.path / "best.safetensors", answers.summary()
    answers.save(run.path / ANSWERS, stamp(weights, judged.photos), judged.skipped)
    keep_calibration(run, weights, judged.calibration)
    at = {"score": next(iter(found.values())), "epoch": summary["epochs"], "step": summary["updates"]}
    numbers = {f"val_{name}": round(value, 4) for name, value in found.items()}
    row = {"kind": "epoch", "seconds": summary["seconds"], **at, **numbers}
    writer.record(row)
    writer.write("classes.json", plain_json(answers.per_class(judged.photos.class_names)))
    writer.write("summary.json", plain_json({**summary, "best": at, "last": row}))


def _copy(source: Path, output: Path, leave: Sequence[str] = ()) -> None:
    """Make the run in `source` the run of the folder."""
    for name in _KEPT:
        if name not in leave and (source / name).is_file():
            write_atomically(output / name, read_bytes(source / name))


def compared(first: AnyPredictions, last: AnyPredictions) -> tuple[stats.Estimate, str, str]:
    """The second model against the first, over the photos that both have answers for: how many points it has more,
    "better", "worse" or "" (no clear difference), and in words. One with a clearly worse accuracy is never better."""
    _, one, other = np.intersect1d(first.index, last.index, return_indices=True)
    a, b = first.rows(one), last.rows(other)
    where = f"against a linear head that was fitted on the same photos, on {len(a):,} held-out photos"
    if isinstance(a, MultiLabelPredictions) and isinstance(b, MultiLabelPredictions):
        gain = b.difference(a)
        verdict = "" if not gain.clear else "better" if gain.value > 0 else "worse"
        return gain, verdict, f"mAP {_interval(gain, 1, ' points')} {where}"
    assert isinstance(a, Predictions)
    assert isinstance(b, Predictions)
    gain, loss = stats.paired_difference(a.correct, b.correct), stats.mean((b.loss - a.loss).tolist())
    worse = (loss.clear and loss.value > 0) or (gain.clear and gain.value < 0)
    verdict = "worse" if worse else "better" if loss.clear else ""
    return gain, verdict, f"log loss {_interval(loss, 2)}, accuracy {_interval(gain, 1, ' points')} {where}"


def _interval(estimate: stats.Estimate, digits: int, unit: str = "") -> str:
    value = f"{estimate.value:+.{digits}f}{unit}"
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} (95 % interval {estimate.low:+.{digits}f} to {estimate.high:+.{digits}f})"


def saved_answers(path: Path) -> AnyPredictions:
    """Answers of the linear head, whichever kind they are."""
    saved = MultiLabelPredictions.saved(path) or Predictions.saved(path)
    if saved is None:
        raise EverytokenError(f"{path} cannot be read; delete {path.parent.parent} and train again")
    return saved[0]


def words(answers: AnyPredictions, folds: int) -> str:
    """The number that counts, its interval, and on what."""
    estimate = answers.accuracy
    what = "mAP" if isinstance(answers, MultiLabelPredictions) else "accuracy"
    interval = "" if estimate.low is None else f" (95 % interval {estimate.low:.1f} to {estimate.high:.1f})"
    where = f"in {folds}-fold cross-validation of {len(answers):,}" if folds else f"on {len(answers):,} held-out"
    return f"{what} {estimate.value:.1f} %{interval} {where} photos"
