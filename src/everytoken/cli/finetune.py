"""`everytoken finetune`: continue from trained weights, at another resolution or on other classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from everytoken.cli._parse import values_of
from everytoken.cli.train import Train, resolve, start
from everytoken.engine.options import TrainOptions
from everytoken.errors import EverytokenError


@dataclass(frozen=True)
class Finetune(Train):
    """Continue from trained weights: at a larger resolution, or on other classes (transfer).

    Position embeddings are resized, heads for other classes are made anew, and token targets follow the new grid.
    Without a recipe, the papers' settings are used: AdamW, a constant lr of 5e-6, weight decay 1e-8, 30 epochs; on
    other classes lr 5e-4 and weight decay 0.05.

    Examples:
        everytoken finetune imagenet --from runs/lvvit_s --img-size 384 --maps maps
        everytoken finetune photos --from runs/lvvit_s --epochs 50
        everytoken finetune photos --from released.pth.tar --model lvvit_s
    """

    source: Annotated[str, tyro.conf.arg(name="from", metavar="RUN|CHECKPOINT")] = ""
    """A run folder or a weights file (safetensors, or another project's .pth, loaded with weights_only)."""


def main(argv: list[str], prog: str) -> int:
    """Parse, fill in what fine-tuning means, train."""
    options = resolve(Finetune, argv, prog)
    if not options.source:
        raise EverytokenError("say what to start from: everytoken finetune DATA --from RUN|CHECKPOINT")
    from everytoken.engine.finetune import finetune_options

    plain = TrainOptions(**values_of(options, TrainOptions))
    given = {word[2:].split("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return start(finetune_options(plain, options.source, given, options.set), options.dry_run)
