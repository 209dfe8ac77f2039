"""Options that contradict each other, found before any image is read. Ranges and choices are beside each option."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import timm
from timm.optim import get_optimizer_class, list_optimizers
from torch import nn

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.mixing import MIXERS, build_mixer, mixer_settings
from everytoken.models import family_of_name
from everytoken.objectives.registry import OBJECTIVES, find_objective, required_by
from everytoken_lab.engine.distributed import check_device
from everytoken_lab.engine.options import LoopOptions, OptimOptions, TrainOptions
from everytoken_lab.engine.recipe import check_settings


def check_loop(options: LoopOptions) -> None:
    """Raise on what the training loop cannot work with. For every task, before anything is built."""
    optim = options.optim
    kind = optim.opt.lower().rsplit("_", 1)[-1]  # timm: lookahead_adamw
    if kind not in list_optimizers():
        raise EverytokenError(f"timm has no optimizer {optim.opt!r}.{did_you_mean(kind, list_optimizers())}")
    try:
        get_optimizer_class(kind)
    except (AssertionError, ImportError) as error:
        raise EverytokenError(f"opt {optim.opt} cannot be used here: {error}; adamw works everywhere") from error
    if optim.decay_rate != OptimOptions().decay_rate and optim.sched != "multistep":
        raise EverytokenError(f"decay_rate is {optim.decay_rate:g}, which sched {optim.sched} does not use")
    check_device(options.run.device)


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
        raise EverytokenError(
            f"color_jitter is {augment.color_jitter:g} and aa is {augment.aa!r}, which replaces it, as in timm; set one"
        )
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
