"""`everytoken transfer`: fine-tune a model on several datasets and tabulate them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import tyro

from everytoken.errors import EverytokenError
from everytoken_lab.cli._parse import Source, parse
from everytoken_lab.machine import Workers, default_workers
from everytoken_lab.schema import say

if TYPE_CHECKING:
    from everytoken_lab.robust.transfer import Target


@dataclass(frozen=True)
class TransferCommand:
    """Fine-tune on CIFAR-10, CIFAR-100, Flowers-102, Stanford Cars or your own data, and make one table.

    Flags after -- go to `everytoken train`, which does it with --weights. An interrupted run resumes.

    Examples:
        everytoken transfer runs/deit_small --suite cifar10 cifar100 flowers=flowers cars=cars
        everytoken transfer timm:deit_small_patch16_224.fb_in1k --suite cifar10 -- --epochs 100 --batch-size 256
        everytoken transfer runs/plain --compare runs/aligned --suite mine=photos --recipe transfer_cifar10
    """

    source: Source
    suite: tuple[str, ...] = ()
    """cifar10, cifar100, flowers, cars, each with =FOLDER for data in folders, or NAME=FOLDER. Default: all but
    flowers, which needs a folder."""
    compare: str = ""
    """A second model, fine-tuned in the same way, to compare with by paired differences."""
    recipe: str = ""
    """Another recipe for all of them; required for your own datasets."""
    device: str = ""
    """cpu, cuda, mps; default: the best available."""
    workers: Workers = field(default_factory=default_workers)
    """Loader processes."""
    json: bool = False
    """Print JSON instead of a table; both are written to --out."""
    out: str = ""
    """Folder for runs and tables. Default: RUN/transfer, else transfer/NAME."""
    train_flags: Annotated[tuple[str, ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    """What stands behind --."""

    @classmethod
    def read(cls, argv: list[str], prog: str) -> Self:
        """The flags before --, and the words behind it."""
        cut = argv.index("--") if "--" in argv else len(argv)
        return replace(parse(cls, prog, argv[:cut]), train_flags=tuple(argv[cut + 1 :]))


def main(options: TransferCommand) -> None:
    from everytoken_lab.cli import main as run
    from everytoken_lab.engine.distributed import pick_device
    from everytoken_lab.robust import RobustOptions
    from everytoken_lab.robust.run import default_folder
    from everytoken_lab.robust.transfer import parse_targets, transfer

    device = pick_device(options.device)
    flags = ["--device", device, "--workers", str(options.workers), *options.train_flags]

    def finetune(source: str, target: Target, folder: Path) -> None:
        start = ["train", target.data, "--weights", source, "--recipe", target.recipe, "--out", str(folder)]
        if code := run([*start, *flags]):
            raise EverytokenError(f"fine-tuning on {target.name} stopped (code {code}); the same command resumes it")

    sources = [options.source, *([options.compare] if options.compare else [])]
    targets = parse_targets(options.suite, options.recipe)
    folder = Path(options.out) if options.out else default_folder(options.source, "transfer")
    table = transfer(sources, targets, folder, finetune, RobustOptions(workers=options.workers, device=device))
    say(table.json() if options.json else table)
