"""Contradictions in what a run is told, found before any image is read."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path

import timm
from timm.optim import get_optimizer_class, list_optimizers
from torch import nn

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.mixing import COMPOSE, MIXERS, build_mixer, mixer_settings
from everytoken.models import family_of_name
from everytoken.objectives.registry import OBJECTIVES, find_objective, required_by
from everytoken_lab.engine.distributed import check_device
from everytoken_lab.engine.optim import DECAYING
from everytoken_lab.engine.options import LoopOptions, OptimOptions, TrainOptions
from everytoken_lab.engine.recipe import check_settings, flat

SCHEDULES = ("cosine", "linear", "multistep", "poly", "step", "tanh")
_LEAST = {
    **dict.fromkeys(("epochs", "batch_size", "grad_accum_steps", "lr_base_size"), 1),
    **dict.fromkeys(("keep", "log_interval", "val_interval", "bad_loss_limit", "repeat_augment"), 1),
    **dict.fromkeys(("lr", "lr_base", "min_lr", "warmup_lr", "weight_decay", "layer_decay", "decay_rate"), 0),
    **dict.fromkeys(("iters", "val_iters", "warmup_epochs", "warmup_iters", "clip_grad"), 0),
    **dict.fromkeys(("checkpoint_minutes", "checkpoint_steps", "threads", "workers", "val_batch_size", "patience"), 0),
}


class ContradictionError(EverytokenError):
    """Two options exclude each other; the message says which and what to change."""


def check_loop(options: LoopOptions) -> None:
    """Raise on what the training loop cannot work with. For every task, before anything is built."""
    optim, run = options.optim, options.run
    given = {**flat(options.dataset), **flat(optim), **flat(run)}
    for name, least in _LEAST.items():
        value = given.get(name, least)
        if not least <= value < math.inf:
            raise EverytokenError(f"{name} is {value}; it must be at least {least}")
    for name, value in (("val_split", given.get("val_split", 0)), ("model_ema_decay", optim.model_ema_decay)):
        if not 0 <= value < 1:
            raise EverytokenError(f"{name} is {value}; it is a part, from 0 to less than 1")
    _check_optimizer(optim.opt)
    if optim.sched == "plateau":
        raise EverytokenError("sched plateau follows validation and cannot be stepped every update; try cosine")
    if optim.sched not in SCHEDULES:
        raise EverytokenError(
            f"sched is {optim.sched!r}; it can be {', '.join(SCHEDULES)}.{did_you_mean(optim.sched, SCHEDULES)}"
        )
    if optim.decay_rate != OptimOptions().decay_rate and optim.sched not in DECAYING:
        raise ContradictionError(
            f"decay_rate is {optim.decay_rate:g}, which sched {optim.sched} does not use; it belongs to "
            f"{', '.join(DECAYING)}"
        )
    check_device(run.device)


def _check_optimizer(name: str) -> None:
    known, kind = list_optimizers(), name.lower().rsplit("_", 1)[-1]  # timm: lookahead_adamw
    if kind not in known:
        raise EverytokenError(
            f"opt is {name!r}, and timm has no such optimizer.{did_you_mean(kind, known)} Usual ones are adamw, sgd, "
            "lamb and lion."
        )
    try:
        get_optimizer_class(kind)
    except (AssertionError, ImportError) as error:
        raise EverytokenError(f"opt {name} cannot be used here: {error}; adamw works everywhere") from error


def check_options(options: TrainOptions) -> list[str]:
    """Raise on what cannot work; return what can but is doubtful, as sentences."""
    if not options.data:
        raise EverytokenError("data is empty: name the images to train on (everytoken train DATA)")
    check_loop(options)
    _check_model(options)
    augment = options.augment
    if augment.color_jitter and augment.aa and "3a" not in augment.aa:
        raise ContradictionError(
            f"color_jitter is {augment.color_jitter:g} and aa is {augment.aa!r}: colours are jittered only without "
            "RandAugment, as in timm, so it would do nothing. Set color_jitter to 0, or aa to ''"
        )
    optim, notes = options.optim, []
    if not optim.iters and not optim.warmup_iters and optim.warmup_epochs >= optim.epochs:
        notes.append(
            f"warm-up would last for the whole training ({optim.warmup_epochs:g} of {optim.epochs} epochs): it takes a "
            "tenth of it instead (warmup_epochs)"
        )
    for name, settings in mixer_settings(options.mixing).items():
        if name in MIXERS:
            check_settings(MIXERS[name], settings, f"mixing {name}")
    build_mixer(options.mixing)
    for name, settings in options.objectives.items():
        if name in OBJECTIVES:
            check_settings(find_objective(name), settings, f"objective {name}")
    return notes


def _check_model(options: TrainOptions) -> None:
    for field in ("drop", "drop_path"):
        value = getattr(options.model, field)
        if not 0 <= value < 1:
            raise EverytokenError(f"{field} is {value}; it is a part, from 0 to less than 1")
    name = options.model.model.split(".")[0]
    if not timm.is_model(name):
        raise EverytokenError(f"timm knows no model {name!r}.{did_you_mean(name, timm.list_models())}")
    family = family_of_name(name)
    if family is None:
        raise EverytokenError(
            f"{name} has no token view yet, so objectives cannot see its tokens; `everytoken models` lists what is "
            "supported"
        )
    if "mixtoken" in mixer_settings(options.mixing) and family.embed is None:
        raise ContradictionError(
            f"MixToken mixes tokens after the patch embedding, and that of {name} cannot be reached or overlaps; use "
            "CutMix instead: mixing: {cutmix: {}}"
        )
    if options.maps and not Path(options.maps).is_dir():
        raise EverytokenError(f"there is no store of score maps at {options.maps}")


def check_multi_label(options: TrainOptions, objectives: Mapping[str, nn.Module]) -> None:
    """Raise on what cannot learn from images with several labels."""
    for name, objective in objectives.items():
        if not getattr(objective, "multi_label", True):  # one of somebody's own may not say
            way = (
                f"set objectives.{name}.class_target to truth"
                if hasattr(objective, "class_target") and name != "online_token"
                else f"leave it out (objectives.{name}: null)"
            )
            raise ContradictionError(
                f"objective {name!r} learns one class per image, and the images of {options.data} have several labels; "
                f"{way}. hard, drloc and tl_align learn several"
            )
    for setting in ("token_vote", "logit_adjustment"):
        if value := getattr(options.model, setting):
            raise ContradictionError(
                f"{setting} is {value:g}, which is about classes of which an image has one; images of {options.data} "
                "have several labels. Set it to 0"
            )


def check_objectives(options: TrainOptions, objectives: Mapping[str, nn.Module]) -> list[str]:
    """The same for the objectives, once they are built."""
    notes: list[str] = []
    names = set(objectives)
    needs = {name: required_by(objective) for name, objective in objectives.items()}
    wanting = sorted(name for name, need in needs.items() if "maps" in need)
    if wanting and not options.maps:
        raise ContradictionError(
            f"objective {wanting[0]!r} needs score maps and `maps` names none. Make them with\n"
            f"  everytoken annotate {shlex.quote(options.data)} --out MAPS --annotator fit\n"
            f"or train without this objective (objectives.{wanting[0]}: null)"
        )
    if options.maps and not wanting:
        notes.append(f"the maps {options.maps} are not used by any objective ({', '.join(sorted(names))})")
    taught = sorted(name for name, need in needs.items() if "teacher" in need)
    if taught and not options.model.teacher:
        raise ContradictionError(f"objective {taught[0]!r} needs a teacher; name one (teacher: resnet50)")
    guides = [name for name in mixer_settings(options.mixing) if getattr(MIXERS[name], "guide", "") == "attention"]
    if options.model.teacher and not taught and not guides:
        notes.append(
            f"the teacher {options.model.teacher} is not asked by any objective ({', '.join(sorted(names))}) or mixing "
            "method"
        )
    follows = sorted(names & {"tl_align", "transmix"})
    if len(follows) == 2:
        raise ContradictionError(
            "transmix is tl_align with the last layer alone; take one of them (objectives.transmix: null)"
        )
    if follows and not options.mixing:
        raise ContradictionError(
            f"{follows[0]} lets labels follow the tokens of mixed images, and nothing is mixed here; add for example "
            f"mixing.cutmix: {{}}, or leave it out (objectives.{follows[0]}: null)"
        )
    both = set(mixer_settings({COMPOSE: options.mixing.get(COMPOSE, {})})) == {"mixup", "mixtoken"}
    if both and "token_labeling" in names:
        notes.append(
            "MixUp and MixToken in the same batch: the papers saw no gain from it (83.1 with MixUp, 83.3 without); "
            "MixToken alone is what they recommend"
        )
    if follows and names & {"hard", "relabel"}:
        notes.append(f"{follows[0]} and another objective both teach the class token; their losses are added")
    if follows and set(mixer_settings(options.mixing)) == {"mixup"}:
        notes.append(
            "under MixUp every token has the same share, so alignment changes nothing; CutMix is what it is for"
        )
    return notes
