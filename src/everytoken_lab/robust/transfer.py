"""Transfer learning: fine-tune one model on several datasets and tabulate them (TL-Align, Table 5).

Each dataset has a recipe `transfer_NAME` and a run folder of its own, so a stopped suite resumes where it stopped. The
last checkpoint is evaluated, not the best one: choosing by the test images would flatter the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.files import make_inside
from everytoken_lab.engine.checkpoint import checkpoints_in
from everytoken_lab.models.open import find_weights
from everytoken_lab.robust import RobustOptions
from everytoken_lab.robust.run import SuiteRunner, slug
from everytoken_lab.robust.suites import Suite, check_folder
from everytoken_lab.robust.tables import Result, Table, make_table

NAMED = {"cifar10": "torchvision:CIFAR10", "cifar100": "torchvision:CIFAR100", "cars": "torchvision:StanfordCars"}
NAMES = ("cifar10", "cifar100", "flowers", "cars")


@dataclass(frozen=True)
class Target:
    """A dataset to transfer to: its name, its data, its recipe."""

    name: str
    data: str
    recipe: str


def parse_targets(words: Sequence[str], recipe: str = "") -> list[Target]:
    """`cifar10`, `cars=FOLDER`, `mine=FOLDER` (with a recipe) -> targets; nothing: all that need no folder."""
    targets = []
    for word in words or NAMED:
        name, _, data = word.partition("=")
        if not data and name == "flowers":
            raise EverytokenError(
                "flowers needs a folder, flowers=FOLDER, with train/ (the official train and val parts, 2,040 images) "
                "and val/ (the test part): torchvision would train on the first 1,020 only"
            )
        data = data or NAMED.get(name, "")
        if not data:
            raise EverytokenError(f"suite {word!r}: your own dataset is NAME=FOLDER.{did_you_mean(name, NAMES)}")
        check_folder(name, data)
        if name not in NAMES and not recipe:
            raise EverytokenError(f"{name} has no recipe of its own; name one (recipe), such as transfer_cifar10")
        targets.append(Target(name, data, recipe or f"transfer_{name}"))
    if len({target.name for target in targets}) < len(targets):
        raise EverytokenError("a dataset is named twice")
    return targets


def transfer(
    sources: Sequence[str],
    targets: Sequence[Target],
    folder: Path,
    finetune: Callable[[str, Target, Path], None],
    options: RobustOptions,
) -> Table:
    """Fine-tune one model, or two, on each target with `finetune` (source, target, run folder) and evaluate."""
    results: list[list[Result]] = []
    for letter, source in zip("AB", sources, strict=False):
        base = f"{letter}-{slug(Path(source).name)}" if len(sources) > 1 else "."
        results.append([])
        for target in targets:
            run = make_inside(folder, Path(base, slug(target.name)))
            finetune(source, target, run)
            steps = checkpoints_in(run / "checkpoints")
            weights = str(find_weights(steps[-1] if steps else run))
            runner = SuiteRunner(weights, options, run / "transfer", (str(run),))
            results[-1].append(runner.evaluate(Suite(target.name, "own", target.data)))
    table = make_table([f"{source}, fine-tuned, last checkpoint" for source in sources], results)
    table.write(folder)
    return table
