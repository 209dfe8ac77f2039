"""Tables and the figure of gains against images: `python benchmarks/miniature/write.py [WORK]`.

With WORK, its finished rows are first added to those beside this file: tuning.jsonl, results.jsonl, measures.jsonl, and
pairs.jsonl, the paired differences with their variance over images, for which WORK keeps every answer.
Writes tables.md here and docs/img/miniature.png. A difference is bold where its 95 % interval excludes zero.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import plan as study
from run import file_name, read_rows
from scipy.special import stdtrit

from everytoken_lab import stats

HERE = Path(__file__).resolve().parent
FIGURE = HERE.parents[1] / "docs" / "img" / "miniature.png"
MEASURED = {  # column of measures.jsonl -> title; those of `PER_IMAGE` get intervals over images
    "pointing": "pointing",
    "box_iou": "box IoU",
    "flowers": "Flowers",
    "caltech": "Caltech",
    "corrupted": "corrupted",
    "pacs_photo": "PACS photo",
    "pacs_art": "art",
    "pacs_cartoon": "cartoon",
    "pacs_sketch": "sketch",
    "place": "tokens name their place",
    "position": "position R²",
    "entropy": "attention entropy",
    "label_rmse": "TL-Align, Figure 3",
    "area_error": "answer - area",
    "share_error": "answer - share",
}
PER_IMAGE = tuple(MEASURED)[:9]


def pairs(work: Path) -> list[dict]:
    """Every comparison, seed by seed, of top-1 and of what `measure.py` keeps per image."""
    rows, out = read_rows(work / "results.jsonl"), []
    for run in (r for r in study.plan() if r.key in rows):
        for base in study.AGAINST.get(run.name, ()):
            part = "images" if run.part == "labels" else run.part
            other = study.Run(part, base, run.count, run.updates, run.seed).key
            if other not in rows:
                continue
            row = {"key": f"{run.key} against {base}", "part": run.part, "name": run.name, "base": base}
            row |= {"count": run.count, "seed": run.seed}
            first, second = (columns(work, key) for key in (other, run.key))
            for column in sorted(first.keys() & second.keys()):
                values = 100 * (second[column] - first[column])
                row[column] = [round(float(values.mean()), 3), round(float(values.var() / len(values)), 5)]
            out.append(row)
    return out


def columns(work: Path, key: str) -> dict[str, np.ndarray]:
    answers = np.load(work / "right" / f"{file_name(key)}.npz")
    out = {"top1": (answers["answer"] == answers["label"]).astype(np.float32)}
    measured = work / "measured" / f"{file_name(key)}.npz"
    return out | (dict(np.load(measured)) if measured.exists() else {})


class Differences:
    """Estimates from `pairs.jsonl`: variance over images (mean of the seeds') plus variance between seeds, pooled."""

    def __init__(self, rows: list[dict]) -> None:
        self.groups: dict[tuple, list[dict]] = {}
        for row in rows:
            self.groups.setdefault((row["part"], row["name"], row["base"], row["count"]), []).append(row)

    def spread(self, column: str) -> tuple[float, int]:
        """Variance of a difference between seeds, and its degrees of freedom."""
        values = [[row[column][0] for row in group if column in row] for group in self.groups.values()]
        values = [v for v in values if len(v) > 1]
        degrees = sum(len(v) - 1 for v in values)
        return (sum(np.var(v, ddof=1) * (len(v) - 1) for v in values) / degrees if degrees else math.nan), degrees

    def estimate(self, key: tuple, column: str = "top1") -> stats.Estimate | None:
        group = [row[column] for row in self.groups.get(key, ()) if column in row]
        if not group:
            return None
        value = sum(mean for mean, _ in group) / len(group)
        between, degrees = self.spread(column)
        # the images are the same for all seeds, so their variance does not shrink with more seeds
        images = sum(v for _, v in group) / len(group)
        # while every comparison has one seed, the interval is that over images alone
        half = (
            float(stdtrit(degrees, 0.975)) * math.sqrt(images + between / len(group))
            if degrees
            else 1.96 * math.sqrt(images)
        )
        return stats.Estimate(value, value - half, value + half, tuple(mean for mean, _ in group))


def text(e: stats.Estimate | None) -> str:
    """`+3.9 [3.1, 4.7]`, bold where two seeds or more have an interval that excludes zero."""
    if e is None:
        return ""
    shown = f"{e.value:+z.1f}" + (f" [{e.low:+z.1f}, {e.high:+z.1f}]" if e.low is not None else "")
    return f"**{shown}**" if e.clear and len(e.values) > 1 else shown


def tables(rows: dict[str, dict], measures: dict[str, dict], known: Differences) -> str:
    """Markdown."""
    out, waiting = [], []
    groups = {(r.part, r.count, r.updates): 0 for r in study.plan()}
    for part, count, updates in groups:
        names = list(dict.fromkeys(r.name for r in study.plan() if (r.part, r.count) == (part, count)))
        if not any((r["part"], r["count"]) == (part, count) for r in rows.values()):
            waiting.append(f"{part} with {count} images per class")
            continue
        out += [f"\n**{part}: {count} images per class, {updates:,} updates**\n"]
        out += ["| arm | top-1 | differences | seeds |", "|---|---|---|---|"]
        for name in names:
            found = [r for r in rows.values() if (r["part"], r["name"], r["count"]) == (part, name, count)]
            bases = study.AGAINST.get(name, ())
            gains = [(base, known.estimate((part, name, base, count))) for base in bases]
            shown = "; ".join(f"{text(e)} against {base}" for base, e in gains if e)
            top1 = f"{sum(r['top1'] for r in found) / len(found):.1f}" if found else "not run"
            out.append(f"| {name} | {top1} | {shown} | {len(found)} |")
    for part, count in dict.fromkeys((r.part, r.count) for r in study.plan()):
        keys = [r for r in study.plan() if (r.part, r.count) == (part, count) and r.key in measures]
        if not keys:
            continue
        out += [f"\n**{part}, {count} per class: what the networks are good for**\n"]
        out += ["| arm | " + " | ".join(MEASURED.values()) + " |", "|---" * (len(MEASURED) + 1) + "|"]
        for name in dict.fromkeys(r.name for r in keys):
            found = [measures[r.key] for r in keys if r.name == name]
            cells = []
            for column in MEASURED:
                value = sum(row[column] for row in found) / len(found)
                e = known.estimate((part, name, "CutMix", count), column) if column in PER_IMAGE else None
                cells.append(f"{value:.3g}" + (f" ({text(e)})" if e else ""))
            out.append(f"| {name} | " + " | ".join(cells) + " |")
        if "untrained" in measures:
            cells = [f"{measures['untrained'][column]:.3g}" for column in MEASURED]
            out.append("| untrained | " + " | ".join(cells) + " |")
    out += [f"\nNot run yet: {', '.join(waiting)}."] if waiting else []
    return "\n".join(out) + "\n"


def figure(known: Differences) -> None:
    """Gain over CutMix against images per class."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    image, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.axhline(0, color="0.6", linewidth=1)
    for number, name in enumerate(name for name in study.ARMS if name not in ("CutMix", "plain")):
        for part, style in (("images", "o-"), ("long", "s")):
            found = [(n, known.estimate((part, name, "CutMix", n))) for n in sorted(study.COUNTS)]
            points = [(n * 1.06 ** (number - 2), e) for n, e in found if e]
            if part == "long":
                points = [(n * 1.8, e) for n, e in points]
            bars = [[e.high - e.value if e.high is not None else 0 for _, e in points]] * 2
            label = name if part == "images" else None
            places, values = [n for n, _ in points], [e.value for _, e in points]
            axis.errorbar(places, values, yerr=bars, fmt=style, color=f"C{number}", label=label, capsize=3)
    axis.set(xscale="log", xlabel="images per class (squares: 500, five times the updates)")
    axis.set_xticks(sorted(study.COUNTS), [str(n) for n in sorted(study.COUNTS)])
    axis.minorticks_off()
    axis.set_ylabel("gain over CutMix, points of top-1, 95 %")
    axis.legend(fontsize=8)
    image.savefig(FIGURE, dpi=110, metadata={"Software": None})


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    if len(sys.argv) > 1:
        work = Path(sys.argv[1])
        for name in ("tuning", "results", "measures"):
            found = read_rows(HERE / f"{name}.jsonl") | read_rows(work / f"{name}.jsonl")
            (HERE / f"{name}.jsonl").write_text(lines(list(found.values())))
        found = read_rows(HERE / "pairs.jsonl") | {row["key"]: row for row in pairs(work)}
        (HERE / "pairs.jsonl").write_text(lines(list(found.values())))
    rows, measures = (read_rows(HERE / f"{name}.jsonl") for name in ("results", "measures"))
    known = Differences([json.loads(line) for line in (HERE / "pairs.jsonl").read_text().splitlines()])
    (HERE / "tables.md").write_text(tables(rows, measures, known))
    figure(known)
    print(f"{len(rows)} rows, {len(measures)} measured")


if __name__ == "__main__":
    main()
