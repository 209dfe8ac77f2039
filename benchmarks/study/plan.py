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
        recipe: a shipped recipe, of which only the numbers of epochs and of warm-up epochs are changed; lr is then 0.
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

# name -> (words, maps); the paper's method with the annotator `fit`, its comparisons, its ablations
Rows = dict[str, tuple[tuple[str, ...], str]]
FIT_TEACHER = ("--teacher", "fit:MAPS-FIT")  # the network that made maps-fit
MAIN: Rows = {
    "plain": (PLAIN, ""),
    "token": (sets(token=TOKEN), "maps-fit"),
    "ReLabel": (sets(relabel=RELABEL), "maps-fit"),
    # what the annotator knows, without places: every cell says what the whole map says
    "token, the map's mean everywhere": (sets(token=TOKEN), "maps-mean"),
    # the token loss without what an annotator knows
    "token, the image's label everywhere": (sets(token=TOKEN), "maps-image"),
    "distillation, soft": ((*sets(hard="{}", distill="{kind: soft}"), *FIT_TEACHER), ""),
    "online tokens": ((*sets(online_token="{beta: 1.0, class_target: truth}"), *FIT_TEACHER), ""),
    "plain, CutMix": (CUTMIX, ""),
    "alignment, CutMix": (sets(alignment="{}", cutmix=HALF), ""),
    "drloc, λ 0.01": (sets(hard="{}", drloc="{weight: 0.01}"), ""),
}
ABLATIONS: Rows = {
    "drloc, λ 0.1": (sets(hard="{}", drloc="{weight: 0.1}"), ""),
    "drloc, λ 0.5": (sets(hard="{}", drloc="{weight: 0.5}"), ""),
    "transmix, CutMix": (sets(transmix="{}", cutmix=HALF), ""),
    "plain, MixToken": (sets(hard="{}", mixtoken=HALF), ""),
    "token, MixToken": (sets(token=TOKEN, mixtoken=HALF), "maps-fit"),
    "token, beta 0.5": (sets(token="{beta: 0.5, class_target: both, rho: 0.5}"), "maps-fit"),
    "token, class token on the truth": (sets(token="{beta: 1.0, class_target: truth}"), "maps-fit"),
    "token, temperature 2": (sets(token="{beta: 1.0, class_target: both, rho: 0.5, temperature: 2.0}"), "maps-fit"),
    "token, temperature 3": (sets(token="{beta: 1.0, class_target: both, rho: 0.5, temperature: 3.0}"), "maps-fit"),
    "token, five scores kept": (sets(token=TOKEN), "maps-top5"),
    "token, half of the tokens": (
        sets(token="{beta: 1.0, class_target: both, rho: 0.5, participation: 0.5}"), "maps-fit"),
    "token, 3 folds": (sets(token=TOKEN), "maps-cross"),
    "token + drloc, λ 0.1": (sets(token=TOKEN, drloc="{weight: 0.1}"), "maps-fit"),
    "token + alignment, CutMix": (sets(alignment=TOKEN, cutmix=HALF), "maps-fit"),
    "distillation, hard": ((*sets(hard="{}", distill="{}"), *FIT_TEACHER), ""),
    "token, self": (sets(token=TOKEN), "maps-self"),
}  # fmt: skip
DRLOC: Rows = {"drloc": (sets(hard="{}", drloc="{}"), "")}  # λ of the family
DRLOC: Rows = {"drloc": (sets(hard="{}", drloc="{}"), "")}  # λ of the family
# on a Swin, as in the paper, where λ is 0.5 and not 0.01
VARIANTS: Rows = {
    f"drloc, {variant}": (sets(hard="{}", drloc=f"{{variant: {variant}}}"), "")
    for variant in ("signed", "ce", "reg", "all")
} | {"drloc, distances not divided by the grid": (sets(hard="{}", drloc="{released: [offsets]}"), "")}
# Imagenette; "ImageNet's": maps of EfficientNet-Lite0
FOREIGN: Rows = {
    "plain": (PLAIN, ""),
    "token": (sets(token=TOKEN), "maps-fit"),
    "token, ImageNet's 1000 classes": (sets(token="{beta: 1.0}"), "maps-foreign"),
    "token, ImageNet's, its 10 classes": (sets(token=TOKEN), "maps-own"),
    "token, the image's label everywhere": (sets(token=TOKEN), "maps-image"),
}
WEAKER: Rows = {
    "token, beta 0.2, ImageNet's 1000 classes": (sets(token="{beta: 0.2}"), "maps-foreign"),
    "token, beta 0.5, class token on the truth, ImageNet's, its 10 classes": (
        sets(token="{beta: 0.5, class_target: truth}"), "maps-own"),
    # its labels are surer than a fitted network's: is that why they do not help?
    "token, temperature 3, ImageNet's, its 10 classes": (
        sets(token="{beta: 1.0, class_target: both, rho: 0.5, temperature: 3.0}"), "maps-own"),
}  # fmt: skip
SELF = "token"  # of part main, seed 0: the run whose tokens annotate for "token, self"
EPOCHS = 15
TUNED = {"lvvit": (1e-3, LIGHT), "vit": (1e-3, LIGHT), "swin": (1e-3, LIGHT), "lvvit64": (1e-3, LIGHT)}


def tune() -> list[Run]:
    """The plain model alone, on a seed that no other part uses."""
    tried = [
        *(("lvvit", "light", LIGHT, CUTMIX, lr) for lr in (5e-4, 1e-3, 2e-3)),
        *(("lvvit", "light without CutMix", LIGHT, PLAIN, lr) for lr in (1e-3, 2e-3)),
        ("lvvit", "medium without CutMix", MEDIUM, PLAIN, 1e-3),
        *(("swin", "light without CutMix", LIGHT, PLAIN, lr) for lr in (1e-3, 2e-3)),
        *(("lvvit64", "light without CutMix", LIGHT, PLAIN, lr) for lr in (1e-3, 2e-3)),
    ]
    return [
        Run("tune", f"{model}, {name}, lr {lr:g}", data_of(model), words_of(model, augment, rest), 100, EPOCHS, lr)
        for model, name, augment, rest, lr in tried
    ]


def data_of(model: str) -> str:
    return NETTE if model == "lvvit64" else CIFAR


def words_of(model: str, augment: tuple[str, ...], rest: tuple[str, ...]) -> tuple[str, ...]:
    return (*MODELS[model], "--img-size", "64" if model == "lvvit64" else "32", *augment, *rest)


def table(part: str, rows: Rows, model: str, seeds: range, data: str = "",
          epochs: int = EPOCHS) -> list[Run]:  # fmt: skip
    """All rows of a part, seed by seed, so that an unfinished study has whole pairs."""
    lr, augment = TUNED[model]
    return [
        Run(part, name, data or data_of(model), words_of(model, augment, words), seed, epochs, lr, maps)
        for seed in seeds
        for name, (words, maps) in rows.items()
    ]


def recipes(seeds: range) -> list[Run]:
    """The shipped pair for 32 pixels, as it is, but for ten epochs, two of them to warm up."""
    pair = (("plain", "small_32", ""), ("token", "small_32_token", "maps-fit"))
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
    pair, quiet = some("plain", "token"), some("drloc, λ 0.01")
    louder = {name: ABLATIONS[name] for name in ("drloc, λ 0.1",)}
    mixed = {name: (MAIN | ABLATIONS)[name] for name in ("plain, CutMix", "token, MixToken")}
    return [
        *tune(),
        *table("main", MAIN, "lvvit", range(1)),
        *table("main", some("token", "ReLabel", "token, the map's mean everywhere"), "lvvit", range(1, 3)),
        *table("swin", pair | DRLOC, "swin", range(3)),
        *table("imagenette", FOREIGN, "lvvit64", range(1)),
        *table("imagenette", dict(list(FOREIGN.items())[:4]), "lvvit64", range(1, 3)),
        *table("main", MAIN, "lvvit", range(1, 3)),
        *table("main", ABLATIONS, "lvvit", range(1)),
        *table("main", louder, "lvvit", range(1, 3)),
        *table("vit", pair | quiet | louder, "vit", range(1)),
        *recipes(range(3)),
        *table("longer", pair | mixed, "lvvit", range(1), epochs=3 * EPOCHS),
        *table("longest", pair, "lvvit", range(1), epochs=7 * EPOCHS),
        *table("swin", VARIANTS, "swin", range(1)),
        *table("imagenette", WEAKER, "lvvit64", range(1)),
        *budget(),
        *table("more", pair, "lvvit", range(1), data="cifar-10000"),
        *table("vit", pair | quiet | louder, "vit", range(1, 3)),
        *table("longer", pair | mixed, "lvvit", range(1, 3), epochs=3 * EPOCHS),
        *table("main", ABLATIONS, "lvvit", range(1, 3)),
        *table("more", pair, "lvvit", range(1, 3), data="cifar-10000"),
    ]


def some(*names: str) -> Rows:
    return {name: MAIN[name] for name in names}
