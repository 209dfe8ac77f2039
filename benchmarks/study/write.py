"""Write docs/results.md and its figure: `python benchmarks/study/write.py [WORK] [--pretrained DIR]`.

With WORK, its finished rows are first copied into results.jsonl beside this file. Sentences are in page.md and
numbers.md, numbers come from the rows: `{cutmix_crops:gains}` is the difference, and an error if the rows no longer say
that it gains. Rows with fewer than three seeds are in no table. `short-trainings.jsonl` is the log of an older study in
another regime (3,000 images, 15 epochs), of which the rows of faults that were fixed since are left out.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import variance

import numpy as np
import plan as study
from against_timm import table as against_timm
from pretrained import best_rate
from pretrained import read_rows as read_list
from pretrained import table as pretrained_table
from run import finished, read_rows
from scipy.stats import t as student

from everytoken_lab import stats

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "results.md"
FIGURE = PAGE.parent / "img" / "results.png"
Runs = dict[int, dict]  # seed -> row
LEAST, FEW = 3, 5  # seeds of a row that is shown (the interval of two is anything), and that need no pooled spread


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
        *against("plain", part, "token labels", "CutMix", "drloc"),
        Line("MixToken, against plain", (part, "MixToken"), (part, "plain"), fixed=False),
        *against("CutMix", part, "CutMix + token labels", "MixToken"),
        *against("CutMix", part, "CutMix + TL-Align", "CutMix + TransMix", "CutMix + drloc"),
        Line(f"{BOTH}, against token labels", (part, BOTH), (part, "token labels"), fixed=False),
    ]


BOTH = "CutMix + token labels"
MEAN, OWN = "the map's mean at every token", "the image's own label at every token"
IMAGENETTE, FOREIGN = ("imagenette", "plain"), "Imagenette, 64 px: token labels of an ImageNet network"
TOKENS = ("light", "CutMix + token labels")
LVVIT_BOTH, MICRO = ("c, LV-ViT", BOTH), (study.LARGER, "token labels")
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
    "Light augmentation (crops): ViT of 0.2 M parameters, 1,000 CIFAR-10 images, 150 epochs": [
        *methods("light"),
        Line(f"MixToken + token labels, against {BOTH}", ("b", "with MixToken"), TOKENS),
    ],
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
    "LV-ViT of 0.2 M parameters, light augmentation": [
        *against("CutMix", "c, LV-ViT", BOTH, "MixToken + token labels"),
        *against(BOTH, "c, LV-ViT", "MixToken + token labels"),
    ],
    "Swin, strong augmentation": against("plain", "c, Swin", "drloc"),
    "Swin, light augmentation": against("CutMix", "c, Swin with crops", "CutMix + TL-Align"),
    "1,000 flower photos of 64 pixels, light augmentation": [
        *against("plain", "d, flowers", "CutMix"),
        *against("CutMix", "d, flowers", BOTH),
    ],
    "LV-ViT of 2.7 M parameters, 50 epochs, light augmentation": [
        *against("token labels", study.LARGER, BOTH),
        Line(
            "LV-ViT of 0.2 M, 150 epochs, CutMix + token labels, against token labels", LVVIT_BOTH, MICRO, fixed=False
        ),
    ],
    "Fine-tuning EfficientNet-Lite0, 30 images per class, 1,000 test images": [
        Line(f"{data}: {title}, against plain", (f"pretrained, {data}", arm), (f"pretrained, {data}", "plain"), False)
        for data in ("cifar10", "flowers")
        for title, arm in (
            ("token labels", "own maps"),
            ("CutMix", "cutmix"),
            ("token labels of ImageNet's classes", "foreign maps"),
        )
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
            Line(f"{FOREIGN}, {which}", ("imagenette", name), IMAGENETTE)
            for which, name in (
                ("its 10 classes", "token, ImageNet's, its 10 classes"),
                ("1000 classes", "token, ImageNet's 1000 classes"),
            )
        ),
    ],
}
LIGHT, STRONG, REASONS, LVVIT, SWIN, SWIN_LIGHT, PHOTOS, MORE, TUNED, SHORT = (
    {line.title: line for line in lines} for lines in TABLES.values()
)
ON_PLAIN, ON_CUTMIX = "token labels, against plain", f"{BOTH}, against CutMix"
# The figure's panels: a method, and by the name that page.md uses, where it was tried and what decides there
METHODS: dict[str, dict[str, tuple[str, Line]]] = {
    "Token labels, against the same without": {
        "tokens_crops": ("crops", LIGHT[ON_PLAIN]),
        "tokens_strong": ("RandAugment", STRONG[ON_PLAIN]),
        "tokens_cutmix": ("crops + CutMix", LIGHT[ON_CUTMIX]),
        "tokens_cutmix_strong": ("RandAugment + CutMix", STRONG[ON_CUTMIX]),
        "tokens_lvvit": ("crops + CutMix, LV-ViT", LVVIT[ON_CUTMIX]),
        "tokens_flowers": ("crops + CutMix, flower photos", PHOTOS[ON_CUTMIX]),
        "tokens_cifar10": ("fine-tuning, CIFAR-10", TUNED["cifar10: token labels, against plain"]),
        "tokens_tuned": ("fine-tuning, flower photos", TUNED["flowers: token labels, against plain"]),
        "tokens_short": ("15 short epochs, LV-ViT", SHORT["token labels from a fitted CNN, against plain"]),
        "tokens_imagenette": ("15 short epochs, photos, ImageNet's 10 classes", SHORT[f"{FOREIGN}, its 10 classes"]),
        "tokens_foreign": ("15 short epochs, photos, ImageNet's 1000 classes", SHORT[f"{FOREIGN}, 1000 classes"]),
    },
    "CutMix, against no mixing": {
        "cutmix_crops": ("crops", LIGHT["CutMix, against plain"]),
        "cutmix_strong": ("RandAugment", STRONG["CutMix, against plain"]),
        "cutmix_flowers": ("crops, flower photos", PHOTOS["CutMix, against plain"]),
        "cutmix_larger": ("crops + token labels, larger LV-ViT, 50 epochs", MORE[f"{BOTH}, against token labels"]),
        "cutmix_short": ("15 short epochs, LV-ViT", SHORT["CutMix, against plain"]),
    },
    "MixToken": {
        "mixtoken_plain": ("crops, against plain", LIGHT["MixToken, against plain"]),
        "mixtoken_crops": ("crops, against CutMix", LIGHT["MixToken, against CutMix"]),
        "mixtoken_tokens": (
            "crops + token labels, against CutMix",
            LIGHT["MixToken + token labels, against CutMix + token labels"],
        ),
        "mixtoken_lvvit": (
            "crops + token labels, against CutMix, LV-ViT",
            LVVIT["MixToken + token labels, against " + BOTH],
        ),
    },
    "TL-Align and TransMix, against CutMix alone": {
        "align_crops": ("TL-Align, crops", LIGHT["CutMix + TL-Align, against CutMix"]),
        "align_swin": ("TL-Align, crops, Swin", SWIN_LIGHT["CutMix + TL-Align, against CutMix"]),
        "align_short": ("TL-Align, 15 short epochs, LV-ViT", SHORT["CutMix + TL-Align, against CutMix"]),
        "transmix_crops": ("TransMix, crops", LIGHT["CutMix + TransMix, against CutMix"]),
    },
    "Dense relative localization, against the same without": {
        "drloc_strong": ("RandAugment", STRONG["drloc, against plain"]),
        "drloc_crops": ("crops", LIGHT["drloc, against plain"]),
        "drloc_cutmix": ("crops + CutMix", LIGHT["CutMix + drloc, against CutMix"]),
        "drloc_swin": ("RandAugment, Swin", SWIN["drloc, against plain"]),
        "drloc_short": ("15 short epochs, LV-ViT", SHORT["drloc, λ 0.1, against plain"]),
        "drloc_swin_short": ("15 short epochs, Swin", SHORT["Swin: drloc, λ 0.5, against plain"]),
    },
    "Token labels against other labels, crops + CutMix": {
        "tokens_soft": ("one soft label per image", REASONS["token labels, against one soft label per image"]),
        "tokens_relabel": ("ReLabel: the label of each crop", REASONS["token labels, against ReLabel"]),
        "tokens_mean": (MEAN, REASONS[f"token labels, against {MEAN}"]),
        "tokens_own": (f"{OWN} (no annotator)", REASONS[f"token labels, against {OWN}"]),
    },
}
# What page.md tells besides
BESIDES = {
    "strong_crops": STRONG["plain, against plain with crops"],
    "lvvit_sizes": MORE["LV-ViT of 0.2 M, 150 epochs, CutMix + token labels, against token labels"],
    "cnn": Line("labels of a fitted CNN", ("b", "fitted CNN"), ("light", "CutMix"), fixed=False),
    **{
        f"linear_{size}": Line(f"{size} against 256 px", ("b", f"linear head at {size} px"), TOKENS, fixed=False)
        for size in (128, 384)
    },
}
MECHANISMS = {
    "place": ("tokens know the place", "+.1f"),
    "pointing": ("pointing", ".1f"),
    "iou": ("IoU", ".1f"),
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
        for row in pretrained_rows():
            self.by_name.setdefault((f"pretrained, {row['dataset']}", row["arm"]), {})[row["seed"]] = row

    def __getitem__(self, name: tuple[str, str]) -> Runs:
        return self.by_name.get(name, {})

    def pairs(self, line: Line, unseen: bool = False) -> list[tuple[float, float]]:
        """Top-1 of the base and of the row, for every seed that both have; empty if these are too few to show.

        Args:
            unseen: only the reserved seeds, of which nobody had seen a row of this arm.
        """
        if unseen and not line.fixed:
            return []
        row, base = self[line.row], self[line.base]
        seeds = sorted(row.keys() & base.keys())
        if unseen:
            new = line.row[0] in study.NEW_PARTS or line.row in study.NEW
            seeds = [seed for seed in seeds if (seed in study.NEW_SEEDS if new else seed >= study.FRESH.start)]
        return [(base[seed]["top1"], row[seed]["top1"]) for seed in seeds] if len(seeds) >= LEAST else []

    @cached_property
    def spread(self) -> tuple[float, int]:
        """Standard deviation of a paired difference between seeds, pooled over all comparisons; its degrees."""
        groups = [differences(pairs) for lines in TABLES.values() for line in lines if (pairs := self.pairs(line))]
        degrees = sum(len(values) - 1 for values in groups)
        squares = sum((len(values) - 1) * variance(values) for values in groups)
        return math.sqrt(squares / degrees), degrees

    def estimate(self, line: Line, unseen: bool = False) -> stats.Estimate | None:
        """Mean difference with its interval; that of few seeds is not narrower than the pooled spread gives.

        Three differences are often alike by luck.
        """
        values = differences(self.pairs(line, unseen))
        if not values:
            return None
        e = stats.mean(values)
        if len(values) >= FEW:
            return e
        deviation, degrees = self.spread
        half = max(e.value - e.low, student.ppf(0.975, degrees) * deviation / math.sqrt(len(values)))
        return stats.Estimate(e.value, e.value - half, e.value + half, e.values)

    def confirmed(self, line: Line) -> bool:
        """Whether the interval excludes zero, and that of the unseen seeds alone does too, on the same side."""
        everything, unseen = (self.estimate(line, which) for which in (False, True))
        if not everything or not unseen:
            return False
        return everything.clear and unseen.clear and everything.value * unseen.value > 0


def differences(pairs: Sequence[tuple[float, float]]) -> list[float]:
    return [after - before for before, after in pairs]


def mean_of(runs: Runs, column: str) -> float | None:
    values = [row[column] for row in runs.values() if row.get(column) is not None]
    return sum(values) / len(values) if values else None


def interval(e: stats.Estimate | None) -> str:
    """`+3.9 [3.1, 4.7]`, bold where it excludes zero; empty without rows."""
    if not e:
        return ""
    text = f"{e.value:+z.1f} [{e.low:+z.1f}, {e.high:+z.1f}]"
    return f"**{text}**" if e.clear else text


class Difference:
    """What page.md shows of a comparison: `{name}`, or `{name:gains}` to be sure that the rows say so.

    "gains" and "costs" are kept for what the unseen seeds alone show too; without those it is "explored".
    """

    def __init__(self, rows: Rows, line: Line) -> None:
        self.title, self.pairs = line.title, rows.pairs(line)
        self.estimate, self.confirmed = rows.estimate(line), rows.confirmed(line)

    @property
    def verdict(self) -> str:
        if not self.estimate:
            return "unknown"
        if self.confirmed:
            return "gains" if self.estimate.value > 0 else "costs"
        return "explored" if self.estimate.clear else "undecided"

    @property
    def span(self) -> str:
        """Mean top-1 of the base and of the row."""
        before, after = (sum(column) / len(self.pairs) for column in zip(*self.pairs, strict=True))
        return f"{before:.1f} to {after:.1f} %"

    def __format__(self, claim: str) -> str:
        if claim and claim != self.verdict:
            raise SystemExit(f"page.md: {self.title}: says {claim}, but the rows say {self.verdict}")
        text = interval(self.estimate)
        return text if self.confirmed else text.replace("*", "")


def sign_flip(differences: Sequence[float]) -> float:
    """Exact two-sided p of paired differences, one per seed: how often random signs give a mean as far from zero.

    Of n seeds the smallest possible value is 2 / 2^n, so fewer than six seeds never reach 0.05. Up to 20 seeds.
    """
    if not 0 < len(differences) <= 20:
        raise ValueError(f"sign_flip takes 1 to 20 differences, not {len(differences)}")
    values = np.asarray(differences, np.float64)
    signs = 1 - 2.0 * (np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1)
    sums = np.abs(signs @ values)
    return float((sums >= abs(values.sum()) - 1e-9).mean())


def table(rows: Rows) -> list[str]:
    """All comparisons as Markdown."""
    out = ["|  | top-1 | difference | p | seeds | reserved seeds |", "|---|---|---|---|---|---|"]
    for title, lines in TABLES.items():
        known = [(line, pairs) for line in lines if (pairs := rows.pairs(line))]
        out += [f"| **{title}** |  |  |  |  |  |"] if known else []
        for line, pairs in known:
            top1, p = sum(after for _, after in pairs) / len(pairs), sign_flip(differences(pairs))
            shown, unseen = (interval(rows.estimate(line, which)) for which in (False, True))
            out.append(f"| {line.title} | {top1:.1f} | {shown} | {p:.2f} | {len(pairs)} | {unseen} |")
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
        gain, other = (rows.estimate(Line(name, key, base)) for base in (("light", "CutMix"), TOKENS))
        rest = "" if key == TOKENS else interval(other)
        out.append(f"| {name} | {cells} | {interval(gain)} | {rest} | {len(rows[key])} |")
    return out


def mechanisms(rows: Rows) -> dict[str, dict[str, float | None]]:
    """What was measured of the networks that were trained with crops: arm -> column -> mean over seeds."""
    arms = {}
    for (part, name), runs in rows.by_name.items():
        prefix = {"light": "", "c, LV-ViT": "LV-ViT: ", "c, Swin with crops": "Swin: "}.get(part)
        if part == "b" and name in (MEAN, OWN):
            prefix = "CutMix + "
        if prefix is not None and len(runs) >= LEAST:
            arms[prefix + name] = {column: mean_of(runs, column) for column in MECHANISMS}
    return arms


def mechanisms_table(rows: Rows) -> list[str]:
    out = ["|  | " + " | ".join(title for title, _ in MECHANISMS.values()) + " |", "|---" * (len(MECHANISMS) + 1) + "|"]
    for arm, means in mechanisms(rows).items():
        cells = ("" if means[column] is None else format(means[column], how) for column, (_, how) in MECHANISMS.items())
        out.append(f"| {arm} | " + " | ".join(cells) + " |")
    return out


def figure(rows: Rows) -> None:
    """Differences with their intervals, one panel per method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = {
        method: [(where, line, e) for where, line in tried.values() if (e := rows.estimate(line))]
        for method, tried in METHODS.items()
    }
    panels = {method: known for method, known in panels.items() if known}
    counts = [len(known) for known in panels.values()]
    image, axes = plt.subplots(
        len(panels),
        figsize=(8, 0.25 * sum(counts) + 0.5 * len(panels)),
        height_ratios=counts,
        squeeze=False,
        layout="constrained",
        sharex=True,
    )
    for axis, (title, known) in zip(axes[:, 0], panels.items(), strict=True):
        axis.axvline(0, color="0.6", linewidth=1)
        axis.grid(axis="x", color="0.92")
        for height, (_, line, e) in enumerate(reversed(known)):
            colour = "0.5" if not e.clear else "C0" if e.value > 0 else "C1"
            axis.plot(e.values, [height] * len(e.values), "|", color="0.2", markersize=5, alpha=0.6)
            axis.text(1.01, height, len(e.values), transform=axis.get_yaxis_transform(), fontsize=8, va="center")
            bar, fill = (e.high or 0) - e.value, colour if rows.confirmed(line) else "white"
            axis.errorbar(e.value, height, xerr=bar, fmt="o", color=colour, markerfacecolor=fill, capsize=3)
        axis.set_yticks(range(len(known)), [where for where, _, _ in reversed(known)])
        axis.set_ylim(-0.6, len(known) - 0.4)
        axis.set_title(title, fontsize=9, loc="left", weight="bold")
        axis.tick_params(labelsize=8)
    image.supxlabel(
        "difference of top-1 in points; bars: 95 % intervals, ticks: seeds (number at the right), filled: confirmed",
        fontsize=8,
    )
    image.savefig(FIGURE, dpi=110, metadata={"Software": None})


def pretrained_rows() -> list[dict]:
    """Rows of the study that starts from pretrained weights, of plain only those at its best rate."""
    rows = read_list(HERE / "pretrained.jsonl")
    best = {key: best_rate(rows, *key, "plain") for key in {(r["dataset"], r["per_class"]) for r in rows}}
    return [r for r in rows if r["arm"] != "plain" or r["rate"] == best[r["dataset"], r["per_class"]]]


def pretrained() -> str:
    """Its table, where arms have enough seeds in common with plain."""
    rows = pretrained_rows()
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
    shown = {name: Difference(rows, line) for tried in METHODS.values() for name, (_, line) in tried.items()}
    shown |= {name: Difference(rows, line) for name, line in BESIDES.items()}
    arms = mechanisms(rows)
    measured = {column: {arm: means[column] for arm, means in arms.items()} for column in MECHANISMS}
    facts = {
        "against": against_timm(),
        "pretrained": pretrained(),
        "comparisons": sum(bool(rows.pairs(line)) for lines in TABLES.values() for line in lines),
        "spread": rows.spread[0],
    }
    tables = {"comparisons": table(rows), "annotators": annotators(rows), "mechanisms": mechanisms_table(rows)}
    tables["miniature"] = [(HERE.parent / "miniature" / "tables.md").read_text().strip()]
    page = (HERE / "page.md").read_text().format(**facts, **shown, **measured)
    numbers = (HERE / "numbers.md").read_text().format(**{name: "\n".join(lines) for name, lines in tables.items()})
    PAGE.write_text(page + numbers)
    print(f"written: {PAGE}, {len(done)} rows")


if __name__ == "__main__":
    main()
