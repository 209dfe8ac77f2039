"""`everytoken eval`: accuracy of a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from everytoken.errors import EverytokenError
from everytoken.files import plain_json, write_atomically
from everytoken_lab.cli._parse import Source, check_source, values_of
from everytoken_lab.evaluation import EvalOptions
from everytoken_lab.schema import say
from everytoken_lab.terminal import Progress, print_classes, print_facts, print_notes

if TYPE_CHECKING:
    from everytoken_lab.evaluation.run import Evaluation

_LABELS = {  # of numbers in percent
    "top1": "top-1",
    "top5": "top-5",
    "ece": "calibration error, uncalibrated",
    "mAP": "mAP",
    "f1": "F1 at 0.5",
    "real_top1": "ReaL top-1",
    "real_top5": "ReaL top-5",
}


@dataclass(frozen=True, kw_only=True)
class EvalCommand(EvalOptions):
    """Evaluate a trained model: top-1, top-5, loss, calibration, a table of classes, throughput; mAP where
    images have several labels.

    Examples:
        everytoken eval runs/photos
        everytoken eval runs/photos more-photos
        everytoken eval lvvit_s.pth.tar imagenet/val --model lvvit_s --token-vote 0.5 --real real.json
        everytoken eval timm:deit_tiny_patch16_224 imagenet/val
    """

    source: Source
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[DATA]")] = ""
    """Images: a folder with val/, a folder of class folders, tar shards, torchvision:NAME. Default: the images
    that the run held out."""
    out: str = ""
    """Write predictions to OUT.csv and numbers to OUT.json."""
    json: bool = False
    """Print JSON instead of tables."""


def main(options: EvalCommand) -> None:
    check_source(options.source)
    from everytoken_lab.evaluation.run import evaluate

    data = options.data or _own_data(options.source)
    with Progress("eval", "images") as progress:
        result = evaluate(options.source, data, progress=progress, **values_of(options, EvalOptions))
    print_notes(result.notes)
    if options.out:
        stem = options.out.removesuffix(".json").removesuffix(".csv")
        result.to_csv(f"{stem}.csv")
        content = plain_json({**result.numbers, "classes": result.per_class()})
        write_atomically(Path(f"{stem}.json"), content.encode())
    if options.json:
        say(plain_json(result.numbers))
    else:
        _print(result, f"{options.source} on {data}")


def _own_data(source: str) -> str:
    """The data of a run."""
    from everytoken_lab.engine.run_folder import run_of

    run = run_of(source)
    if run is None:
        raise EverytokenError(f"name the images: {source} is no run folder that says what it was trained on")
    if run.cross_validated:
        raise EverytokenError(
            f"{source} was trained on all of its photos, so they cannot tell how good it is; cross-validation said "
            f"{run.metric} {run.score:.1f} %. Name photos that it has not seen"
        )
    return run.own_data()


def _print(result: Evaluation, title: str) -> None:
    from everytoken_lab.classes import shown_name

    facts = {}
    for key, value in result.numbers.items():
        if key == "ece" and len(result.predictions) < 500:  # says more about chance
            continue
        text = f"{value:.2f} %" if key in _LABELS else f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3f}"
        if key in ("top1", "mAP"):
            text += f"  (95 % interval {result.top1.low:.2f} to {result.top1.high:.2f})"
        facts[_LABELS.get(key, key.replace("_per_second", "/s"))] = text
    if result.skipped:
        facts["unreadable, left out"] = str(len(result.skipped))
    print_facts(facts, title)
    rows = [{n: shown_name(v) if isinstance(v, str) else v for n, v in row.items()} for row in result.per_class()]
    print_classes(rows, "AP" if "AP" in rows[0] else "recall")
