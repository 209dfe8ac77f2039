"""Judge the fine-tuned model of training without a recipe against the linear head, and keep the better one.

Log loss decides, which tells models apart with fewer photos than counting right answers does; mAP in multi-label data.
What is judged and kept is a mean with the initial weights, which keeps more of what the backbone knew (Wortsman et al.,
"Robust fine-tuning of zero-shot models", 2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everytoken.errors import EverytokenError
from everytoken.files import plain_json, read_bytes, write_atomically
from everytoken_lab import schema, stats
from everytoken_lab.annotators.linear import FOLDS
from everytoken_lab.calibration import Calibration, calibrate
from everytoken_lab.data.augment import eval_view
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.engine.accuracy import AnyPredictions, MultiLabelPredictions, Predictions, predictions_of
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.engine.distributed import pick_device
from everytoken_lab.engine.options import TrainOptions
from everytoken_lab.engine.recipe import apply
from everytoken_lab.engine.run_folder import CROSS_VALIDATED, RunFolder, read_run
from everytoken_lab.evaluation.run import EvalOptions, Inference, Voter, keep_calibration
from everytoken_lab.models.description import describe
from everytoken_lab.models.open import OpenModel, open_model
from everytoken_lab.reports.predictions import CACHE, stamp
from everytoken_lab.training.classify import train_with
from everytoken_lab.training.inputs import Inputs

MIX = 0.75
"""How far to go from the initial weights to the fine-tuned ones: 0.5 was better on Caltech-101, 1 on Grocery Store."""
RIVAL = "on-held-out.npz"
"""In linear/: answers of heads that were fitted on the photos that the fine-tuned model is trained on."""
_KEPT = (
    *("best.safetensors", "best.token_head.safetensors", "config.yaml", "config.json", "environment.json"),
    *("metrics.jsonl", "classes.json", "batch.jpg", CACHE, "calibration.json", "summary.json"),
)  # the summary last: it says that the run is finished


def trainings(inputs: Inputs, crossed: bool) -> list[tuple[str, Inputs]]:
    """What judges fine-tuning: one training if there are validation photos, else one on each half of the photos."""
    return [("-1", inputs.only("train")), ("-2", inputs.only("held out"))] if crossed else [("", inputs.only("train"))]


def training(options: TrainOptions, output: Path, which: str = "") -> TrainOptions:
    """One of the trainings: -1 and -2 on half of the photos, "" on all that there are to train on."""
    values = {"weights": str(output / f"start{which}.safetensors")}
    values["out"] = str(output / (f"fold{which}" if which else "fine-tuned"))
    if options.maps and Path(options.maps).parent == output:
        values["maps"] = str(output / f"maps{which}")
    return apply(options, values, "auto")


def keep(output: Path, tuning: TrainOptions | None, inputs: Inputs) -> dict[str, Any]:
    """Make the better model the result of the run; what is kept, its number and what it is a number of.

    Args:
        tuning: options of the fine-tuning, if there was one.
    """
    crossed = read_run(output / "linear").cross_validated
    answers, folds = saved_answers(output / "linear" / CACHE), FOLDS if crossed else 0
    result: dict[str, Any] = {"kept": "linear", "linear": answers.accuracy.value}
    text, verdict = "Kept: the linear head", ""
    if tuning is not None:
        judged = judge(output, tuning, inputs, crossed)
        gain, verdict, how = compared(saved_answers(output / "linear" / RIVAL), judged.calibrated)
        result |= {"fine-tuned": judged.answers.accuracy.value, "gain": [gain.value, gain.low, gain.high]}
        text += f". Fine-tuning {'made it worse' if verdict == 'worse' else 'made no clear difference'}: {how}"
    if tuning is None or verdict != "better":
        _copy(output / "linear", output)
    else:
        answers, folds = judged.answers, 2 if crossed else 0
        text = f"Kept: the fine-tuned model, which is better: {how}"
        result |= {"kept": "fine-tuned"}
        model, own = judged.model, training(tuning, output)
        if crossed:
            train_with(own, inputs.only("all"), reported=False)
            model = mean_model(own, inputs)
        _save_tuned(output, model, judged, crossed)
    metric = "mAP" if isinstance(answers, MultiLabelPredictions) else "top1"
    saw = f"; models of cross-validation saw {100 - 100 // folds} % of the photos, this one all" if folds else ""
    result |= {"judged on": len(answers), "cross-validated": crossed}
    result |= {metric: answers.accuracy.value, "interval": [answers.accuracy.low, answers.accuracy.high]}
    return {**result, "text": f"{text}. Expected on new photos: {words(answers, folds)}{saw}."}


@dataclass(frozen=True)
class Judged:
    """Answers of fine-tuned models for photos that they were not trained on; the last of these models."""

    photos: DataSet
    answers: AnyPredictions
    calibrated: AnyPredictions
    calibration: Calibration
    skipped: dict[str, str]
    model: OpenModel


def judges_of(options: TrainOptions, inputs: Inputs, crossed: bool) -> DataSet:
    """The photos that judge fine-tuning."""
    return inputs.undivided(options) if crossed else inputs.splits(options)[1]


def judge(output: Path, options: TrainOptions, inputs: Inputs, crossed: bool) -> Judged:
    """Validation photos by the fine-tuned model; without them, each half of the photos by the model of the other."""
    judges = judges_of(options, inputs, crossed)
    parts: list[tuple[torch.Tensor, ...]] = []
    skipped: dict[str, str] = {}
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
    index, truth, logits = (torch.cat(values) for values in zip(*parts, strict=True))
    order = index.argsort()
    index, truth, logits = index[order], truth[order], logits[order]
    calibration = calibrate(logits.numpy(), truth.numpy())
    calibrated = predictions_of(index, truth, logits / calibration.temperature)
    return Judged(judges, predictions_of(index, truth, logits), calibrated, calibration, skipped, opened)


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
    save_answers(writer, judged.answers, judged.photos, judged.skipped, judged.calibration, read_run(source).summary)


def save_answers(
    writer: RunFolder,
    answers: AnyPredictions,
    photos: DataSet,
    skipped: Mapping[str, str],
    calibration: Calibration,
    summary: Mapping[str, Any],
) -> None:
    """Write the numbers of a model; the summary, which says that the run is finished, comes last."""
    run = writer.read()
    weights, found = run.path / "best.safetensors", answers.summary()
    answers.save(run.path / CACHE, stamp(weights, photos), skipped)
    keep_calibration(run, weights, calibration)
    at = {"score": next(iter(found.values())), "epoch": summary["epochs"], "step": summary["updates"]}
    numbers = {f"val_{name}": round(value, 4) for name, value in found.items()}
    row = {"kind": "epoch", "seconds": summary["seconds"], **at, **numbers}
    writer.record(row)
    writer.write("classes.json", plain_json(answers.per_class(photos.class_names)))
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
    text = f"log loss {_interval(loss, 2)}, accuracy {_interval(gain, 1, ' points')} {where}"
    return gain, verdict, text


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
