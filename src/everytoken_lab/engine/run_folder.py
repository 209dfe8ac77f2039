"""A run is a folder; this is its only writer and its only reader.

config.yaml       all options, resolved
config.json       of a classifier: what timm needs to open the folder (`local-dir:RUN`)
batch.jpg         the first training batch, with what is learnt from it
environment.json  versions, machine and command of each start
metrics.jsonl     a row per logged update (kind "step") and per epoch or validation (kind "epoch")
log.txt           what was logged
checkpoints/      see checkpoint.py
best.safetensors  the weights with the best validation score, as a plain timm model
summary.json      the result
report.html       a page about the run

`RunFolder` writes, and only rank 0 does. `read_run` reads whatever is there, in whatever state: a file that cannot be
read is named in `Run.troubles`, and never keeps a run from being continued or looked at.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everytoken import __version__, files
from everytoken.errors import EverytokenError, did_you_mean
from everytoken.files import BusyError, Lock, append, make_inside, plain_json, remove_temporary, write_atomically
from everytoken_lab import schema
from everytoken_lab.data.datasets import DEFAULT_VAL_SPLIT, DataError, DataSet, open_dataset
from everytoken_lab.data.labels import find_labels
from everytoken_lab.data.tree import NAMED, SUBSET, find_split, network_address, split_folder
from everytoken_lab.engine.options import flat_names, how_to_run
from everytoken_lab.models import PUBLISHED

if TYPE_CHECKING:
    from everytoken_lab.engine.track import Tracker
    from everytoken_lab.models.open import OpenModel

logger = logging.getLogger(__name__)
CROSS_VALIDATED = "cross-validation"
"""Value of `validation` in config.yaml of a model that was trained on all images: its numbers are out of fold."""
_FILES = ("config.yaml", "metrics.jsonl", "summary.json", "best.safetensors")


@dataclass(frozen=True)
class Run:
    """One run, as far as its folder can be read.

    run = lab.train("photos")
    run.score, run.summary["best"], run.history
    run.report("report.html")
    """

    path: Path
    name: str
    config: Mapping[str, Any]  # options, flat
    steps: Sequence[Mapping[str, Any]]  # rows of metrics.jsonl by kind
    epochs: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any]  # of a finished run, else empty
    starts: Sequence[Mapping[str, Any]]  # environment of each start
    skipped: Mapping[str, str]  # images that could not be read: key -> reason
    bad_updates: int  # updates that were left out because the loss was not finite
    troubles: Sequence[str]  # what is wrong with the folder, as sentences

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row per epoch or validation: epoch, step, seconds, score, validation numbers."""
        return [{key: value for key, value in row.items() if key != "kind"} for row in self.epochs]

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write the page of `everytoken report` about this run; options: those of `lab.report`."""
        from everytoken_lab.reports.collect import report

        report(self.path, path, **options)
        return Path(path)

    def load(self) -> OpenModel:
        """The model with the best weights, ready to use, as `lab.load` gives it."""
        from everytoken_lab.models.open import load

        return load(self.path)

    @property
    def seed(self) -> int | None:
        """The run's seed, None if it is not known."""
        return value if isinstance(value := self.config.get("seed"), int) else None

    @property
    def planned_epochs(self) -> int:
        """Whole epochs that the run is to have; 0 where updates are counted and it is not finished."""
        planned = self.summary.get("epochs") or (0 if self.config.get("iters") else self.config.get("epochs")) or 0
        return int(planned) if isinstance(planned, int | float) else 0

    @property
    def done_epochs(self) -> int:
        """Whole epochs that it has had."""
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
    def classifies(self) -> bool:
        """Whether it is a classifier's; a multi-label one has mAP as detectors do, and F1."""
        return self.metric not in ("mIoU", "mAP") or any("val_f1" in row for row in self.epochs)

    @property
    def scores(self) -> list[tuple[float, float]]:
        """(epoch, validation score in percent), of the averaged weights where there are any."""
        return self.curve("ema_score", "epoch") or self.curve("score", "epoch")

    @property
    def score(self) -> float | None:
        """Validation score after the last epoch that was validated; not the best of many."""
        return self.scores[-1][1] if self.scores else None

    @property
    def best(self) -> float | None:
        """The best validation score on the way, which is a little too good by selection."""
        return max((score for _, score in self.scores), default=None)

    @property
    def seconds(self) -> float | None:
        """Time spent training, over all starts."""
        return self.last("seconds", "epoch")

    @property
    def terms(self) -> list[str]:
        """Names of the loss terms, the total first."""
        others = {"kind", "step", "epoch", "lr", "images_per_second", "waiting", "grad_norm"}
        terms = dict.fromkeys(k for row in self.steps for k, v in row.items() if k not in others and _is_number(v))
        return sorted(terms, key=lambda name: name != "loss")

    def curve(self, name: str, kind: str = "step") -> list[tuple[float, float]]:
        """(epoch, value) of one column; rows without a finite number are left out."""
        rows = self.steps if kind == "step" else self.epochs
        good = [row for row in rows if _is_number(row.get("epoch")) and _is_number(row.get(name))]
        return [(float(row["epoch"]), float(row[name])) for row in good]

    def last(self, name: str, kind: str = "step") -> float | None:
        """The last value of a column."""
        return next((value for _, value in reversed(self.curve(name, kind))), None)

    def mean(self, name: str) -> float | None:
        """The mean of a column of the steps."""
        values = [v for _, v in self.curve(name)]
        return sum(values) / len(values) if values else None

    def settings(self) -> dict[str, Any]:
        """The options that decide what is learnt, but for the seed; inner ones as `objectives.drloc.weight`."""
        others = {"seed", *how_to_run()}
        return {k: v for k, v in flat_names(self.config).items() if k.split(".", 1)[0] not in others}

    # -- where the data was ---------------------------------------------------------------------------------------

    @property
    def val_split(self) -> float:
        """The fraction that is held out of data without validation images."""
        value = self.config.get("val_split")
        return float(value) if _is_number(value) and value else DEFAULT_VAL_SPLIT

    def held_out(self) -> float:
        """The fraction of its data that it held out; 0 if its data has validation images."""
        there = self.place()
        return 0.0 if there is not None and find_split(str(there), "val") else self.val_split

    @property
    def cross_validated(self) -> bool:
        """Whether it was trained on all of its images, and judged by cross-validation."""
        return self.config.get("validation") == CROSS_VALIDATED

    def _places(self, option: str) -> list[Path]:
        """Where the path of an option may lead: from the folder of the start, those above the run, and this one."""
        text = str(self.config.get(option) or "")
        started_in = [Path(str(start["folder"])) for start in self.starts[-1:] if start.get("folder")]
        bases = (*started_in, *self.path.parents, Path.cwd()) if text else ()
        return [(base / Path(text).expanduser()).resolve() for base in bases]

    def place(self, option: str = "data") -> Path | None:
        """The path of an option, where it is now; None if it is nowhere."""
        return next((path for path in self._places(option) if path.exists()), None)

    def own_data(self) -> str:
        """Its images, where they are now. Raises if they are at an address: no file opens a connection by its word."""
        given = str(self.config.get("data") or "")
        if network_address(given):
            what = f"{self.path / 'config.yaml'} says that its images are at {given}"
            way = "name it yourself (everytoken eval RUN DATA, everytoken report RUN --data DATA)"
            raise EverytokenError(f"{what}, and no address is opened because a file names it: {way}")
        return str(self.place() or given)

    def names(self, given: str, option: str = "data", part: Callable[[Path], Path] = Path) -> bool | None:
        """Whether an option of the run means what is `given` here; None if that cannot be known.

        `part` turns a path into the folder or file that is compared.
        """
        recorded, given = str(self.config.get(option) or ""), schema.without_secrets(given)
        if any(name.startswith((NAMED, SUBSET)) for name in (recorded, given)):
            return recorded == given
        path, place = Path(given).expanduser().resolve(), self.place(option)
        if place is not None:
            return part(place) == part(path)
        return True if path in self._places(option) else None


def read_run(path: Path, name: str = "") -> Run:
    """One run folder."""
    troubles: list[str] = []
    config = schema.texts(_read(path / "config.yaml", dict[str, Any], troubles), schema.without_secrets)
    rows, skipped, bad = (_rows(path / f"{f}.jsonl", troubles) for f in ("metrics", "skipped-images", "bad-updates"))
    summary = _read(path / "summary.json", dict[str, Any], troubles)
    starts = schema.texts(_read(path / "environment.json", list[dict[str, Any]], troubles), schema.without_secrets)
    if not is_run(path):
        troubles = [f"{path} holds no run: none of {', '.join(_FILES)} is in it"]
    elif not (path / "config.yaml").exists():
        troubles.append("config.yaml is missing")
    return Run(
        path,
        name or path.name,
        config or {},
        [row for row in rows if row.get("kind") == "step"],
        [row for row in rows if row.get("kind") == "epoch"],
        summary or {},
        starts or [],
        {str(row.get("key")): str(row.get("reason")) for row in skipped},
        len(bad),
        troubles,
    )


def find_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs that were named; a folder of runs stands for the runs inside it."""
    folders: list[Path] = []
    for given in paths:
        path = Path(given).expanduser()
        if not path.is_dir():
            near = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
            what = "is a file; a run is a folder" if path.exists() else "does not exist"
            raise EverytokenError(f"the run folder {path} {what}.{did_you_mean(path.name, near)}")
        inside = sorted(p for p in path.iterdir() if p.is_dir() and is_run(p))
        folders += inside if inside and not is_run(path) else [path]
    folders = list({folder.resolve(): folder for folder in folders}.values())
    parts = [folder.resolve().parts for folder in folders]
    depth = 1  # of the names: as much of the paths as it takes to tell the runs apart
    while len({p[-depth:] for p in parts}) < len(parts):
        depth += 1
    return [read_run(folder, "/".join(p[-depth:])) for folder, p in zip(folders, parts, strict=True)]


def run_of(source: str | Path) -> Run | None:
    """The run that a run folder, a checkpoint or a weights file belongs to; None if there is none."""
    path = Path(source).expanduser().resolve()
    folder = path if path.is_dir() else path.parent
    folder = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    run = read_run(folder) if (folder / "config.yaml").is_file() else None
    return run if run is not None and run.config.get("data") else None


def is_run(path: Path) -> bool:
    """Whether a folder has any file of a run."""
    return any((path / file).exists() for file in _FILES)


class RunFolder:
    """Writes the files of one run; on all ranks but the first it is not `writable`, and writes nothing."""

    def __init__(self, path: str | Path, writable: bool = True) -> None:
        self.path, self.writable = Path(path), writable
        self.checkpoints = self.path / "checkpoints"
        self.trackers: list[Tracker] = []
        self._opened = False

    def open(self) -> Lock:
        """Make the folder and take the right to write to it, which ends with this process."""
        if self.path.exists() and not self.path.is_dir():
            raise EverytokenError(f"the output {self.path} is a file; a run is a folder")
        try:
            make_inside(self.path, self.checkpoints.name)
            lock = Lock(self.path, "run")
            remove_temporary(self.path)  # of a writer that was killed
        except BusyError as error:
            what = f"another process is training in {self.path}; wait for it, or choose another output"
            raise EverytokenError(f"{what}.\n{error}") from error
        except OSError as error:
            raise EverytokenError(
                f"{self.path} cannot be written to ({error.strerror}); choose another output"
            ) from error
        self._opened = True
        return lock

    def read(self) -> Run:
        """What is in the folder."""
        return read_run(self.path)

    def write(self, name: str, text: str) -> None:
        """Replace a small file in one step, on the disk."""
        if self.writable:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / name, text.encode())

    def write_config(self, options: Mapping[str, Any], timm_config: Mapping[str, Any] | None = None) -> None:
        """`config.yaml`; `config.json`, if timm can open the weights; the environment, added to `environment.json`."""
        if self.writable:
            self.write("config.yaml", schema.to_yaml(options))
            if timm_config is not None:
                self.write("config.json", plain_json(dict(timm_config)))
            starts = _read(self.path / "environment.json", list[dict[str, Any]], []) or []
            self.write("environment.json", json.dumps([*starts, environment()], indent=1))

    def log(self, text: str) -> None:
        """Log a line, and keep it in log.txt with the time."""
        if self.writable:
            logger.info(text)
        if self._opened:
            append(self.path / "log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')} {schema.shown(text)}\n".encode())

    @contextmanager
    def surviving(self, what: str) -> Iterator[None]:
        """For what a run does not depend on, copies and pictures: an error becomes a line in the log."""
        try:
            yield
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0][:200]
            self.log(f"note: {what} failed: {type(error).__name__}: {reason}")

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """A line at the end of a file of JSON lines."""
        if self.writable:
            self.path.mkdir(parents=True, exist_ok=True)
            append(self.path / name, f"{plain_json(dict(row), None)}\n".encode())

    def record(self, row: dict[str, Any]) -> None:
        """A line in metrics.jsonl, and in the trackers."""
        self.append("metrics.jsonl", row)
        for tracker in list(self.trackers):
            with self.surviving(f"{type(tracker).__name__}, which gets no more rows"):
                tracker.record(row)
                continue
            self.trackers.remove(tracker)

    def close_trackers(self) -> None:
        """Finish the records of the trackers."""
        for tracker in self.trackers:
            with self.surviving(type(tracker).__name__):
                tracker.close()

    def forget_after(self, step: int) -> None:
        """Drop the metrics of updates that a resumed run will do again, and lines that cannot be read."""
        if self.writable:
            troubles: list[str] = []
            rows = _rows(self.path / "metrics.jsonl", troubles)
            for trouble in troubles:
                self.log(f"note: {trouble}")
            kept = [row for row in rows if _is_number(row.get("step")) and row["step"] <= step]
            self.write("metrics.jsonl", "".join(plain_json(row, None) + "\n" for row in kept))


def environment() -> dict[str, Any]:
    """Where and with what a run was started. Git is not asked: it executes what a folder's .git/config names."""
    import timm
    import torch

    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(map(schema.without_secrets, sys.argv)),
        "folder": os.getcwd(),  # where relative paths in config.yaml start
        "everytoken": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _read(path: Path, kind: Any, troubles: list[str]) -> Any:
    """A YAML or JSON file of the run; None if it is not there, or cannot be read, which is added to `troubles`."""
    try:
        if not path.exists():
            return None
        if path.suffix == ".json":
            return schema.read_json(path, kind)
        return schema.parse(kind, schema.read_yaml(files.read_bytes(path), str(path)), str(path))
    except (OSError, schema.SchemaError) as error:
        troubles.append(f"{path.name} cannot be read ({str(error).removeprefix(f'{path}: ').rstrip('.')[:120]})")
        return None


def _rows(path: Path, troubles: list[str]) -> list[dict[str, Any]]:
    """The lines of a JSON-lines file; the last may be torn after a kill, other bad ones are counted in `troubles`."""
    try:
        lines = files.read_bytes(path).splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        troubles.append(f"{path.name} cannot be read ({error.strerror})")
        return []
    rows: list[Any] = []
    for line in lines:
        rows.append(None)
        with suppress(ValueError, RecursionError):
            rows[-1] = json.loads(line)
    if bad := sum(not isinstance(row, dict) for row in rows[:-1]):
        troubles.append(f"{bad} of {len(lines)} lines of {path.name} cannot be read and are left out")
    return [row for row in rows if isinstance(row, dict)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# -- what a run held out -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOut:
    """What is known about models and a dataset without validation images.

    Such data is divided by the names of its images, so the same images are found again from `data` and `val_split` in
    the run's config.yaml. Weights inside a run folder belong to that run. Of other weights nothing can be known, and
    the user is told.
    """

    fraction: float  # of the data that the runs held out; 0 if they were not trained on it
    trained: str  # the first model that was trained on it
    unknown: str  # the first model of which that cannot be known

    def note(self, data: str, images: int) -> str:
        """What to say about the images that are used; "" if there is nothing to say."""
        if self.trained:
            only = f"only the {images:,} images that it held out ({self.fraction:.0%}) are used here"
            return f"{self.trained} was trained on {data}: {only if self.fraction else 'these are its training images'}"
        if self.unknown and not split_folder([Path(data).stem], "val"):
            doubt = f"it is not known what {self.unknown} was trained on, so its training images may be among them"
            return f"all {images:,} images of {data} are used; {doubt}"
        return ""


def held_out(
    sources: Sequence[str],
    data: str,
    same: Callable[[Run], bool | None] | None = None,
    fraction: Callable[[Run], float] = lambda run: run.val_split,
) -> HeldOut:
    """What the runs of `sources` held out of `data`.

    Args:
        same: whether a run was trained on it; None if that cannot be known. Default: whether the paths are the same.
        fraction: of it that such a run held out; 0 if it had validation images of its own.
    """
    fractions, unknown = dict[str, float](), ""
    for source in sources:
        if source.startswith(PUBLISHED):
            continue
        run = run_of(source)
        trained = None if run is None else same(run) if same else run.names(data)
        if run is not None and trained:
            fractions[source] = fraction(run)
        elif trained is None:
            unknown = unknown or source
    if len(set(fractions.values())) > 1:
        raise EverytokenError(f"{' and '.join(fractions)} held out different fractions of {data}")
    trained_on, held = next(iter(fractions.items()), ("", 0.0))
    return HeldOut(held, trained_on, unknown)


def open_part(sources: Sequence[str], data: str, split: str = "val", *, doubt: bool = True) -> tuple[DataSet, str]:
    """The images to evaluate models on (run folders, weights files, timm:NAME), and what to say about them.

    Of data without validation images, these are the images that the runs held out, if they were trained on it, else
    all. `doubt`: say it if it cannot be known whether they were trained on these images.
    """
    named = data.startswith(NAMED)
    if split == "test" and not named and find_split(data, split) is None:
        raise EverytokenError(f"{data} has no part for {split}. Make a folder {split}/ in it, or choose another split")
    if split != "val" or (not named and find_split(data, "val")):
        return open_dataset(data, split), ""
    if named:
        try:
            return open_dataset(data, "val"), ""
        except DataError:
            held = held_out(sources, data)
            if not held.fraction:
                raise
    else:
        held = held_out(sources, data, lambda run: run.names(data, part=_train_folder), Run.held_out)
    if held.fraction:
        dataset = open_dataset(data, "val", val_split=held.fraction)
        return dataset, held.note(data, len(dataset))
    if train := find_split(data, "train"):
        way = "Give the run folder of a model that held some out, other images, or split='train' for all of them"
        raise EverytokenError(f"{data} has no validation images, only {train.name}. {way}")
    dataset = open_dataset(data, "all")
    return dataset, held.note(data, len(dataset)) if held.trained or doubt else ""


def _train_folder(path: Path) -> Path:
    """Where training images come from: data with train/ and that train/ itself hold the same; a labels file."""
    if labels := find_labels(path):
        return labels
    try:
        train = find_split(str(path), "train")
    except DataError:
        train = None
    return train.folder.resolve() if train and train.folder else path
