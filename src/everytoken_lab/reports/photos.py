"""Photos for the page: thumbnails of mistakes and of some others, and for the first of them tokens and a mask.

What the tokens say is the best class of every token of the network's input. It comes from the token head where there is
one; a plain model's own class head is asked at every token instead. The mask is that of `everytoken predict --locate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from everytoken.errors import EverytokenError
from everytoken_lab.data.augment import eval_view
from everytoken_lab.data.labels import parse_labels
from everytoken_lab.data.tree import NAMED, find_split
from everytoken_lab.draw import data_address
from everytoken_lab.engine.accuracy import AnyPredictions, MultiLabelPredictions
from everytoken_lab.evaluation import EvalOptions
from everytoken_lab.evaluation.locate import ALIKE, Locator, cell_classes, run_lengths
from everytoken_lab.evaluation.run import Inference, shown_probabilities
from everytoken_lab.maps.summary import sample_positions
from everytoken_lab.reports.predictions import PredictedRun

MISTAKES, OTHERS = 2000, 100  # photos on a page, at most
LARGE, SMALL = 320, 128  # pixels of the long side: of photos with tokens, and of others
MASK = 96  # cells of a mask, in each direction
BATCH = 8


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
    with suppress(RuntimeError, EverytokenError, AttributeError):  # a head that cannot read single cells
        locator = Locator(opened)
        views.append(locator.view)
    for seen, *whole in zip(*(Inference(opened.model, part, view, options).views() for view in views), strict=True):
        answers = opened.model(seen.images)
        sure = shown_probabilities(opened.info, answers.voted(opened.info.token_vote)).amax(-1).tolist()
        rows: list[dict[str, Any]] = [{} if run.run.cross_validated else {"p": round(p, 4)} for p in sure]
        with suppress(RuntimeError, EverytokenError, AttributeError):
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
