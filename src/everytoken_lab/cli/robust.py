"""`everytoken robust`: one table of every test set: shifted data, corruptions, attacks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from everytoken_lab.cli._parse import Source, values_of
from everytoken_lab.robust import RobustOptions
from everytoken_lab.schema import say
from everytoken_lab.terminal import Progress


@dataclass(frozen=True, kw_only=True)
class RobustCommand(RobustOptions):
    """Robustness and generalisation in one table. An interrupted run goes on with the first unfinished suite.

    Suites: val, v2, a, r, sketch, real, c (published ImageNet-C), corrupt (made on the fly), attack, or your own names.

    Examples:
        everytoken robust runs/small --suite val=photos/val corrupt --severities 1 3 5
        everytoken robust timm:deit_small_patch16_224 --weights a.pth --suite a=imagenet-a r=imagenet-r v2=imagenetv2
        everytoken robust registry:efficientnet_lite0 --suite val=val attack --attack apgd-ce --eps 1/255 --limit 100
        everytoken robust runs/plain --compare runs/aligned --suite val=val corrupt c=ImageNet-C
    """

    source: Source
    json: bool = False
    """Print JSON instead of a table; both are written to --out."""
    out: str = ""
    """Folder for tables, predictions and logs. Default: RUN/robust, else robust/NAME."""


def main(options: RobustCommand) -> None:
    from everytoken_lab.robust.run import robustness

    with contextlib.ExitStack() as stack:
        bars: dict[str, Progress] = {}

        def progress(suite: str, done: int, total: int, doing: str = "") -> None:
            if suite not in bars:  # a bar for each suite in turn
                stack.close()
                bars[suite] = stack.enter_context(Progress(suite, "images", every=30, keep=False))
            bars[suite](done, total, doing)

        result = robustness(options.source, options.out, progress=progress, **values_of(options, RobustOptions))
    say(result.table.json() if options.json else result.table)
