"""`everytoken segment train | eval | predict`: a class for every pixel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from everytoken_lab.cli import Command, call
from everytoken_lab.cli._dense import JsonFlag, PrintFlags, TrainFlags, predict, report, train
from everytoken_lab.cli._parse import parse
from everytoken_lab.dense.segment.options import SegmentEval, SegmentOptions, SegmentPredict


@dataclass(frozen=True)
class Train(TrainFlags, SegmentOptions):
    """Train a segmenter. Run the same command again to resume it.

    Examples:
        everytoken segment train ade20k --recipe segment_lvvit_s_upernet --weights runs/lvvit_s
        everytoken segment train photos --weights timm:swin_tiny_patch4_window7_224.ms_in1k --iters 20000 -b 8
        torchrun --nproc-per-node 8 -m everytoken_lab segment train ade20k --recipe segment_swin_tiny_upernet -b 2
    """


@dataclass(frozen=True)
class Eval(PrintFlags, SegmentEval):
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


OPTIONS = {"train": Train, "eval": Eval, "predict": Predict}


def main(argv: list[str], prog: str) -> int | None:
    """Call the command named by the first word."""
    commands: dict[str, Command] = {
        "train": ("train a segmenter on a backbone", partial(train, Train, SegmentOptions, "segment")),
        "eval": ("mIoU, mAcc and pixel accuracy of a segmenter", _eval),
        "predict": ("write masks and pictures of images", partial(predict, Predict, "segment")),
    }
    return call(commands, argv, prog, OPTIONS)


def _eval(argv: list[str], prog: str) -> None:
    options = parse(Eval, prog, argv)
    from everytoken_lab.dense.segment.infer import evaluate

    result = evaluate(options)
    titles = {"mIoU": "mIoU", "mAcc": "mean class accuracy", "aAcc": "pixels right"}
    rows = [("", "%"), *((title, f"{result.numbers[name]:.2f}") for name, title in titles.items())]
    columns = {"class": "class", "IoU": "IoU", "accuracy": "accuracy", "pixels %": "pixels", "taken for": "taken for"}
    report(result, options, rows, "IoU", columns)
