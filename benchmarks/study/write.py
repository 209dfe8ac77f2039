"""From results.jsonl to docs/results.md and its plot; made anew each time.

    python benchmarks/study/write.py

A difference is the mean over seeds of (row - baseline) with the same seed, with a 95 % interval from Student's t over
the seeds: what another set of seeds would give, with these images and this annotator. The baseline is the plain model,
for mixed images also the plain model with CutMix. The words come from findings.md beside this file; the numbers from
the raw results alone.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

from everytoken import stats

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "results.md"
PLOT = PAGE.parent / "img" / "results.png"
PARTS = {
    "main": "CIFAR-10, 3,000 training images, a small LV-ViT at 32 pixels",
    "imagenette": "Imagenette, 3,000 training images, LV-ViT at 64 pixels",
    "swin": "CIFAR-10, 3,000 training images, a small Swin",
    "vit": "CIFAR-10, 3,000 training images, a small ViT",
    "longer": "CIFAR-10, 3,000 training images, LV-ViT, three times as many epochs",
    "longest": "CIFAR-10, 3,000 training images, LV-ViT, seven times as many epochs",
    "recipe": "CIFAR-10, 3,000 training images, the shipped recipes small_32 and small_32_token, cut to ten epochs",
    "more": "CIFAR-10, 10,000 training images, LV-ViT",
    "budget": "Two sizes of LV-ViT with token labels, about as long on one core as each other",
    "first": "With the first annotator: five scores per cell, and cells 0.4 of their size out of place",
}
SHORT = {"main": "LV-ViT", "imagenette": "Imagenette", "swin": "Swin", "longer": "45 epochs", "recipe": "recipe"}
PLAIN, MIXED = "plain", "plain, CutMix"
BASELINES = {"budget": "2.7 M parameters, 25 epochs"}  # of other parts: PLAIN


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """(mean, half of the 95 % interval) of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    estimate = stats.mean(values)
    return estimate.value, (estimate.high or 0.0) - estimate.value


def by_row(rows: list[dict]) -> dict[str, dict[int, dict]]:
    """name -> seed -> result, in the order of the file."""
    found: dict[str, dict[int, dict]] = {}
    for row in rows:
        found.setdefault(row["name"], {})[row["seed"]] = row
    return found


def difference(row: dict[int, dict], base: dict[int, dict], what: str) -> list[float]:
    """Paired by seed."""
    return [row[seed][what] - base[seed][what] for seed in sorted(row.keys() & base.keys())]


def load() -> dict[str, dict[str, dict[int, dict]]]:
    """part -> name -> seed -> result. Rows of the first annotator have the baselines of the parts they belong to."""
    rows = [json.loads(line) for line in (HERE / "results.jsonl").read_text().splitlines() if line.strip()]
    found = {part: by_row([r for r in rows if r["part"] == part]) for part in ("tune", *PARTS)}
    first = {}
    for of, title in SHORT.items():
        first |= {f"{title}: {n}": runs for n, runs in by_row([r for r in rows if r.get("of") == of]).items()}
    tuned = by_row([r for r in rows if r.get("of") == "tune"])
    return found | {"first": first, "tune": found["tune"] | tuned}


def base_of(found: dict[str, dict[str, dict[int, dict]]], part: str, name: str) -> dict[int, dict]:
    """The runs to compare a row with."""
    if part == "first":
        part = next(of for of, title in SHORT.items() if name.startswith(f"{title}: "))
    return found[part].get(BASELINES.get(part, PLAIN), {})


def told(values: Sequence[float]) -> str:
    """A paired difference in words, bold where its interval excludes zero."""
    made = interval(values)
    if made is None:
        return f"{values[0]:+.2f}" if values else ""
    text = f"{made[0]:+.2f} ± {made[1]:.2f}"
    return f"**{text}**" if abs(made[0]) > made[1] else text


def ordered(found: dict[str, dict[str, dict[int, dict]]], part: str) -> dict[str, list[float]]:
    """name -> paired differences of a part's rows, the best first."""
    paired = {n: difference(runs, base_of(found, part, n), "top1") for n, runs in found[part].items()}
    own = BASELINES.get(part, PLAIN)
    names = [n for n, values in paired.items() if values and n != own]
    return {n: paired[n] for n in sorted(names, key=lambda n: -statistics.mean(paired[n]))}


def table(found: dict[str, dict[str, dict[int, dict]]], part: str) -> list[str]:
    """One part as Markdown: the baseline, then the best first."""
    rows, own = found[part], BASELINES.get(part, PLAIN)
    mixed = rows.get(MIXED, {})
    head = [
        "",
        "top-1",
        f"against {own}",
        *(["against plain, CutMix"] if mixed else []),
        "seeds",
        "tokens know the place",
    ]
    head += ["loss", "ECE", "CPU time"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in [*([own] if own in rows else []), *ordered(found, part)]:
        runs, base = rows[name], base_of(found, part, name)
        mean = {key: statistics.mean(r[key] for r in runs.values()) for key in ("top1", "loss", "ece")}
        place = statistics.mean(r["own_half"] - r["other_half"] for r in runs.values())
        shared = [s for s in runs.keys() & base.keys() if runs[s]["cpu_seconds"] and base[s]["cpu_seconds"]]
        time = [runs[s]["cpu_seconds"] / base[s]["cpu_seconds"] for s in shared]
        cells = [name, f"{mean['top1']:.2f}", told(difference(runs, base, "top1")) if name != own else ""]
        if mixed:
            cells.append(told(difference(runs, mixed, "top1")) if "CutMix" in name and name != MIXED else "")
        cells += [str(len(runs)), f"{place:+.1f}", f"{mean['loss']:.3f}", f"{mean['ece']:.1f}"]
        cells.append(f"{statistics.mean(time):.2f}x" if time and name != own else "")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def tuning(rows: dict[str, dict[int, dict]]) -> list[str]:
    about = (
        "One run each, judged by the images that the tables are judged by, with another seed than theirs. Light: crops "
        "of half to all of the image, and flips. Medium: RandAugment and erasing, too. With CutMix for half of the "
        "batches unless it says without. Token labels were tried with the plain model's choice and the first annotator."
    )
    lines = [about, "", "| model, augmentation, learning rate | top-1 |", "|---|---|"]
    return lines + [f"| {name} | {next(iter(runs.values()))['top1']:.2f} |" for name, runs in sorted(rows.items())]


def plot(found: dict[str, dict[str, dict[int, dict]]]) -> None:
    """Differences with intervals, one panel per part, all with the same axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parts = [part for part in PARTS if part not in BASELINES and ordered(found, part)]
    counts = [len(ordered(found, part)) for part in parts]
    figure, panels = plt.subplots(
        len(parts), 1, figsize=(8, 0.27 * sum(counts) + 0.7 * len(parts)), height_ratios=counts, squeeze=False,
        layout="constrained", sharex=True,
    )  # fmt: skip
    for part, panel in zip(parts, panels[:, 0], strict=True):
        paired = ordered(found, part)
        names = list(paired)[::-1]
        panel.axvline(0, color="0.6", linewidth=1)
        panel.grid(axis="x", color="0.92")
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
    figure.supxlabel("top-1 against plain, in points, with 95 % interval over seeds; hollow: one seed", fontsize=8)
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=110, metadata={"Software": None})


def main() -> None:
    found = load()
    page = [(HERE / "findings.md").read_text().strip(), ""]
    plot(found)
    page += ["## All differences", "", f"![Top-1 against the plain model](img/{PLOT.name})", ""]
    for part, title in PARTS.items():
        if ordered(found, part):
            page += [f"## {title}", "", *table(found, part), ""]
    page += ["## How the baseline was tuned", "", *tuning(found["tune"]), ""]
    PAGE.write_text("\n".join(page).rstrip() + "\n")
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
