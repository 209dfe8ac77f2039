"""What the doctor says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        level: error: training would stop or be wrong; warning: it would suffer; note: good to know.
        what: what was found; where: the file, folder or part of the machine; todo: what to do about it.
        code: a short fixed name, for scripts.
        examples: some of the images or files, and `count` of all.
    """

    level: Level
    code: str
    what: str
    where: str
    todo: str = ""
    examples: tuple[str, ...] = ()
    count: int = 0

    def to_json(self) -> dict[str, Any]:
        """As a plain dictionary."""
        return {**asdict(self), "examples": list(self.examples)}


def counted(number: int, one: str, many: str = "") -> str:
    """ "1 image", "1,200 images"; verbs that follow are written by the caller."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some(items: Sequence[str], most: int = 5) -> tuple[str, ...]:
    """The first few of a list of examples."""
    return tuple(items[:most])


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes, each in the order found."""
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))
