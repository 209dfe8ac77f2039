"""The model card of an exported model: README.md with what it was trained on and how, its result, and how to use it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jinja2
import numpy as np
import yaml

from everytoken import __version__
from everytoken.errors import EverytokenError
from everytoken_lab.classes import shown_name
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.evaluation import ExportOptions
from everytoken_lab.evaluation.calibrated import splits
from everytoken_lab.models.description import Description
from everytoken_lab.models.open import OpenModel
from everytoken_lab.stats import Estimate, percentage

_SETTINGS = ("epochs", "iters", "batch_size", "opt", "lr", "weight_decay", "smoothing", "aa", "seed")


def model_card(
    opened: OpenModel, run: Run | None, differences: Mapping[str, float], checked_on: str, options: ExportOptions
) -> str:
    """The text of README.md."""
    info, config = opened.info, None if run is None else run.config
    facts = _data_facts(run, info.multi_label)
    result = facts.get("result")
    title = info.architecture if run is None else run.name
    front: dict[str, Any] = {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm", "everytoken"],
    }
    if options.license:
        front["license"] = options.license
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("everytoken_lab.evaluation"), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"code": _code, "plain": _plain}
    return environment.get_template("card.md").render(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        title=title,
        opened=opened,
        info=info,
        names=[shown_name(name) for name in info.class_names],
        config=config,
        facts=facts,
        settings=[name for name in _SETTINGS if config and config.get(name) not in (None, "", 0)],
        result=result,
        calibration=info.calibration,
        differences=differences,
        registered=type(opened.model.backbone).__module__.startswith("everytoken"),
        preprocessing=preprocessing(info),
        checked_on=checked_on,
        version=__version__,
    )


def _data_facts(run: Run | None, multi_label: bool) -> dict[str, Any]:
    """Name and size of the data, and the result with its interval, as far as they can be known."""
    if run is None:
        return {}
    facts: dict[str, Any] = {"data": str(run.config.get("data", "")).rstrip("/").split("/")[-1] or "the run's data"}
    with contextlib.suppress(EverytokenError, OSError):  # moved or deleted: the result has no interval then
        facts["train"], facts["val"] = map(len, splits(run))
    images = f"{facts['val']:,} " if "val" in facts else ""
    facts["judged"] = f"on {images}held-out images"
    if run.cross_validated:
        facts["judged"] = f"in cross-validation of its {images}images; the model itself was then fitted on all of them"
    elif len(run.scores) > 1:
        facts["judged"] += ", which also chose the epoch: the number is a little too good"
    best = run.summary.get("best")
    score = best.get("score") if isinstance(best, Mapping) else run.best
    if isinstance(score, int | float):
        count = 0 if multi_label else facts.get("val", 0)  # the interval of mAP is not known without the answers
        facts["result"] = percentage(np.arange(count) < round(score / 100 * count)) if count else Estimate(float(score))
    return facts


def preprocessing(info: Description) -> dict[str, Any]:
    """What is done to an upright image before the network sees it."""
    resized, then = {
        "center": ("resize_short_side", "centre_crop"),
        "squash": ("resize_both_sides", "centre_crop"),
        "border": ("resize_long_side", "pad_with_mean_colour"),
    }[info.crop_mode]
    sizes = {resized: [int(side / info.crop_pct) for side in info.img_size], then: list(info.img_size)}
    colours = {"scale": "divide by 255", "mean": list(info.mean), "std": list(info.std), "layout": "NCHW, RGB"}
    return {**sizes, "interpolation": info.interpolation, **colours}


def _plain(text: object) -> str:
    """One line without Markdown's special signs."""
    return " ".join("".join("\\" + letter if letter in "\\`*_{}[]<>|~#" else letter for letter in str(text)).split())


def _code(text: object) -> str:
    return "`" + " ".join(str(text).replace("`", "'").split()) + "`"
