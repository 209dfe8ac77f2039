"""Transfer learning: fine-tune one model on several data sets and tabulate them (TL-Align, Table 5).

Each data set has a recipe `transfer_NAME` and a run folder of its own, so a stopped suite goes on where it stopped. The
last checkpoint is evaluated, not the best one: choosing by the test images would flatter the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everytoken.engine.checkpoint import checkpoints_in
from everytoken.errors import EverytokenError, did_you_mean
from everytoken.models.open import find_weights
from everytoken.robust.models import open_subject, slug
from everytoken.robust.run import Result, Settings, Tell, evaluate_suite
from everytoken.robust.suites import Suite

NAMED = {"cifar10": "torchvision:CIFAR10", "cifar100": "torchvision:CIFAR100", "cars": "torchvision:StanfordCars"}
NAMES = ("cifar10", "cifar100", "flowers", "cars")


@dataclass(frozen=True)
class Target:
    """A data set to transfer to: its name, its data, its recipe."""

    name: str
    data: str
    recipe: str


def parse_targets(words: Sequence[str], recipe: str = "") -> list[Target]:
    """`cifar10`, `cars=FOLDER`, `mine=FOLDER` (with a recipe) -> targets; nothing: all that need no folder."""
    out = []
    for word in words or NAMED:
        name, _, data = word.partition("=")
        if not data and name == "flowers":
            raise EverytokenError(
                "flowers needs a folder, flowers=FOLDER, with train/ (the official train and val parts, 2,040 images) "
                "and val/ (the test part): torchvision would train on the first 1,020 only"
            )
        data = data or NAMED.get(name, "")
        if not data:
            raise EverytokenError(f"--suite {word!r}: your own data set is NAME=FOLDER.{did_you_mean(name, NAMES)}")
        if not data.startswith(("torchvision:", "hf:")) and not Path(data).expanduser().exists():
            raise EverytokenError(f"--suite {word}: there is no such folder")
        if name not in NAMES and not recipe:
            raise EverytokenError(f"{name} has no recipe of its own; name one with --recipe, such as transfer_cifar10")
        out.append(Target(name, data, recipe or f"transfer_{name}"))
    if len({target.name for target in out}) < len(out):
        raise EverytokenError("a data set is named twice")
    return out


def transfer(
    source: str, targets: Sequence[Target], folder: Path, run: Callable[[list[str]], int], words: Sequence[str],
    device: str, workers: int, tell: Tell,
) -> list[Result]:  # fmt: skip
    """Fine-tune on each target and evaluate.

    Args:
        source: run folder or weights file.
        folder: for the runs.
        run: the command line, `everytoken.cli.main`.
        words: further flags for `everytoken finetune`.
    """
    out = []
    for target in targets:
        place = folder / slug(target.name)
        command = ["finetune", target.data, "--from", source, "--recipe", target.recipe, "--output", str(place), *words]
        code = run(command)
        if code:
            raise EverytokenError(
                f"fine-tuning on {target.name} stopped (exit code {code}); the same command goes on from there"
            )
        subject = open_subject(str(last_weights(place)), device=device)
        suite = Suite(target.name, "own", target.data)
        settings = Settings(workers=workers, sources=(str(place),))
        out.append(evaluate_suite(subject, suite, settings, place / "transfer", tell))
    return out


def last_weights(place: Path) -> Path:
    """The weights of a run's last checkpoint."""
    steps = checkpoints_in(place / "checkpoints")
    return find_weights(steps[-1]) if steps else find_weights(place)
