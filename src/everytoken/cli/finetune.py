"""`everytoken finetune`: `everytoken train` that insists on weights to start from."""

from __future__ import annotations

from dataclasses import dataclass

from everytoken.cli._parse import parse
from everytoken.cli.train import Train, recipe_of, train
from everytoken.errors import EverytokenError


@dataclass(frozen=True)
class Finetune(Train):
    """Continue from trained weights: `everytoken train` with --weights, which are required here.

    Position embeddings are resized, heads for other classes are made anew, and token targets follow the new grid.
    Without a recipe, the papers' settings are used: recipes finetune (other classes) and finetune_resolution.

    Examples:
        everytoken finetune imagenet --weights runs/lvvit_s --img-size 384 --maps maps
        everytoken finetune photos --weights timm:deit_small_patch16_224.fb_in1k --epochs 50
        everytoken finetune photos --weights released.pth.tar --model lvvit_s
    """


OPTIONS = Finetune


def main(argv: list[str], prog: str) -> int:
    """Check that there are weights, train."""
    words = {word.partition("=")[0] for word in argv}
    if not words & {"--weights", "-h", "--help", "--help-all"} and not recipe_of(argv):
        parse(Finetune, prog, argv)  # a misspelt flag is named first
        raise EverytokenError("say what to start from: everytoken finetune DATA --weights RUN|FILE|timm:NAME")
    return train(Finetune, argv, prog)
