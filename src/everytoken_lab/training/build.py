"""From options to the setup of a classification run: data, store, model, objectives, mixing, teacher."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from timm.data import resolve_data_config
from timm.models import group_parameters
from torch import nn

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.keyed import uniform
from everytoken.maps import Maps
from everytoken.mixing import MIXERS, build_mixer, mixer_settings
from everytoken.models import TokenModel, family_of_name, probe
from everytoken.models.weights import load_weights
from everytoken.objectives.drloc import Drloc
from everytoken.objectives.registry import OBJECTIVES, build_objectives, find_objective, required_by
from everytoken.step import FrozenTeacher, TokenStep
from everytoken_lab.classes import ClassList, match_classes
from everytoken_lab.data.augment import EvalTransform, TrainTransform, eval_view
from everytoken_lab.data.datasets import DataSet
from everytoken_lab.engine.distributed import World
from everytoken_lab.engine.optim import check_loop
from everytoken_lab.engine.options import TrainOptions, check_settings
from everytoken_lab.models.description import (
    Description,
    building,
    constructor_arguments,
    create_sized,
    token_head_file,
)
from everytoken_lab.models.open import Weights, open_model, source_of, start_classifier, with_own_head
from everytoken_lab.training.inputs import Inputs

logger = logging.getLogger(__name__)


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
