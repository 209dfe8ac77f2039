"""Test sets by name: what the user typed becomes a flat list of things to evaluate.

val=FOLDER        class folders; `corrupt`, `attack` and `real` use them if they are given without a folder
v2=FOLDER         one variant of ImageNet-V2, or the folder that holds all three
a= r= sketch=     ImageNet-A, -R (200 classes, logits masked) and -Sketch
real=FOLDER       ImageNet's validation images, judged by ReaL labels
c=FOLDER          the published ImageNet-C: CORRUPTION/SEVERITY/CLASS, perhaps below noise/, blur/, ...
corrupt[=FOLDER]  the same corruptions, made on the fly
attack[=FOLDER]   adversarial attacks
NAME=FOLDER       any other class folders
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everytoken.errors import EverytokenError, did_you_mean
from everytoken_lab.data.tree import dataset_path
from everytoken_lab.robust.corruptions import CORRUPTIONS, GROUPS, SEVERITIES

KINDS = ("val", "v2", "a", "r", "sketch", "real", "c", "corrupt", "attack")
FROM_VAL = ("real", "corrupt", "attack")
V2 = ("matched-frequency", "threshold0.7", "top-images")


@dataclass(frozen=True)
class Suite:
    """One thing to evaluate: class folders, of one of KINDS or "own".

    Attributes:
        corruption, severity: of "c" and "corrupt". eps: of "attack".
    """

    name: str
    kind: str
    path: str
    corruption: str = ""
    severity: int = 0
    eps: float = 0.0


def corruption_names(words: Sequence[str]) -> tuple[str, ...]:
    """`standard` (all), a group such as `noise`, or names -> names in the published order."""
    groups = {**GROUPS, "standard": list(CORRUPTIONS)}
    chosen = {name for word in words for name in groups.get(word, [word])}
    if unknown := sorted(chosen - set(CORRUPTIONS)):
        hint = did_you_mean(unknown[0], CORRUPTIONS)
        raise EverytokenError(f"there is no corruption {unknown[0]!r}.{hint} There are {', '.join(CORRUPTIONS)}.")
    return tuple(name for name in CORRUPTIONS if name in chosen)


def parse_suites(
    words: Sequence[str],
    corruptions: Sequence[str] = tuple(CORRUPTIONS),
    severities: Sequence[int] = SEVERITIES,
    eps: Sequence[float] = (),
) -> list[Suite]:
    """All suites, in the order given."""
    given = [(name, path) for name, _, path in (word.partition("=") for word in words)]
    if not given:
        raise EverytokenError("say what to test on: a suite such as val=FOLDER, a=FOLDER, corrupt, attack")
    named = dict(given)
    if len(named) < len(given):
        raise EverytokenError("a suite is named twice; give your own folders names of their own")
    out: list[Suite] = []
    for name, path in given:
        if name in FROM_VAL:
            path = path or named.get("val", "")
        if not path:
            hint = " It also takes the images of val=FOLDER." if name in FROM_VAL else did_you_mean(name, KINDS)
            raise EverytokenError(f"a suite is NAME=FOLDER, not {name!r}.{hint}")
        check_folder(name, path)
        out += _expand(name, path, [(c, s) for c in corruptions for s in severities], eps)
    return out


def check_folder(name: str, path: str) -> None:
    """Refuse a folder that is not there."""
    place = dataset_path(path)
    if place is not None and not Path(place).expanduser().exists():
        raise EverytokenError(f"suite {name}={path}: there is no such folder")


def _expand(name: str, path: str, corrupted: Sequence[tuple[str, int]], eps: Sequence[float]) -> Iterator[Suite]:
    place = Path(path).expanduser()
    if name == "v2":  # one variant, or the three
        variants = [Suite(f"v2 {v}", "v2", str(p)) for v in V2 for p in sorted(place.glob(f"*{v}*/"))]
        yield from variants or [Suite("v2", "v2", path)]
    elif name in ("c", "corrupt"):
        paths = _published(place, corrupted) if name == "c" else [path] * len(corrupted)
        for (corruption, severity), folder in zip(corrupted, paths, strict=True):
            yield Suite(f"{corruption} {severity}", name, folder, corruption, severity)
    elif name == "attack":
        for size in sorted(eps):
            title = f"attack {size * 255:.3g}/255" if size < 0.2 else f"attack {size:.3g}"
            yield Suite(title, "attack", path, eps=size)
    else:
        yield Suite(name, name if name in KINDS else "own", path)


def _published(place: Path, corrupted: Sequence[tuple[str, int]]) -> list[str]:
    """The folders of ImageNet-C, which may lie in folders of their groups."""
    groups = {name: group for group, names in GROUPS.items() for name in names}
    folders = []
    for name, severity in corrupted:
        candidates = (place / name / str(severity), place / groups[name] / name / str(severity))
        folder = next((str(folder) for folder in candidates if folder.is_dir()), "")
        if not folder:
            raise EverytokenError(
                f"suite c={place}: the folder {name}/{severity} is missing. Say which there are (corruptions, "
                "severities), or make the corruptions on the fly with corrupt=FOLDER."
            )
        folders.append(folder)
    return folders
