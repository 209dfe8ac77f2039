"""The table of one model, or of two side by side with paired differences; mean corruption errors.

mCE: Hendrycks and Dietterich 2019, section 4. CE_c = sum_s E_{s,c} / sum_s E^AlexNet_{s,c}; mCE is its mean over the 15
corruptions. AlexNet's errors are the published ones for each severity. The numbers compare with the paper's only on
ImageNet, with all 15 corruptions and 5 severities of the published images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from everytoken.errors import EverytokenError
from everytoken.files import plain_json, write_atomically
from everytoken_lab.robust.corruptions import SEVERITIES
from everytoken_lab.robust.suites import Suite
from everytoken_lab.stats import Estimate, bootstrap, paired_difference, percentage

ALEXNET: dict[str, tuple[float, ...]] = {
    "gaussian_noise": (0.69528, 0.82542, 0.93554, 0.98138, 0.99452),
    "shot_noise": (0.71224, 0.85108, 0.93574, 0.98182, 0.99146),
    "impulse_noise": (0.78374, 0.89808, 0.9487, 0.9872, 0.99548),
    "defocus_blur": (0.65624, 0.73202, 0.85036, 0.91364, 0.94714),
    "glass_blur": (0.64308, 0.75054, 0.88806, 0.91622, 0.93344),
    "motion_blur": (0.5843, 0.70048, 0.82108, 0.8975, 0.92638),
    "zoom_blur": (0.70008, 0.76992, 0.80784, 0.84198, 0.87198),
    "snow": (0.71726, 0.88392, 0.86468, 0.9187, 0.94952),
    "frost": (0.6139, 0.79734, 0.8879, 0.89942, 0.9343),
    "fog": (0.67474, 0.7605, 0.84378, 0.8726, 0.945),
    "brightness": (0.4514, 0.48502, 0.54048, 0.62166, 0.7244),
    "contrast": (0.64548, 0.7615, 0.88874, 0.9776, 0.9927),
    "elastic_transform": (0.52596, 0.70116, 0.55686, 0.64076, 0.80554),
    "pixelate": (0.52218, 0.5462, 0.73728, 0.87092, 0.91262),
    "jpeg_compression": (0.51002, 0.54718, 0.57294, 0.65458, 0.74778),
}
LABELS = {"c": "ImageNet-C", "corrupt": "corrupt"}  # of the kinds of suites with corruptions
Cell = str | float | int | None


def mce_weights(places: Sequence[tuple[str, int]]) -> np.ndarray:
    """What errors (0..1) at places (corruption, severity) are multiplied by to give the mCE in percent."""
    base = {name: sum(ALEXNET[c][s - 1] for c, s in places if c == name) for name, _ in places}
    return np.array([100 / len(base) / base[name] for name, _ in places])


@dataclass
class Table:
    """Columns and rows; numbers stay numbers until they are written. `str` of it is the table as text."""

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        forms: dict[type, str] = {float: "{:.2f}", int: "{:,}", str: "{}"}
        cells = [self.columns, *([forms.get(type(cell), "").format(cell) for cell in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        lines = [self.title, ""]
        for number, row in enumerate(cells):
            padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(padded).rstrip())
            if not number:
                lines.append("-" * (sum(widths) + 2 * len(widths) - 2))
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])

    def json(self) -> str:
        """The table as JSON: title, rows, notes."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return plain_json({"title": self.title, "rows": rows, "notes": self.notes})

    def write(self, folder: Path) -> None:
        """table.txt and table.json."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "table.txt", f"{self}\n".encode())
        write_atomically(folder / "table.json", f"{self.json()}\n".encode())


@dataclass(frozen=True)
class Result:
    """What a model did on one suite."""

    suite: Suite
    correct: np.ndarray  # bool [N]
    keys: list[str]  # [N] names of the images
    top5: float | None = None  # percent
    ece: float | None = None  # percent
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """One row: the mean of what each image contributes."""

    name: str
    values: np.ndarray  # [N] percent
    keys: list[str]
    top5: float | None = None
    ece: float | None = None
    accuracy: bool = False  # values are 0 or 100

    @property
    def estimate(self) -> Estimate:
        """The row's value with its interval: Wilson's for an accuracy, else by the bootstrap."""
        return percentage(self.values > 0) if self.accuracy else _mean(self.values)

    def difference(self, other: Line) -> Estimate:
        """What `other` has more on the same images."""
        if self.accuracy:
            return paired_difference(self.values > 0, other.values > 0)
        return _mean(other.values - self.values)


def _mean(values: np.ndarray) -> Estimate:
    if not np.ptp(values):
        return Estimate(float(values.mean()))
    return bootstrap(values[:, None], lambda means: means[..., 0])


def _lines(results: Sequence[Result]) -> Iterator[Line]:
    """Rows of one model: every suite; corruptions as means over severities, then over all, and mCE."""
    seen: set[str] = set()
    for result in results:
        kind = result.suite.kind
        if not result.suite.corruption:
            values = 100.0 * result.correct
            yield Line(result.suite.name, values, result.keys, result.top5, result.ece, accuracy=True)
        elif kind not in seen:
            seen.add(kind)
            yield from _corruption_lines([r for r in results if r.suite.kind == kind])


def _corruption_lines(results: Sequence[Result]) -> Iterator[Line]:
    label, keys = LABELS[results[0].suite.kind], results[0].keys
    if any(result.keys != keys for result in results):
        raise EverytokenError(f"{label}: the corruptions do not have the same images; check the folders")
    errors = 1.0 - np.stack([result.correct for result in results], 1)
    places = [(result.suite.corruption, result.suite.severity) for result in results]
    for name in (*dict.fromkeys(name for name, _ in places), "mean"):
        chosen = [i for i, place in enumerate(places) if name in (place[0], "mean")]
        top5, ece = (float(np.mean([getattr(results[i], what) for i in chosen])) for what in ("top5", "ece"))
        yield Line(f"{label} {name}", 100 * (1 - errors[:, chosen].mean(1)), keys, top5, ece)
    yield Line(f"{label} mCE", errors @ mce_weights(places), keys)


def make_table(names: Sequence[str], results: Sequence[Sequence[Result]]) -> Table:
    """Of one model; or of two and the second minus the first, paired over the images that both saw."""
    if len(results) == 1:
        table = Table(names[0], ["test set", "images", "top-1", "low", "high", "top-5", "ECE"])
        for line in _lines(results[0]):
            e = line.estimate
            table.rows.append([line.name, len(line.keys), e.value, e.low, e.high, line.top5, line.ece])
    else:
        columns = ["test set", "images", "A", "B", "B - A", "low", "high", "ECE A", "ECE B"]
        table = Table(f"A = {names[0]}, B = {names[1]}", columns)
        for a, b in zip(*map(_lines, results), strict=True):
            if a.keys != b.keys:
                raise EverytokenError(f"{a.name}: the two models did not see the same images")
            d, values = a.difference(b), (a.estimate.value, b.estimate.value)
            table.rows.append([a.name, len(a.keys), *values, d.value, d.low, d.high, a.ece, b.ece])
    who = [""] if len(results) == 1 else ["A, ", "B, "]
    own = (f"{w}{note}" for w, some in zip(who, results, strict=True) for result in some for note in result.notes)
    table.notes = [*dict.fromkeys(own), *_mce_notes(results[0])]
    if len(results) > 1:
        table.notes.append("B - A with paired 95 % intervals over images; none where all images agree.")
    return table


def _mce_notes(results: Sequence[Result]) -> Iterator[str]:
    """How far the corruption errors compare with published ones."""
    for kind, label in LABELS.items():
        places = {(r.suite.corruption, r.suite.severity) for r in results if r.suite.kind == kind}
        if places and len(places) < len(ALEXNET) * len(SEVERITIES):
            yield f"{label}: mCE covers only these corruptions and severities, for AlexNet as well."
    corrupted = [r.suite.corruption for r in results if r.suite.kind == "corrupt"]
    if corrupted:
        yield "corrupt: mCE divides by AlexNet's errors on ImageNet; on other data it only ranks models."
    if "frost" in corrupted:
        yield "corrupt frost: its textures are generated, so its numbers are not ImageNet-C's."
