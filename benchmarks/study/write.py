"""From results.jsonl to docs/results.md and its plot; made anew each time.

    python benchmarks/study/write.py

A difference is the mean over seeds of (row - plain) with the same seed, with a 95 % interval from Student's t over the
seeds: what another set of seeds would give, on these validation images. The words come from findings.md beside this
file; the numbers from the raw results alone.
"""

from __future__ import annotations

import json
import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "results.md"
PLOT = PAGE.parent / "img" / "results.png"
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
PARTS = {
    "main": "CIFAR-10, 3,000 training images, a small LV-ViT at 32 pixels",
    "imagenette": "Imagenette, 3,000 training images, LV-ViT at 64 pixels",
    "swin": "CIFAR-10, 3,000 training images, a small Swin",
    "vit": "CIFAR-10, 3,000 training images, a small ViT",
    "longer": "CIFAR-10, 3,000 training images, LV-ViT, three times as many epochs",
    "recipe": "CIFAR-10, 3,000 training images, the shipped recipes small_32 and small_32_token, cut to ten epochs",
    "more": "CIFAR-10, 10,000 training images, LV-ViT",
}


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """(mean, half of the 95 % interval) of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return statistics.mean(values), T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def by_row(rows: list[dict]) -> dict[str, dict[int, dict]]:
    """name -> seed -> result, in the order of the file."""
    found: dict[str, dict[int, dict]] = {}
    for row in rows:
        found.setdefault(row["name"], {})[row["seed"]] = row
    return found


def difference(row: dict[int, dict], base: dict[int, dict], what: str) -> list[float]:
    """Paired by seed."""
    return [row[seed][what] - base[seed][what] for seed in sorted(row.keys() & base.keys())]


def table(rows: list[dict]) -> list[str]:
    """One part as Markdown, best first, plain on top."""
    found = by_row(rows)
    base = found["plain"]
    lines = [
        "| | top-1 | against plain | seeds | tokens locate | loss | ECE | CPU time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = sorted(found, key=lambda n: (n != "plain", -statistics.mean(r["top1"] for r in found[n].values())))
    for name in order:
        runs = found[name]
        mean = {key: statistics.mean(r[key] for r in runs.values()) for key in ("top1", "halves", "loss", "ece")}
        paired = difference(runs, base, "top1") if name != "plain" else []
        made = interval(paired)
        gain = f"{made[0]:+.2f} ± {made[1]:.2f}" if made else f"{paired[0]:+.2f}" if paired else ""
        if made and abs(made[0]) > made[1]:
            gain = f"**{gain}**"
        shared = [s for s in runs.keys() & base.keys() if runs[s]["cpu_seconds"] and base[s]["cpu_seconds"]]
        time = [runs[s]["cpu_seconds"] / base[s]["cpu_seconds"] for s in shared]
        lines.append(
            f"| {name} | {mean['top1']:.2f} | {gain} | {len(runs)} | {mean['halves']:.1f} | {mean['loss']:.3f} | "
            f"{mean['ece']:.1f} | {f'{statistics.mean(time):.2f}x' if time else ''} |"
        )
    return lines


def tuning(rows: list[dict]) -> list[str]:
    about = (
        "One run each. Light: crops of half to all of the image, and flips. Medium: RandAugment and erasing, too. With "
        "CutMix for half of the batches unless it says without. Token labels were tried with the plain model's choice."
    )
    lines = [about, "", "| model, augmentation, learning rate | top-1 |", "|---|---|"]
    return lines + [f"| {row['name']} | {row['top1']:.2f} |" for row in sorted(rows, key=lambda r: r["name"])]


def plot(rows: list[dict]) -> None:
    """Differences with intervals, one panel per part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parts = [part for part in PARTS if any(r["part"] == part for r in rows)]
    counts = [max(1, len(by_row([r for r in rows if r["part"] == part])) - 1) for part in parts]
    figure, panels = plt.subplots(
        len(parts), 1, figsize=(8, 0.3 * sum(counts) + 0.9 * len(parts)), height_ratios=counts, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for part, panel in zip(parts, panels[:, 0], strict=True):
        found = by_row([r for r in rows if r["part"] == part])
        base = found.pop("plain")
        paired = {n: d for n, r in found.items() if (d := difference(r, base, "top1"))}
        names = sorted(paired, key=lambda n: statistics.mean(paired[n]))
        panel.axvline(0, color="0.6", linewidth=1)
        for at, name in enumerate(names):
            made, single = interval(paired[name]), paired[name][0]
            if made is None:  # one seed: hollow
                panel.plot(single, at, "o", color="C0", markerfacecolor="white")
            else:
                panel.errorbar(made[0], at, xerr=made[1], fmt="o", color="C0", capsize=3)
        panel.set_yticks(range(len(names)), names)
        panel.set_ylim(-0.6, len(names) - 0.4)
        panel.set_title(textwrap.fill(PARTS[part], 60), fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
    panels[-1, 0].set_xlabel(
        "top-1 against plain, in points, with 95 % interval over seeds; hollow: one seed", fontsize=8
    )
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=110, metadata={"Software": None})


def main() -> None:
    rows = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines() if line.strip()]
    page = [(HERE / "findings.md").read_text().strip(), ""]
    shown = [r for r in rows if r["part"] in PARTS]
    if shown:
        plot(shown)
        page += ["## All differences", "", f"![Top-1 against the plain model](img/{PLOT.name})", ""]
    for part, title in PARTS.items():
        chosen = [r for r in rows if r["part"] == part]
        if any(r["name"] == "plain" for r in chosen):
            page += [f"## {title}", "", *table(chosen), ""]
    tuned = [r for r in rows if r["part"] == "tune"]
    if tuned:
        page += ["## How the baseline was tuned", "", *tuning(tuned), ""]
    PAGE.write_text("\n".join(page).rstrip() + "\n")
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
