"""The papers in miniature: questions, arms, seeds and the order of rows, fixed before the first row was run.

**Data.** Tiny-ImageNet, 64 px: 100 of its classes with 500 training and 50 validation images each. `CLASSES` draws them
at random; 100 other classes tune the plain recipe. With fewer images per class, every seed draws its own.

**Network.** One ViT: 8x8 tokens of 8 px, 96 wide, 6 deep, 3 heads, 0.7 M parameters, from scratch.

**Annotator.** `registry:efficientnet_lite2`, its 1,000 classes matched by WordNet id, images enlarged to 192 px, 6x6
cells, the five best scores kept. On 500 validation images of the tuning classes its top-1 among 100 classes was 58.8 %
at 128 px, 66.0 at 160, 68.2 at 192, 67.2 at 224, 63.6 at 256 (7.6, 11.0, 15.7, 21.0 and 25.7 ms per image and core), so
192 px. It was trained on ImageNet, of which these images are a part, as the paper's annotator was.

**Questions.** Top-1 on the 5,000 validation images, last weights, float32. Each arm against its base (`AGAINST`):
1. What does each method add to CutMix with 5, 50 and 500 images per class at equal updates (part "images")?
2. Is that still so with 500 images per class and 7.5 epochs (part "long"), the nearest to the papers?
3. Do token labels add to ReLabel, which has the same annotator but one label per crop (All Tokens Matter, Table 3)?
   Is MixToken better than CutMix with them (Table 2)?
4. 50 per class (part "labels"): a weaker annotator (`lite0`, same size), a head fitted to the training images
   themselves, 20 % of the tokens, and the annotator's label for the class token too, as in the released code.
5. From the same networks (`measure.py`): location, transfer, robustness, tokens that name their place, drloc's
   mechanism, TL-Align's Figures 3 to 6.
"Plain" (crops only) is the control that tells whether CutMix itself helps.

**Settings.** Token labeling, ReLabel and TL-Align as published (β 0.5, the class token learns the true label; ReLabel:
the annotator's). drloc: λ = 0.1 on distances divided by the grid, which acts on small networks where the paper's λ of
0.01 does not. All arms share the recipe tuned for CutMix alone: on the tuning classes, 500 per class, 2,000 updates,
one seed, top-1 on their own validation images decides among `RATES`; weight decay is 0.05 and was not tuned. The rows
of the rates (10.5, 10.2 and 9.9 %) were known when this was written.

**Intervals.** Differences are paired by image and by seed. The variance of a mean difference is that over images plus
that over seeds, the latter pooled over all comparisons, since two seeds tell little by themselves. A difference is
called a gain or a cost only where its 95 % interval excludes zero. Two seeds; no row is repeated, all rows are shown.

**Size.** 1,500 updates of 50 images are what two seeds of all arms may cost on two shared cores (five core-hours with
the annotator). These networks are far from their end: what is measured is the beginning of training.

**Order.** The cheap part first, seed by seed, so that every row adds to a table that is complete so far. After six
rows of the first seed (50 per class, all between 8.6 and 10.4 %) its longer runs were moved before the second seed, and
after ten (10.4 to 10.8 % with 500 per class) before its rows with 5 per class: so short a training says little. Of
the longer runs, token labels come first.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]
SEEDS = (1, 2)
COUNTS = (50, 500, 5)  # images per class, in the order of the rows
UPDATES, LONG = 1_500, 7_500  # of 50 images; 500 per class: 1.5 and 7.5 epochs
SIZE = 192  # pixels of the annotator's input
ANNOTATOR = "registry:efficientnet_lite2"

RATES, DECAY, TUNING = (1e-3, 2e-3, 5e-4), 0.05, 2_000
RECIPE: Settings = {
    "model": "vit_nano_patch8_64",
    "model_kwargs": {"embed_dim": 96, "depth": 6, "num_heads": 3},
    "img_size": 64,
    "batch_size": 50,
    "val_batch_size": 100,
    "opt": "adamw",
    "warmup_lr": 1e-6,
    "min_lr": 1e-5,
    "clip_grad": 1.0,
    "smoothing": 0.1,
    "scale": (0.35, 1.0),
    "aa": "",
    "reprob": 0.0,
    "amp": True,
    "device": "cpu",
    "threads": 1,
    "workers": 0,
    "keep": 1,
    "checkpoint_minutes": 5,
    "log_interval": 100,
}


@dataclass(frozen=True)
class Arm:
    """What is learnt, how images are mixed, and from which maps."""

    objectives: Settings
    mixing: Settings
    maps: str = ""


HARD: Settings = {"hard": {}}
CUTMIX: Settings = {"cutmix": {}}
TOKENS: Settings = {"token_labeling": {"beta": 0.5, "class_target": "truth"}}
ARMS = {
    "CutMix": Arm(HARD, CUTMIX),
    "CutMix + TL-Align": Arm({"tl_align": {}}, CUTMIX),
    "CutMix + drloc": Arm({**HARD, "drloc": {"weight": 0.1}}, CUTMIX),
    "CutMix + token labels": Arm(TOKENS, CUTMIX, "lite2"),
    "CutMix + ReLabel": Arm({"relabel": {"class_target": "machine"}}, CUTMIX, "lite2"),
    "MixToken + token labels": Arm(TOKENS, {"mixtoken": {}}, "lite2"),
    "plain": Arm(HARD, {}),
}
MAIN_FIRST = sorted(ARMS, key=lambda name: name not in ("CutMix", "CutMix + token labels"))
LABELS = {
    "token labels of lite0": Arm(TOKENS, CUTMIX, "lite0"),
    "20 % of the tokens": Arm({"token_labeling": {**TOKENS["token_labeling"], "participation": 0.2}}, CUTMIX, "lite2"),
    "the annotator's class too": Arm({"token_labeling": {"beta": 0.5, "class_target": "machine"}}, CUTMIX, "lite2"),
    "token labels of a fitted head": Arm(TOKENS, CUTMIX, "fit"),  # one set of maps per seed
}
AGAINST = {
    **{name: ("CutMix",) for name in ARMS if name != "CutMix"},
    "CutMix + token labels": ("CutMix", "CutMix + ReLabel"),
    "MixToken + token labels": ("CutMix", "CutMix + token labels"),
    **dict.fromkeys(LABELS, ("CutMix", "CutMix + token labels")),
}


@dataclass(frozen=True)
class Run:
    """One training."""

    part: str
    name: str
    count: int  # images per class
    updates: int
    seed: int

    @property
    def arm(self) -> Arm:
        return (ARMS | LABELS)[self.name]

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}/{self.count}/seed{self.seed}"


def plan() -> list[Run]:
    """Every run, in order."""
    images, long, labels = (
        {seed: [Run(part, name, count, updates, seed) for count in counts for name in arms] for seed in SEEDS}
        for part, arms, counts, updates in (
            ("images", ARMS, COUNTS, UPDATES),
            ("long", MAIN_FIRST, (500,), LONG),
            ("labels", LABELS, (50,), UPDATES),
        )
    )
    few = [run for run in images[1] if run.count == 5]
    return [*(run for run in images[1] if run.count > 5), *long[1], *few, *images[2], *labels[1], *labels[2], *long[2]]


def classes(names: list[str]) -> tuple[list[str], list[str]]:
    """Classes of the study and of the tuning, from all names of the data."""
    names = sorted(names)
    random.Random(0).shuffle(names)
    return names[:100], names[100:200]
