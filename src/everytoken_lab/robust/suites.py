"""Test sets by name: what the user typed becomes a flat list of things to evaluate.

val=FOLDER        class folders; also the data that `corrupt` and `attack` use if they are given without a folder
v2=FOLDER         one variant of ImageNet-V2, or the folder that holds all three
a= r= sketch=     ImageNet-A, -R (200 classes, logits masked) and -Sketch
real=FOLDER       ImageNet's validation images, judged by ReaL labels
c=FOLDER          the published ImageNet-C: CORRUPTION/SEVERITY/CLASS, perhaps below noise/, blur/, ...
corrupt[=FOLDER]  the same corruptions, made on the fly
attack[=FOLDER]   adversarial attacks
NAME=FOLDER       any other class folders
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everytoken.errors import EverytokenError, did_you_mean
from everytoken_lab.data.datasets import dataset_path
from everytoken_lab.robust.corruptions import CORRUPTIONS, GROUPS, SEVERITIES, check

KINDS = ("val", "v2", "a", "r", "sketch", "real", "c", "corrupt", "attack")
V2 = ("matched-frequency", "threshold0.7", "top-images")


@dataclass(frozen=True)
class Suite:
    """One thing to evaluate: class folders, of one of KINDS or "own".

    Attributes:
        subset: "a" or "r" for the 200-class sets. corruption, severity: of "c" and "corrupt". eps: of "attack".
    """

    name: str
    kind: str
    path: str
    subset: str = ""
    corruption: str = ""
    severity: int = 0
    eps: float = 0.0


def corruption_names(words: Sequence[str]) -> tuple[str, ...]:
    """`standard` (all), a group such as `noise`, or names -> names in the published order."""
    groups = {name: tuple(f.__name__ for f in group) for name, group in GROUPS.items()}
    groups["standard"] = tuple(CORRUPTIONS)
    chosen: set[str] = set()
    for word in words:
        for name in groups.get(word, (word,)):
            check(name, 1)
            chosen.add(name)
    return tuple(name for name in CORRUPTIONS if name in chosen)


def parse_suites(
    words: Sequence[str],
    corruptions: Sequence[str] = tuple(CORRUPTIONS),
    severities: Sequence[int] = SEVERITIES,
    eps: Sequence[float] = (),
) -> list[Suite]:
    """All suites, in the order given."""
    for severity in severities:
        check("fog", severity)
    given = [(name, path) for name, _, path in (word.partition("=") for word in words)]
    if not given:
        raise EverytokenError("say what to test on: a suite such as val=FOLDER, a=FOLDER, corrupt, attack")
    named = dict(given)
    if len(named) < len(given):
        raise EverytokenError("a suite is named twice; give your own folders names of their own")
    out: list[Suite] = []
    for name, path in given:
        if not path and name in ("corrupt", "attack", "real"):
            path = named.get("val", "")
            if not path:
                raise EverytokenError(f"suite {name} needs images: {name}=FOLDER, or val=FOLDER beside it")
        if not path:
            raise EverytokenError(f"a suite is NAME=FOLDER, not {name!r}.{did_you_mean(name, KINDS)}")
        check_folder(name, path)
        out += _expand(name, path, corruptions, severities, eps)
    return out


def check_folder(name: str, path: str) -> None:
    """Refuse a folder that is not there."""
    place = dataset_path(path)
    if place is not None and not Path(place).expanduser().exists():
        raise EverytokenError(f"suite {name}={path}: there is no such folder")


def _expand(
    name: str, path: str, corruptions: Sequence[str], severities: Sequence[int], eps: Sequence[float]
) -> list[Suite]:
    if name in ("a", "r"):
        return [Suite(name, name, path, subset=name)]
    if name == "v2":
        variants = _variants(Path(path).expanduser())
        return [Suite(f"v2 {variant}", "v2", str(place)) for variant, place in variants] or [Suite("v2", "v2", path)]
    if name == "c":
        return _published(Path(path).expanduser(), corruptions, severities)
    if name == "corrupt":
        return [Suite(f"{c} {s}", "corrupt", path, corruption=c, severity=s) for c in corruptions for s in severities]
    if name == "attack":
        return [
            Suite(f"attack {e * 255:.3g}/255" if e < 0.2 else f"attack {e:.3g}", "attack", path, eps=e)
            for e in sorted(eps)
        ]
    return [Suite(name, name if name in KINDS else "own", path)]


def _variants(place: Path) -> list[tuple[str, Path]]:
    """ImageNet-V2's three folders, if they are inside."""
    folders = sorted(p for p in place.iterdir() if p.is_dir()) if place.is_dir() else []
    return [(v, p) for v in V2 for p in folders if v in p.name]


def _published(place: Path, corruptions: Sequence[str], severities: Sequence[int]) -> list[Suite]:
    out, missing = [], []
    for name in corruptions:
        base = next((p for p in (place / name, *(place / group / name for group in GROUPS)) if p.is_dir()), None)
        for severity in severities:
            folder = base / str(severity) if base else None
            if folder is None or not folder.is_dir():
                missing.append(f"{name}/{severity}")
                continue
            out.append(Suite(f"{name} {severity}", "c", str(folder), corruption=name, severity=severity))
    if missing:
        raise EverytokenError(
            f"suite c={place}: {len(missing)} of {len(missing) + len(out)} folders CORRUPTION/SEVERITY are missing: "
            f"{', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}. Say which there are (corruptions, "
            "severities), or make the corruptions on the fly with corrupt=FOLDER."
        )
    return out
