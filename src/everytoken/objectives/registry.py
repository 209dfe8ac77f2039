"""Objectives by name, for recipes. This file does not import torch until something is built.

A name is one of OBJECTIVES, an older name of one (ALIASES), or the import path of somebody's own class,
`package.module:Class`: anything with `forward(view, batch) -> dict with "loss"`. If its constructor has a parameter
`model`, it gets the TokenModel that is trained; the other parameters are its settings.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from everytoken.errors import EverytokenError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

    from everytoken.models import TokenModel

OBJECTIVES: dict[str, str] = {
    "hard": "everytoken.objectives.hard:HardLabels",
    "relabel": "everytoken.objectives.relabel:ReLabel",
    "token_labeling": "everytoken.objectives.token_labeling:TokenLabeling",
    "online_token": "everytoken.objectives.online_token:OnlineTokenLabeling",
    "distillation": "everytoken.objectives.distillation:Distillation",
    "drloc": "everytoken.objectives.drloc:Drloc",
    "tl_align": "everytoken.objectives.tl_align:TLAlign",
    "transmix": "everytoken.objectives.tl_align:TransMix",
}
ALIASES = {
    "token": "token_labeling",
    "online-token": "online_token",
    "distill": "distillation",
    "alignment": "tl_align",
}
# Settings of older recipes and run configurations: objective -> old name -> new name.
_MAPS = {"legacy": "released"}
_OLD_SETTINGS: dict[str, dict[str, str]] = {
    "relabel": _MAPS,
    "token_labeling": _MAPS,
    "tl_align": _MAPS,
    "transmix": _MAPS,
    "drloc": {"direction": "signed"},
}
Settings = Mapping[str, Mapping[str, Any] | None]


def canonical(settings: Settings) -> dict[str, dict[str, Any]]:
    """Settings of objectives under their present names; an objective that is named twice gets both settings."""
    out: dict[str, dict[str, Any]] = {}
    for given, fields in settings.items():
        name = ALIASES.get(given, given)
        renamed = _OLD_SETTINGS.get(name, {})
        fields = {renamed.get(field, field): value for field, value in (fields or {}).items()}
        if given == "token_labeling" and "weight" in fields:
            fields["beta"] = fields.pop("weight")  # as the papers write it: the weight of the token term
        if name == "drloc":
            fields = _older_drloc(fields)
        out.setdefault(name, {}).update(fields)
    return out


def resolved(settings: Settings, begun: Any = None) -> dict[str, dict[str, Any]]:
    """Settings under their present names, in which `token_labeling` states what its default was when the run began.

    Args:
        settings: of a run that starts or goes on.
        begun: the settings that its folder holds, if any; those of the first version do not state their defaults.
    """
    out = canonical(settings)
    if "token_labeling" in out:
        given = out["token_labeling"]
        by_machine = given.get("released") or given.get("class_map") is not None
        defaults = {
            "beta": 1.0 if given.get("released") else 0.5,
            "class_target": "machine" if by_machine else "truth",
        }
        for name, fields in begun.items() if isinstance(begun, dict) else ():
            if ALIASES.get(name, name) == "token_labeling" and isinstance(fields, dict):
                first_version = {"beta": 0.5, "class_target": "machine"}
                defaults = {field: fields.get(field, value) for field, value in first_version.items()}
        out["token_labeling"] = defaults | given
    return out


def _older_drloc(fields: dict[str, Any]) -> dict[str, Any]:
    """`released` was a list of parts, and two of the settings are gone."""
    if fields.get("released") in ("all", [], (), ""):
        fields = {**fields, "released": fields["released"] == "all"}
    if "released" in fields and not isinstance(fields["released"], bool):
        raise EverytokenError(
            f"drloc: released={fields['released']!r} names parts of the authors' code; now it is true, for all of "
            "them, or false."
        )
    if fields.get("norm"):
        raise EverytokenError("drloc: norm=true doubled the loss; double the weight instead.")
    if fields.get("sides") is not None:
        raise EverytokenError("drloc: sides is gone; released=true counts the classes as the authors' code does.")
    return {name: value for name, value in fields.items() if name not in ("norm", "sides")}


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
    """The class of an objective by its name, old name or import path."""
    path = OBJECTIVES.get(ALIASES.get(name, name), name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise EverytokenError(
            f"there is no objective {name!r}.{did_you_mean(name, [*OBJECTIVES, *ALIASES])} One of your own is named by "
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


def build_objectives(settings: Settings, model: TokenModel, smoothing: float = 0.1) -> dict[str, nn.Module]:
    """Objectives by name; `hard` comes first when nothing else teaches the class token.

    Args:
        settings: name -> its settings, as in a recipe.
        model: the model that is trained.
        smoothing: label smoothing of those that have it and do not say their own.
    """
    out: dict[str, nn.Module] = {}
    for name, fields in canonical(settings).items():
        kind = find_objective(name)
        allowed = settings_of(kind)
        for field in fields:
            if allowed is not None and field not in allowed - {"model"}:
                raise EverytokenError(
                    f"objective {name!r} has no setting {field!r}.{did_you_mean(field, allowed - {'model'})}"
                )
        extra = {"model": model, "smoothing": smoothing}
        extra = {k: v for k, v in extra.items() if allowed is not None and k in allowed and k not in fields}
        out[name.partition(":")[2] or name] = kind(**extra, **fields)
    if not any(getattr(objective, "teaches_class", False) for objective in out.values()):
        return {"hard": find_objective("hard")(smoothing=smoothing), **out}
    return out
