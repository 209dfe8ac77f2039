"""The table of one model, or of two side by side with paired differences; mean corruption errors.

mCE: Hendrycks and Dietterich 2019, section 4. CE_c = sum_s E_{s,c} / sum_s E^AlexNet_{s,c}; mCE is its mean over the 15
corruptions. Relative: (E_{s,c} - E_clean) in place of E_{s,c}, likewise for AlexNet. AlexNet's errors are the published
ones for each severity. The numbers compare with the paper's only on ImageNet, with all 15 corruptions and 5 severities
of the published images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from everytoken.errors import EverytokenError
from everytoken.files import plain_json, write_atomically
from everytoken_lab.robust.corruptions import SEVERITIES
from everytoken_lab.robust.suites import Suite
from everytoken_lab.stats import Estimate, bootstrap, paired_difference, percentage

ALEXNET_CLEAN = 0.435
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
Errors = Mapping[tuple[str, int], float | np.ndarray]  # (corruption, severity) -> error in 0..1, or many draws of it
Cell = str | float | int | None


def mean_corruption_error(errors: Errors, clean: float | np.ndarray | None = None) -> float | np.ndarray | None:
    """mCE in percent over the corruptions that are there; None without any.

    Args:
        clean: the error (0..1) without corruption, for the relative mCE.
    """
    ratios = []
    for name, alexnet in ALEXNET.items():
        severities = [s for c, s in errors if c == name]
        if not severities:
            continue
        model_sum: float | np.ndarray = sum(errors[name, s] for s in severities)
        alexnet_sum = sum(alexnet[s - 1] for s in severities)
        if clean is not None:
            model_sum = model_sum - len(severities) * clean
            alexnet_sum -= len(severities) * ALEXNET_CLEAN
        ratios.append(100 * model_sum / alexnet_sum)
    return sum(ratios[1:], start=ratios[0]) / len(ratios) if ratios else None


@dataclass
class Table:
    """Columns and rows; numbers stay numbers until they are written. `str` of it is the table as text."""

    title: str
    columns: list[str]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        cells = [self.columns, *([_shown(cell) for cell in row] for row in self.rows)]
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


def _shown(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.2f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


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
    """One row: the images' right or wrong in columns, and what is made of the columns' means."""

    name: str
    columns: np.ndarray  # [N, k] 0 or 1
    keys: list[str]
    statistic: Callable[[np.ndarray], np.ndarray] | None = None  # [..., k] -> [...], percent; None: the accuracy
    top5: float | None = None
    ece: float | None = None

    @property
    def estimate(self) -> Estimate:
        """The row's value with its interval: Wilson's for an accuracy, else by the bootstrap."""
        return bootstrap(self.columns, self.statistic) if self.statistic else percentage(self.columns[:, 0])

    def difference(self, other: Line) -> Estimate:
        """What `other` has more on the same images."""
        mine, theirs, width = self.statistic, other.statistic, self.columns.shape[1]
        if mine is None or theirs is None:
            return paired_difference(self.columns[:, 0], other.columns[:, 0])
        both = np.concatenate([self.columns, other.columns], 1)
        return bootstrap(both, lambda means: theirs(means[..., width:]) - mine(means[..., :width]))


def _lines(results: Sequence[Result]) -> list[Line]:
    """Rows of one model: every suite; corruptions as means over severities, then over all, mCE and relative mCE."""
    lines: list[Line] = []
    clean = next((r for r in results if r.suite.kind == "val"), None)
    corrupted = [r for r in results if r.suite.corruption]
    for result in results:
        if not result.suite.corruption:
            columns = result.correct[:, None].astype(np.uint8)
            lines.append(Line(result.suite.name, columns, result.keys, None, result.top5, result.ece))
        elif (same := [r for r in corrupted if r.suite.kind == result.suite.kind])[0] is result:
            lines += _corruption_lines(same, clean)
    return lines


def _corruption_lines(results: list[Result], clean: Result | None) -> list[Line]:
    label = LABELS[results[0].suite.kind]
    by_place = {(r.suite.corruption, r.suite.severity): r for r in results}
    keys = results[0].keys
    if any(r.keys != keys for r in results):
        raise EverytokenError(f"{label}: the corruptions do not have the same images; check the folders")

    def stack(places: Sequence[tuple[str, int]]) -> np.ndarray:
        return np.stack([by_place[p].correct for p in places], 1).astype(np.uint8)

    def mean_line(title: str, places: Sequence[tuple[str, int]], top5: float | None = None) -> Line:
        ece = float(np.mean([by_place[p].ece for p in places]))
        return Line(f"{label} {title}", stack(places), keys, lambda means: 100 * means.mean(-1), top5, ece)

    lines = []
    for name in dict.fromkeys(corruption for corruption, _ in by_place):
        places = [p for p in by_place if p[0] == name]
        lines.append(mean_line(name, places, float(np.mean([by_place[p].top5 for p in places]))))
    every = list(by_place)
    lines.append(mean_line("mean", every))
    columns = stack(every)

    def mce(means: np.ndarray, relative: bool = False) -> np.ndarray:
        errors = {p: 1 - means[..., i] for i, p in enumerate(every)}
        return np.asarray(mean_corruption_error(errors, 1 - means[..., -1] if relative else None))

    lines.append(Line(f"{label} mCE", columns, keys, mce))
    if clean is not None and set(keys) <= set(clean.keys):
        position = {key: i for i, key in enumerate(clean.keys)}
        clean_column = clean.correct[[position[key] for key in keys]][:, None].astype(np.uint8)
        both = np.concatenate([columns, clean_column], 1)
        lines.append(Line(f"{label} relative mCE", both, keys, lambda means: mce(means, True)))
    return lines


def make_table(names: Sequence[str], results: Sequence[Sequence[Result]]) -> Table:
    """Of one model; or of two and the second minus the first, paired over the images that both saw."""
    if len(results) == 1:
        table = Table(names[0], ["test set", "images", "top-1", "low", "high", "top-5", "ECE"])
        for line in _lines(results[0]):
            e = line.estimate
            table.rows.append([line.name, len(line.columns), e.value, e.low, e.high, line.top5, line.ece])
        table.notes = [*_own_notes(results[0]), *_mce_notes(results[0])]
        return table
    columns = ["test set", "images", "A", "B", "B - A", "low", "high", "ECE A", "ECE B"]
    table = Table(f"A = {names[0]}, B = {names[1]}", columns)
    lines_b = {line.name: line for line in _lines(results[1])}
    for a in _lines(results[0]):
        b = lines_b.get(a.name)
        if b is None or a.keys != b.keys:
            raise EverytokenError(f"{a.name}: the two models did not see the same images")
        d, values = a.difference(b), (a.estimate.value, b.estimate.value)
        table.rows.append([a.name, len(a.columns), *values, d.value, d.low, d.high, a.ece, b.ece])
    table.notes = [*_own_notes(results[0], "A, "), *_own_notes(results[1], "B, "), *_mce_notes(results[0])]
    table.notes.append("B - A with paired 95 % intervals over images; none where all images agree.")
    return table


def _own_notes(results: Sequence[Result], who: str = "") -> list[str]:
    return list(dict.fromkeys(f"{who}{note}" for r in results for note in r.notes))


def _mce_notes(results: Sequence[Result]) -> list[str]:
    """How far the corruption errors compare with published ones."""
    notes = []
    for kind, label in LABELS.items():
        places = {(r.suite.corruption, r.suite.severity) for r in results if r.suite.kind == kind}
        if places and len(places) < len(ALEXNET) * len(SEVERITIES):
            notes.append(f"{label}: mCE covers only these corruptions and severities, for AlexNet as well.")
    corrupted = [r.suite.corruption for r in results if r.suite.kind == "corrupt"]
    if corrupted:
        notes.append("corrupt: mCE divides by AlexNet's errors on ImageNet; on other data it only ranks models.")
    if "frost" in corrupted:
        notes.append("corrupt frost: its textures are generated unless frost_textures was given.")
    return notes
