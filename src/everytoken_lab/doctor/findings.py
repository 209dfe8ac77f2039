"""What the doctor says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["error", "warning", "note"]
SHOWN = 5  # examples


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        level: error: training would stop or be wrong; warning: it would suffer; note: good to know.
        code: a short fixed name, for scripts.
        what: what was found; where: the file, folder or part of the machine; todo: what to do about it.
        examples: images or files, the first of which are shown; count: of all, if these are not all.
    """

    level: Level
    code: str
    what: str
    where: str
    todo: str = ""
    examples: Sequence[str] = ()
    count: int = 0

    def to_json(self) -> dict[str, Any]:
        """As a plain dictionary."""
        return {**asdict(self), "examples": self.some, "count": self.count or len(self.examples)}

    @property
    def some(self) -> list[str]:
        """The first few examples."""
        return list(self.examples[:SHOWN])


def some(items: Sequence[str]) -> tuple[str, ...]:
    """The first few of a list of examples."""
    return tuple(items[:SHOWN])
