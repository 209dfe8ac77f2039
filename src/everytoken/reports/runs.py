"""Read run folders for a report: whatever is there, in whatever state, without a traceback.

A run that is not finished, or whose files are damaged, is still a run: `state` and `troubles` say what is the matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from everytoken.errors import EverytokenError, did_you_mean

# Options that do not change what is learned, or that name the run: they make no difference between groups.
NOT_SETTINGS = frozenset({
    "seed", "output", "resume", "device", "threads", "workers", "log_interval", "keep", "checkpoint_minutes",
    "checkpoint_steps", "tensorboard", "wandb", "val_interval", "val_batch_size", "bad_loss_limit",
})  # fmt: skip
_FILES = ("config.yaml", "metrics.jsonl", "summary.json", "best.safetensors")


@dataclass(frozen=True)
class Run:
    """One run folder, as far as it can be read.

    Attributes:
        path, name: the folder, and what to call it (unique in a report).
        config: options, flat; steps, epochs: rows of metrics.jsonl by kind; summary: of a finished run.
        starts: environment of each start; skipped: images that could not be read (key -> reason).
        bad_updates: updates that were left out because the loss was not finite.
        troubles: what is wrong with the folder, as sentences.
    """

    path: Path
    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    steps: Sequence[Mapping[str, Any]] = ()
    epochs: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    starts: Sequence[Mapping[str, Any]] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    bad_updates: int = 0
    troubles: Sequence[str] = ()

    @property
    def seed(self) -> int | None:
        """The run's seed, None if it is not known."""
        value = self.config.get("seed")
        return value if isinstance(value, int) else None

    @property
    def planned_epochs(self) -> int:
        """Epochs that the run is to have."""
        planned = self.summary.get("epochs") or self.config.get("epochs") or 0
        return int(planned) if isinstance(planned, int | float) else 0

    @property
    def done_epochs(self) -> int:
        """Epochs that it has had."""
        return int(self.epochs[-1].get("epoch", 0)) if self.epochs else 0

    @property
    def state(self) -> str:
        """ "finished", "unfinished", "not begun" or "damaged"."""
        if self.summary and self.score is not None and self.done_epochs >= self.planned_epochs:
            return "finished"
        if not self.config:
            return "damaged"
        return "unfinished" if self.steps or self.epochs else "not begun"

    @property
    def metric(self) -> str:
        """What the score is: "top-1" of a classifier, or another task's, such as "mIoU"."""
        columns = {name for row in self.epochs for name in row}
        return next((m for m in ("top-1", "mIoU", "mAP") if f"val_{m.replace('-', '')}" in columns), "score")

    @property
    def scores(self) -> list[tuple[float, float]]:
        """(epoch, validation score in percent), of the averaged weights where there are any."""
        averaged = self.curve("ema_score", "epoch")
        return averaged or self.curve("score", "epoch")

    @property
    def score(self) -> float | None:
        """Validation score after the last epoch that was validated; not the best of many looks."""
        return self.scores[-1][1] if self.scores else None

    @property
    def best(self) -> float | None:
        """The best validation score on the way, which is a little too good by selection."""
        return max((score for _, score in self.scores), default=None)

    @property
    def seconds(self) -> float | None:
        """Time spent training, over all starts."""
        found = self.curve("seconds", "epoch")
        return found[-1][1] if found else None

    @property
    def terms(self) -> list[str]:
        """Names of the loss terms, the total first."""
        known = {"kind", "step", "epoch", "lr", "images_per_second", "waiting", "grad_norm", "loss"}
        own = dict.fromkeys(k for row in self.steps for k, v in row.items() if k not in known and _number(v))
        return [*(["loss"] if any("loss" in row for row in self.steps) else []), *own]

    def curve(self, name: str, kind: str = "step") -> list[tuple[float, float]]:
        """(epoch, value) of one column; rows without a finite number are left out."""
        rows = self.steps if kind == "step" else self.epochs
        return [(float(r["epoch"]), float(r[name])) for r in rows if _number(r.get("epoch")) and _number(r.get(name))]

    def last(self, name: str) -> float | None:
        """The last value of a column of the steps."""
        curve = self.curve(name)
        return curve[-1][1] if curve else None

    def mean(self, name: str) -> float | None:
        """The mean of a column of the steps."""
        values = [v for _, v in self.curve(name)]
        return sum(values) / len(values) if values else None

    def settings(self) -> dict[str, Any]:
        """The options that decide what is learned, `objectives.token.beta` and the like as names of their own."""
        return {k: v for k, v in _flat(self.config).items() if k.split(".", 1)[0] not in NOT_SETTINGS}


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs that were named; a folder of runs stands for the runs inside it."""
    folders: list[Path] = []
    for given in paths:
        path = Path(given).expanduser()
        if not path.is_dir():
            near = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
            what = "is a file; a run is a folder" if path.exists() else "does not exist"
            raise EverytokenError(f"the run folder {path} {what}.{did_you_mean(path.name, near)}")
        inside = sorted(p for p in path.iterdir() if p.is_dir() and _looks_like_run(p))
        folders += inside if inside and not _looks_like_run(path) else [path]
    folders = list({folder.resolve(): folder for folder in folders}.values())
    names = _short_names(folders)
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(path: Path, name: str = "") -> Run:
    """One run folder."""
    troubles: list[str] = []
    config = _mapping(path / "config.yaml", yaml.safe_load, troubles)
    summary = _mapping(path / "summary.json", json.loads, troubles, optional=True)
    rows = _lines(path / "metrics.jsonl", troubles)
    starts = _read(path / "environment.json", json.loads, troubles, optional=True)
    skipped = {str(r.get("key")): str(r.get("reason")) for r in _lines(path / "skipped-images.jsonl", troubles)}
    if not any((path / file).exists() for file in _FILES):
        troubles = [f"{path} holds no run: none of {', '.join(_FILES)} is in it"]
    return Run(
        path,
        name or path.name,
        config,
        [row for row in rows if row.get("kind") == "step"],
        [row for row in rows if row.get("kind") == "epoch"],
        summary,
        [s for s in starts if isinstance(s, dict)] if isinstance(starts, list) else [],
        skipped,
        len(_lines(path / "bad-updates.jsonl", troubles)),
        troubles,
    )


def _looks_like_run(path: Path) -> bool:
    return any((path / file).exists() for file in _FILES)


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of the path before them as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    depth = 1
    while len({p[-depth:] for p in parts}) < len(parts) and depth < max(map(len, parts)):
        depth += 1
    return ["/".join(p[-depth:]) for p in parts]


def _read(path: Path, parse: Any, troubles: list[str], optional: bool = False) -> Any:
    if not path.exists():
        if not optional:
            troubles.append(f"{path.name} is missing")
        return None
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        troubles.append(f"{path.name} cannot be read ({str(error).splitlines()[0][:120]})")
        return None


def _mapping(path: Path, parse: Any, troubles: list[str], optional: bool = False) -> dict[str, Any]:
    content = _read(path, parse, troubles, optional)
    if content is None:
        return {}
    if not isinstance(content, dict):
        troubles.append(f"{path.name} does not hold names and values")
        return {}
    return content


def _lines(path: Path, troubles: list[str]) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; the last may be torn after a kill, others are counted."""
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        troubles.append(f"{path.name} cannot be read ({error})")
        return []
    out, bad = [], 0
    for number, line in enumerate(lines):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            out.append(row)
        elif number < len(lines) - 1:
            bad += 1
    if bad:
        troubles.append(f"{bad} of {len(lines)} lines of {path.name} cannot be read and are left out")
    return out


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            out |= _flat(value, f"{before}{key}.")
        else:
            out[f"{before}{key}"] = {} if isinstance(value, Mapping) else value
    return out
