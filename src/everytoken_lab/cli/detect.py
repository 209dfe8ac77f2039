"""`everytoken detect train | eval | predict`: objects, their boxes and masks."""

from __future__ import annotations

from dataclasses import dataclass

from everytoken_lab.cli._parse import values_of
from everytoken_lab.cli.train import TrainFlags
from everytoken_lab.dense.detect import DetectEval, DetectOptions, DetectPredict
from everytoken_lab.terminal import JsonFlag, known, print_evaluation, print_predictions


@dataclass(frozen=True)
class Train(TrainFlags, DetectOptions):
    """Train a detector on COCO annotations. Run the same command again to resume it.

    Examples:
        everytoken detect train coco --recipe detect_swin_tiny_cascade_1x --weights runs/swin_tiny
        everytoken detect train photos --weights timm:resnet50.a1_in1k --norm-eval --detector mask -b 2
        torchrun --nproc-per-node 8 -m everytoken_lab detect train coco --recipe detect_swin_tiny_mask_1x -b 2
    """


@dataclass(frozen=True)
class Eval(JsonFlag, DetectEval):
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


def train(options: Train) -> None:
    from everytoken_lab.dense.detect import task

    task.train(DetectOptions(**values_of(options, DetectOptions)), set(options.given), options.set)


def evaluate(options: Eval) -> None:
    from everytoken_lab.dense.detect import task

    result = task.evaluate(options)
    kinds = [kind for kind in ("box", "mask") if f"{kind} AP" in result.numbers]
    rows = [{"": kind, **{n: known(result.numbers[f"{kind} {n}"]) for n in task.NAMES}} for kind in kinds]
    print_evaluation(result, options, rows, f"{kinds[-1]} AP")


def predict(options: Predict) -> None:
    from everytoken_lab.dense.detect import task

    print_predictions(task.predict(options), options, "objects")


COMMANDS = {"train": train, "eval": evaluate, "predict": predict}
