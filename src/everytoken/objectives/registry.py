"""Objectives by name, for recipes. This file does not import torch until something is built.

A name is one of OBJECTIVES, or the import path of somebody's own class,
`package.module:Class`: anything with `forward(view, batch) -> dict with "loss"`. If its constructor has a parameter
`model`, it gets the TokenModel that is trained, and for `teacher` the teacher; the other parameters are its settings.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from everytoken.errors import EverytokenError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from everytoken.maps import Maps
    from everytoken.models import TokenModel
    from everytoken.step import FrozenTeacher

OBJECTIVES: dict[str, str] = {
    "hard": "everytoken.objectives.hard:HardLabels",
    "relabel": "everytoken.objectives.token_labeling:ReLabel",
    "token_labeling": "everytoken.objectives.token_labeling:TokenLabeling",
    "online_token": "everytoken.objectives.distillation:OnlineTokenLabeling",
    "distillation": "everytoken.objectives.distillation:Distillation",
    "feature_distillation": "everytoken.objectives.distillation:FeatureDistillation",
    "drloc": "everytoken.objectives.drloc:Drloc",
    "tl_align": "everytoken.objectives.tl_align:TLAlign",
    "transmix": "everytoken.objectives.tl_align:TransMix",
}
Settings = Mapping[str, Mapping[str, Any] | None]


def refuse_code(values: Mapping[str, Any], where: str) -> None:
    """Raise if options that a file holds name an objective by an import path: a file does not say what code is run."""
    settings = values.get("objectives")
    for name in map(str, settings) if isinstance(settings, Mapping) else ():
        if ":" in name:
            raise EverytokenError(
                f"{where} names the objective {name!r}, whose code would be imported and run: add --trust-code "
                "(trust_code=True in Python) if you trust that file and that code, or take it out of the file."
            )


def find_objective(name: str) -> type[nn.Module]:
    """The class of an objective by its name or import path."""
    path = OBJECTIVES.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise EverytokenError(
            f"there is no objective {name!r}.{did_you_mean(name, OBJECTIVES)} One of your own is named by "
            "its import path, package.module:Class."
        )
    try:
        kind = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise EverytokenError(f"objective {name!r}: {module} cannot be imported ({error}).") from error
    if not isinstance(kind, type) or not callable(getattr(kind, "forward", None)):
        raise EverytokenError(f"objective {name!r}: {module} has no class {attribute} with forward(view, batch).")
    return kind


def required_by(objective: nn.Module) -> frozenset[str]:
    """What an objective says that it needs, see `Objective.requires`; nothing for one that does not say."""
    required: frozenset[str] = getattr(objective, "requires", frozenset())
    return required


def settings_of(kind: type) -> set[str] | None:
    """Names that a constructor takes, also through `**settings`; None: any."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        names |= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.kind is not p.VAR_POSITIONAL}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return None


def build_objectives(
    settings: Settings, model: TokenModel, smoothing: float = 0.1, teacher: FrozenTeacher | Maps | None = None
) -> dict[str, nn.Module]:
    """Objectives by name; `hard` comes first when nothing else teaches the class token.

    Args:
        settings: name -> its settings, as in a recipe.
        model: the model that is trained.
        smoothing: label smoothing of those that have it and do not say their own.
        teacher: for those whose constructor has a parameter of this name: the teacher, or a store of its features.
    """
    out: dict[str, nn.Module] = {}
    for name, given in settings.items():
        kind, fields = find_objective(name), given or {}
        allowed = settings_of(kind)
        for field in fields:
            if allowed is not None and field not in (open_to_all := allowed - getattr(kind, "built_from", {"model"})):
                raise EverytokenError(f"objective {name!r} has no setting {field!r}.{did_you_mean(field, open_to_all)}")
        extra = {"model": model, "teacher": teacher, "smoothing": smoothing}
        extra = {k: v for k, v in extra.items() if allowed is not None and k in allowed and k not in fields}
        out[name.partition(":")[2] or name] = kind(**extra, **fields)
    if not any(getattr(objective, "teaches_class", False) for objective in out.values()):
        return {"hard": find_objective("hard")(smoothing=smoothing), **out}
    return out
