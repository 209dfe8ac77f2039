"""`everytoken robust`: one table of every test set: shifted data, corruptions, attacks."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from everytoken.cli._parse import parse
from everytoken.errors import EverytokenError
from everytoken.machine import default_workers
from everytoken.progress import Progress as Meter

if TYPE_CHECKING:
    from everytoken.robust.models import Subject
    from everytoken.robust.run import Result, Settings
    from everytoken.robust.suites import Suite


@dataclass(frozen=True)
class Robust:
    """Robustness and generalisation in one table. Stopped, it goes on: predictions and attack logs are kept in --out.

    Suites: val, v2, a, r, sketch, real, c (published ImageNet-C), corrupt (made on the fly), attack, or your own names.

    Examples:
        everytoken robust runs/small --suite val=photos/val corrupt --severities 1 3 5
        everytoken robust timm:deit_small_patch16_224 --root /data/imagenet-tests
        everytoken robust timm:deit_small_patch16_224 --checkpoint a.pth --suite a=imagenet-a r=imagenet-r v2=imagenetv2
        everytoken robust registry:efficientnet_lite0 --suite val=val attack --attack pgd --eps 1/255 --limit 100
        everytoken robust runs/plain --compare runs/aligned --suite val=val corrupt c=ImageNet-C
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CHECKPOINT|timm:NAME|registry:NAME")]
    """A run folder, a weights file, timm:NAME, or registry:efficientnet_lite0."""
    suite: tuple[str, ...] = ()
    """What to test on: NAME=FOLDER ...; corrupt, attack and real use val's folder if they have none of their own."""
    root: str = ""
    """A folder that holds test sets under their usual names (val, imagenetv2, imagenet-a, imagenet-r, ...)."""
    compare: str = ""
    """A second model: side by side, with paired differences."""
    model: str = ""
    """timm model name, for weights that do not say it themselves."""
    checkpoint: str = ""
    """Weights for timm:NAME, instead of the pretrained ones."""
    compare_checkpoint: str = ""
    """The same for --compare timm:NAME."""
    img_size: int = 0
    """Another input size; 0: the model's own."""
    crop_pct: float = 0.0
    """Part of the resized image that the centre crop shows; 0: the model's own."""
    token_vote: float = 0.0
    """Add this much of the strongest token logit of each class (LV-ViT's evaluation uses 0.5)."""
    limit: int = 0
    """Images per suite, chosen by a hash of their names; 0: all."""
    restrict: bool = False
    """Let the model answer among the data's classes only (a and r always do so with their 200)."""
    real: str = ""
    """ReaL labels (real.json) for the suite `real`; default: timm's copy."""
    corruptions: tuple[str, ...] = ("standard",)
    """standard (15), extra (4), all, noise, blur, weather, digital, or names."""
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Which severities."""
    each_severity: bool = False
    """A row for each severity too."""
    as_stored: bool = True
    """Send generated corruptions through a JPEG of quality 85, as the published images were."""
    frost_textures: str = ""
    """Folder of photographs of frost; without it, textures are drawn."""
    attack: str = "autoattack"
    """autoattack, autoattack-plus, fgsm, pgd, apgd-ce, apgd-dlr, apgd-t, fab, fab-t or square."""
    norm: Literal["linf", "l2"] = "linf"
    """Of the attack's ball."""
    eps: tuple[str, ...] = ()
    """Radii of the ball, such as 4/255 or 0.5, pixels being 0 to 1. Default: 4/255 for linf, 3 for l2."""
    attack_limit: int = 0
    """Images to attack; 0: as --limit."""
    attack_steps: int = 100
    """Steps of APGD and FAB."""
    pgd_steps: int = 20
    """Steps of PGD."""
    queries: int = 5000
    """Queries of Square."""
    targets: int = 9
    """Classes that targeted attacks aim at."""
    batch_size: Annotated[int, tyro.conf.arg(aliases=["-b"])] = 64
    """Images per step."""
    attack_batch_size: int = 16
    """Images that are attacked together."""
    workers: Annotated[int, tyro.conf.arg(aliases=["-j"])] = field(default_factory=default_workers)
    """Loader processes."""
    device: str = ""
    """cpu, cuda, mps; default: the best there is."""
    on_bad_image: Literal["raise", "skip"] = "raise"
    """What to do with an image that cannot be read."""
    format: Literal["text", "csv", "md", "html", "json"] = "text"
    """How the table is printed; all forms are written to --out."""
    out: str = ""
    """Folder for tables, predictions and logs. Default: RUN/robust, else robust/NAME."""


def main(argv: list[str], prog: str) -> None:
    """Parse, evaluate, print."""
    options = parse(Robust, prog, argv)
    from everytoken.engine.distributed import pick_device
    from everytoken.robust import suites as known
    from everytoken.robust.attacks.auto import Budget, attacks
    from everytoken.robust.models import open_subject, slug, throughput
    from everytoken.robust.report import table_of_one, table_of_two
    from everytoken.robust.run import Settings, notes_on
    from everytoken.robust.table import FORMATS

    default = ("4/255",) if options.norm == "linf" else ("3",)
    eps = [radius(text) for text in options.eps or default]
    suites = known.parse(
        options.suite, options.root, corruptions=known.corruption_names(options.corruptions),
        severities=sorted(set(options.severities)), eps=eps,
    )  # fmt: skip
    budget = Budget(options.attack_steps, options.pgd_steps, options.queries, options.targets)
    attacks(options.attack, budget)  # a wrong name is found before hours of evaluation
    settings = Settings(
        options.limit, options.attack_limit, options.batch_size, options.attack_batch_size, options.workers,
        options.as_stored, options.frost_textures, options.restrict, options.real, options.on_bad_image,
        options.attack, options.norm, budget,
        tuple(filter(None, (options.checkpoint or options.source, options.compare_checkpoint or options.compare))),
    )  # fmt: skip
    common: dict[str, Any] = {
        "architecture": options.model, "img_size": options.img_size, "crop_pct": options.crop_pct,
        "token_vote": options.token_vote, "device": pick_device(options.device),
    }  # fmt: skip
    for note in notes_on(suites, settings.sources):
        print(f"note: {note}", file=sys.stderr)
    folder = Path(options.out) if options.out else _folder(options.source, slug)
    sources = [(options.source, options.checkpoint)]
    sources += [(options.compare, options.compare_checkpoint)] if options.compare else []
    names, results, facts = [], [], []
    for source, checkpoint in sources:
        subject = open_subject(source, checkpoint=checkpoint, **common)
        results.append(_evaluate(subject, suites, settings, folder / subject.place))
        names.append(subject.name)
        rate = throughput(subject)
        facts.append(f"{subject.parameters / 1e6:.1f} M parameters, {rate:.0f} images/s on {subject.device}")
    if len(results) == 1:
        table = table_of_one(names[0], results[0], options.each_severity, facts[0])
    else:
        table = table_of_two((names[0], names[1]), (results[0], results[1]), options.each_severity, facts)
    for form in FORMATS:
        suffix = "txt" if form == "text" else form
        (folder / f"table.{suffix}").write_text(table.write(form) + "\n", encoding="utf-8")
    print(table.write(options.format))


def radius(text: str) -> float:
    """'4/255' or '0.5' -> a number above 0."""
    upper, slash, lower = text.partition("/")
    try:
        value = float(upper) / (float(lower) if slash else 1.0)
    except (ValueError, ZeroDivisionError) as error:
        raise EverytokenError(f"--eps takes numbers such as 4/255 or 0.5, not {text!r}") from error
    if not value > 0:
        raise EverytokenError(f"--eps must be above 0, not {text}")
    return value


def _folder(source: str, slug: object) -> Path:
    if Path(source).is_dir():
        return Path(source) / "robust"
    return Path("robust") / slug(source)  # type: ignore[operator]


def _evaluate(subject: Subject, suites: list[Suite], settings: Settings, folder: Path) -> list[Result]:
    """All suites of one model, with progress on the error stream."""
    from everytoken.robust.run import attack_suites, evaluate_suite

    tell = _Progress(subject.name)
    try:
        out = [evaluate_suite(subject, s, settings, folder, tell) for s in suites if s.kind != "attack"]
        attack = [s for s in suites if s.kind == "attack"]
        return out + (attack_suites(subject, attack, settings, folder, tell) if attack else [])
    finally:
        tell.end()


class _Progress:
    """A meter for each suite in turn."""

    def __init__(self, name: str) -> None:
        self.name, self.suite = name, ""
        self.meter: Meter | None = None

    def __call__(self, suite: str, done: int, total: int, doing: str = "") -> None:
        if self.meter is None or suite != self.suite:
            self.end()
            self.suite, self.meter = suite, Meter(f"{self.name}: {suite}", "images", every=30, keep=False)
            self.meter.__enter__()
        self.meter(done, total, doing)

    def end(self) -> None:
        if self.meter is not None:
            self.meter.__exit__()
            self.meter = None
