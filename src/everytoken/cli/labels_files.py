"""`everytoken labels verify | import | export`: stores and the files they are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from everytoken._meter import Meter
from everytoken.cli._parse import parse
from everytoken.errors import EverytokenError


@dataclass(frozen=True)
class Verify:
    """Check every byte of a store. Exit code 1 when something is damaged.

    Examples:
        everytoken labels verify maps
    """

    maps: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MAPS")]
    """Folder of the store."""
    list: Annotated[int, tyro.conf.arg(metavar="N")] = 20
    """Damaged images to name per file."""


def verify_main(argv: list[str], prog: str) -> int:
    """Parse, check, print."""
    from everytoken.maps.checks import verify

    options = parse(Verify, prog, argv)
    with Meter("verify", "B") as meter:
        verdict = verify(options.maps, meter)
    say = Console(soft_wrap=True, highlight=False).print
    for problem in verdict.problems:
        say(f"[red]damaged[/red]  {problem.file}: {problem.what}", markup=True)
        _list(problem.keys, options.list)
    state = "" if verdict.complete or not verdict.ok else f" of {verdict.images:,}; the store is not finished"
    count = f"{verdict.maps:,} maps, {verdict.skipped:,} skipped images{state}, {verdict.bytes / 1e6:,.1f} MB"
    if verdict.ok:
        say(f"{options.maps}: intact ({count})", markup=False)
        return 0
    say(
        f"{options.maps}: {len(verdict.problems)} damaged file(s) ({count}).\n"
        "Restore them from a copy; or delete damaged shard-*.npy files and run the command that made the store again: "
        "it makes only those.",
        markup=False,
    )
    return 1


@dataclass(frozen=True)
class Import:
    """Make a store of a folder of released .pt maps: token labeling [2, 5, 18, 18], ReLabel [2, 5, 15, 15].

    Nothing in the files is executed; files that are not what they should be are refused and listed.

    Examples:
        everytoken labels import label_top5_train_nfnet maps --images imagenet/train
        everytoken labels import relabel maps --images imagenet/train
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Folder of the released maps, with one folder per class."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder of the new store."""
    images: Path | None = None
    """Image folder; keys become its images' paths. Without it, keys are the maps' paths without .pt."""
    num_classes: int = 1000
    """Classes of the annotator."""
    class_names: Path | None = None
    """Text file with one class name per line, in order. Default: the class folders, if they are as many."""
    resize_mode: Literal["squash", "center", "letterbox"] | None = None
    """How images went into the annotator. Default: squash for 15x15 (ReLabel), else center (token labeling)."""
    annotator: str = "released maps"
    """What to note as the maps' origin."""


def import_main(argv: list[str], prog: str) -> int:
    """Parse, import, print."""
    from everytoken.maps.legacy import import_legacy

    options = parse(Import, prog, argv)
    names = read_names(options.class_names)
    with Meter("import", "maps") as meter:
        done = import_legacy(
            options.source,
            options.out,
            options.images,
            options.num_classes,
            names,
            options.resize_mode,
            {"name": options.annotator},
            meter,
        )
    print(f"{done.store}: {done.maps:,} maps")
    for note in done.notes:
        print(f"  {note}")
    for count, what in (
        (done.refused, "label files refused"),
        (done.ambiguous, "label files that several images claim; none of them gets it"),
        (done.without_label, "images without a label file"),
        (done.without_image, "label files without an image"),
    ):
        if count:
            print(f"{len(count):,} {what}:")
            _list([f"{name} {count[name]}" for name in count] if isinstance(count, dict) else count, 10)
    if done.refused or done.ambiguous or done.without_label:
        print(f"All images without a map are listed in {done.store / 'skipped.csv'}.")
    return 0


@dataclass(frozen=True)
class Export:
    """Write a store as released .pt maps [2, k, height, width], for other code that reads them.

    Examples:
        everytoken labels export maps pt_maps
    """

    maps: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MAPS")]
    """Folder of the store."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder for the files; new or empty."""
    overwrite: bool = False
    """Replace files in a folder that is not empty."""


def export_main(argv: list[str], prog: str) -> int:
    """Parse, export, print."""
    from everytoken.maps.legacy import export_legacy
    from everytoken.maps.store import Maps

    options = parse(Export, prog, argv)
    store = Maps(options.maps)
    with Meter("export", "maps") as meter:
        notes = export_legacy(store, options.out, options.overwrite, meter)
    print(f"{options.out}: {len(store):,} maps")
    for note in notes:
        print(f"  note: {note}")
    return 0


def read_names(path: Path | None) -> list[str]:
    """Class names from a text file, one per line; none without a file."""
    if path is None:
        return []
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise EverytokenError(
            f"cannot read class names from {path}: {error}. Give a text file, one name per line."
        ) from error


def _list(lines: Iterable[str], limit: int) -> None:
    lines = list(lines)
    for line in lines[:limit]:
        print(f"  {line.encode('utf-8', 'replace').decode()}")
    if len(lines) > limit:
        print(f"  and {len(lines) - limit:,} more")
