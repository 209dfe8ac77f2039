"""The experiments, as data: which runs, in which order, and how many of them an answer takes.

**Regime.** The papers train for 300 epochs on data that their networks overfit without help. Here: 1,000 images,
networks of a fifth of a million parameters (Swin 0.6), 150 epochs. Every seed draws its own 1,000 training images and
its own weights, and fits its own annotator, so intervals also tell what other images would give. Accuracy is that of
the last epoch on all test images.

**Power.** In the older short trainings (short-trainings.jsonl, CIFAR rows) the paired difference between two arms had a
standard deviation of 0.8 points between seeds. With 0.8 to 1.0, Student's interval excludes zero with probability 0.8
for differences of
    3 seeds: 2.7 to 3.3     4: 1.8 to 2.2     5: 1.4 to 1.7     6: 1.2 to 1.5     8: 1.0 to 1.2 points.
In the first rows of this plan the deviation was 1.2 (every seed has its own images): three seeds show 4 points, five
2.1, nine 1.3.

**What decides.** Seeds 0 to 3 explored: network, regimes and order were settled after the tuning rows; "the image's own
label at every token" was added, and smaller gains were given a fourth seed, after looking at two and three. Then the
questions of `CONFIRMED` were fixed, with the seeds that answer them (`FRESH`), of which nobody had seen a row; the
first runs of seed 4 were under way by then, unread. MixToken, TransMix and drloc on CutMix, each against CutMix alone,
have five seeds, all of them unseen (`NEW`). When those were known (MixToken +0.9 [-0.0, +1.8], drloc +0.7 [+0.2, +1.3])
these two got three more, the last for which CutMix has rows; only the first five decide. Two more seeds for Swin's
drloc (-0.3 with three) were planned and then given up for TL-Align in a Swin and the recipe. The other blocks have
three seeds, for effects of four points or for mechanisms. With RandAugment CutMix costs accuracy, so what could be
added to it there answers nothing and is not run. LV-ViT and the photos were moved from RandAugment to crops because
crops with CutMix and token labels was the best arm so far; no row of theirs existed. The best arm against the best
plain one (crops against RandAugment) is a comparison that was added after its first seeds were known, so it is not one
of the fixed questions. The rows "fitted CNN" have labels of a small CNN that an earlier `fit` trained on the same
images, so they cannot be repeated.

**Tuning.** The plain network alone, on a training set and 2,000 validation images that no other part uses, none of them
from the test set (`TUNED`). RandAugment gained 3 to 6 points over crops and stopped the overfitting, so there are two
regimes (`REGIMES`): a, with RandAugment, which is the better plain network; light, with crops alone, which overfits as
the papers' networks do without help. The budget decided the size: the larger network was no better with crops, 2 points
better with RandAugment, and takes more than twice as long.
One seed each: crops 40.9 (half as many epochs 40.8), RandAugment 43.7 (twice the rate, not taken, 44.0); the larger
network 40.0 and 45.6. λ of drloc was tuned with crops only: 0.1 gave 42.1, 0.5 gave 41.9.

**Order.** Seed by seed within a block, so that a study that is stopped has whole pairs; the most telling blocks first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]
SEEDS = range(3)
FRESH = range(4, 8)  # for `CONFIRMED`, and one more for the smallest effect, drloc's
EPOCHS = 150
TUNING_SEED = 100
SIZES = {"cifar": 32, "flowers": 64}

VITS: dict[str, Settings] = {
    "64 wide, 4 deep": {"embed_dim": 64, "depth": 4, "num_heads": 2},  # 0.2 M parameters
    "96 wide, 6 deep": {"embed_dim": 96, "depth": 6, "num_heads": 3},  # 0.7 M
}
COMMON: Settings = {
    "batch_size": 50,
    "val_batch_size": 100,
    "opt": "adamw",
    "weight_decay": 0.05,
    "warmup_epochs": 5,
    "warmup_lr": 1e-6,
    "min_lr": 1e-5,
    "clip_grad": 1.0,
    "smoothing": 0.1,
    "amp": True,
    "device": "cpu",
    "threads": 1,
    "workers": 0,
    "keep": 1,
    "log_interval": 20,
}
CROPS: Settings = {"scale": (0.5, 1.0), "aa": "", "reprob": 0.0}
AUGMENTATION: dict[str, Settings] = {
    "crops": CROPS,
    "small crops": {**CROPS, "scale": (0.25, 1.0)},
    "RandAugment": {**CROPS, "aa": "rand-m7-mstd0.5-inc1"},
}
SMALL, LARGE = VITS
# What was tried: size, rate, augmentation, epochs, λ of drloc (0: plain)
TUNED = (
    (LARGE, 1e-3, "crops", 150, 0.0),
    (LARGE, 5e-4, "crops", 150, 0.0),
    (LARGE, 5e-4, "small crops", 150, 0.0),
    (LARGE, 5e-4, "RandAugment", 150, 0.0),
    (SMALL, 1e-3, "crops", 150, 0.0),
    (SMALL, 1e-3, "RandAugment", 150, 0.0),
    (SMALL, 2e-3, "RandAugment", 150, 0.0),
    (SMALL, 1e-3, "crops", 75, 0.0),
    (SMALL, 1e-3, "crops", 150, 0.1),
    (SMALL, 1e-3, "crops", 150, 0.5),
    (SMALL, 1e-3, "RandAugment", 300, 0.0),
)


@dataclass(frozen=True)
class Regime:
    """What all arms of a comparison share, and λ of drloc, as tuned."""

    augmentation: str
    lr: float
    drloc: float


REGIMES = {"a": Regime("RandAugment", 1e-3, 0.1), "light": Regime("crops", 1e-3, 0.1)}


@dataclass(frozen=True)
class Arm:
    """What an arm learns, from which maps (`prepare.py` makes them), and how its images are mixed."""

    objectives: Settings
    mixing: Settings
    maps: str = ""


@dataclass(frozen=True)
class Run:
    """One training. `settings` are arguments of `everytoken.train`; `data` names the images, `maps` the score maps."""

    part: str
    name: str
    seed: int
    data: str
    settings: Settings
    maps: str = ""

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}/seed{self.seed}"


HARD: Settings = {"hard": {}}
CUTMIX: Settings = {"cutmix": {}}
BOTH: Settings = {"class_target": "both", "rho": 0.5}
TOKENS: Settings = {"token_labeling": {"beta": 1.0, **BOTH}}


def arms_a(drloc: float) -> dict[str, Arm]:
    """Every method, alone and on CutMix."""
    located: Settings = {**HARD, "drloc": {"weight": drloc}}
    return {
        "plain": Arm(HARD, {}),
        "token labels": Arm(TOKENS, {}, "linear-256"),
        "CutMix": Arm(HARD, CUTMIX),
        "CutMix + token labels": Arm(TOKENS, CUTMIX, "linear-256"),
        "CutMix + TL-Align": Arm({"tl_align": {}}, CUTMIX),
        "drloc": Arm(located, {}),
        "CutMix + drloc": Arm(located, CUTMIX),
        "MixToken": Arm(HARD, {"mixtoken": {}}),
        "CutMix + TransMix": Arm({"transmix": {}}, CUTMIX),
    }


# Why token labels help: the same annotator without places, and other annotators with places. All light, with CutMix.
ARMS_B = {
    "ReLabel": Arm({"relabel": BOTH}, CUTMIX, "linear-256"),
    "the map's mean at every token": Arm(TOKENS, CUTMIX, "linear-256-mean"),
    "the image's own label at every token": Arm(TOKENS, CUTMIX, "linear-256-truth"),
    "one soft label per image": Arm({"relabel": BOTH}, CUTMIX, "linear-256-mean"),
    "ImageNet's 1000 classes": Arm({"token_labeling": {"beta": 1.0, "class_target": "truth"}}, CUTMIX, "foreign-256"),
    "linear head at 128 px": Arm(TOKENS, CUTMIX, "linear-128"),
    "linear head at 384 px": Arm(TOKENS, CUTMIX, "linear-384"),
    "cells of 2x2 averaged": Arm(TOKENS, CUTMIX, "linear-256-coarse"),
    "softer, temperature 2": Arm({"token_labeling": {"beta": 1.0, **BOTH, "temperature": 2.0}}, CUTMIX, "linear-256"),
    "with MixToken": Arm(TOKENS, {"mixtoken": {}}, "linear-256"),
}

# What seeds that nobody had seen decide: each against plain, or against CutMix where it adds to that
CONFIRMED = {
    "a": ("plain", "drloc", "token labels"),
    "light": ("plain", "token labels", "CutMix", "CutMix + token labels", "CutMix + TL-Align"),
}
# No row of these existed when their comparisons were fixed, so that all of their seeds count as unseen
NEW = {
    *(("light", name) for name in ("MixToken", "CutMix + TransMix", "CutMix + drloc")),
    *(("b", name) for name in ("cells of 2x2 averaged", "softer, temperature 2", "with MixToken")),
}
LARGER = "LV-ViT of 2.7 M"
NEW_SEEDS = range(5)  # that were to decide; later ones were added when these were known
NEW_PARTS = ("c, LV-ViT", "c, Swin", "d, flowers", "c, Swin with crops", LARGER)


def tuning() -> list[Run]:
    """The runs that tune."""

    def run(vit: str, rate: float, augmentation: str, epochs: int, drloc: float) -> Run:
        name = f"{vit}, lr {rate:g}, {augmentation}, {epochs} epochs" + (f", drloc {drloc:g}" if drloc else "")
        settings = settings_of("ViT", vit, "cifar", rate, augmentation, epochs)
        objectives = {**HARD, "drloc": {"weight": drloc}} if drloc else HARD
        return Run("tune", name, TUNING_SEED, "cifar", {**settings, "objectives": objectives, "mixing": {}})

    return [run(*setting) for setting in TUNED]


def settings_of(model: str, vit: str, data: str, rate: float, augmentation: str, epochs: int) -> Settings:
    """`vit` is the size of a plain ViT or LV-ViT."""
    size = SIZES[data]
    networks: dict[str, Settings] = {
        "ViT": {"model": f"vit_nano_patch{size // 8}_{size}", "model_kwargs": VITS[vit]},
        "LV-ViT": {"model": "lvvit_nano_patch4_32", "model_kwargs": {**VITS[vit], "stem_width": 16}},
        "Swin": {
            "model": "swin_nano_patch2_window4_32",
            "model_kwargs": {"embed_dim": 32, "depths": (2, 2, 2), "num_heads": (1, 2, 4)},
        },
    }
    return {
        **COMMON,
        **networks[model],
        **AUGMENTATION[augmentation],
        "img_size": size,
        "lr": rate,
        "epochs": epochs,
        "val_interval": epochs,
    }


def larger() -> list[Run]:
    """Token labels in an LV-ViT of 2.7 M parameters for 50 epochs, without mixing and with CutMix.

    It was the recipe for small images; LV-ViTs of 0.2 M for 150 epochs ("c, LV-ViT") took its place.
    """
    settings: Settings = {**COMMON, **CROPS, "model": "lvvit_micro_patch4_32", "img_size": 32, "drop_path": 0.1}
    settings |= {"batch_size": 32, "lr": 5e-4, "epochs": 50, "warmup_epochs": 3, "val_interval": 50}
    return [
        Run(LARGER, name, seed, "cifar", {**settings, "objectives": TOKENS, "mixing": mixing}, "linear-256")
        for seed in SEEDS
        for name, mixing in (("token labels", {}), ("CutMix + token labels", CUTMIX))
    ]


def plan() -> list[Run]:
    """Every run, the most telling first."""

    def block(
        part: str, arms: Mapping[str, Arm], seeds: range, regime: str = "a", model: str = "ViT", data: str = "cifar"
    ) -> list[Run]:
        how = REGIMES[regime]
        settings = settings_of(model, SMALL, data, how.lr, how.augmentation, EPOCHS)
        return [
            Run(part, arm, seed, data, {**settings, "objectives": a.objectives, "mixing": a.mixing}, a.maps)
            for seed in seeds
            for arm, a in arms.items()
        ]

    def some(arms: Mapping[str, Arm], *names: str) -> dict[str, Arm]:
        return {name: arms[name] for name in names}

    a, light = (arms_a(REGIMES[name].drloc) for name in ("a", "light"))
    explored = ("plain", "token labels", "CutMix", "drloc")
    reasons = dict(list(ARMS_B.items())[:5])
    annotators = some(ARMS_B, "linear head at 128 px", "linear head at 384 px")
    winners = some(light, "plain", "CutMix", "CutMix + token labels")
    lvvit = some(light, "CutMix", "CutMix + token labels") | {"MixToken + token labels": ARMS_B["with MixToken"]}
    family: Settings = {**HARD, "drloc": {"weight": 0.5}}  # the paper's λ for this family
    swin = some(a, "plain") | {"drloc": Arm(family, {})}
    runs = tuning()[:-1]
    for first in (SEEDS[:2], SEEDS[2:]):
        runs += block("light", some(light, *explored, "CutMix + token labels", "CutMix + TL-Align"), first, "light")
        runs += block("a", some(a, *explored), first) + block("b", reasons, first, "light")
    runs += block("a", some(a, "drloc", "plain"), range(3, 4))
    runs += block("light", some(light, "plain", "drloc", "CutMix", "CutMix + TL-Align"), range(3, 4), "light")
    for seed in FRESH:
        one = range(seed, seed + 1)
        runs += block("a", some(a, *CONFIRMED["a"]), one)
        runs += block("light", some(light, *CONFIRMED["light"]), one, "light")
    runs += block("a", some(a, "drloc", "plain"), range(FRESH.stop, FRESH.stop + 1))
    runs += block("b", annotators, SEEDS, "light") + block("a", some(a, "CutMix + token labels"), SEEDS)
    runs += block("d, flowers", winners, SEEDS, "light", data="flowers")
    runs += block("c, Swin", swin, SEEDS, model="Swin")
    runs += block("light", some(light, "MixToken", "CutMix + TransMix", "CutMix + drloc"), range(5), "light")
    runs += block("c, LV-ViT", lvvit, SEEDS, "light", model="LV-ViT")
    aligned = some(light, "CutMix", "CutMix + TL-Align")  # attention is sharper in a Swin
    runs += block("c, Swin with crops", aligned, SEEDS, "light", model="Swin")
    runs += block("light", some(light, "CutMix + drloc", "MixToken"), range(5, 8), "light")
    runs += larger() + block("b", some(ARMS_B, "with MixToken", "cells of 2x2 averaged"), SEEDS, "light")
    runs += block("b", ARMS_B, SEEDS, "light") + tuning()
    return list({run.key: run for run in runs}.values())
