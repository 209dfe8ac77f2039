"""The model card of an exported model: README.md with what it was trained on and how, its result, and how to use it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml

from everytoken._version import version
from everytoken.errors import EverytokenError
from everytoken_lab.classes import shown_name
from everytoken_lab.engine.run_folder import Run
from everytoken_lab.evaluation import ExportOptions
from everytoken_lab.evaluation.calibrated import splits
from everytoken_lab.models.open import Description, OpenModel
from everytoken_lab.stats import Estimate, percentage

_SHOWN = 40  # classes that are named
_SETTINGS = ("epochs", "iters", "batch_size", "opt", "lr", "weight_decay", "smoothing", "aa", "seed")


def model_card(
    opened: OpenModel, run: Run | None, differences: Mapping[str, float], checked_on: str, options: ExportOptions
) -> str:
    """The text of README.md."""
    facts = _data_facts(run, opened.info.multi_label)
    result = facts.get("result")
    title = options.push.split("/")[-1] or (run.name if run is not None else opened.info.architecture)
    front: dict[str, Any] = {
        "library_name": "timm",
        "pipeline_tag": "image-classification",
        "tags": ["image-classification", "timm", "everytoken"],
    }
    if options.license:
        front["license"] = options.license
    if isinstance(result, Estimate):
        kind, name = ("mAP", "mAP") if opened.info.multi_label else ("accuracy", "top-1")
        outcome = {
            "task": {"type": "image-classification"},
            "dataset": {"type": "imagefolder", "name": str(facts["data"])},
            "metrics": [{"type": kind, "value": round(result.value, 2), "name": f"{name} on held-out images"}],
        }
        front["model-index"] = [{"name": title, "results": [outcome]}]
    compared = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
    sections = [
        f"# {_plain(title)}",
        _about(opened),
        _training(run, facts),
        _result(opened, facts),
        _use(opened, differences),
        f"Compared with the trained model on {checked_on}; largest difference of a logit: {compared}.",
        f"Written by everytoken {version()}.",
    ]
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


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


def _about(opened: OpenModel) -> str:
    info = opened.info
    names = [_code(shown_name(name)) for name in info.class_names[:_SHOWN]]
    more = f" and {opened.num_classes - _SHOWN} more (config.json)" if opened.num_classes > _SHOWN else ""
    return (
        f"An image classifier: `{info.architecture}`, {opened.parameters / 1e6:.1f} M parameters, images of "
        f"{info.img_size[1]} x {info.img_size[0]} pixels, {opened.num_classes} classes"
        f"{', of which an image may have several (sigmoid)' if info.multi_label else ''}: {', '.join(names)}{more}."
    )


def _training(run: Run | None, facts: Mapping[str, Any]) -> str:
    if run is None:
        return ""
    config = run.config
    lines = ["## Training", f"- data: {_code(facts['data'])}"]
    if "train" in facts:
        held_out = "" if "method" in config else f" to train on, {facts['val']:,} held out"
        lines[-1] += f": {facts['train']:,} images{held_out}"
    if "method" in config:
        lines.append(
            f"- {_plain(config['method'])} of {_code(config.get('weights', ''))} at {config.get('img_size')} px, "
            f"L2 penalty {config.get('penalty', 0.0):.1e}; no augmentation, no fine-tuning"
        )
        return "\n".join(lines)
    objectives, mixing = (", ".join(map(_code, config.get(name) or {})) for name in ("objectives", "mixing"))
    settings = (f"{name} {_code(config[name])}" for name in _SETTINGS if config.get(name) not in (None, "", 0))
    lines += [
        f"- recipe: {_code(config['recipe']) if config.get('recipe') else 'options of `everytoken train`'}",
        f"- objectives: {objectives or 'plain labels'}; mixing: {mixing or 'none'}",
        f"- starts from: {_code(config['weights']) if config.get('weights') else 'random weights'}",
        f"- {', '.join(settings)}",
    ]
    if config.get("maps"):
        lines.append(f"- score maps for the tokens: {_code(str(config['maps']).rstrip('/').split('/')[-1])}")
    return "\n".join(lines)


def _result(opened: OpenModel, facts: Mapping[str, Any]) -> str:
    result, calibration, multi_label = facts.get("result"), opened.info.calibration, opened.info.multi_label
    lines = []
    if isinstance(result, Estimate):
        interval = "" if result.low is None else f" (95 % interval {result.low:.1f} to {result.high:.1f})"
        metric = "Mean average precision" if multi_label else "Top-1 accuracy"
        lines.append(f"{metric} {result.value:.1f} %{interval} {facts['judged']}.")
    if calibration is not None:
        lines.append(
            f"Divide logits by {calibration.temperature:.3g} before the {'sigmoid' if multi_label else 'softmax'} "
            f"(calibrated on {calibration.images:,} images{calibration.words()})."
        )
        points = ((rate, *calibration.threshold(rate)) for rate in (0.9, 0.95, 0.99))
        if rows := [f"| {rate:.0%} | {least:.3f} | {found:.0f} % |" for rate, least, found in points if found]:
            head = "precision | threshold | recall" if multi_label else "accuracy | threshold | coverage"
            lines += ["", f"| {head} |", "|---|---|---|", *rows]
        if multi_label:
            lines += ["", f"`everytoken predict` gives the labels of {calibration.best_threshold()[0]:.3f} or more."]
    return "\n".join(["## Result", *lines]) if lines else ""


def _use(opened: OpenModel, differences: Mapping[str, float]) -> str:
    info, parts = opened.info, ["## Use"]
    own = type(opened.model.backbone).__module__.startswith("everytoken")
    if "model.safetensors" in differences:
        first = "import everytoken  # registers this model with timm\n" if own else ""
        parts.append(
            f"```python\n{first}import timm\nfrom PIL import Image\n\n"
            'model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()   # or hf-hub:USER/NAME\n'
            "config = timm.data.resolve_model_data_config(model)\n"
            "transform = timm.data.create_transform(**config, is_training=False)\n"
            'logits = model(transform(Image.open("photo.jpg").convert("RGB"))[None])\n'
            'model.pretrained_cfg["label_names"][logits.argmax()]\n```'
        )
        if info.token_class_names:
            parts.append(
                "timm opens the classifier. The head that answers for every token is "
                + ("in the weights too" if opened.model.uses_own_head else "in model.token_head.safetensors")
                + "; everytoken uses it."
            )
    if "model.onnx" in differences:
        height, width = info.img_size
        parts.append(
            "```python\nimport json, numpy, onnxruntime\n\n"
            'session = onnxruntime.InferenceSession("model.onnx")\n'
            "about = session.get_modelmeta().custom_metadata_map      # classes, preprocessing, temperature\n"
            f"# images: float32 [B, 3, {height}, {width}], see Preprocessing\n"
            'logits = session.run(["logits"], {"images": images})[0]\n'
            'json.loads(about["classes"])[logits[0].argmax()]\n```'
        )
    parts.append("```sh\neverytoken predict FOLDER photos --out predictions.csv\n```")
    steps = (f"{name.replace('_', ' ')} {value}" for name, value in preprocessing(info).items())
    parts.append(f"Preprocessing: {', '.join(steps)}. Sizes are height and width in pixels.")
    return "\n\n".join(parts)


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
