"""What the best weights of a run answer about its validation images, and photos of it for the page.

The validation images are those of the training run: found from its configuration, `--val-split` included. What was
predicted is kept in RUN/report-predictions.npz with a note of the weights and images it belongs to, and is used again
when both are unchanged.

Photos are thumbnails of mistakes and of some others, the first of them with tokens and a mask. What the tokens say is
the best class of every token of the network's input. It comes from the token head where there is one; a plain model's
own class head is asked at every token instead. The mask is that of `everytoken predict --locate`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from everytoken.errors import EverytokenError
from everytoken_lab.calibration import Calibration
from everytoken_lab.classes import shown_name
from everytoken_lab.data.augment import eval_view
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.data.labels import parse_labels
from everytoken_lab.data.tree import NAMED, find_split
from everytoken_lab.draw import data_address
from everytoken_lab.engine.accuracy import AnyPredictions, MultiLabelPredictions, Predictions
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.evaluation import EvalOptions
from everytoken_lab.evaluation.locate import ALIKE, Locator, cell_classes, run_lengths
from everytoken_lab.evaluation.run import (
    ANSWERS,
    FEWEST,
    Inference,
    evaluate,
    keep_calibration,
    read_calibration,
    shown_probabilities,
    stamp,
    validation_set,
)
from everytoken_lab.maps.summary import sample_positions
from everytoken_lab.models.description import describe
from everytoken_lab.models.open import OpenModel, find_weights, open_model

MISTAKES, OTHERS = 2000, 100  # photos on a page, at most
LARGE, SMALL = 320, 128  # pixels of the long side: of photos with tokens, and of others
MASK = 96  # cells of a mask, in each direction
BATCH = 8


@dataclass(frozen=True)
class PredictedRun:
    """Predictions of one run on its validation images."""

    run: Run
    predictions: AnyPredictions
    class_names: list[str]
    keys: list[str]  # of the images, by `predictions.index`
    data: DataSet
    skipped: dict[str, str]  # unreadable images, key -> reason
    weights: Path
    calibration: Calibration | None  # None of too few images
    opened: OpenModel | None = None  # if it had to be opened for the predictions
    group: str = ""  # name of the group that it stands for

    def model(self) -> OpenModel:
        """The model with its calibration."""
        opened = self.opened or open_model(self.weights)
        return replace(opened, info=replace(opened.info, calibration=self.calibration))

    def same_images(self, other: PredictedRun) -> bool:
        """Whether two runs answered the same images, in the same classes."""
        index = self.predictions.index, other.predictions.index
        return self.keys == other.keys and self.class_names == other.class_names and np.array_equal(*index)

    @property
    def names(self) -> list[str]:
        """Of the classes, for people."""
        return [shown_name(name) for name in self.class_names]


def predict_run(
    run: Run,
    device: str,
    data: str = "",
    workers: int = 0,
    tell: Callable[[int, int], None] = lambda done, total: None,
    images: DataSet | None = None,
) -> PredictedRun:
    """Evaluate the best weights of a run, or read what the last report found; `images`: those for validation, if open.

    Raises:
        EverytokenError: there are no weights or no images, or they do not fit; the message says which.
    """
    images = validation_set(run, data) if images is None else images
    weights, keys = find_weights(run.path), list(images.keys())
    note, about = stamp(weights, images), describe(weights)
    kind = MultiLabelPredictions if about is not None and about.multi_label else Predictions
    saved: tuple[AnyPredictions, dict[str, str]] | None = kind.saved(run.path / ANSWERS, note)
    calibration = read_calibration(run, weights)
    enough = len(images) >= FEWEST
    if saved is not None and about is not None and about.class_names and (calibration is not None or not enough):
        predictions, skipped = saved
        return PredictedRun(run, predictions, list(about.class_names), keys, images, skipped, weights, calibration)
    if run.cross_validated:
        raise EverytokenError(
            f"{run.name} was trained on all of its images, and its out-of-fold predictions ({ANSWERS}) are missing, or "
            "of other images or weights"
        )
    opened = open_model(weights)
    how = {"device": device, "workers": workers, "on_bad_image": "skip"}
    result = evaluate(opened, images, progress=tell, calibrates=enough, **how)
    if result.calibration is not None:
        keep_calibration(run, weights, result.calibration)
    with contextlib.suppress(OSError):  # a run folder that cannot be written is only slower next time
        result.predictions.save(run.path / ANSWERS, note, result.skipped)
    return PredictedRun(
        run, result.predictions, result.class_names, keys, images, result.skipped, weights, result.calibration, opened
    )


# -- photos ------------------------------------------------------------------------------------------------------------


def doubt(predictions: AnyPredictions) -> np.ndarray:
    """[N] by how much the answer's logit is above the label's; multi-label: that of the worst decision."""
    if isinstance(predictions, MultiLabelPredictions):
        values: np.ndarray = -np.where(predictions.label, predictions.logits, -predictions.logits).min(1)
        return values
    return np.log(predictions.confidence) + predictions.loss


def choose(predicted: Sequence[PredictedRun], count: int) -> tuple[list[int], set[int]]:
    """Positions in the predictions: photos to show, the most doubtful labels first, and which of them get tokens.

    Mistakes are those of any run; photos that all runs get right are evenly spread over their confidence. Tokens are
    for `count` photos, a quarter of which are right, for a fair impression.
    """
    right = np.all([p.predictions.correct for p in predicted], axis=0)
    worst = np.max([doubt(p.predictions) for p in predicted], axis=0)
    sure = np.mean([p.predictions.confidence for p in predicted], axis=0)
    mistakes = np.flatnonzero(~right)[np.argsort(-worst[~right], kind="stable")][:MISTAKES].tolist()
    fine = np.flatnonzero(right)[np.argsort(-sure[right], kind="stable")]
    others = fine[sample_positions(len(fine), OTHERS)].tolist()
    looked = mistakes[: count - count // 4]
    looked += [others[i] for i in sample_positions(len(others), count - len(looked))]
    return mistakes + others, set(looked)


def labelling(predicted: PredictedRun, data: str = "") -> dict[str, Any]:
    """What corrections of labels need: the data, its classes, the split of the photos, and what the run has corrected.

    The split is named only where validation photos have a folder of their own: held-out ones are drawn again.
    """
    run, data = predicted.run, data or predicted.run.own_data()
    divided = not run.cross_validated and not run.config.get("val_split") and find_split(data, "val") is not None
    file = run.place("corrections")
    rows = () if file is None else parse_labels(file, corrections=True)
    earlier = [(row.path, ";".join(row.labels) or ";" * row.several, row.split) for row in rows]
    facts = {"data": data, "split": "val" if divided or data.startswith(NAMED) else "", "earlier": earlier}
    return facts | {"names": predicted.class_names, "multi_label": predicted.data.multi_label}


def photos(
    predicted: Sequence[PredictedRun], count: int, device: str, split: str, tell: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """What the page shows of photos that all runs have answers for; `count` of them get tokens and masks."""
    base = predicted[0]
    chosen, detailed = choose(predicted, count)
    indices = {i: int(base.predictions.index[i]) for i in chosen}
    rows: dict[int, dict[str, Any]] = {}
    for done, i in enumerate(chosen):
        tell(done, len(chosen))
        image = base.data.load(indices[i])
        picture = data_address(image, LARGE if i in detailed else SMALL)
        facts = {"key": base.keys[indices[i]], "split": split, "size": image.size, "picture": picture}
        answers = [_answer(run, i) for run in predicted]
        rows[i] = {**facts, "label": _numbers(base.predictions.label[i]), "answers": answers}
    looked = [i for i in chosen if i in detailed]
    for number, run in enumerate(predicted):
        for i, facts in zip(looked, _looks(run, [indices[i] for i in looked], device), strict=False):
            rows[i]["answers"][number] |= facts
    return list(rows.values())


def _answer(run: PredictedRun, i: int) -> dict[str, Any]:
    """A run's answer about a photo; `times`: how many times likelier it is than the label."""
    p, gap = run.predictions, float(doubt(run.predictions.rows(np.array([i])))[0])
    answer = p.logits[i] > 0 if isinstance(p, MultiLabelPredictions) else p.top[i, 0]
    facts = {"top": _numbers(answer), "right": bool(p.correct[i]), "doubt": round(gap, 4)}
    if run.calibration is not None and not p.correct[i]:
        facts["times"] = float(np.exp(min(gap / run.calibration.temperature, 12)))
    return {**facts, "sure": round(float(p.confidence[i]), 4)}


def _numbers(label: np.ndarray) -> list[int]:
    """Class numbers of a label or an answer: one, or those of a multi-label row."""
    found: list[int] = np.flatnonzero(label).tolist() if np.ndim(label) else [int(label)]
    return found


@torch.no_grad()
def _looks(run: PredictedRun, indices: Sequence[int], device: str) -> Iterator[dict[str, Any]]:
    """Of photos of the data: the probability that `predict` gives, tokens, and the mask; as far as the model can."""
    opened, part = run.model(), run.data.subset(indices)
    opened.model.to(device)
    views, options = [eval_view(opened.info)], EvalOptions(batch_size=BATCH, workers=0)
    locator = None
    with contextlib.suppress(RuntimeError, EverytokenError, AttributeError):  # a head that cannot read single cells
        locator = Locator(opened)
        views.append(locator.view)
    for seen, *whole in zip(*(Inference(opened.model, part, view, options).views() for view in views), strict=True):
        answers = opened.model(seen.images)
        sure = shown_probabilities(opened.info, answers.voted(opened.info.token_vote)).amax(-1).tolist()
        rows: list[dict[str, Any]] = [{} if run.run.cross_validated else {"p": round(p, 4)} for p in sure]
        with contextlib.suppress(RuntimeError, EverytokenError, AttributeError):
            cells = cell_classes(opened, seen.images)
            for row, top, confidence, place in zip(rows, cells.top, cells.confidence, seen.placement, strict=True):
                (width, _, x), (_, height, y) = place.tolist()
                percent = (100 * confidence).round().astype(int).ravel().tolist()
                row["tokens"] = {"columns": top.shape[1], "top": top.ravel().tolist(), "percent": percent}
                row["tokens"] |= {"area": [x, y, x + width, y + height], "source": cells.source}
                row["tokens"]["names"] = {c: cells.names[c] for c in np.unique(top).tolist()}
            likely, classes = answers.logits.softmax(-1).topk(min(ALIKE, answers.logits.shape[-1]))
            located = locator.locate(whole[0].images, classes, likely, [(MASK, MASK)] * len(rows)) if locator else []
            for row, location in zip(rows, located, strict=False):
                if location:
                    row["mask"] = run_lengths(location.mask().ravel())
        yield from rows
