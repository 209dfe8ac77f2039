"""`everytoken detect train | eval | predict`: objects, their boxes and masks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from everytoken_lab.cli import Command, call
from everytoken_lab.cli._dense import JsonFlag, PrintFlags, TrainFlags, cell, predict, report, train
from everytoken_lab.cli._parse import parse
from everytoken_lab.dense.detect.options import DetectEval, DetectOptions, DetectPredict


@dataclass(frozen=True)
class Train(TrainFlags, DetectOptions):
    """Train a detector on COCO annotations. Run the same command again to resume it.

    Examples:
        everytoken detect train coco --recipe detect_swin_tiny_cascade_1x --weights runs/swin_tiny
        everytoken detect train photos --weights timm:resnet50.a1_in1k --norm-eval --detector mask -b 2
        torchrun --nproc-per-node 8 -m everytoken_lab detect train coco --recipe detect_swin_tiny_mask_1x -b 2
    """


@dataclass(frozen=True)
class Eval(PrintFlags, DetectEval):
    """Evaluate a detector: AP, AP50 and AP75 of boxes and masks, by COCO's evaluator, and a table of classes.

    It is used as its run was validated, unless --size, --max-size, --score-thresh, --nms-thresh or --max-detections
    say otherwise.

    Examples:
        everytoken detect eval runs/detect coco
        everytoken detect eval runs/detect photos --split all
        everytoken detect eval runs/detect coco --size 640 --results results.json
    """


@dataclass(frozen=True)
class Predict(JsonFlag, DetectPredict):
    """Write, for every image, NAME.objects.jpg; and predictions.json with all boxes and masks (COCO run lengths).

    Images whose names differ in the ending alone keep it (photo.jpg.objects.jpg), and no image is ever overwritten.

    Examples:
        everytoken detect predict runs/detect photo.jpg --out objects
        everytoken detect predict runs/detect photos --out objects --sure 0.7 --size 640
    """


OPTIONS = {"train": Train, "eval": Eval, "predict": Predict}


def main(argv: list[str], prog: str) -> int | None:
    """Call the command named by the first word."""
    commands: dict[str, Command] = {
        "train": (
            "train Mask R-CNN or Cascade Mask R-CNN on a backbone",
            partial(train, Train, DetectOptions, "detect"),
        ),
        "eval": ("COCO's average precision of boxes and masks", _eval),
        "predict": (
            "write pictures of the objects in images, their boxes and masks",
            partial(predict, Predict, "detect"),
        ),
    }
    return call(commands, argv, prog, OPTIONS)


def _eval(argv: list[str], prog: str) -> None:
    options = parse(Eval, prog, argv)
    from everytoken_lab.dense.detect.infer import evaluate

    result = evaluate(options)
    kinds = [kind for kind in ("box", "mask") if f"{kind} AP" in result.numbers]
    names = ("AP", "AP50", "AP75", "APs", "APm", "APl")
    rows = [("", *names), *((kind, *(cell(result.numbers[f"{kind} {name}"]) for name in names)) for kind in kinds)]
    columns = ("class", "objects", *(f"{kind} {name}" for kind in kinds for name in ("AP", "AP50")))
    report(result, options, rows, f"{kinds[-1]} AP", {name: name for name in columns})
