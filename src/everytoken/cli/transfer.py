"""`everytoken transfer`: fine-tune a model on several data sets and tabulate them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from everytoken.cli._parse import parse
from everytoken.machine import default_workers


@dataclass(frozen=True)
class Transfer:
    """Fine-tune on CIFAR-10, CIFAR-100, Flowers-102, Stanford Cars or data of your own, and make one table.

    Flags after -- go to `everytoken finetune` as they are. Stopped, it goes on.

    Examples:
        everytoken transfer runs/deit_small --suite cifar10 cifar100 flowers=flowers cars=cars
        everytoken transfer runs/deit_small --suite cifar10 -- --epochs 100 --batch-size 256
        everytoken transfer runs/plain --compare runs/aligned --suite mine=photos --recipe transfer_cifar10
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """A run folder or a weights file."""
    suite: tuple[str, ...] = ()
    """cifar10, cifar100, flowers, cars, each with =FOLDER for data in folders, or NAME=FOLDER. Default: all but
    flowers, which needs a folder."""
    compare: str = ""
    """A second model, fine-tuned in the same way: side by side, with paired differences."""
    recipe: str = ""
    """Another recipe for all of them; needed for data sets of your own."""
    device: str = ""
    """cpu, cuda, mps; default: the best there is."""
    workers: Annotated[int, tyro.conf.arg(aliases=["-j"])] = field(default_factory=default_workers)
    """Loader processes."""
    format: Literal["text", "csv", "md", "html", "json"] = "text"
    """How the table is printed; all forms are written to --out."""
    out: str = ""
    """Folder for runs and tables. Default: RUN/transfer, else transfer/NAME."""


def main(argv: list[str], prog: str) -> None:
    """Parse, fine-tune, evaluate, print."""
    cut = argv.index("--") if "--" in argv else len(argv)
    options = parse(Transfer, prog, argv[:cut])
    from everytoken.cli import main as run
    from everytoken.engine.distributed import pick_device
    from everytoken.robust.models import slug
    from everytoken.robust.report import table_of_one, table_of_two
    from everytoken.robust.table import FORMATS
    from everytoken.robust.transfer_suite import parse_targets, transfer

    targets = parse_targets(options.suite, options.recipe)
    device = pick_device(options.device)
    words = ["--device", device, "--workers", str(options.workers), *argv[cut + 1 :]]
    own = Path(options.source)
    folder = Path(options.out or (own / "transfer" if own.is_dir() else Path("transfer") / slug(own.name)))
    sources = [options.source, *([options.compare] if options.compare else [])]
    results = []
    for number, source in enumerate(sources):
        place = folder / f"{'AB'[number]}-{slug(Path(source).name)}" if options.compare else folder
        results.append(transfer(source, targets, place, run, words, device, options.workers, lambda *_: None))
    facts = "top-1 after fine-tuning, last checkpoint"
    if len(results) == 1:
        table = table_of_one(options.source, results[0], False, facts)
    else:
        table = table_of_two((sources[0], sources[1]), (results[0], results[1]), False, [facts, "likewise"])
    folder.mkdir(parents=True, exist_ok=True)
    for form in FORMATS:
        (folder / f"table.{'txt' if form == 'text' else form}").write_text(table.write(form) + "\n", encoding="utf-8")
    print(table.write(options.format))
