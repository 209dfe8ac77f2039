"""The experiments of the study, as data: which runs, in which order, compared with what.

Within a part everything is equal but what the name says: images, network, number of updates, learning rate,
augmentation. The learning rate and the augmentation were chosen for the plain model (part `tune`), on other seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

CIFAR, NETTE = "cifar-3000", "imagenette-3000"
SMALL = "{embed_dim: 64, depth: 6, num_heads: 2, stem_width: 8}"
MODELS = {
    "lvvit": ("--model", "lvvit_nano_patch4_32", "--set", f"model_kwargs={SMALL}"),
    "vit": ("--model", "vit_nano_patch4_32", "--set", "model_kwargs={embed_dim: 64, depth: 6, num_heads: 2}"),
    "swin": ("--model", "swin_nano_patch2_window4_32", "--set", "model_kwargs={embed_dim: 32, num_heads: [1, 2, 4]}"),
    "lvvit64": ("--model", "lvvit_nano_patch8_64", "--set", f"model_kwargs={SMALL}"),
}
LIGHT = ("--scale", "0.5", "1", "--aa", "", "--reprob", "0")
MEDIUM = ("--scale", "0.5", "1", "--aa", "rand-m7-mstd0.5-inc1", "--reprob", "0.1")
COMMON = (
    *("--batch-size", "32", "--opt", "adamw", "--weight-decay", "0.05", "--warmup-lr", "1e-6", "--min-lr", "1e-5"),
    *("--clip-grad", "1", "--smoothing", "0.1", "--drop-path", "0"),
)
MACHINE = ("--workers", "0", "--threads", "1", "--device", "cpu", "--checkpoint-minutes", "2", "--log-interval", "50")


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        part: which table it belongs to; name: its row.
        data: folder of images in the work folder; maps: folder of score maps there, or "".
        words: what is different about it, as the command line wants it.
        seed, epochs, lr: as everywhere.
        recipe: a shipped recipe, of which only the number of epochs is changed; lr is then 0.
    """

    part: str
    name: str
    data: str
    words: tuple[str, ...]
    seed: int
    epochs: int
    lr: float
    maps: str = ""
    recipe: str = ""

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
TOKEN = "{beta: 1.0, class_target: both, rho: 0.5}"
RELABEL = "{class_target: both, rho: 0.5}"
PLAIN = sets(hard="{}")  # mixing costs accuracy in trainings as short as these, so the tuned baseline has none
CUTMIX = sets(hard="{}", cutmix=HALF)

# name -> (words, maps); the paper's method with our annotators, its comparisons, its ablations
MAIN: dict[str, tuple[tuple[str, ...], str]] = {
    "plain": (PLAIN, ""),
    "token, cross-fitted": (sets(token=TOKEN), "maps-cross"),
    "token, fitted": (sets(token=TOKEN), "maps-fit"),
    "ReLabel, cross-fitted": (sets(relabel=RELABEL), "maps-cross"),
    "drloc": (sets(hard="{}", drloc="{}"), ""),
    "plain, CutMix": (CUTMIX, ""),
    "alignment, CutMix": (sets(alignment="{}", cutmix=HALF), ""),
}
MORE: dict[str, tuple[tuple[str, ...], str]] = {
    "distillation": ((*sets(hard="{}", distill="{}"), "--teacher", "fit:MAPS-FIT"), ""),
    "online tokens": ((*sets(online_token="{}"), "--teacher", "fit:MAPS-FIT"), ""),
    "token + drloc, cross-fitted": (sets(token=TOKEN, drloc="{}"), "maps-cross"),
}
ABLATIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "plain, MixToken": (sets(hard="{}", mixtoken=HALF), ""),
    "token, MixToken, cross-fitted": (sets(token=TOKEN, mixtoken=HALF), "maps-cross"),
    "token, self": (sets(token=TOKEN), "maps-self"),
    "token, class token on the truth, cross-fitted": (sets(token="{beta: 1.0, class_target: truth}"), "maps-cross"),
    "token, beta 0.5, cross-fitted": (sets(token="{beta: 0.5, class_target: both, rho: 0.5}"), "maps-cross"),
    "token, half of the tokens, cross-fitted": (
        sets(token="{beta: 1.0, class_target: both, rho: 0.5, participation: 0.5}"), "maps-cross"),
    "token + alignment, CutMix, cross-fitted": (sets(alignment=TOKEN, cutmix=HALF), "maps-cross"),
    "transmix, CutMix": (sets(transmix="{}", cutmix=HALF), ""),
    "drloc, λ 0.1": (sets(hard="{}", drloc="{weight: 0.1}"), ""),
    "drloc, λ 0.5": (sets(hard="{}", drloc="{weight: 0.5}"), ""),
    "drloc, CutMix": (sets(hard="{}", drloc="{}", cutmix=HALF), ""),
    "drloc, CutMix, crossing pairs left out": (sets(hard="{}", drloc="{skip_crossing: true}", cutmix=HALF), ""),
}  # fmt: skip
# on a Swin, as in the paper, where λ is 0.5 and not 0.01
VARIANTS: dict[str, tuple[tuple[str, ...], str]] = {
    f"drloc, {variant}": (sets(hard="{}", drloc=f"{{variant: {variant}}}"), "")
    for variant in ("signed", "ce", "reg", "all")
}
# the token loss without what an annotator knows: every token learns the image's label
CONTROL = {"token, the image's label everywhere": (sets(token=TOKEN), "maps-image")}
FOREIGN: dict[str, tuple[tuple[str, ...], str]] = {
    "plain": (PLAIN, ""),
    "token, ImageNet's 1000 classes": (sets(token="{beta: 1.0}"), "maps-foreign"),
    "token, its 10 classes": (sets(token=TOKEN), "maps-own"),
    "ReLabel, its 10 classes": (sets(relabel=RELABEL), "maps-own"),
    "drloc": (sets(hard="{}", drloc="{}"), ""),
}
FITTED = {"token, fitted": (sets(token=TOKEN), "maps-fit")}  # by a small CNN, from the same images
WEAKER: dict[str, tuple[tuple[str, ...], str]] = {
    "token, beta 0.2, ImageNet's 1000 classes": (sets(token="{beta: 0.2}"), "maps-foreign"),
    "token, beta 0.5, class token on the truth, its 10 classes": (
        sets(token="{beta: 0.5, class_target: truth}"), "maps-own"),
    # the crop's label is nearly certain (0.93 on average, 0.66 with a fitted network): is that why it does not help?
    "token, temperature 3, its 10 classes": (
        sets(token="{beta: 1.0, class_target: both, rho: 0.5, temperature: 3.0}"), "maps-own"),
}  # fmt: skip
SELF = "lvvit, token, beta 1, class token on both"  # the run whose tokens annotate for "token, self"
EPOCHS = 15
TUNED = {"lvvit": (1e-3, LIGHT), "vit": (1e-3, LIGHT), "swin": (1e-3, LIGHT), "lvvit64": (1e-3, LIGHT)}


TRIED_TOKENS = {
    "token, beta 1, class token on the truth": sets(token="{beta: 1.0, class_target: truth}"),
    "token, beta 1, class token on both": sets(token="{beta: 1.0, class_target: both, rho: 0.5}"),
    "token, beta 1, class token on both, MixToken": sets(
        token="{beta: 1.0, class_target: both, rho: 0.5}", mixtoken=HALF
    ),
    "token, beta 1, class token on the maps": sets(token="{beta: 1.0, class_target: machine}"),
}


def tune() -> list[Run]:
    """The plain model alone, on a seed that no other part uses."""
    tried = [
        *(("lvvit", "light", LIGHT, CUTMIX, lr) for lr in (5e-4, 1e-3, 2e-3)),
        *(("lvvit", "light without CutMix", LIGHT, PLAIN, lr) for lr in (1e-3, 2e-3)),
        ("lvvit", "medium without CutMix", MEDIUM, PLAIN, 1e-3),
        *(("swin", "light without CutMix", LIGHT, PLAIN, lr) for lr in (1e-3, 2e-3)),
        *(("lvvit64", "light without CutMix", LIGHT, PLAIN, lr) for lr in (1e-3, 2e-3)),
    ]
    runs = [
        Run("tune", f"{model}, {name}, lr {lr:g}", data_of(model), words_of(model, augment, rest), 100, EPOCHS, lr)
        for model, name, augment, rest, lr in tried
    ]
    for name, rest in TRIED_TOKENS.items():
        words = words_of("lvvit", LIGHT, rest)
        runs.append(Run("tune", f"lvvit, {name}", CIFAR, words, 100, EPOCHS, TUNED["lvvit"][0], "maps-cross"))
    return runs


def data_of(model: str) -> str:
    return NETTE if model == "lvvit64" else CIFAR


def words_of(model: str, augment: tuple[str, ...], rest: tuple[str, ...]) -> tuple[str, ...]:
    return (*MODELS[model], "--img-size", "64" if model == "lvvit64" else "32", *augment, *rest)


def table(part: str, rows: dict[str, tuple[tuple[str, ...], str]], model: str, seeds: range, data: str = "",
          epochs: int = EPOCHS) -> list[Run]:  # fmt: skip
    """All rows of a part, seed by seed, so that an unfinished study has whole pairs."""
    lr, augment = TUNED[model]
    return [
        Run(part, name, data or data_of(model), words_of(model, augment, words), seed, epochs, lr, maps)
        for seed in seeds
        for name, (words, maps) in rows.items()
    ]


def recipes(seeds: range) -> list[Run]:
    """The shipped pair for 32 pixels, as it is, but for ten epochs."""
    pair = (("plain", "small_32", ""), ("token, fitted", "small_32_token", "maps-fit"))
    return [Run("recipe", name, CIFAR, (), seed, 10, 0, maps, recipe) for seed in seeds for name, recipe, maps in pair]


def budget() -> list[Run]:
    """Networks of different sizes with token labels, for about as long on one core as each other."""
    lr, augment = TUNED["lvvit"]
    small = words_of("lvvit", augment, sets(token=TOKEN))
    return [
        Run("budget", "2.7 M parameters, 25 epochs", CIFAR, (), 0, 25, 0, "maps-fit", "small_32_token"),
        Run("budget", "0.26 M parameters, 135 epochs", CIFAR, small, 0, 135, lr, "maps-fit"),
    ]


def plan() -> list[Run]:
    """Every run, the most telling first."""
    pair = {name: MAIN[name] for name in ("plain", "token, cross-fitted")}
    drloc = {name: MAIN[name] for name in ("plain", "drloc")}
    token = {name: MAIN[name] for name in ("token, cross-fitted",)}
    fitted = {name: MAIN[name] for name in ("plain", "token, fitted")}
    key = {name: MAIN[name] for name in MAIN if name not in ("token, fitted", "ReLabel, cross-fitted")}
    claims = {name: row for name, row in (MAIN | CONTROL | MORE).items() if name not in key}
    mixed = {name: (MAIN | ABLATIONS)[name] for name in ("plain, CutMix", "token, MixToken, cross-fitted")}
    return [
        *tune(),
        *table("main", MAIN | MORE, "lvvit", range(1)),
        *table("imagenette", dict(list(FOREIGN.items())[:3]), "lvvit64", range(3)),
        *table("main", CONTROL, "lvvit", range(1)),
        *table("imagenette", CONTROL | WEAKER, "lvvit64", range(1)),
        *table("main", key, "lvvit", range(1, 3)),
        *table("imagenette", FITTED, "lvvit64", range(3)),
        *recipes(range(3)),
        *table("longer", pair, "lvvit", range(1), epochs=3 * EPOCHS),
        *table("longer", mixed, "lvvit", range(1), epochs=3 * EPOCHS),
        *table("main", ABLATIONS, "lvvit", range(1)),
        *table("swin", drloc | token, "swin", range(3)),
        *table("vit", drloc | token, "vit", range(3)),
        *table("swin", VARIANTS, "swin", range(1)),
        *table("main", claims, "lvvit", range(1, 3)),
        *budget(),
        *table("more", fitted, "lvvit", range(1), data="cifar-10000"),
        *table("longer", pair | mixed, "lvvit", range(1, 3), epochs=3 * EPOCHS),
        *table("imagenette", dict(list(FOREIGN.items())[3:]), "lvvit64", range(3)),
        *table("main", ABLATIONS, "lvvit", range(1, 3)),
        *table("main", pair, "lvvit", range(3, 5)),
        *table("more", fitted, "lvvit", range(1, 3), data="cifar-10000"),
    ]
