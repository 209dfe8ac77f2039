"""Options of a training run, and recipes: flat YAML files of their names, plus `objectives` and `mixing`.

model: lvvit_s
batch_size: 128
lr_base: 1.0e-3
objectives:
  token_labeling: {beta: 0.5}
mixing:
  mixtoken: {alpha: 1.0}

Names are timm's where they mean the same. The groups exist for the reader of `--help`; a recipe does not need to know
them. The type of an option holds its range and its choices, which `apply` checks, and whether it only says how to run
(`HOW`). Unknown keys are errors with suggestions.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro
from annotated_types import Interval

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.files import read_bytes
from everytoken.objectives import registry
from everytoken_lab import schema
from everytoken_lab.data.augment import AugmentOptions
from everytoken_lab.machine import Workers, default_workers
from everytoken_lab.schema import SchemaError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

Positive = Annotated[int, Interval(ge=1)]
NotNegative = Annotated[int, Interval(ge=0)]
Amount = Annotated[float, Interval(ge=0, lt=math.inf)]
Fraction = Annotated[float, Interval(ge=0, lt=1)]
Chance = Annotated[float, Interval(ge=0, le=1)]
Scale = Annotated[float, Interval(gt=0, lt=100)]
HOW = "how to run: does not change what is learnt"
"""Mark of options that another machine, or another day, may set differently without making it another run."""


@dataclass(frozen=True)
class BackboneOptions:
    """The backbone."""

    model: str = ""
    """timm model name; empty: that of the weights."""
    weights: str = ""
    """Start from trained weights: a run folder, a file, timm:NAME, timm (of the model), registry:efficientnet_lite0|1|2
    or hf-hub:USER/NAME. Empty: from scratch."""
    drop_path: Fraction = 0.1
    """Stochastic depth, rising linearly to this rate in the last block."""
    grad_checkpointing: bool = False
    """Trade time for memory: recompute activations in the backward pass."""
    model_kwargs: tyro.conf.Suppress[dict[str, Any]] = field(default_factory=dict)
    """Further arguments of the model's constructor (recipes and --set only)."""


@dataclass(frozen=True)
class ModelOptions(BackboneOptions):
    """The network."""

    model: str = ""
    """timm model name; `everytoken models` lists what is supported. Default: that of the weights, else lvvit_t."""
    img_size: NotNegative = 0
    """Side of the square input, in pixels. 0: that of the weights, else 224."""
    drop: Fraction = 0.0
    """Dropout before the classifier."""
    drop_path: Fraction = 0.0
    """Stochastic depth, rising linearly to this rate in the last block."""
    token_vote: float = 0.0
    """In validation, add this much of the strongest token logit of each class to the class logits (LV-ViT: 0.5);
    `everytoken eval` and the others then do the same."""
    teacher: str = ""
    """Teacher of the objectives `distillation` and `online_token`: a timm name with the tag of its weights
    (regnety_160.deit_in1k), a run folder, registry:NAME, or MAPS/annotator for the network that `everytoken annotate
    --annotator fit` saved with its maps. Its classes are matched by name; it may know more than the data has."""
    norm_eval: bool = False
    """Keep the statistics of batch norms as they are: for pretrained networks and small batches."""
    freeze: NotNegative = 0
    """Do not train this many of the network's first layer groups (stem, then stages or blocks, as timm counts them).
    Their backward pass is saved, which in convolutional networks is most of the time."""
    logit_adjustment: float = 0.0
    """For classes of unequal size: add this much of the log of each class's prior to its logit in training, so that
    large classes are preferred less. 0: off; 1: all classes count the same."""
    torchcompile: bool = False
    """Compile the model with torch.compile: one graph for training, one for validation (docs/scale.md)."""
    channels_last: bool = False
    """Keep convolutions in channels-last layout (faster on GPUs with tensor cores)."""


@dataclass(frozen=True)
class BatchOptions:
    """Images and batches, of every task."""

    batch_size: Annotated[Positive, tyro.conf.arg(aliases=["-b"])] = 16
    """Images per step and process."""
    workers: Annotated[Workers, HOW] = field(default_factory=default_workers)
    """Loader processes per training process; 0 loads in the main process."""
    on_bad_image: Literal["raise", "skip"] = "raise"
    """What to do with unreadable images. skip: they are logged and counted; training stops if more than 1 % are bad."""


@dataclass(frozen=True)
class DataOptions(BatchOptions):
    """Images and batches."""

    val_split: Fraction = 0.0
    """Fraction of the images to hold out for validation if the data has no validation images (0: the default, 0.1)."""
    batch_size: Annotated[Positive, tyro.conf.arg(aliases=["-b"])] = 128
    """Images per step and process."""
    val_batch_size: Annotated[NotNegative, HOW] = 0
    """Images per step in validation; 0: as in training."""
    repeat_augment: Positive = 1
    """Repeated augmentation: N views of each sampled image; the epoch keeps its length (DeiT uses 3)."""
    exclude: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Text file with names of training images to leave out, a line each, relative to the folder of class folders."""
    corrections: str = ""
    """CSV file with path and label of images whose labels are wrong, as `everytoken doctor` writes it: they get this
    label, or are left out if it is empty. Validation images, too."""


@dataclass(frozen=True)
class OptimOptions:
    """Optimizer and schedule."""

    epochs: Positive = 300
    """Passes over the data, warm-up included."""
    iters: NotNegative = 0
    """Train for this many updates instead of epochs; 0: use epochs."""
    opt: str = "adamw"
    """timm optimizer name."""
    lr: Amount = 0.0
    """Learning rate for the whole batch; 0: from --lr-base and the real global batch."""
    lr_base: Amount = 1e-3
    """Learning rate at a global batch of --lr-base-size; scales with the global batch, see --lr-scaling."""
    lr_base_size: Positive = 1024
    """See --lr-base. Token labeling uses 640, everything else in the papers 1024."""
    lr_scaling: Literal["", "linear", "sqrt"] = ""
    """How --lr-base follows the global batch. Default: linear with a recipe that does not say, as in the papers;
    without a recipe sqrt for AdamW and its relatives, linear for others, as in timm."""
    weight_decay: Amount = 0.05
    """Weight decay; biases, norms, positions and the class token are excluded."""
    layer_decay: Amount = 0.0
    """Multiply the learning rate by this per layer from the top; 0: off."""
    sched: Literal["cosine", "linear", "multistep"] = "cosine"
    """Schedule, stepped every update, down to --min-lr."""
    decay_milestones: tuple[int, ...] = ()
    """Epochs (updates when --iters is set) after which multistep multiplies the learning rate by --decay-rate."""
    decay_rate: Amount = 0.1
    """See --decay-milestones."""
    warmup_epochs: Amount = 5
    """Epochs of linear warm-up."""
    warmup_iters: NotNegative = 0
    """The same in updates; 0: --warmup-epochs."""
    warmup_lr: Amount = 1e-6
    """Where warm-up starts."""
    min_lr: Amount = 1e-5
    """Where the schedule ends."""
    clip_grad: Amount = 0.0
    """Clip the gradient's norm at this value; 0: off."""
    grad_accum_steps: Positive = 1
    """Steps whose gradients are added before an update."""
    model_ema: bool = False
    """Keep an average of the weights and evaluate it."""
    model_ema_decay: Fraction = 0.9999
    """Decay of the average, warmed up at the start."""
    amp: bool = False
    """Mixed precision (bfloat16)."""


@dataclass(frozen=True)
class RunOptions:
    """The run."""

    out: Annotated[str, HOW] = ""
    """The run's folder. Default: runs/<recipe or command>-<model>-<data>-seed<seed>."""
    seed: int = 42
    """All randomness is derived from it."""
    device: Annotated[str, HOW] = ""
    """cpu, cuda, mps; default: the best available."""
    threads: Annotated[NotNegative, HOW] = 0
    """Threads of torch on the CPU; 0: torch's choice."""
    checkpoint_minutes: Annotated[Amount, HOW] = 10.0
    """Write a checkpoint at least this often (and after every epoch)."""
    checkpoint_steps: Annotated[NotNegative, HOW] = 0
    """Also write a checkpoint every N updates; 0: off."""
    keep: Annotated[Positive, HOW] = 2
    """Checkpoints to keep, besides the best weights."""
    log_interval: Annotated[Positive, HOW] = 50
    """Updates between lines in the metrics files."""
    val_interval: Positive = 1
    """Epochs between validations; the last epoch is always validated."""
    val_iters: NotNegative = 0
    """Updates between validations when --iters is set; each also writes a checkpoint. 0: validate at the end only."""
    bad_loss_limit: Annotated[Positive, HOW] = 5
    """Stop after this many non-finite losses in a row; single ones are skipped and counted."""
    tensorboard: Annotated[bool, HOW] = False
    """Also write TensorBoard files (extra: track)."""
    wandb: Annotated[str, HOW, tyro.conf.arg(metavar="PROJECT")] = ""
    """Also log to this Weights & Biases project (extra: track)."""
    mlflow: Annotated[str, HOW, tyro.conf.arg(metavar="EXPERIMENT")] = ""
    """Also log to this MLflow experiment (extra: track), where MLFLOW_TRACKING_URI says."""
    fsdp: Annotated[bool, HOW] = False
    """Shard weights and optimizer over the processes (FSDP2) instead of copying them (DDP)."""


@dataclass(frozen=True)
class AutoOptions:
    """Without --recipe and --model: the command chooses all other settings itself."""

    minutes: Annotated[Amount, tyro.conf.arg(help_behavior_hint="(default: 20)")] = 0.0
    """Time budget for everything; 0: 20 minutes."""
    linear: bool = False
    """Only fit a linear head on frozen features; with --weights RUN, a linear probe of that run."""
    offline: bool = False
    """Download no weights, as HF_HUB_OFFLINE=1 does; without it, small networks of the Hugging Face hub are tried."""


@dataclass(frozen=True)
class TrainOptions:
    """Everything that determines a run; `config.yaml` of a run folder is this, resolved."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = ""
    """Folder with train/ and val/, or one folder of class folders; also tar shards, torchvision:NAME."""
    maps: str = ""
    """Store of score maps (`everytoken annotate`), for objectives that need maps. Without a recipe: auto makes and
    keeps them and trains every token; none trains without, which is the default."""
    recipe: str = ""
    """Shipped recipe, or a YAML file of your own; flags override it. `everytoken recipes` lists them."""
    model: tyro.conf.OmitArgPrefixes[ModelOptions] = field(default_factory=ModelOptions)
    dataset: tyro.conf.OmitArgPrefixes[DataOptions] = field(default_factory=DataOptions)
    augment: tyro.conf.OmitArgPrefixes[AugmentOptions] = field(default_factory=AugmentOptions)
    optim: tyro.conf.OmitArgPrefixes[OptimOptions] = field(default_factory=OptimOptions)
    run: tyro.conf.OmitArgPrefixes[RunOptions] = field(default_factory=RunOptions)
    objectives: tyro.conf.Suppress[dict[str, dict[str, Any]]] = field(default_factory=dict)
    mixing: tyro.conf.Suppress[dict[str, dict[str, Any]]] = field(default_factory=dict)


# -- segmentation and detection ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DenseOptions:
    """Everything that determines a run; `config.yaml` of a run folder is this, resolved. Tasks add their groups."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")] = ""
    """The dataset; the page of the task says how it is laid out."""
    recipe: str = ""
    """Shipped recipe, or a YAML file of your own; flags override it. `everytoken recipes` lists them."""
    model: tyro.conf.OmitArgPrefixes[BackboneOptions] = field(default_factory=BackboneOptions)
    dataset: tyro.conf.OmitArgPrefixes[BatchOptions] = field(default_factory=BatchOptions)
    optim: tyro.conf.OmitArgPrefixes[OptimOptions] = field(default_factory=OptimOptions)
    run: tyro.conf.OmitArgPrefixes[RunOptions] = field(default_factory=RunOptions)


def check_rate(optim: OptimOptions) -> None:
    """Raise if `lr_base` was set and would do nothing: dense tasks have an absolute `lr`, as the papers do."""
    if optim.lr and optim.lr_base != OptimOptions().lr_base:
        raise EverytokenError(f"lr_base is {optim.lr_base:g}, but lr is {optim.lr:g} and used instead; set lr to 0")


@dataclass(frozen=True)
class SourceOptions:
    """A trained model and where it runs."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder or a weights file."""
    device: str = field(default="", kw_only=True)
    """cpu, cuda, mps; default: the best available."""
    amp: bool | None = field(default=None, kw_only=True)
    """Mixed precision. Default: as the run was validated."""


@dataclass(frozen=True)
class EvaluateOptions(SourceOptions):
    """Options of every evaluation of a dense task."""

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """The dataset, laid out as for training."""
    split: Literal["val", "test", "train", "all"] = "val"
    """Which part of the data. If the data has no validation part, val means the images that the run held out, or all
    images if the run was trained on other data."""
    workers: Workers = field(default_factory=default_workers)
    """Loader processes."""
    on_bad_image: Literal["raise", "skip"] = "raise"
    """What to do with an image or mask that cannot be read."""


@dataclass(frozen=True)
class PredictOptions(SourceOptions):
    """Options of every prediction of a dense task."""

    images: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGES")]
    """Image files and folders."""
    out: str
    """Folder for the results."""
    workers: Workers = 0
    """Loader processes."""


def fill(options: T, defaults: Mapping[str, Any]) -> T:
    """Fields that were left open (None or an empty tuple) take their value from `defaults`."""
    open_fields = {name: value for name, value in defaults.items() if getattr(options, name) in (None, ())}
    return replace(options, **open_fields)


def default_output(options: DenseOptions, task: str) -> str:
    """runs/<recipe or task>-<model, or the run it starts from>-<data>-seed<seed>."""
    recipe, start = Path(options.recipe).stem if options.recipe else task, Path(options.model.weights)
    model = start.name if options.model.weights and start.is_dir() else options.model.model.partition(".")[0]
    data = Path(options.data).name.removesuffix(".json")
    return str(Path("runs") / f"{recipe}-{model}-{data}-seed{options.run.seed}")


LoopOptions = TrainOptions | DenseOptions


def how_to_run(kind: Any = TrainOptions) -> set[str]:
    """Names of the options that do not change what is learnt."""
    hints = _flat_form(kind)[0].__annotations__
    return {name for name, hint in hints.items() if HOW in getattr(hint, "__metadata__", ())}


# -- recipes -----------------------------------------------------------------------------------------------------------


_DICTS = ("objectives", "mixing", "model_kwargs")


def recipe_names() -> list[str]:
    """Names of the recipes that are shipped."""
    folder = resources.files("everytoken_lab") / "recipes"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml"))


def read_recipe(name: str, trust_code: bool = False) -> dict[str, Any]:
    """The content of a shipped recipe, or of a YAML file of your own (a path that ends in .yaml).

    Args:
        trust_code: whether it may name objectives by import paths, which are imported then.
    """
    content = schema.read_yaml(recipe_text(name), name)
    values = schema.parse(dict[str, Any], {} if content is None else content, name)
    if not trust_code:
        registry.refuse_code(values, name)
    return values


def recipe_text(name: str) -> str:
    """The text of a shipped recipe or of a file."""
    if name.endswith((".yaml", ".yml")):
        try:
            return read_bytes(name).decode("utf-8")
        except FileNotFoundError as error:
            raise SchemaError(f"there is no recipe file {name}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise SchemaError(f"the recipe file {name} cannot be read: {error}") from error
    if name not in recipe_names():
        hint = f"{did_you_mean(name, recipe_names())} `everytoken recipes` lists them; your own ends in .yaml"
        raise SchemaError(f"there is no recipe {name!r}.{hint}")
    return (resources.files("everytoken_lab") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def header(name: str) -> str:
    """The comment block on top of a shipped recipe: cost, result, source, and whether it was run."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), recipe_text(name).splitlines())
    return "\n".join(line.lstrip("# ") for line in lines)


@functools.cache
def _flat_form(kind: type) -> tuple[type, dict[str, str]]:
    """A dataclass of all options of `kind` without their groups, and the group of each option ("": none)."""
    types, home = dict[str, Any](), dict[str, str]()
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        group = typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
        grouped = dataclasses.is_dataclass(group)
        inside = typing.get_type_hints(group, include_extras=True) if grouped else {name: hint}
        types |= inside
        home |= dict.fromkeys(inside, name if grouped else "")
    return dataclasses.make_dataclass("Settings", types.items()), home


def apply(options: T, values: Mapping[str, Any], where: str) -> T:
    """A copy of `options` with flat `values` put into the group that owns each name; types and ranges are checked."""
    form, home = _flat_form(type(options))
    for key in values:
        if key not in home:
            raise SchemaError(f"{where}: there is no option {key!r}.{did_you_mean(key, home)}")
    values = {key: {} if value is None and key in _DICTS else value for key, value in values.items()}
    for key in ("objectives", "mixing"):
        if isinstance(inner := values.get(key), Mapping):  # `hard:` without settings is `hard: {}`
            values[key] = {name: {} if fields is None else fields for name, fields in inner.items()}
    for key, value in flat_names(values).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SchemaError(f"{where}: {key} is {value}, which is not a number to train with.")
    checked: Any = schema.parse(form, {**flat(options), **values}, where)
    inside: dict[str, dict[str, Any]] = {group: {} for group in ("", *home.values())}
    for name, group in home.items():
        inside[group][name] = getattr(checked, name)
    new = inside.pop("")
    groups = {group: replace(getattr(options, group), **fields) for group, fields in inside.items()}
    return replace(options, **new, **groups)


def check_settings(kind: type, settings: Mapping[str, Any], where: str) -> None:
    """Raise if a value does not fit the type that the constructor of `kind` says for it; unknown names pass."""
    hints = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
    for base in () if dataclasses.is_dataclass(kind) else reversed(kind.__mro__[:-1]):
        hints |= typing.get_type_hints(vars(base).get("__init__", object))  # `**settings` may pass through to a base
    typed = {name: value for name, value in settings.items() if name in hints}
    schema.parse(dataclasses.make_dataclass("Settings", [(name, hints[name]) for name in typed]), typed, where)


def flat(options: Any) -> dict[str, Any]:
    """The reverse of `apply`: all options as one flat dict of plain values."""
    values: dict[str, Any] = {}
    for name, value in vars(options).items():
        plain = list(value) if isinstance(value, tuple) else value
        values |= flat(value) if dataclasses.is_dataclass(value) else {name: plain}
    return values


def flat_names(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested values under names such as `objectives.token_labeling.beta`."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        out |= flat_names(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return out


def overrides(assignments: Iterable[str], base: Mapping[str, Any]) -> dict[str, Any]:
    """`objectives.drloc.weight=0.1` -> nested values, merged into what `base` holds for that name.

    A value is YAML: numbers, true, [1, 2], {a: b}; `null` removes the entry.
    """
    values: dict[str, Any] = {}
    for text in assignments:
        path, sign, raw = text.partition("=")
        if not sign:
            raise SchemaError(f"{text!r} should be NAME=VALUE, for example objectives.drloc.weight=0.1")
        value = schema.read_yaml(raw, text)
        first, *rest = path.split(".")
        if not rest:
            values[first] = value
            continue
        if first not in _DICTS:
            raise SchemaError(f"{text}: only {', '.join(_DICTS)} have inner names.{did_you_mean(first, _DICTS)}")
        node = values.setdefault(first, copy.deepcopy(dict(base.get(first) or {})))
        for name in rest[:-1]:
            node[name] = {} if node.get(name) is None else node[name]
            if not isinstance(node[name], dict):
                raise SchemaError(f"{text}: {name} is {node[name]!r} and has no inner names")
            node = node[name]
        node[rest[-1]] = value
        if value is None:
            del node[rest[-1]]
    return values
