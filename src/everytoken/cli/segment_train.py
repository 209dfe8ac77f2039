"""`everytoken segment train`: train a segmenter."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import tyro

from everytoken.cli.train import resolve
from everytoken.tasks.segment.options import SegmentOptions


@dataclass(frozen=True)
class SegmentTrain(SegmentOptions):
    """Train a segmenter. Run the same command again and it goes on where it stopped.

    Examples:
        everytoken segment train ade20k --recipe segment_lvvit_s_upernet --initial-checkpoint runs/lvvit_s
        everytoken segment train photos --model swin_tiny_patch4_window7_224 --pretrained --iters 20000 -b 8
        torchrun --nproc-per-node 8 -m everytoken segment train ade20k --recipe segment_swin_tiny_upernet -b 2
    """

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = field(default_factory=tuple)
    """NAME=VALUE for inner settings, such as model_kwargs.depth=4; may be repeated."""


def main(argv: list[str], prog: str) -> int:
    """Parse, train."""
    options = resolve(SegmentTrain, argv, prog)
    from everytoken.tasks.segment.task import train

    train(SegmentOptions(**{f.name: getattr(options, f.name) for f in dataclasses.fields(SegmentOptions)}))
    return 0
