"""`export`: a folder that others use without this package: timm and the Hugging Face Hub, ONNX.

| format | files | opened by |
|---|---|---|
| timm, hf | model.safetensors, config.json | `timm.create_model("local-dir:FOLDER", pretrained=True)`, the Hub |
| onnx | model.onnx | onnxruntime and everything else that reads ONNX; `everytoken predict FOLDER/model.onnx` |

Every file is compared with the model on images before it takes its place. Class names, preprocessing and calibration
are in config.json and in the metadata of model.safetensors and model.onnx; README.md is the model card.

The token head is part of the weights (LV-ViT, VOLO) or beside them in model.token_head.safetensors, which only this
package reads.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jinja2
import numpy as np
import timm
import torch
import yaml
from torch import Tensor, nn

from everytoken import __version__
from everytoken.errors import EverytokenError, need
from everytoken.files import disk_errors, plain_json, refuse_link, remove_temporary, write_atomically
from everytoken_lab import schema
from everytoken_lab.classes import shown_name
from everytoken_lab.engine.checkpoint import write_weights
from everytoken_lab.engine.run_folder import Run, run_of
from everytoken_lab.evaluation import ExportOptions, InferenceOptions
from everytoken_lab.evaluation.run import calibrated, network_inputs, open_with, splits, validation_set
from everytoken_lab.maps.summary import sample_positions
from everytoken_lab.models.description import Description, timm_config, token_head_file
from everytoken_lab.models.onnx import OnnxModel, export_onnx, open_session, sealed
from everytoken_lab.models.open import OpenModel
from everytoken_lab.stats import Estimate, percentage

CHECKED_ON = 8  # images
_WORK = ".export-"
_TOKEN_HEAD = token_head_file(Path("model.safetensors")).name
_TOLERANCE = 2e-3  # of the largest logit
_SETTINGS = ("epochs", "iters", "batch_size", "opt", "lr", "weight_decay", "smoothing", "aa", "seed")  # in the card


@dataclass(frozen=True)
class Exported:
    """What `export` wrote."""

    folder: Path
    differences: dict[str, float]  # file -> largest difference to the model's own logits, on `checked_on`
    checked_on: str
    notes: tuple[str, ...] = ()


class _Answers(nn.Module):
    """Images -> logits, or (logits, cells): what is traced. The vote of the tokens is part of the logits."""

    def __init__(self, opened: OpenModel, cells: bool, vote: float) -> None:
        super().__init__()
        self.model, self.cells, self.vote = opened.model, cells, vote

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        view = self.model(images)
        logits = view.voted(self.vote)
        if not self.cells:
            return (logits,)
        return logits, self.model.class_and_cell_logits(images)[1] if view.token_logits is None else view.token_logits


def export(source: str | Path | OpenModel, out: str | Path | None = None, **settings: Any) -> Exported:
    """Write a folder that others use without this package: for timm and the Hub or ONNX; with a model card.

    Example:
        >>> lab.export("runs/first", "flowers", to=("timm", "onnx")).differences
        {'model.safetensors': 0.0, 'model.onnx': 4.8e-06}
        >>> timm.create_model("local-dir:flowers", pretrained=True)

    Args:
        source: as for `load`, or a loaded model.
        out: the folder; default: `export` in the run.
        settings: fields of `ExportOptions`; `to` may be one name.
    """
    if isinstance(settings.get("to"), str):
        settings["to"] = (settings["to"],)
    options = schema.from_keywords(ExportOptions, settings, "export()")
    kinds = list(dict.fromkeys("timm" if kind == "hf" else kind for kind in options.to))
    for module in ("onnx", "onnxscript", "onnxruntime") if "onnx" in kinds else ():
        need(module, "export", "an ONNX file")
    how = InferenceOptions(
        model=options.model, weights=options.weights, img_size=options.img_size, workers=0, device="cpu"
    )
    opened = open_with(source, how)
    if isinstance(opened.model, OnnxModel):
        raise EverytokenError(f"{opened.source} is an exported program; export the weights that it was made from.")
    path = Path(opened.source)
    run = run_of(path) if path.is_file() else None
    name = path.stem if path.is_file() else re.split("[:/]", opened.source)[-1]
    folder = Path(out or (Path("export") / name if run is None else run.path / "export"))
    if out is None:
        refuse_link(folder)
    if stale := [name for kind, (name, _) in WRITERS.items() if kind not in kinds and (folder / name).exists()]:
        raise EverytokenError(
            f"{folder / stale[0]} of an earlier export would stay beside the new files. Export all formats at once "
            "(to) or choose another folder."
        )
    remark = ""
    if not options.img_size:  # at another size, probabilities mean something else
        opened, remark = calibrated(opened, how)
    opened = replace(opened, info=_portable(opened))
    images, checked_on = _check_images(opened, run)
    folder.mkdir(parents=True, exist_ok=True)
    with disk_errors(folder, "writing the exported model"):
        remove_temporary(folder)  # of an export that was killed, and its folder
        for left in folder.glob(f"{_WORK}*"):
            shutil.rmtree(left, ignore_errors=True)
        differences = {WRITERS[kind][0]: WRITERS[kind][1](opened, folder, images, options.cells) for kind in kinds}
        card = model_card(opened, run, differences, checked_on, options)
        write_atomically(folder / "README.md", schema.printable(card).encode())
    return Exported(folder, differences, checked_on, (remark,) if remark else ())


def _portable(opened: OpenModel) -> Description:
    """The description, with everything that the opened model knew from elsewhere."""
    info, config = opened.info, cast(Any, opened.model.backbone.pretrained_cfg) or {}
    own = opened.class_names if opened.model.uses_own_head else ()  # of weights from elsewhere: the same classes
    return replace(
        info,
        architecture=(config.get("architecture") or info.architecture).split(".")[0],
        arguments={**info.arguments, "num_classes": opened.num_classes},
        class_names=opened.class_names,
        token_class_names=info.token_class_names or own,
    )


def _check_images(opened: OpenModel, run: Run | None) -> tuple[Tensor, str]:
    """A few images as the network sees them, [N, 3, H, W], and what they are."""
    with contextlib.suppress(EverytokenError, OSError):  # moved or deleted
        if run is not None:
            data = validation_set(run)
            _, images = network_inputs(opened.info, map(data.picture, sample_positions(len(data), CHECKED_ON)))
            return images, f"{len(images)} {'of its photos' if run.cross_validated else 'images that the run held out'}"
    noise = torch.randn(CHECKED_ON, 3, *opened.info.img_size, generator=torch.Generator().manual_seed(0))
    return noise, f"{CHECKED_ON} images of noise"


def _write_timm(opened: OpenModel, folder: Path, images: Tensor, cells: bool) -> float:
    """model.safetensors and config.json."""
    model, info = opened.model, opened.info
    about = timm_config(model.backbone, info)
    if model.token_head is not None:
        about["token_head"] = _TOKEN_HEAD
    with tempfile.TemporaryDirectory(dir=folder, prefix=_WORK) as work:
        trial = Path(work)
        write_weights(trial / "model.safetensors", dict(model.backbone.state_dict()), info.to_metadata())
        if model.token_head is not None:
            write_weights(trial / _TOKEN_HEAD, dict(model.token_head.state_dict()), info.to_metadata())
        write_atomically(trial / "config.json", plain_json(about).encode())
        again = timm.create_model(f"local-dir:{trial}", pretrained=True).eval()
        trained = _Answers(opened, False, 0.0).eval()  # timm's model has no token head to vote with

        def answer(x: Tensor) -> tuple[Tensor, ...]:
            output = again(x)  # LV-ViT and VOLO also answer for tokens
            return (output[0] if isinstance(output, tuple) else output,)

        difference = _compare("model.safetensors", answer, trained, images)
        (folder / _TOKEN_HEAD).unlink(missing_ok=True)  # of another model
        for file in sorted(trial.iterdir()):
            file.replace(folder / file.name)
    return difference


def _write_onnx(opened: OpenModel, folder: Path, images: Tensor, cells: bool) -> float:
    """model.onnx with named inputs and outputs, any batch size, and the description in its metadata."""
    import onnx

    outputs = ["logits", "cells"] if cells else ["logits"]
    module = _Answers(opened, cells, opened.info.token_vote).eval()
    info = replace(opened.info, token_vote=0.0)  # which is in the logits now
    program = onnx.load_from_string(export_onnx(module, images[:2], outputs))
    temperature = 1.0 if info.calibration is None else info.calibration.temperature
    about = {"classes": json.dumps(info.class_names, ensure_ascii=False)}
    about |= {"preprocessing": json.dumps(preprocessing(info)), "temperature": str(temperature)}
    onnx.helper.set_model_props(program, {**info.to_metadata(), **about})
    content = sealed(program.SerializeToString())
    session = open_session(content)

    def answer(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, session.run(outputs, {"images": x.numpy()})))

    difference = _compare("model.onnx", answer, module, images)
    write_atomically(folder / "model.onnx", content)
    return difference


WRITERS = {"timm": ("model.safetensors", _write_timm), "onnx": ("model.onnx", _write_onnx)}


@torch.no_grad()
def _compare(name: str, answer: Callable[[Tensor], tuple[Tensor, ...]], module: nn.Module, images: Tensor) -> float:
    """The largest difference to the model, for a batch and for a single image; an error if it is no rounding."""
    largest = 0.0
    for batch in (images, images[:1]):
        for exported, expected in zip(answer(batch), module(batch), strict=True):
            difference = float((exported - expected).abs().max())
            if not difference <= _TOLERANCE * max(1.0, float(expected.abs().max())):
                raise EverytokenError(
                    f"{name} was not kept: its answers differ from the model's by {difference:.3g}, more than rounding "
                    "explains. Another format may work."
                )
            largest = max(largest, difference)
    return largest


# -- the model card ----------------------------------------------------------------------------------------------------


def model_card(
    opened: OpenModel, run: Run | None, differences: Mapping[str, float], checked_on: str, options: ExportOptions
) -> str:
    """The text of README.md."""
    info, config = opened.info, None if run is None else run.config
    front: dict[str, Any] = {"library_name": "timm", "pipeline_tag": "image-classification"}
    front["tags"] = ["image-classification", "timm", "everytoken"]
    if options.license:
        front["license"] = options.license
    loader = jinja2.PackageLoader("everytoken_lab.evaluation")
    environment = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"code": _code, "plain": _plain}
    return environment.get_template("card.md").render(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True),
        title=info.architecture if run is None else run.name,
        opened=opened,
        info=info,
        names=[shown_name(name) for name in info.class_names],
        config=config,
        facts=_data_facts(run, info.multi_label),
        settings=[name for name in _SETTINGS if config and config.get(name) not in (None, "", 0)],
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
