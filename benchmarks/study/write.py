"""Write docs/results.md, its table and its figure: `python benchmarks/study/write.py [WORK] [--pretrained DIR]`.

With WORK, its finished rows are first copied into results.jsonl beside this file. Numbers come from the rows alone;
what they mean is in page.md. Rows with fewer than three seeds are in no table. `short-trainings.jsonl` is the log of an
older study in another regime (3,000 images, 15 epochs), of which the rows of faults that were fixed since are left out.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import plan as study
from run import finished, read_rows

from everytoken import stats

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "results.md"
NUMBERS = PAGE.with_name("results-table.md")
FIGURE = PAGE.parent / "img" / "results.png"
Runs = dict[int, dict]  # seed -> row
LEAST = 3  # seeds of a row that is shown: the interval of two is anything


@dataclass(frozen=True)
class Line:
    """One comparison: a row and what it is compared with, each (part, name)."""

    title: str
    row: tuple[str, str]
    base: tuple[str, str]
    fixed: bool = True  # before its unseen seeds were run; otherwise they do not confirm it


def against(base: str, part: str, *names: str) -> list[Line]:
    return [Line(f"{name}, against {base}", (part, name), (part, base)) for name in names]


def methods(part: str) -> list[Line]:
    """What is compared in each of the two regimes."""
    return [
        *against("plain", part, "token labels", "CutMix", "MixToken", "drloc"),
        *against("CutMix", part, "CutMix + token labels", "MixToken"),
        *against("CutMix", part, "CutMix + TL-Align", "CutMix + TransMix", "CutMix + drloc"),
        Line(f"{BOTH}, against token labels", (part, BOTH), (part, "token labels"), fixed=False),
    ]


BOTH = "CutMix + token labels"
MEAN, OWN = "the map's mean at every token", "the image's own label at every token"
IMAGENETTE = ("imagenette", "plain")
TOKENS = ("light", "CutMix + token labels")
# maps that token labels are made of, beside those of the linear head at 256 px that all other parts use
ANNOTATORS = (
    "ImageNet's 1000 classes",
    "fitted CNN",
    "linear head at 128 px",
    "linear head at 384 px",
    "cells of 2x2 averaged",
    "softer, temperature 2",
)
TABLES: dict[str, list[Line]] = {
    "Light augmentation (crops): ViT of 0.2 M parameters, 1,000 CIFAR-10 images, 150 epochs": methods("light"),
    "Strong augmentation (RandAugment), otherwise the same": [
        *methods("a"),
        Line("plain, against plain with crops", ("a", "plain"), ("light", "plain"), fixed=False),
        Line("CutMix + token labels with crops, against plain with RandAugment", TOKENS, ("a", "plain"), fixed=False),
    ],
    "Why token labels help: other labels in their place, light augmentation + CutMix": [
        *(
            Line(f"{name}, against CutMix", ("b", name), ("light", "CutMix"))
            for name in ("one soft label per image", "ReLabel", OWN, MEAN, "ImageNet's 1000 classes")
        ),
        *(
            Line(f"token labels, against {name}", TOKENS, ("b", name))
            for name in ("one soft label per image", "ReLabel", OWN, MEAN)
        ),
    ],
    "LV-ViT, light augmentation": [
        *against("CutMix", "c, LV-ViT", "CutMix + token labels", "MixToken + token labels"),
    ],
    "Swin, strong augmentation": against("plain", "c, Swin", "drloc"),
    "1,000 flower photos of 64 pixels, light augmentation": [
        *against("plain", "d, flowers", "CutMix"),
        *against("CutMix", "d, flowers", "CutMix + token labels"),
    ],
    "Short trainings: LV-ViT of 0.26 M parameters, 3,000 CIFAR-10 images, 15 epochs, 5,000 test images": [
        Line("token labels from a fitted CNN, against plain", ("main", "token"), ("main", "plain")),
        Line("CutMix, against plain", ("main", "plain, CutMix"), ("main", "plain")),
        Line("CutMix + TL-Align, against CutMix", ("main", "alignment, CutMix"), ("main", "plain, CutMix")),
        Line("drloc, λ 0.1, against plain", ("main", "drloc, λ 0.1"), ("main", "plain")),
        Line("ReLabel, same annotator, against plain", ("main", "ReLabel"), ("main", "plain")),
        Line(f"{MEAN}, against plain", ("main", "token, the map's mean everywhere"), ("main", "plain")),
        Line("Swin: drloc, λ 0.5, against plain", ("swin", "drloc"), ("swin", "plain")),
        *(
            Line(f"Imagenette, 64 px: token labels of an ImageNet network, {which}", ("imagenette", name), IMAGENETTE)
            for which, name in (
                ("its 10 classes", "token, ImageNet's, its 10 classes"),
                ("1000 classes", "token, ImageNet's 1000 classes"),
            )
        ),
    ],
}
LIGHT, STRONG, _, LVVIT, SWIN, PHOTOS, SHORT = ({line.title: line for line in lines} for lines in TABLES.values())
ON_PLAIN, ON_CUTMIX = "token labels, against plain", "CutMix + token labels, against CutMix"
# a method and the comparisons that decide about it, for the sentences at the top
METHODS: dict[str, list[tuple[str, Line]]] = {
    "Token labels": [
        ("with crops", LIGHT[ON_PLAIN]),
        ("with RandAugment", STRONG[ON_PLAIN]),
        ("with 15 short epochs", SHORT["token labels from a fitted CNN, against plain"]),
        ("on top of CutMix with crops", LIGHT[ON_CUTMIX]),
        ("on CutMix with RandAugment", STRONG[ON_CUTMIX]),
        ("on CutMix in an LV-ViT", LVVIT[ON_CUTMIX]),
        ("on CutMix with flower photos", PHOTOS[ON_CUTMIX]),
    ],
    "CutMix": [
        (f"with {regime}", lines["CutMix, against plain"])
        for regime, lines in (
            ("crops", LIGHT),
            ("RandAugment", STRONG),
            ("flower photos", PHOTOS),
            ("15 short epochs", SHORT),
        )
    ],
    "MixToken": [("with crops", LIGHT["MixToken, against CutMix"])],
    "TL-Align": [
        (f"with {regime}", lines["CutMix + TL-Align, against CutMix"])
        for regime, lines in (("crops", LIGHT), ("15 short epochs", SHORT))
    ],
    "TransMix": [("with crops", LIGHT["CutMix + TransMix, against CutMix"])],
    "Dense relative localization": [
        ("with RandAugment", STRONG["drloc, against plain"]),
        ("with crops", LIGHT["drloc, against plain"]),
        ("in a Swin", SWIN["drloc, against plain"]),
        ("with 15 short epochs", SHORT["drloc, λ 0.1, against plain"]),
    ],
}
MECHANISMS = {
    "place": ("tokens know the place", "+.1f"),
    "pointing": ("pointing", ".1f"),
    "entropy": ("attention entropy", ".3f"),
    "share_rmse": ("share - area", ".4f"),
    "area_error": ("answer - area", ".3f"),
    "share_error": ("answer - share", ".3f"),
    "position": ("position R²", ".3f"),
    "drloc_loss": ("drloc's loss", ".4f"),
}


KNOWN = ("right", "cells_like_image", "sharpness")


class Rows:
    """All rows, by part and name and seed."""

    def __init__(self, *files: Path) -> None:
        self.by_name: dict[tuple[str, str], Runs] = {}
        for file in files:
            for row in read_rows(file).values():
                self.by_name.setdefault((row["part"], row["name"]), {})[row["seed"]] = row

    def __getitem__(self, name: tuple[str, str]) -> Runs:
        return self.by_name.get(name, {})

    def pairs(self, line: Line, unseen: bool = False) -> list[tuple[float, float]]:
        """Top-1 of the base and of the row, for every seed that both have; empty if these are too few to show.

        Args:
            unseen: only of the seeds of which nobody had seen a row when the questions were fixed.
        """
        if unseen and not line.fixed:
            return []
        row, base = self[line.row], self[line.base]
        new = line.row[0] in study.NEW_PARTS or line.row in study.NEW
        first = study.FRESH.start if unseen and not new else 0
        seeds = sorted(seed for seed in row.keys() & base.keys() if seed >= first)
        return [(base[seed]["top1"], row[seed]["top1"]) for seed in seeds] if len(seeds) >= LEAST else []

    def confirmed(self, line: Line) -> bool:
        """Whether the interval excludes zero, and that of the unseen seeds alone does too, on the same side."""
        everything, unseen = (differences(self.pairs(line, which)) for which in (False, True))
        if not unseen:
            return False
        e, u = stats.mean(everything), stats.mean(unseen)
        return e.clear and u.clear and e.value * u.value > 0


def differences(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [after - before for before, after in pairs]


def mean_of(runs: Runs, column: str) -> float | None:
    values = [row[column] for row in runs.values() if row.get(column) is not None]
    return sum(values) / len(values) if values else None


def interval(pairs: Sequence[tuple[float, float]]) -> str:
    """`+3.9 [3.1, 4.7]`, bold where it excludes zero; empty without pairs."""
    if not pairs:
        return ""
    e = stats.mean(differences(pairs))
    text = f"{e.value:+.1f} [{e.low:+.1f}, {e.high:+.1f}]"
    return f"**{text}**" if e.clear else text


def sentence(rows: Rows, where: str, line: Line) -> str:
    """What is known about a method in a regime; nothing if nothing is.

    "Gains" and "costs" are kept for what the unseen seeds alone show too.
    """
    pairs = rows.pairs(line)
    if not pairs:
        return ""
    e, confirmed = stats.mean(differences(pairs)), rows.confirmed(line)
    verdict = "undecided,"
    if not e.clear and max(abs(e.low or 0), abs(e.high or 0)) < 1:
        verdict = "changes less than a point,"
    if confirmed:
        verdict = "gains" if e.value > 0 else "costs"
    elif e.clear:
        verdict = "not confirmed by unseen seeds," if rows.pairs(line, unseen=True) else "explored only,"
    before, after = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    base = line.title.rpartition("against ")[2]
    shown = interval(pairs) if confirmed else interval(pairs).replace("*", "")
    return f"{where} {verdict} {shown} ({base} {before:.1f} to {after:.1f} %)"


HEADING = (
    "# Every comparison",
    "",
    "Top-1 in percent and differences in points, with 95 % intervals, bold where they exclude zero; p flips all signs.",
    "What the arms are, and which seeds are unseen: [results](results.md). Where that column is empty there are none,",
    "or the comparison is not one that was fixed before they ran.",
    "",
)


def table(rows: Rows) -> list[str]:
    """All comparisons as Markdown."""
    out = ["|  | top-1 | difference | p | seeds | unseen seeds alone |", "|---|---|---|---|---|---|"]
    for title, lines in TABLES.items():
        known = [(line, pairs) for line in lines if (pairs := rows.pairs(line))]
        out += [f"| **{title}** |  |  |  |  |  |"] if known else []
        for line, pairs in known:
            top1, p = sum(after for _, after in pairs) / len(pairs), stats.sign_flip(differences(pairs))
            unseen = interval(rows.pairs(line, unseen=True))
            out.append(f"| {line.title} | {top1:.1f} | {interval(pairs)} | {p:.2f} | {len(pairs)} | {unseen} |")
    return out


def annotators(rows: Rows) -> list[str]:
    """What each annotator knows, how local and how sharp its cells are, and what its labels are worth on CutMix."""
    out = [
        "| maps | right | cells like the image | sharpness | against CutMix | against linear head at 256 px | seeds |"
    ]
    out.append("|---" * 7 + "|")
    for name, key in {"linear head at 256 px": TOKENS, **{name: ("b", name) for name in ANNOTATORS}}.items():
        if len(rows[key]) < LEAST:
            continue
        known = [row["annotator"] for row in rows[key].values() if row.get("annotator")]
        means = [100 * sum(a[column] for a in known) / len(known) for column in KNOWN] if known else []
        cells = " | ".join(f"{value:.0f}" for value in means) or " | | "
        gain, other = (rows.pairs(Line(name, key, base)) for base in (("light", "CutMix"), TOKENS))
        rest = "" if key == TOKENS else interval(other)
        out.append(f"| {name} | {cells} | {interval(gain)} | {rest} | {len(gain)} |")
    return out


def mechanisms(rows: Rows) -> list[str]:
    """One row per arm of the regime that overfits."""
    shown = {name for part, name in rows.by_name if part == "light"} | {MEAN, OWN}
    arms = [key for key in rows.by_name if key[0] in ("light", "b") and key[1] in shown and len(rows[key]) >= LEAST]
    if not arms:
        return []
    out = ["|  | " + " | ".join(title for title, _ in MECHANISMS.values()) + " |", "|---" * (len(MECHANISMS) + 1) + "|"]
    for part, name in arms:
        means = [(mean_of(rows[part, name], column), how) for column, (_, how) in MECHANISMS.items()]
        cells = " | ".join("" if value is None else format(value, how) for value, how in means)
        out.append(f"| {'CutMix + ' if part == 'b' else ''}{name} | {cells} |")
    return out


def figure(rows: Rows) -> None:
    """All differences with their intervals, one panel per table that has any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = {
        title: [(line, pairs) for line in lines if (pairs := rows.pairs(line))] for title, lines in TABLES.items()
    }
    panels = {title: known for title, known in panels.items() if known}
    counts = [len(known) for known in panels.values()]
    image, axes = plt.subplots(
        len(panels),
        figsize=(8, 0.28 * sum(counts) + 0.8 * len(panels)),
        height_ratios=counts,
        squeeze=False,
        layout="constrained",
        sharex=True,
    )
    for axis, (title, known) in zip(axes[:, 0], panels.items(), strict=True):
        axis.axvline(0, color="0.6", linewidth=1)
        axis.grid(axis="x", color="0.92")
        for height, (line, pairs) in enumerate(reversed(known)):
            values = differences(pairs)
            e = stats.mean(values)
            colour = "0.5" if not e.clear else "C2" if e.value > 0 else "C3"
            axis.plot(values, [height] * len(values), "|", color=colour, alpha=0.5)
            bar, fill = (e.high or 0) - e.value, colour if rows.confirmed(line) else "white"
            axis.errorbar(e.value, height, xerr=bar, fmt="o", color=colour, markerfacecolor=fill, capsize=3)
        axis.set_yticks(range(len(known)), [line.title for line, _ in reversed(known)])
        axis.set_ylim(-0.6, len(known) - 0.4)
        axis.set_title(textwrap.fill(title, 55), fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
    image.supxlabel(
        "difference of top-1 in points; bars: 95 % interval over seeds, ticks: seeds, filled: unseen seeds alone agree",
        fontsize=8,
    )
    image.savefig(FIGURE, dpi=110, metadata={"Software": None})


def pretrained() -> str:
    """The table of the study that starts from pretrained weights, where plain at its best rate has enough seeds."""
    from pretrained import best_rate
    from pretrained import read_rows as read_list
    from pretrained import table as pretrained_table

    rows = read_list(HERE / "pretrained.jsonl")
    best = {key: best_rate(rows, *key, "plain") for key in {(r["dataset"], r["per_class"]) for r in rows}}
    rows = [r for r in rows if r["arm"] != "plain" or r["rate"] == best[r["dataset"], r["per_class"]]]
    seeds: dict[tuple, set[int]] = {}
    for row in rows:
        seeds.setdefault((row["dataset"], row["per_class"], row["arm"]), set()).add(row["seed"])

    def enough(row: dict) -> bool:
        group = (row["dataset"], row["per_class"])
        return len(seeds[(*group, row["arm"])] & seeds[(*group, "plain")]) >= LEAST

    return pretrained_table([row for row in rows if enough(row)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, nargs="?", help="copy the rows of run.py's folder first")
    parser.add_argument("--pretrained", type=Path, help="copy the rows of pretrained.py's folder first")
    options = parser.parse_args()
    results = HERE / "results.jsonl"
    if options.work:
        done = finished(options.work)
        results.write_text("".join(json.dumps(row) + "\n" for row in done.values()))
    if options.pretrained and (options.pretrained / "results.jsonl").exists():
        (HERE / "pretrained.jsonl").write_text((options.pretrained / "results.jsonl").read_text())
    done = read_rows(results)
    rows = Rows(results, HERE / "short-trainings.jsonl")
    figure(rows)
    sentences = [
        f"- **{method}**: " + "; ".join(known) + "."
        for method, lines in METHODS.items()
        if (known := [text for where, line in lines if (text := sentence(rows, where, line))])
    ]
    text = (HERE / "page.md").read_text()
    text = text.format(
        sentences="\n".join(sentences),
        pretrained=pretrained(),
        annotators="\n".join(annotators(rows)),
        mechanisms="\n".join(mechanisms(rows)) or "No rows yet.",
    )
    PAGE.write_text(text)
    NUMBERS.write_text("\n".join((*HEADING, *table(rows), "")))
    print(f"written: {PAGE}, {len(done)} rows")


if __name__ == "__main__":
    main()
