"""`everytoken detect train`: train a detector."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import tyro

from everytoken.cli.train import resolve
from everytoken.tasks.detect.options import DetectOptions


@dataclass(frozen=True)
class DetectTrain(DetectOptions):
    """Train a detector on COCO annotations. Run the same command again and it goes on where it stopped.

    Examples:
        everytoken detect train coco --recipe detect_swin_tiny_cascade_1x --initial-checkpoint runs/swin_tiny
        everytoken detect train photos --model resnet50 --pretrained --norm-eval --detector mask -b 2
        torchrun --nproc-per-node 8 -m everytoken detect train coco --recipe detect_swin_tiny_mask_1x -b 2
    """

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = field(default_factory=tuple)
    """NAME=VALUE for inner settings, such as model_kwargs.depth=4; may be repeated."""


def main(argv: list[str], prog: str) -> int:
    """Parse, train."""
    options = resolve(DetectTrain, argv, prog)
    from everytoken.tasks.detect.task import train

    train(DetectOptions(**{f.name: getattr(options, f.name) for f in dataclasses.fields(DetectOptions)}))
    return 0
