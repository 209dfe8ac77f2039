"""From options to the setup of a classification run: `complete` decides what was left open, `build` makes the parts.

- The weights decide the model, its arguments and its size, unless these were asked for.
- Weights without a recipe are fine-tuned: the recipe `finetune` for other classes, `finetune_resolution` for the same,
  and objectives, mixing and augmentation of the run that they come from.
- A run that is continued keeps what was decided when it began.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import timm
import torch
from timm.data import resolve_data_config
from timm.models import group_parameters
from torch import nn

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.files import read_bytes
from everytoken.keyed import uniform
from everytoken.maps import Maps
from everytoken.mixing import MIXERS, build_mixer, mixer_settings
from everytoken.models import TokenModel, family_of_name, probe
from everytoken.models.weights import load_weights
from everytoken.objectives.drloc import Drloc
from everytoken.objectives.registry import OBJECTIVES, build_objectives, find_objective, refuse_code, required_by
from everytoken.step import FrozenTeacher, TokenStep
from everytoken_lab.classes import ClassList, match_classes
from everytoken_lab.data import datasets
from everytoken_lab.data.augment import AugmentOptions, EvalTransform, TrainTransform, eval_view
from everytoken_lab.data.datasets import DEFAULT_VAL_SPLIT, DataSet
from everytoken_lab.data.labels import parse_labels
from everytoken_lab.data.tree import NAMED, dataset_title, find_split
from everytoken_lab.engine.checkpoint import checkpoints_in
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.optim import check_loop, default_scaling
from everytoken_lab.engine.options import TrainOptions, apply, check_settings, flat, overrides, read_recipe
from everytoken_lab.engine.run_folder import read_run
from everytoken_lab.models.description import (
    Description,
    building,
    constructor_arguments,
    create_sized,
    token_head_file,
)
from everytoken_lab.models.open import Weights, open_model, open_weights, source_of, start_classifier, with_own_head

logger = logging.getLogger(__name__)
DEFAULT_MODEL, DEFAULT_SIZE = "lvvit_t", 224
FINETUNE = ("finetune", "finetune_resolution")
"""Recipes that are taken for weights if none is given: for other classes, and for the same."""
_INHERITED = ("objectives", "mixing", "drop_path", "clip_grad", "token_vote", *(f.name for f in fields(AugmentOptions)))


@dataclass(frozen=True)
class ClassifierSetup:
    """What a classification run is made of."""

    train_set: DataSet
    val_set: DataSet
    store: Maps | None
    step: TokenStep
    grid: tuple[int, int]
    train_view: TrainTransform
    eval_view: EvalTransform
    description: Description
    notes: list[str]


def build(options: TrainOptions, world: World, inputs: Inputs | None = None) -> ClassifierSetup:
    """Everything but the loop. Contradictions are found before any image is read."""
    inputs, notes = inputs or Inputs(), check_options(options)
    store = Maps(options.maps) if options.maps else None
    train_set, val_set, more = inputs.splits(options)
    notes += [*more, *([] if store is None else check_held_out(store, train_set, val_set))]
    class_names = tuple(train_set.class_names)
    settings, more = _resolve_class_targets(options, store, train_set)
    notes += more
    weights = inputs.weights(options.model.weights, options.model.model) if options.model.weights else None
    backbone, arguments = build_backbone(options, len(class_names))
    if weights is not None:
        logger.info(f"weights from {weights.source}: {str(weights.load(backbone)) or 'all tensors loaded'}")
    config = resolve_data_config({}, model=backbone) if weights is None else asdict(weights.info)
    model = TokenModel(backbone)
    teacher, teacher_classes = open_teacher(options, config)
    objectives = build_objectives(settings, model, options.augment.smoothing, teacher or store)
    if train_set.multi_label:
        check_multi_label(options, objectives)
    token_names: tuple[str, ...] = ()
    if any("token_logits" in required_by(objective) for objective in objectives.values()):
        token_names = class_names if store is None else tuple(map(store.meta.class_name, range(store.num_classes)))
        model.add_token_head(len(token_names))
    notes += [] if weights is None else _start_heads(model, weights, class_names, token_names)
    notes += check_objectives(options, objectives)
    square = store is None or store.meta.grid[0] == store.meta.grid[1]
    for name, objective in objectives.items():
        if isinstance(objective, Drloc):
            notes.append(f"drloc: {objective.extra_repr()}")
        if not square and "maps" in required_by(objective) and getattr(objective, "released", False):
            what = f"objective {name!r} with released=true needs square maps, as the released code does"
            raise EverytokenError(f"{what}; annotate at a square size, or leave released out")
    asked = any("teacher" in required_by(o) or not hasattr(o, "requires") for o in objectives.values())
    if teacher is not None and asked:
        notes += match_teacher(teacher, teacher_classes, options, class_names)
    vote = options.model.token_vote or float(options.model.model_kwargs.get("token_vote", 0.0))
    if vote and token_names != class_names:
        what = f"token_vote is {vote:g}, which needs tokens that learn the data's classes"
        raise EverytokenError(f"{what} (token_labeling); set it to 0")
    offsets = None
    if adjustment := options.model.logit_adjustment:
        offsets = adjustment * torch.from_numpy(log_priors(train_set.labels, len(class_names))).float()
    freeze_first(backbone, options.model.freeze)
    norm_eval, compiled, size = options.model.norm_eval, options.model.torchcompile, options.model.img_size
    mixer = build_mixer(options.mixing)
    step = TokenStep(model, objectives, mixer, teacher, compiled, vote, norm_eval, offsets).to(world.device)
    with building(f"{options.model.model} for {size} x {size} pixels"):
        step.grid = grid = probe(model, (size, size))
    patch = getattr(getattr(backbone, "patch_embed", None), "patch_size", (1, 1))
    if isinstance(patch, tuple) and any(size % side for side in patch):
        shift = "tokens and their labels are slightly misaligned at the right and the bottom"
        notes.append(f"img_size {size} is no multiple of the patch size {patch[0]}: {shift}")
    description = Description(
        architecture=options.model.model,
        arguments=arguments,
        class_names=class_names,
        token_class_names=token_names,
        img_size=(size, size),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        crop_pct=options.augment.crop_pct or config["crop_pct"],
        crop_mode=config["crop_mode"],
        interpolation=options.augment.interpolation or config["interpolation"],
        token_vote=vote,
        multi_label=train_set.multi_label,
        amp="bfloat16" if options.optim.amp else "",
    )
    train_view = TrainTransform(size, options.augment, mean=description.mean, std=description.std)
    return ClassifierSetup(
        train_set, val_set, store, step, grid, train_view, eval_view(description), description, notes
    )


# -- contradictions ---------------------------------------------------------------------------------------------------


def check_options(options: TrainOptions) -> list[str]:
    """Raise on what cannot work; return warnings as sentences."""
    if not options.data:
        raise EverytokenError("data is empty: name the images to train on (everytoken train DATA)")
    check_loop(options)
    name = options.model.model.split(".")[0]
    if not timm.is_model(name):
        raise EverytokenError(f"timm knows no model {name!r}.{did_you_mean(name, timm.list_models())}")
    family = family_of_name(name)
    if family is None:
        raise EverytokenError(f"{name} has no token view yet; `everytoken models` lists what is supported")
    if "mixtoken" in mixer_settings(options.mixing) and family.embed is None:
        raise EverytokenError(f"MixToken needs a patch embedding without overlap, which {name} lacks; use CutMix")
    if options.maps and not Path(options.maps).is_dir():
        raise EverytokenError(f"there is no store of score maps at {options.maps}")
    augment = options.augment
    if augment.color_jitter and augment.aa and "3a" not in augment.aa:
        what = f"color_jitter is {augment.color_jitter:g} and aa is {augment.aa!r}"
        raise EverytokenError(f"{what}, which replaces it, as in timm; set one")
    for name, settings in mixer_settings(options.mixing).items():
        if name in MIXERS:
            check_settings(MIXERS[name], settings, f"mixing {name}")
    build_mixer(options.mixing)
    for name, settings in options.objectives.items():
        if name in OBJECTIVES:
            check_settings(find_objective(name), settings, f"objective {name}")
    optim = options.optim
    if optim.iters or optim.warmup_iters or optim.warmup_epochs < optim.epochs:
        return []
    return [f"warm-up takes a tenth of the training, as {optim.warmup_epochs:g} epochs would be all of it"]


def check_multi_label(options: TrainOptions, objectives: Mapping[str, nn.Module]) -> None:
    """Raise on what cannot learn from multi-label images."""
    for name, objective in objectives.items():
        if not getattr(objective, "multi_label", True):  # one of somebody's own may not say
            way = f"leave it out (objectives.{name}: null)"
            if hasattr(objective, "class_target") and name != "online_token":
                way = f"set objectives.{name}.class_target to truth"
            raise EverytokenError(
                f"objective {name!r} learns one class per image, and {options.data} is multi-label; {way}"
            )
    for setting in ("token_vote", "logit_adjustment"):
        if getattr(options.model, setting):
            raise EverytokenError(f"{setting} needs one class per image; {options.data} is multi-label. Set it to 0")


def check_objectives(options: TrainOptions, objectives: Mapping[str, nn.Module]) -> list[str]:
    """As `check_options`, for objectives that are built."""
    notes, used, mixers = [], ", ".join(sorted(objectives)), mixer_settings(options.mixing)
    needs = {name: required_by(objective) for name, objective in objectives.items()}
    mapped, taught = (sorted(name for name in needs if what in needs[name]) for what in ("maps", "teacher"))
    if mapped and not options.maps:
        raise EverytokenError(
            f"objective {mapped[0]!r} needs score maps and `maps` names none. Make them with\n"
            f"  everytoken annotate {shlex.quote(options.data)} --out MAPS --annotator fit\n"
            f"or train without this objective (objectives.{mapped[0]}: null)"
        )
    if taught and not options.model.teacher:
        raise EverytokenError(f"objective {taught[0]!r} needs a teacher; name one (teacher: resnet50)")
    if options.maps and not mapped:
        notes.append(f"the maps {options.maps} are not used by any objective ({used})")
    taught += sorted(name for name, objective in objectives.items() if getattr(objective, "teacher", None) is not None)
    guided = any(getattr(MIXERS[name], "guide", "") == "attention" for name in mixers)
    if options.model.teacher and not taught and not guided:
        notes.append(f"the teacher {options.model.teacher} is not used by any objective ({used}) or mixing method")
    follows = sorted(objectives.keys() & {"tl_align", "transmix"})
    if len(follows) == 2:
        raise EverytokenError("transmix is tl_align of the last layer; take one of them (objectives.transmix: null)")
    if follows and not options.mixing:
        raise EverytokenError(f"{follows[0]} is for mixed images, and nothing is mixed; add mixing.cutmix: {{}}")
    if follows and set(mixers) == {"mixup"}:
        notes.append("under MixUp all tokens have the same share, so alignment changes nothing; use CutMix")
    return notes


# -- parts ------------------------------------------------------------------------------------------------------------


def layer_groups(backbone: Any) -> dict[str, int]:
    """The layer group of each parameter, as timm counts them: stem, stages or blocks, head."""
    matcher = getattr(backbone, "group_matcher", None)
    if matcher is None:
        raise EverytokenError(f"freeze: {type(backbone).__name__} has no layer groups; leave it out")
    return {name: int(group) for name, group in group_parameters(backbone, matcher(coarse=True), reverse=True).items()}


def freeze_first(backbone: nn.Module, count: int) -> None:
    """Do not train the parameters of the first `count` layer groups."""
    if not count:
        return
    groups = layer_groups(backbone)
    if count > (most := max(groups.values())):
        raise EverytokenError(f"freeze is {count}, and this network has {most} layer groups before its classifier")
    for name, parameter in backbone.named_parameters():
        if groups[name] < count:
            parameter.requires_grad_(False)


def log_priors(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """[K]: the log of each class's fraction of the images; a class without images counts as one with one."""
    counts = np.maximum(np.bincount(labels, minlength=num_classes), 1)
    return np.asarray(np.log(counts / counts.sum()))


def check_held_out(store: Maps, train_set: DataSet, val_set: DataSet) -> list[str]:
    """A warning if the maps' annotator may have learnt from images that this run validates on.

    Only the annotator `fit` learns from the dataset; its store records the fraction of images, by the hash that divides
    data everywhere, that it did not learn from. Images without a map were not there at all.
    """
    fit = store.meta.annotator.get("fit")
    if store.meta.annotator.get("name") != "fit" or not isinstance(fit, dict):
        return []
    trained = set(train_set.keys())  # where train/ and val/ are folders, their images may have the same names
    draws = [uniform(0, "val-split", key) for key in val_set.keys() if key in store and key not in trained]  # noqa: SIM118
    held_out = fit.get("held_out")
    beyond = sum(draw >= (held_out or 0.0) for draw in draws)
    # a class of few images may hold out one beyond the fraction, see `split_off`
    if not draws or (held_out is not None and beyond <= val_set.num_classes):
        return []
    what = f"the annotator of {store.path} was fitted on {beyond:,} of the {len(val_set):,} validation images"
    way = f"Annotate again with val_split {max(draws):.2f} or more" if held_out else "Annotate again"
    return [f"{what}, so validation looks better than it is. {way}, or validate on images that it has not seen"]


def _resolve_class_targets(
    options: TrainOptions, store: Maps | None, train_set: DataSet
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """With maps of other classes, the class token learns the data's own labels; say so."""
    settings = {name: dict(fields) for name, fields in options.objectives.items()}
    if store is None or list(store.meta.class_names) == list(train_set.class_names):
        return settings, []
    if "relabel" in settings and "class_map" not in settings["relabel"]:
        raise EverytokenError(
            f"the maps have {store.meta.num_classes} classes, not the {train_set.num_classes} of {options.data}, and "
            "relabel teaches the class token theirs. Use token_labeling, or say which classes correspond (class_map)."
        )
    if "token_labeling" not in settings or "class_map" in settings["token_labeling"]:
        return settings, []
    settings["token_labeling"]["class_target"] = "truth"  # whatever the recipe says: the maps cannot label whole images
    theirs = f"{store.meta.num_classes} classes (such as {store.meta.class_name(0)!r})"
    ours = f"{train_set.num_classes} (such as {train_set.class_names[0]!r})"
    learnt = "tokens learn the maps' classes, the class token the data's labels"
    return settings, [f"the maps have {theirs}, the data {ours}: {learnt}"]


def _start_heads(
    model: TokenModel, weights: Weights, class_names: tuple[str, ...], token_names: tuple[str, ...]
) -> list[str]:
    """Heads of the initial weights are kept where they learnt the same classes, and start anew where they did not."""
    notes, same = [], weights.matches(class_names)
    if not same:
        count = int(model.backbone.num_classes)  # type: ignore[arg-type]
        if weights.classes.count == count:  # they fit in number, but mean other things
            model.backbone.reset_classifier(count)  # type: ignore[operator]
        start_classifier(model.backbone)
        was = "was trained on other classes" if weights.classes.count else "has no classifier"
        notes.append(f"{weights.source} {was}: the classifier starts anew")
    if (head := model.token_head) is None:
        return notes
    saved, classifier = token_head_file(Path(weights.source)), model.backbone.get_classifier()  # type: ignore[operator]
    if weights.own and weights.info.token_class_names == token_names and saved.is_file():
        load_weights(head, saved)
        return [*notes, f"token head from {saved}"]
    reads_tokens = model.family.layout == "nchw" and isinstance(classifier, nn.Linear) and isinstance(head, nn.Linear)
    fits = reads_tokens and classifier.bias is not None and classifier.weight.shape == head.weight.shape
    if weights.own and same and token_names == class_names and fits:
        head.load_state_dict(classifier.state_dict())
        return [*notes, "the token head starts as the classifier"]
    return [*notes, "the token head starts anew"]


def build_backbone(options: TrainOptions, num_classes: int) -> tuple[nn.Module, dict[str, Any]]:
    """The timm model, with fresh weights, and the arguments it was made with."""
    chosen = options.model
    arguments: dict[str, Any] = {"num_classes": num_classes, "img_size": chosen.img_size, **chosen.model_kwargs}
    extra = {"drop_rate": chosen.drop} if chosen.drop else {}
    if chosen.drop_path or "drop_path_rate" in constructor_arguments(chosen.model):
        extra["drop_path_rate"] = chosen.drop_path  # also 0: Swin has stochastic depth of its own unless told not to
    with building(f"{chosen.model} with {arguments}"):
        backbone, arguments = create_sized(chosen.model, arguments, **extra)
    if chosen.grad_checkpointing:
        backbone.set_grad_checkpointing(True)  # type: ignore[operator]
    if chosen.channels_last:
        backbone = backbone.to(memory_format=torch.channels_last)
    return backbone, arguments


def open_teacher(options: TrainOptions, config: dict[str, Any]) -> tuple[FrozenTeacher | None, ClassList]:
    """The teacher, if there is one, and its classes."""
    if not options.model.teacher:
        return None, ClassList(0)
    loaded = open_model(source_of(options.model.teacher))
    about, model = loaded.info, loaded.model
    if about.token_class_names != about.class_names or not about.class_names:
        # its token head has other classes, or is not known to be trained
        model = with_own_head(model.backbone, about if about.class_names else None)
    return FrozenTeacher(model, (config["mean"], config["std"]), (about.mean, about.std)), loaded.classes


def match_teacher(
    teacher: FrozenTeacher, classes: ClassList, options: TrainOptions, class_names: tuple[str, ...]
) -> list[str]:
    """Take the data's classes from the teacher's answers, by name; a note if it has more."""
    name = options.model.teacher
    columns = match_classes(classes, class_names, f"{options.data}, for the teacher {name}").labels.tolist()
    if columns != list(range(classes.count)):
        teacher.columns = torch.tensor(columns)
    note = f"{len(columns)} of the {classes.count} classes of the teacher {name} are those of the data, by name"
    return [note] if len(columns) < classes.count else []


# -- images and weights ------------------------------------------------------------------------------------------------


class Inputs:
    """Images and weights of a command, opened when they are first asked for."""

    def __init__(self) -> None:
        self._images: dict[tuple[str, str], DataSet] = {}
        self._weights: dict[str, Weights] = {}
        self._only: str | None = None

    def only(self, part: Literal["train", "held out", "all"]) -> Inputs:
        """The same, with this part of the images (of undivided data) to train on and nothing to validate on."""
        other = Inputs()
        other._images, other._weights, other._only = self._images, self._weights, part
        return other

    def weights(self, source: str, model: str = "") -> Weights:
        """As `open_weights`."""
        if source not in self._weights:
            found = open_weights(source, model)
            found = replace(found, read=cache(found.read))
            self._weights |= {source: found, found.source: found}
        return self._weights[source]

    def splits(self, options: TrainOptions) -> tuple[DataSet, DataSet, list[str]]:
        """Training and validation images, and what to say about them.

        A tenth is held out where the data has no validation images of its own and nothing was asked for: by the names
        of the images alone, so the same ones for every seed, and for `everytoken annotate`.
        """
        fraction, notes = options.dataset.val_split, []
        if not fraction and not has_validation(options):
            fraction = DEFAULT_VAL_SPLIT
            notes.append(f"{options.data} has no validation images: 10 % of each class are held out (val_split)")
        if fraction:
            whole = self._open(options.data, "undivided")
            train, val = datasets.hold_out(whole, options.data, fraction)
            train = {None: train, "train": train, "held out": val, "all": whole}[self._only]
        else:
            train, val = self._open(options.data, "train"), self._open(options.data, "val")
        if self._only is not None:
            val = val.subset([])
        train, val, more = _chosen(options, train, val)
        return train, val, notes + more

    def undivided(self, options: TrainOptions) -> DataSet:
        """All images of data without validation images."""
        whole = self._open(options.data, "undivided")
        return _chosen(options, whole, whole.subset(np.zeros(0, dtype=np.int64)))[0]

    def _open(self, data: str, split: str) -> DataSet:
        if (data, split) not in self._images:
            self._images[data, split] = datasets.open_dataset(data, split)
        return self._images[data, split]


def has_validation(options: TrainOptions) -> bool:
    """Whether the data brings validation images, or some are to be held out."""
    named = options.data.startswith(NAMED)
    return bool(options.dataset.val_split) or named or find_split(options.data, "val") is not None


def _chosen(options: TrainOptions, train: DataSet, val: DataSet) -> tuple[DataSet, DataSet, list[str]]:
    """Without the training images to leave out, and with corrected labels."""
    notes: list[str] = []
    if train.num_classes < 2 and not train.multi_label:
        what = f"{options.data} has one class only ({', '.join(train.class_names)})"
        raise EverytokenError(f"{what}: give every class a folder of its own, at least two")
    if names := excluded(options):
        train = train.subset([i for i, key in enumerate(train.keys()) if key not in names])
        if not len(train):
            raise EverytokenError(f"exclude leaves no images of {train.name}")
    if options.dataset.corrections:
        (train, val), notes = corrected(train, val, Path(options.dataset.corrections))
    return train, val, notes


def excluded(options: TrainOptions) -> set[str]:
    """Names of the training images to leave out."""
    file = options.dataset.exclude
    try:
        lines = os.fsdecode(read_bytes(file)).splitlines() if file else []
    except OSError as error:
        raise EverytokenError(f"exclude: {file} cannot be read ({error.strerror})") from error
    return {line.partition("\t")[0] for line in lines}  # what follows a tab is a remark


def corrected(train: DataSet, val: DataSet, file: Path) -> tuple[tuple[DataSet, DataSet], list[str]]:
    """Both splits with the labels of a CSV file (path, label, perhaps split); images with an empty one are left out."""
    if not file.is_file():
        raise EverytokenError(f"corrections: there is no file {file}")
    rows = list(parse_labels(file, corrections=True))
    out, changed, dropped, found = [], 0, 0, set[int]()
    for name, data in (("train", train), ("val", val)):
        by_path = {row.path: row for row in rows if row.split in ("", name)}
        number = {label: k for k, label in enumerate(data.class_names)}
        labels, keep = data.labels.copy(), np.ones(len(data), dtype=bool)
        for i, row in enumerate(map(by_path.get, data.keys())):
            if row is None:
                continue
            found.add(row.line)
            where, unknown = f"{file}, line {row.line}", [label for label in row.labels if label not in number]
            if unknown:
                hint = did_you_mean(unknown[0], number)
                raise EverytokenError(f"{where}: no class is {unknown[0]!r} of {data.name}.{hint}")
            if not row.labels and not row.several:
                keep[i], dropped = False, dropped + 1
                continue
            if data.multi_label:
                labels[i] = [label in row.labels for label in data.class_names]
            elif len(row.labels) == 1:
                labels[i] = number[row.labels[0]]
            else:
                raise EverytokenError(f"{where}: {';'.join(row.labels)!r} is not one label of {data.name}.")
            changed += not np.array_equal(labels[i], data.labels[i])
        part = data.subset(np.flatnonzero(keep))
        part.labels = labels[keep]
        out.append(part)
    notes = [f"{file}: {changed:,} labels corrected, {dropped:,} images left out"]
    if len(found) < len(rows):
        notes.append(f"{file} names {len(rows) - len(found):,} images that are not there")
    return (out[0], out[1]), notes


# -- decisions ---------------------------------------------------------------------------------------------------------


def complete(
    options: TrainOptions,
    asked: Set[str] | None = None,
    assignments: Sequence[str] = (),
    trust_code: bool = False,
    inputs: Inputs | None = None,
) -> TrainOptions:
    """The options with everything decided that was left open; complete options stay as they are.

    Args:
        options: with the values of a recipe, if one is named.
        asked: names of the options that the user gave, which are not changed. Default: those that are not the default.
        assignments: of the kind `objectives.drloc.weight=0.1`, which come last.
        trust_code: whether objectives that a run folder names by import paths may be taken over.
    """
    inputs = inputs or Inputs()
    if asked is not None and "lr_base" in asked and options.optim.lr:
        if "lr" in asked:
            raise EverytokenError("lr is for any batch, and lr_base is scaled to the batch: set one of them")
        options = apply(options, {"lr": 0.0}, "lr_base")  # a recipe's
    if asked is None:
        plain = flat(TrainOptions())
        asked = {name for name, value in flat(options).items() if value != plain[name]}
    asked = {*asked, *(text.partition("=")[0] for text in assignments)}
    if (teacher := source_of(options.model.teacher)).startswith("timm:"):
        full_name = open_weights(teacher).source.removeprefix("timm:")
        options = apply(options, {"teacher": full_name}, "teacher")
    source = options.model.weights
    weights = inputs.weights(source, options.model.model) if source else None
    chosen = options.model
    values: dict[str, Any] = {"model": chosen.model or DEFAULT_MODEL, "img_size": chosen.img_size or DEFAULT_SIZE}
    if weights is not None:
        model, arguments = weights.choose(chosen.model, chosen.model_kwargs, "model" in asked)
        values = {"model": model, "model_kwargs": arguments, "img_size": chosen.img_size or weights.info.img_size[0]}
        values |= {} if Path(weights.source).exists() else {"weights": weights.source}  # by its full name
    options = apply(options, values, source or "defaults")
    if options.recipe:
        decisions: dict[str, Any] = {"lr_scaling": default_scaling(options.optim, options.recipe)}
    else:
        decisions = {} if weights is None else _fine_tuning(options, weights, source, inputs)
        if "opt" in asked or "lr_scaling" not in decisions:
            decisions["lr_scaling"] = default_scaling(options.optim)
        if "lr_base" in asked:
            decisions.pop("lr", None)
        folder = Path(options.run.out or default_output(options))
        began = read_run(folder).config if checkpoints_in(folder / "checkpoints") else {}
        recorded = {name: began[name] for name in decisions if name in began}
        decisions |= recorded
        if "objectives" not in asked and not trust_code:
            refuse_code(decisions, str((folder if "objectives" in recorded else Path(source)) / "config.yaml"))
        decisions = {k: v for k, v in decisions.items() if k not in asked}
    options = apply(options, decisions, options.recipe or "fine-tuning")
    options = apply(options, overrides(assignments, flat(options)), "--set")
    return options if "batch_size" in asked or not options.data else _small_batch(options, inputs)


def _small_batch(options: TrainOptions, inputs: Inputs) -> TrainOptions:
    """With a smaller batch, if the training images do not fill the recipe's."""
    try:
        each = len(inputs.splits(options)[0]) // int(os.environ.get("WORLD_SIZE", "1"))
    except EverytokenError:  # told when the images are opened, after the options have been checked
        each = 0
    if 0 < each < options.dataset.batch_size:
        logger.info(f"Batch size {each} instead of {options.dataset.batch_size}: there are no more training images.")
        options = apply(options, {"batch_size": each}, "batch_size")
    return options


def _fine_tuning(options: TrainOptions, weights: Weights, source: str, inputs: Inputs) -> dict[str, Any]:
    """A recipe for the weights, with what the run that they come from had."""
    names = inputs.splits(options)[0].class_names if options.data else []
    recipe = FINETUNE[not names or weights.matches(names)]
    run = read_run(Path(source)).config if Path(source).is_dir() else {}
    return {"recipe": recipe, **read_recipe(recipe), **{name: run[name] for name in _INHERITED if name in run}}


def default_output(options: TrainOptions) -> str:
    """runs/<recipe>-<model>-<data>-seed<seed>, and the size of the images for one that starts from weights."""
    start = options.model.weights
    recipe = Path(options.recipe).stem if options.recipe not in ("", *FINETUNE) else "finetune" if start else "train"
    size = f"-{options.model.img_size}px" if start else ""
    data = dataset_title(options.data) or "data"
    return str(Path("runs") / f"{recipe}-{options.model.model}{size}-{data}-seed{options.run.seed}")
