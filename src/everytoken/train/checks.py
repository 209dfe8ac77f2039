"""Contradictions in what a run is told, found before any image is read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import timm

from everytoken.errors import EverytokenError, did_you_mean
from everytoken.mixing import MIXERS
from everytoken.models import family_of_name
from everytoken.objectives import Objective
from everytoken.train.options import TrainOptions


class ContradictionError(EverytokenError):
    """Two options exclude each other; the message says which and what to change."""


def check_options(options: TrainOptions) -> list[str]:
    """Raise on what cannot work; return what can but is doubtful, as sentences."""
    if not options.data:
        raise EverytokenError("say which images to train on: everytoken train DATA ... (see `everytoken train --help`)")
    _check_model(options)
    optim, data = options.optim, options.dataset
    for name, value in (
        ("--epochs", optim.epochs),
        ("--batch-size", data.batch_size),
        ("--grad-accum-steps", optim.grad_accum_steps),
        ("--repeat-augment", data.repeat_augment),
        ("--keep", options.run.keep),
    ):
        if value < 1:
            raise EverytokenError(f"{name} is {value}; it must be at least 1")
    if not 0 <= data.val_split < 1:
        raise EverytokenError(f"--val-split is {data.val_split}; it is a part, such as 0.1")
    if optim.sched == "plateau":
        raise EverytokenError("--sched plateau follows validation and cannot be stepped every update; try cosine")
    notes = []
    if optim.warmup_epochs >= optim.epochs:
        notes.append(f"warm-up ({optim.warmup_epochs} epochs) lasts for the whole training ({optim.epochs} epochs)")
    for name in options.mixing:
        if name not in MIXERS:
            raise EverytokenError(f"there is no mixing method {name!r}.{did_you_mean(name, MIXERS)}")
    return notes


def _check_model(options: TrainOptions) -> None:
    name = options.model.model.split(".")[0]
    if not timm.is_model(name):
        raise EverytokenError(f"timm knows no model {name!r}.{did_you_mean(name, timm.list_models())}")
    family = family_of_name(name)
    if family is None:
        raise EverytokenError(
            f"{name} has no token view yet, so objectives cannot see its tokens; `everytoken models` lists what is "
            "supported"
        )
    if "mixtoken" in options.mixing and family.embed is None:
        raise ContradictionError(
            f"MixToken mixes tokens after the patch embedding, and that of {name} cannot be reached or overlaps; use "
            "CutMix instead: --set mixing.mixtoken=null --set mixing.cutmix={}"
        )
    if options.labels and not Path(options.labels).is_dir():
        raise EverytokenError(f"there is no store of score maps at --labels {options.labels}")


def check_objectives(options: TrainOptions, objectives: Sequence[Objective]) -> list[str]:
    """The same for the objectives, once they are built."""
    notes: list[str] = []
    names = {o.name for o in objectives}
    needs = {o.name: o.needs for o in objectives}
    wanting = sorted(name for name, need in needs.items() if "maps" in need)
    if wanting and not options.labels:
        raise ContradictionError(
            f"objective {wanting[0]!r} needs score maps and --labels names none. Make them with\n"
            f"  everytoken annotate {options.data} --out MAPS --annotator fit\n"
            f"or train without: --set objectives.{wanting[0]}=null"
        )
    if options.labels and not wanting:
        notes.append(f"--labels {options.labels} is not used by any objective ({', '.join(sorted(names))})")
    taught = sorted(name for name, need in needs.items() if "teacher" in need)
    if taught and not options.model.teacher:
        raise ContradictionError(f"objective {taught[0]!r} needs a teacher; name one with --teacher, such as resnet50")
    if options.model.teacher and not taught:
        notes.append(f"--teacher {options.model.teacher} is not asked by any objective ({', '.join(sorted(names))})")
    follows = sorted(names & {"alignment", "transmix"})
    if len(follows) == 2:
        raise ContradictionError(
            "transmix is alignment with the last layer alone; take one of them: --set objectives.transmix=null"
        )
    if follows and not options.mixing:
        raise ContradictionError(
            f"{follows[0]} lets labels follow the tokens of mixed images, and nothing is mixed here; add for example "
            f"--set mixing.cutmix={{}} or leave it out: --set objectives.{follows[0]}=null"
        )
    if "mixup" in options.mixing and "token" in names:
        notes.append(
            "MixUp with token labeling: the papers saw no gain from it (83.1 with, 83.3 without); MixToken alone is "
            "what they recommend"
        )
    if follows and names & {"hard", "relabel"}:
        notes.append(f"{follows[0]} and another objective both teach the class token; their losses are added")
    if follows and set(options.mixing) == {"mixup"}:
        notes.append(
            "under MixUp every token has the same share, so alignment changes nothing; CutMix is what it is for"
        )
    return notes
