"""Find trouble before training does: in images, labels and the machine. Each finding says what to do."""

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
        level: error: training would stop or be wrong; warning: results would be worse; note: good to know.
        code: a short fixed name, for scripts.
        what: what was found; where: the file, folder or part of the machine; todo: what to do about it.
        examples: all images or files, of which the first few are shown.
    """

    level: Level
    code: str
    what: str
    where: str
    todo: str = ""
    examples: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """As a plain dictionary."""
        return {**asdict(self), "examples": list(self.examples[:SHOWN]), "count": len(self.examples)}
