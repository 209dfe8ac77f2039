"""`everytoken segment train | eval | predict`: a class for every pixel."""

from __future__ import annotations

from dataclasses import dataclass

from everytoken_lab.cli._parse import values_of
from everytoken_lab.cli.train import TrainFlags
from everytoken_lab.dense.segment import SegmentEval, SegmentOptions, SegmentPredict
from everytoken_lab.terminal import JsonFlag, print_evaluation, print_predictions


@dataclass(frozen=True)
class Train(TrainFlags, SegmentOptions):
    """Train a segmenter. Run the same command again to resume it.

    Examples:
        everytoken segment train ade20k --recipe segment_lvvit_s_upernet --weights runs/lvvit_s
        everytoken segment train photos --weights timm:swin_tiny_patch4_window7_224.ms_in1k --iters 20000 -b 8
        torchrun --nproc-per-node 8 -m everytoken_lab segment train ade20k --recipe segment_swin_tiny_upernet -b 2
    """


@dataclass(frozen=True)
class Eval(JsonFlag, SegmentEval):
    """Evaluate a segmenter: mIoU, mAcc and pixel accuracy from one confusion matrix over the whole set.

    It is used as its run was validated, unless --mode, --stride, --scales or --flip say otherwise.

    Examples:
        everytoken segment eval runs/segment ade20k
        everytoken segment eval runs/segment ade20k --mode slide --scales 0.75 1.0 1.25 1.5 1.75 --flip
        everytoken segment eval runs/segment ade20k --multi-scale
    """


@dataclass(frozen=True)
class Predict(JsonFlag, SegmentPredict):
    """Write, for every image, NAME.png (a palette image whose values are classes) and NAME.overlay.jpg.

    classes.json in the same folder names the classes. Images whose names differ in the ending alone keep it
    (photo.jpg.png), and no image is ever overwritten.

    Examples:
        everytoken segment predict runs/segment photo.jpg --out masks
        everytoken segment predict runs/segment photos --out masks --mode slide --flip
    """


def train(options: Train) -> None:
    from everytoken_lab.dense.segment import task

    task.train(SegmentOptions(**values_of(options, SegmentOptions)), set(options.given), options.set)


def evaluate(options: Eval) -> None:
    from everytoken_lab.dense.segment import task

    result = task.evaluate(options)
    titles = {"mIoU": "mIoU", "mAcc": "mean class accuracy", "aAcc": "pixels right"}
    rows = [{"": title, "%": f"{result.numbers[name]:.2f}"} for name, title in titles.items()]
    print_evaluation(result, options, rows, "IoU")


def predict(options: Predict) -> None:
    from everytoken_lab.dense.segment import task

    print_predictions(task.predict(options), options, "masks", " %")


COMMANDS = {"train": train, "eval": evaluate, "predict": predict}
