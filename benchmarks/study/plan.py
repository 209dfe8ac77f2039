"""The experiments of the study, as data: which runs, in which order, compared with what.

Within a part everything is equal but what the name says: images, network, number of updates, learning rate,
augmentation. The learning rate and the augmentation were chosen for the plain model (part `tune`), on other seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

CIFAR, NETTE = "cifar-3000", "imagenette-64"
SMALL = "{embed_dim: 96, depth: 5, num_heads: 3, stem_width: 16}"
MODELS = {
    "lvvit": ("--model", "lvvit_nano_patch4_32", "--set", f"model_kwargs={SMALL}"),
    "vit": ("--model", "vit_nano_patch4_32", "--set", "model_kwargs={embed_dim: 96, depth: 5, num_heads: 3}"),
    "swin": ("--model", "swin_nano_patch2_window4_32"),
    "lvvit64": ("--model", "lvvit_nano_patch8_64", "--set", f"model_kwargs={SMALL}"),
}
LIGHT = ("--scale", "0.5", "1", "--aa", "", "--reprob", "0")
MEDIUM = ("--scale", "0.5", "1", "--aa", "rand-m7-mstd0.5-inc1", "--reprob", "0.1")
COMMON = (
    *("--batch-size", "64", "--opt", "adamw", "--weight-decay", "0.05", "--warmup-lr", "1e-6", "--min-lr", "1e-5"),
    *("--clip-grad", "1", "--smoothing", "0.1", "--drop-path", "0.05", "--workers", "0", "--threads", "1"),
    *("--device", "cpu", "--checkpoint-minutes", "2", "--log-interval", "50"),
)


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        part: which table it belongs to; name: its row.
        data: folder of images in the work folder; maps: folder of score maps there, or "".
        words: what is different about it, as the command line wants it.
        seed, epochs, lr: as everywhere.
    """

    part: str
    name: str
    data: str
    words: tuple[str, ...]
    seed: int
    epochs: int
    lr: float
    maps: str = ""

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}/seed{self.seed}"


def sets(**settings: str) -> tuple[str, ...]:
    """--set words: objectives by name, mixing by name (those in MIX)."""
    words: list[str] = []
    for name, value in settings.items():
        kind = "mixing" if name in MIX else "objectives"
        words += ["--set", f"{kind}.{name.replace('_', '-')}={value}"]
    return tuple(words)


MIX = {"cutmix", "mixtoken", "mixup", "random", "block"}
HALF = "{prob: 0.5}"
TOKEN = "{beta: 0.5, class_target: both, rho: 0.5}"
PLAIN = sets(hard="{}", cutmix=HALF)

# name -> (words, maps); the paper's method with our annotators, its comparisons, its ablations
MAIN: dict[str, tuple[tuple[str, ...], str]] = {
    "plain": (PLAIN, ""),
    "token, cross-fitted": (sets(token=TOKEN, mixtoken=HALF), "maps-fit5"),
    "token, fitted": (sets(token=TOKEN, mixtoken=HALF), "maps-fit"),
    "plain, MixToken": (sets(hard="{}", mixtoken=HALF), ""),
    "drloc": (sets(hard="{}", drloc="{}", cutmix=HALF), ""),
    "alignment": (sets(alignment="{}", cutmix=HALF), ""),
    "ReLabel, cross-fitted": (sets(relabel="{class_target: both, rho: 0.5}", cutmix=HALF), "maps-fit5"),
    "token with CutMix, cross-fitted": (sets(token=TOKEN, cutmix=HALF), "maps-fit5"),
    "distillation": ((*sets(hard="{}", distill="{}", cutmix=HALF), "--teacher", "fit:MAPS-FIT"), ""),
    "online tokens": ((*sets(online_token="{}", mixtoken=HALF), "--teacher", "fit:MAPS-FIT"), ""),
    "token + drloc": (sets(token=TOKEN, drloc="{}", mixtoken=HALF), "maps-fit5"),
    "token + alignment": (sets(alignment="{beta: 0.5, class_target: both, rho: 0.5}", cutmix=HALF), "maps-fit5"),
    "plain, no mixing": (sets(hard="{}"), ""),
    "token, half of the tokens": (
        sets(token="{beta: 0.5, class_target: both, rho: 0.5, participation: 0.5}", mixtoken=HALF), "maps-fit5"),
    "token, no class maps": (sets(token="{beta: 0.5, class_target: truth}", mixtoken=HALF), "maps-fit5"),
    "token, beta 1": (sets(token="{beta: 1.0, class_target: both, rho: 0.5}", mixtoken=HALF), "maps-fit5"),
    "drloc, signed": (sets(hard="{}", drloc="{variant: signed}", cutmix=HALF), ""),
    "drloc, ce": (sets(hard="{}", drloc="{variant: ce}", cutmix=HALF), ""),
    "drloc, reg": (sets(hard="{}", drloc="{variant: reg}", cutmix=HALF), ""),
    "drloc, all": (sets(hard="{}", drloc="{variant: all}", cutmix=HALF), ""),
    "drloc, crossing pairs left out": (sets(hard="{}", drloc="{skip_crossing: true}", cutmix=HALF), ""),
    "transmix": (sets(transmix="{}", cutmix=HALF), ""),
}  # fmt: skip
BACKBONES = ("plain", "token, cross-fitted", "drloc", "alignment")
FOREIGN: dict[str, tuple[tuple[str, ...], str]] = {
    "plain": (PLAIN, ""),
    "token, ImageNet's 1000 classes": (sets(token="{beta: 0.5}", mixtoken=HALF), "maps-foreign"),
    "token, its 10 classes": (sets(token=TOKEN, mixtoken=HALF), "maps-own"),
    "ReLabel, its 10 classes": (sets(relabel="{class_target: both, rho: 0.5}", cutmix=HALF), "maps-own"),
    "plain, MixToken": (sets(hard="{}", mixtoken=HALF), ""),
    "drloc": (sets(hard="{}", drloc="{}", cutmix=HALF), ""),
    "alignment": (sets(alignment="{}", cutmix=HALF), ""),
}
TUNED = {"lvvit": (2e-3, LIGHT), "vit": (1e-3, LIGHT), "swin": (1e-3, LIGHT), "lvvit64": (2e-3, LIGHT)}
EPOCHS = {"main": 30, "tune": 30, "vit": 30, "swin": 30, "more": 30, "imagenette": 15}


def tune() -> list[Run]:
    runs = []
    for model in ("lvvit", "vit", "swin"):
        for lr in (5e-4, 1e-3, 2e-3, 4e-3):
            words = (*MODELS[model], "--img-size", "32", *LIGHT, *PLAIN)
            runs.append(Run("tune", f"{model}, light, lr {lr:g}", CIFAR, words, 100, EPOCHS["tune"], lr))
    for lr in (1e-3, 2e-3):
        words = (*MODELS["lvvit"], "--img-size", "32", *MEDIUM, *PLAIN)
        runs.append(Run("tune", f"lvvit, medium, lr {lr:g}", CIFAR, words, 100, EPOCHS["tune"], lr))
        words = (*MODELS["lvvit"], "--img-size", "32", *LIGHT, *sets(hard="{}"))
        runs.append(Run("tune", f"lvvit, light without CutMix, lr {lr:g}", CIFAR, words, 100, EPOCHS["tune"], lr))
        words = (*MODELS["lvvit64"], "--img-size", "64", *LIGHT, *PLAIN)
        runs.append(Run("tune", f"lvvit64, light, lr {lr:g}", NETTE, words, 100, EPOCHS["imagenette"], lr))
    return runs


def table(part: str, rows: dict[str, tuple[tuple[str, ...], str]], model: str, data: str, seeds: range) -> list[Run]:
    """All rows of a part, seed by seed, so that an unfinished study has whole pairs."""
    lr, augment = TUNED[model]
    size = "64" if model.endswith("64") else "32"
    return [
        Run(part, name, data, (*MODELS[model], "--img-size", size, *augment, *words), seed, EPOCHS[part], lr, maps)
        for seed in seeds
        for name, (words, maps) in rows.items()
    ]


def plan() -> list[Run]:
    """Every run, the most telling first."""
    first = dict(list(MAIN.items())[:8])
    most = {name: row for name, row in MAIN.items() if name not in first}
    chosen = {name: MAIN[name] for name in BACKBONES}
    return [
        *tune(),
        *table("main", first, "lvvit", CIFAR, range(3)),
        *table("imagenette", FOREIGN, "lvvit64", NETTE, range(3)),
        *table("vit", chosen, "vit", CIFAR, range(3)),
        *table("swin", chosen, "swin", CIFAR, range(3)),
        *table("main", most, "lvvit", CIFAR, range(3)),
        *table("main", dict(list(first.items())[:3]), "lvvit", CIFAR, range(3, 5)),
        *table("more", {name: MAIN[name] for name in BACKBONES[:2]}, "lvvit", "cifar-10000", range(3)),
    ]
